# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What does K3 see?
#
# An image on its way to the text model, then a model that learns to read from nothing:
#
# 1. image → made smaller, padded, cut into patches,
# 2. where a patch is: a table that is resized, and rotary angles,
# 3. several images in one row of patches that do not see each other,
# 4. features in the place of tokens,
# 5. a model with a tower learns to read handwritten digits, and is asked where it looked.

# %%
import dataclasses
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

import k3jax
from k3jax.config import DataConfig, ImagesConfig, MeshConfig, OptimizerConfig, RunConfig, TrainConfig, VisionConfig
from k3jax.data.digits import encode_png, lines
from k3jax.data.images import fitted_size, open_item, prompt
from k3jax.data.loader import open_data
from k3jax.data.patches import arrange
from k3jax.data.tokenizers import MEDIA_TOKEN, load_tokenizer
from k3jax.model.vision import Images, rotary_angles, table_positions
from k3jax.sharding import make_mesh
from k3jax.train.batch import patch_rows, place_batch
from k3jax.train.loop import use_compile_cache
from k3jax.train.optimizer import make_optimizer
from k3jax.train.state import abstract_params, create_state
from k3jax.train.step import make_train_step

use_compile_cache()  # compiled programs are kept between runs, so only the first run of this notebook is slow
jax.config.update("jax_default_matmul_precision", "highest")  # float32 means float32 on a GPU too: we compare results
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# **Change this cell to try something else**, then run all. `IMAGE` may be a file of yours, `BUDGET` the most patches it
# may have. K3's own tower has patches of 14 pixels and a table of 64 × 64 positions (`k3jax.config.moonvit()`); this
# one is small enough to learn on two CPU cores.

# %%
IMAGE: str | None = None
BUDGET = 96
STEPS = 100

vision = VisionConfig(
    hidden_size=32, num_layers=1, num_heads=2, head_dim=16, mlp_size=64, patch_size=8, position_grid=(4, 8)
)
base = k3jax.nano(hidden_size=64, num_layers=2, mla_layers=(1,), attn_res_block_size=2, dense_size=128, vision=vision)
model_config = dataclasses.replace(
    base,
    kda=dataclasses.replace(base.kda, num_heads=2),
    mla=dataclasses.replace(base.mla, num_heads=2),
    moe=dataclasses.replace(base.moe, num_experts=4, experts_per_token=2, qb_bins=100),
)
tokenizer = load_tokenizer("bytes")
media = tokenizer.special_tokens[MEDIA_TOKEN]
p, merge = vision.patch_size, vision.merge

# %% [markdown]
# ## 1 · Image → patches
#
# An image is never made larger. If it has more patches than its budget, it is made smaller in proportion; then zeros
# fill it up to whole groups of 2 × 2 patches, because each group becomes one token. Patches are sent group by group.


# %%
def a_picture() -> bytes:
    """A landscape, 150 × 110 pixels, as a PNG file."""
    y, x = np.mgrid[0:110, 0:150]
    sky = np.stack([90 + y, 140 + y, 255 - y // 2], axis=-1)
    sky[(x - 110) ** 2 + (y - 28) ** 2 < 18**2] = 255, 210, 60
    hills = y > 70 - 18 * np.sin(x / 22) - 8 * np.sin(x / 7)
    sky[hills] = np.stack([40 + y // 4, 150 - y // 2, 60 + 0 * y], axis=-1)[hills]
    return encode_png(sky.astype(np.uint8))


def unpatched(patches: np.ndarray) -> np.ndarray:
    """Patches [..., 3·p·p] as pixels [..., p, p, 3]."""
    return np.moveaxis(patches.reshape(*patches.shape[:-1], 3, p, p), -3, -1)


data = a_picture() if IMAGE is None else Path(IMAGE).read_bytes()
item = open_item(data, "the picture", vision, BUDGET)
_, h, w = item.grid
width, height = fitted_size(*item.size, vision, BUDGET)
print(f"{item.size[0]} × {item.size[1]} pixels → {width} × {height} → padded to {w * p} × {h * p}")
print(f"{h} × {w} = {h * w} patches of {p} × {p} pixels, {item.features(merge)} tokens")

ids = prompt(item, tokenizer, merge)
packed = arrange(
    [[item]], np.array([ids]), media_token=media, rows=1, patches=h * w, merge=merge, patch_size=p
)  # arrays of one row of text and one row of patches
position = packed["patch_position"][0]  # frame, row and column of each patch, in the order of the row

fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
axes[0].imshow(Image.open(io.BytesIO(data)).convert("RGB"))
axes[0].set(title="as stored", xlabel="pixels", ylabel="pixels")
canvas = unpatched(item.patches).reshape(h, w, p, p, 3).swapaxes(1, 2).reshape(h * p, w * p, 3)
axes[1].imshow(canvas)
for edge in range(0, max(h, w) + 1):
    style = {"color": "white", "linewidth": 1.6 if edge % merge == 0 else 0.4}
    if edge <= h:
        axes[1].axhline(edge * p - 0.5, **style)
    if edge <= w:
        axes[1].axvline(edge * p - 0.5, **style)
for order, (_, row, column) in enumerate(position):
    if order < 12 or order == len(position) - 1:
        centre = (column + 0.5) * p - 0.5, (row + 0.5) * p - 0.5
        axes[1].text(*centre, order, ha="center", va="center", fontsize=7, color="black", bbox={"fc": "w", "pad": 0.8})
axes[1].set(title="as the tower gets it: thick lines are tokens, numbers the order", xlabel="pixels", ylabel="pixels")
plt.show()

# %%
shown = unpatched(packed["patches"][0][:24])
fig, axes = plt.subplots(1, 24, figsize=(9, 0.75))
for order, (axis, patch) in enumerate(zip(axes, shown)):
    axis.imshow(patch)
    axis.set(xticks=[], yticks=[], xlabel=order)
fig.suptitle("the row of patches begins so: four of a token, then four of the next", y=1.15)
plt.show()

# %% [markdown]
# ## 2 · Where is a patch?
#
# It is told twice. A learned table of absolute positions (here 4 × 8, K3's 64 × 64) is added to the patch, resized
# bilinearly to the image's own grid: the lower right of a small image and of a large one get nearly the same vector.
# Queries and keys are also turned by their column (even pairs of elements) and row (odd pairs), so attention sees
# differences of positions, whatever the size of the image.

# %%
model = k3jax.create(model_config)
at = jnp.asarray(packed["patch_position"]), jnp.asarray(packed["patch_grid"])
table = model.vision.positions[...]
resized = np.asarray(table_positions(table, *at))[0]
as_image = np.zeros((h, w, table.shape[-1]))
as_image[position[:, 1], position[:, 2]] = resized

far = np.mgrid[-8:9, -8:9].transpose(1, 2, 0).reshape(-1, 2)  # rows, columns
angles = rotary_angles(jnp.asarray(np.concatenate([0 * far[:, :1], far], axis=1))[None], vision.head_dim)[0]
score = np.asarray(jnp.cos(angles).mean(-1)).reshape(17, 17)  # q·k for q = k = (1, 0, 1, 0, …)

fig, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained", width_ratios=[1, 1, 0.9])
limit = np.abs(table[..., 0]).max()
for axis, values, title in (
    (axes[0], table[..., 0], f"table, {table.shape[0]} × {table.shape[1]}"),
    (axes[1], as_image[..., 0], f"resized to this image, {h} × {w}"),
):
    image = axis.imshow(values, cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set(title=title, xlabel="column", ylabel="row")
fig.colorbar(image, ax=axes[:2], label="element 0 of the vector", location="bottom", shrink=0.6)
image = axes[2].imshow(score, extent=(-8.5, 8.5, 8.5, -8.5), cmap="viridis")
axes[2].set(title="rotary: score of equal contents", xlabel="columns apart", ylabel="rows apart")
fig.colorbar(image, ax=axes[2], label="cosine")
plt.show()

# %% [markdown]
# ## 3 · Do images in one row see each other?
#
# Images of any size are packed into rows of one length, and a patch attends only within its image, in both directions.
# Proof by poking: change the pixels of one patch at a time and see which outputs of the tower change at all.

# %%
P = 64
several = [open_item(encode_png(pixels), "line", vision) for n in (1, 3, 2, 4, 3) for pixels, _ in lines(True, 1, n, n)]
texts = [prompt(one, tokenizer, merge) for one in several]
tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
for row, text in zip(tokens, texts):
    row[: len(text)] = text
options = {"media_token": media, "merge": merge, "patch_size": p}
together = arrange([[one] for one in several], tokens, rows=1, patches=P, **options)
images = Images.of(jax.tree.map(jnp.asarray, together))


@jax.jit
def influence(images: Images) -> jax.Array:
    """[P, P]: how much the tower's output at each patch changes when the pixels of another one do."""

    def poked(patch: jax.Array) -> jax.Array:
        chosen = (jnp.arange(P) == patch)[None, :, None]
        pixels = jnp.where(chosen, 255 - images.patches, images.patches)
        return model.vision.encode(dataclasses.replace(images, patches=pixels))[0]

    outputs = jax.lax.map(poked, jnp.arange(-1, P))  # the first is of no patch
    return jnp.abs(outputs[1:] - outputs[0]).max(-1)


touched = np.asarray(influence(images))
item_of = together["patch_item"][0]
foreign = (item_of[:, None] != item_of) & (item_of > 0) & (item_of[:, None] > 0)
print(f"largest change of an output by a patch of another image: {touched[foreign].max()}")

features = jax.jit(lambda images: model.vision(images))
packed_features = np.asarray(features(images))[0]
apart = 0.0
for number, one in enumerate(several):
    alone = arrange([[one]], tokens[number : number + 1], rows=1, patches=P, **options)
    mine = np.asarray(features(Images.of(jax.tree.map(jnp.asarray, alone))))[0, : one.features(merge)]
    index = together["media_index"][number]
    apart = max(apart, float(np.abs(mine - packed_features[index[index >= 0]]).max()))
print(f"features of images packed together and alone differ by at most {apart:.1e}")
assert touched[foreign].max() == 0
assert apart < 1e-4

fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
image = axes[0].imshow(np.where(touched > 0, touched, np.nan), norm="log", cmap="viridis")
axes[0].set(title="measured: white is exactly 0", xlabel="output of patch", ylabel="pixels changed of patch")
fig.colorbar(image, ax=axes[0], label="largest change")
strip = unpatched(together["patches"][0]).reshape(P // 4, merge, merge, p, p, 3)
strip = strip.transpose(1, 3, 0, 2, 4, 5).reshape(merge * p, -1, 3)
axes[1].imshow(np.concatenate(np.split(strip, 4, axis=1)), extent=(0, 4, 4, 0))
for group, number in enumerate(item_of[::4]):
    label = f"image {number}" if number else "padding"
    box = {"fc": f"C{number}" if number else "0.5", "ec": "none", "pad": 1.5}
    axes[1].text(group % 4 + 0.03, group // 4 + 0.05, label, fontsize=7, color="white", va="top", bbox=box)
axes[1].set(title="the same row, a token's patches in each square", xticks=range(5), yticks=range(5))
axes[1].set(xlabel="token (4 in a line)", ylabel="line")
plt.show()

# %% [markdown]
# ## 4 · Features among the tokens
#
# In the text an image is its size in words and one `<|media_pad|>` for each feature. The embeddings of those are
# replaced; the text model treats them as any other token (and its loss skips them). They end in a norm, so in a fresh
# model they are long beside embeddings of N(0, 0.02); the norm before the first layer makes them equal.

# %%
mine, replaced = [tokenizer.id_bytes(t) for t in texts[1]], together["media_index"][1][: len(texts[1])]
print(*("[image]" if r >= 0 else repr(t)[2:-1] for t, r in zip(mine, replaced)), sep=" ")
print("features:", replaced[replaced >= 0])

embedded = jax.jit(lambda tokens, images: model.embedded(tokens, images))
text_only = embedded(jnp.asarray(tokens), None)[1, : len(mine)]
with_image = embedded(jnp.asarray(tokens), images)[1, : len(mine)]
norms = jnp.stack([jnp.linalg.norm(x, axis=-1) for x in (text_only, with_image)])
fig, axis = plt.subplots(figsize=(9, 2.2), layout="constrained")
axis.plot(norms[0], "o", mfc="none", label="token embeddings")
axis.plot(norms[1], ".", label="with the image's features")
axis.set_xticks(range(len(mine)), ["▒" if r >= 0 else repr(t)[2:-1][:9] for t, r in zip(mine, replaced)], fontsize=6)
axis.tick_params(axis="x", rotation=60)
axis.set(xlabel="token", ylabel="length of the vector", ylim=(0, None))
axis.legend(frameon=False, loc="center left")
plt.show()

# %% [markdown]
# ## 5 · Learning to see
#
# Rows of documents "image of 1 to 4 handwritten digits, then the digits as text". Nothing but the loss of the text
# teaches the tower. The test is on digit images that no training document shows, with their pixels and with every pixel
# 0: a model that guesses from the text around the digits would do as well without. Chance is 10 %.

# %%
config = RunConfig(
    model_config,
    DataConfig(sequence_length=64, batch_size=8, images=ImagesConfig(source="digits", share=1.0, patches=64)),
    optimizer=OptimizerConfig(learning_rate=5e-3),
    train=TrainConfig(steps=STEPS),
)
N, DIGITS = 200, 3
shown = lines(held_out=True, count=N, digits=DIGITS)
test_items = [open_item(encode_png(pixels), "line", vision) for pixels, _ in shown]
begin = np.array([prompt(one, tokenizer, merge) for one in test_items], np.int32)
labels = np.array([[ord(d) for d in label] for _, label in shown], np.int32)
test_tokens = np.concatenate([begin, labels], axis=1)
grid = test_items[0].grid[1:]
test_rows = arrange([[one] for one in test_items], test_tokens, rows=N, patches=grid[0] * grid[1], **options)
test_images = Images.of(jax.tree.map(jnp.asarray, test_rows))


@jax.jit
def log_probabilities(model, bias, images) -> jax.Array:
    """Of every token at the places of the digits, given the right ones before: [N, DIGITS, V]."""
    logits = model(jnp.asarray(test_tokens), images=images, router_bias=bias)
    return jax.nn.log_softmax(logits[:, begin.shape[1] - 1 : -1])


blind = dataclasses.replace(test_images, patches=jnp.zeros_like(test_images.patches))
mesh = make_mesh(MeshConfig())
optimizer = make_optimizer(config.optimizer, abstract_params(model_config), STEPS)
text_data = open_data(config.data, model_config.vocab_size, vision)
history = []
with jax.set_mesh(mesh):
    state = create_state(model_config, optimizer.transform, mesh, 0)
    step = make_train_step(config, optimizer, text_data.tokenizer.token_bytes)
    # on a CPU, optimising the code takes longer than a hundred steps gain by it
    quick = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    step = jax.jit(step, donate_argnums=0, compiler_options=quick)
    rows = patch_rows(config, mesh, media)
    with text_data.train_loader() as loader:
        for number in range(STEPS + 1):
            if number % 10 == 0:
                read = [log_probabilities(state.params, state.router_bias, x).argmax(-1) for x in (test_images, blind)]
                history.append((number, *(float((answers == labels).mean()) for answers in read)))
            if number < STEPS:
                state, metrics = step(state, place_batch(next(loader), 1, mesh, rows))
steps, seen, unseen = np.array(history).T
print(f"after {STEPS} steps: {seen[-1]:.0%} of unseen digits are read, {unseen[-1]:.0%} without pixels")

# %%
fig, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
axis.plot(steps, 100 * seen, ".-", label="with pixels")
axis.plot(steps, 100 * unseen, ".-", color="0.5", label="every pixel 0")
axis.axhline(10, color="black", linestyle=":", linewidth=1, label="chance")
axis.set(xlabel="training steps", ylabel="digits read (%)", ylim=(0, 100), title="digits never seen in training")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# Where did it look? One patch after the other is covered with blank paper, and we see how much less likely the right
# digits become: on average over all lines, and for two of them. Answer 1 hangs on the first cell, and so on.

# %%
places = test_rows["patch_position"][0, :, 1:]  # row and column of each patch


def right(images: Images) -> np.ndarray:
    """Log-probability of the right digits [N, DIGITS]."""
    found = np.asarray(log_probabilities(state.params, state.router_bias, images))
    return np.take_along_axis(found, labels[..., None], axis=-1)[..., 0]


loss = np.zeros((N, DIGITS, *grid))
with jax.set_mesh(mesh):
    in_view = right(test_images)
    for patch, (row, column) in enumerate(places):
        covered = dataclasses.replace(test_images, patches=test_images.patches.at[:, patch].set(255))
        loss[:, :, row, column] = in_view - right(covered)


def laid_out(patches: np.ndarray) -> np.ndarray:
    """Patches of a line in the order of its row [P, 3·p·p] as grey pixels [H, W]."""
    out = np.zeros((*grid, p, p))
    out[*places.T] = unpatched(patches).mean(-1)
    return out.swapaxes(1, 2).reshape(grid[0] * p, grid[1] * p)


answers = np.asarray(read[0])
fig, axes = plt.subplots(3, 1 + DIGITS, figsize=(10, 3.4), layout="constrained")
pictures = [(test_rows["patches"].mean(0), loss.mean(0), f"mean of {N} lines", [""] * DIGITS)]
for line in range(2):
    said = [f": “{chr(a)}”" for a in answers[line]]
    pictures.append((test_rows["patches"][line], loss[line], f"line {line}: {shown[line][1]}", said))
for axis_row, (pixels, by_place, name, said) in zip(axes, pictures):
    axis_row[0].imshow(laid_out(pixels), cmap="gray", vmin=0, vmax=255)
    axis_row[0].set_title(name, fontsize=8)
    limit = np.abs(by_place).max()
    for place, axis in enumerate(axis_row[1:]):
        image = axis.imshow(by_place[place], cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.set_title(f"answer {place + 1}{said[place]}", fontsize=8)
    fig.colorbar(image, ax=axis_row[1:], label="less likely by (nats)")
for axis in axes.ravel():
    axis.set(xticks=[], yticks=[])
plt.show()

# %% [markdown]
# A better reader: `python train.py configs/nano_vision.py`, then `python -m benchmarks.digits runs/nano_vision`.
