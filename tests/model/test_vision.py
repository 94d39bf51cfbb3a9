"""The vision tower and its features in the token stream."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import GOLDEN, golden_cases, micro, relmax
from jax.sharding import PartitionSpec as P

from k3jax.checkpoint import hf
from k3jax.config import ConfigError, MeshConfig, VisionConfig, k3, moonvit, nano
from k3jax.data.images import Item
from k3jax.data.patches import arrange, assign
from k3jax.model.k3 import K3, create
from k3jax.model.vision import Images, Vision
from k3jax.sharding import make_mesh, shardings, spec

TINY = GOLDEN / "g9_checkpoint" / "tiny_k3"
MEDIA = 155
VISION = VisionConfig(
    hidden_size=16, num_layers=2, num_heads=2, head_dim=8, mlp_size=24, patch_size=2, position_grid=(4, 4)
)


@pytest.fixture(scope="module")
def tiny():
    return hf.load_hf(TINY)


def images_of(pixels, grids, tokens, *, rows, patches, media=MEDIA, order=None) -> Images:
    """Float patches [N, 3, p, p] in (item, frame, row, column) order as `Images`, items in the order of their tokens.

    `tokens` [B, T] hold every item's features one after the other over the flattened batch.
    """
    merge, size = 2, pixels.shape[-1]
    flat = np.asarray(pixels, np.float32).reshape(len(pixels), -1)
    starts = np.concatenate([[0], np.cumsum(np.prod(grids, axis=1))])
    items = [Item(np.zeros((int(np.prod(g)), flat.shape[1]), np.uint8), tuple(map(int, g)), (1, 1)) for g in grids]
    left, by_row = list(items), []
    for row in np.asarray(tokens):
        count, mine = int(np.sum(row == media)), []
        while count:
            mine.append(left.pop(0))
            count -= mine[-1].features(merge)
        by_row.append(mine)
    out = arrange(
        by_row, np.asarray(tokens), media_token=media, rows=rows, patches=patches, merge=merge, patch_size=size
    )
    row_of = assign([len(item.patches) for item in items], rows, patches)
    values = np.zeros(out["patches"].shape, np.float32)
    for r in range(rows):
        inside = [i for i, row in enumerate(row_of) if row == r]
        for p in np.flatnonzero(out["patch_item"][r]):
            item = inside[out["patch_item"][r, p] - 1]
            at = np.ravel_multi_index(out["patch_position"][r, p], grids[item])
            values[r, p] = flat[starts[item] + at]
    return Images.of({name: jnp.asarray(a) for name, a in (out | {"patches": values}).items()})


def one_row_of_media(grids, media=MEDIA) -> np.ndarray:
    return np.full((1, sum(int(g[1] * g[2]) // 4 for g in grids)), media, np.int32)


def features_in_order(features, index) -> jax.Array:
    return features.reshape(-1, features.shape[-1])[np.asarray(index).ravel()]


def random_items(rng, grids, size=2):
    n = int(np.sum(np.prod(grids, axis=1)))
    return rng.uniform(-1, 1, (n, 3, size, size)).astype(np.float32)


@pytest.mark.parametrize("case", ["two_images", "odd_sizes", "video_and_image"])
def test_tower_and_projector_match_golden(golden, tiny, case):
    data, vision = golden("g6_vision", case), tiny[0].vision
    grids = data["in.grid_thws"]
    images = images_of(data["in.pixel_values"], grids, one_row_of_media(grids), rows=1, patches=160)
    where = []  # of each patch in the order of the vectors
    for number, grid in enumerate(grids, 1):
        for position in np.ndindex(*grid):
            hit = (images.item[0] == number) & np.all(np.asarray(images.position[0]) == position, axis=-1)
            where.append(int(np.flatnonzero(hit)[0]))

    def run(vision, patches):
        filled = replace(images, patches=patches)
        embedded, x = vision.embed(filled), vision.encode(filled)
        return embedded, x, features_in_order(vision.project(x, filled), images.index)

    (embedded, x, projected), pull = jax.vjp(jax.jit(run), vision, images.patches)
    assert relmax(embedded[0, np.array(where)], data["mid.patch_embed"]) <= 2e-5
    assert relmax(x[0, np.array(where)], data["mid.final_norm"]) <= 2e-5
    assert relmax(projected, data["out.projected"]) <= 2e-5
    assert relmax(projected, data["ref64.projected"]) <= 2e-5
    zeros = jnp.zeros_like(embedded), jnp.zeros_like(x)
    d_vision, d_patches = pull((*zeros, jnp.asarray(data["in.w"])))
    assert (
        relmax(d_patches[0, np.array(where)].reshape(data["grad.pixel_values"].shape), data["grad.pixel_values"])
        <= 1e-4
    )
    model = nnx.clone(tiny[0])
    model.vision = d_vision
    ours = dict(hf.to_hf(model))
    names = golden_cases("g6_vision")[case]["grad_names"]
    norms = np.array([np.linalg.norm(ours[name]) for name in names])
    np.testing.assert_allclose(norms, data["grad_norm"], rtol=1e-4)
    for name in names:
        if "fullgrad." + name in data:
            assert relmax(ours[name], data["fullgrad." + name]) <= 1e-4, name


@pytest.mark.parametrize("case", ["one_row_two_images", "batch_right_pad", "batch_left_pad", "video"])
def test_images_in_text_match_golden(golden, tiny, case):
    data, (model, bias) = golden("g8_multimodal", case), tiny
    described = golden_cases("g8_multimodal")[case]
    counts, tokens, valid = list(described["tokens_per_item"]), [], []
    width = data["mid.merged_embeds"].shape[1]
    for ids, mask in zip(data["in.input_ids"], data["in.attention_mask"]):
        row, real = [], []
        for token, keep in zip(ids, mask):
            n = counts.pop(0) if token == MEDIA and keep else 1
            row += [token] * n
            real += [keep] * n
        left = case == "batch_left_pad"
        fill = [described["pad_token_id"]] * (width - len(row)), [0] * (width - len(row))
        tokens.append(fill[0] + row if left else row + fill[0])
        valid.append(fill[1] + real if left else real + fill[1])
    tokens, valid = np.array(tokens, np.int32), np.array(valid, np.int32)
    np.testing.assert_array_equal(valid, data["mid.merged_attention_mask"])
    images = images_of(data["in.pixel_values"], data["in.grid_thws"], tokens, rows=2, patches=80)
    labels = jnp.asarray(data["mid.merged_labels"])[:, 1:]

    def loss_fn(model):
        logits = model(jnp.asarray(tokens), jnp.asarray(valid), images=images, router_bias=bias)
        logp = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(logp, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        keep = (labels != -100) & (valid[:, 1:] == 1)
        return -jnp.sum(jnp.where(keep, picked, 0)) / jnp.sum(keep), logits

    embeds = jax.jit(lambda m: m.embedded(jnp.asarray(tokens), images))(model)
    assert relmax(embeds[valid == 1], data["mid.merged_embeds"][valid == 1]) <= 2e-5
    if with_gradients := "grad_norm" in data:
        (loss, logits), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(model)
    else:
        (loss, logits), grads = jax.jit(loss_fn)(model), None
    error = (np.asarray(logits, np.float64) - data["ref64.logits"])[valid == 1]
    assert np.linalg.norm(error) / np.linalg.norm(data["ref64.logits"][valid == 1]) <= 1.5e-4
    assert np.max(np.abs(error)) <= 4e-3
    assert abs(float(loss) - float(data["out.loss"][0])) <= 1e-4
    if not with_gradients:
        return
    ours = dict(hf.to_hf(grads))
    name = "language_model.model.embed_tokens.weight"
    ours[name] = ours[name].copy()
    ours[name][described["pad_token_id"]] = 0  # the peer's padding row gets no gradient
    norms = np.array([np.linalg.norm(ours[name]) for name in described["grad_names"]])
    reached = data["grad_norm"] > 0  # the others are experts of tokens that no loss depends on
    assert norms[~reached].max() <= 1e-7 * norms.max()
    relative = np.abs(norms - data["grad_norm"])[reached] / data["grad_norm"][reached]
    assert relative.max() <= 1e-2
    assert np.median(relative) <= 2e-3
    for key, value in data.items():
        if key.startswith("fullgrad."):
            name = key.removeprefix("fullgrad.")
            mine = ours[name][: value.size] if name.endswith("A_log") else ours[name]
            assert relmax(mine, value) <= 1e-2, name


def test_parameter_counts_are_those_of_the_release():
    def count(config) -> int:
        return sum(x.size for x in jax.tree.leaves(nnx.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0)))))

    assert count(k3(vision=moonvit())) - count(k3()) == 447_358_976
    small = VisionConfig(
        hidden_size=32, num_layers=2, num_heads=3, head_dim=16, mlp_size=64, patch_size=4, position_grid=(8, 8)
    )
    assert count(nano(vision=small)) - count(nano()) == 24_224 + 32_896


GRIDS = np.array([[1, 4, 2], [1, 2, 6], [3, 2, 2], [1, 4, 4], [2, 4, 2]])


@pytest.fixture(scope="module")
def seeing():
    return create(micro(vision=VISION))


def test_packed_items_equal_items_by_themselves_whatever_their_order_and_rows(seeing):
    pixels = random_items(np.random.default_rng(0), GRIDS)
    starts = np.concatenate([[0], np.cumsum(np.prod(GRIDS, axis=1))])

    def features(numbers, rows, patches):
        chosen = np.concatenate([pixels[starts[i] : starts[i + 1]] for i in numbers])
        images = images_of(chosen, GRIDS[numbers], one_row_of_media(GRIDS[numbers]), rows=rows, patches=patches)
        out = np.asarray(features_in_order(jax.jit(seeing.vision)(images), images.index))
        sizes = [int(GRIDS[i][1] * GRIDS[i][2]) // 4 for i in numbers]
        return dict(zip(numbers, np.split(out, np.cumsum(sizes)[:-1])))

    alone = {i: features([i], 1, 16)[i] for i in range(len(GRIDS))}
    for numbers, rows, patches in ([[0, 1, 2, 3, 4], 1, 72], [[4, 2, 0, 3, 1], 3, 28], [[3, 1], 4, 32]):
        for i, value in features(numbers, rows, patches).items():
            np.testing.assert_allclose(value, alone[i], rtol=2e-5, atol=2e-6)


def test_padding_is_inert_whatever_it_holds(seeing):
    pixels, grids = random_items(np.random.default_rng(1), GRIDS[:2]), GRIDS[:2]
    images = images_of(pixels, grids, one_row_of_media(grids), rows=2, patches=24)
    padding = np.asarray(images.item) == 0
    assert padding.any()
    poisoned = replace(images, patches=jnp.where(padding[..., None], 1e4, images.patches))

    def loss(vision, filled):
        return jnp.sum(jnp.sin(features_in_order(vision(filled), images.index)))

    (a, da), (b, db) = (jax.jit(jax.value_and_grad(loss))(seeing.vision, i) for i in (images, poisoned))
    np.testing.assert_array_equal(a, b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), da, db)
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(da))


def test_pixels_as_bytes_are_pixels_in_minus_one_to_one(seeing):
    bytes_ = np.random.default_rng(2).integers(0, 256, (8, 3, 2, 2))
    floats = images_of(bytes_ / 255 * 2 - 1, GRIDS[:1], one_row_of_media(GRIDS[:1]), rows=1, patches=8)
    whole = images_of(bytes_, GRIDS[:1], one_row_of_media(GRIDS[:1]), rows=1, patches=8)
    whole = replace(whole, patches=whole.patches.astype(jnp.uint8))
    np.testing.assert_allclose(seeing.vision(whole), seeing.vision(floats), rtol=1e-5, atol=1e-6)


def test_rematerialised_blocks_change_no_gradient(seeing):
    images = images_of(
        random_items(np.random.default_rng(3), GRIDS), GRIDS, one_row_of_media(GRIDS), rows=1, patches=72
    )

    def gradient(remat):
        return jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(v(images, remat=remat)))))(seeing.vision)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), gradient(False), gradient(True))


@pytest.mark.parametrize(
    ("merge", "grids", "rows", "patches"),
    [
        pytest.param(
            2, [(1, 200, 2), (1, 2, 300)], 2, 600, id="fifty times the table, a full row", marks=pytest.mark.slow
        ),
        pytest.param(2, [(4, 2, 2), (1, 2, 2)], 4, 16, id="one token of four frames, empty rows"),
        pytest.param(1, [(1, 1, 1), (1, 3, 5), (4, 1, 2)], 1, 24, id="merge 1", marks=pytest.mark.slow),
        pytest.param(3, [(1, 3, 3), (2, 6, 9)], 1, 117, id="merge 3"),
    ],
)
def test_extreme_items_are_finite_and_near_float32_in_bfloat16(merge, grids, rows, patches):
    rng = np.random.default_rng(9)
    items = [Item(rng.integers(0, 256, (t * h * w, 12), np.uint8), (t, h, w), (1, 1)) for t, h, w in grids]
    tokens = np.full((1, sum(item.features(merge) for item in items)), MEDIA)
    shape = {"media_token": MEDIA, "rows": rows, "patches": patches, "merge": merge, "patch_size": 2}
    images = Images.of({name: jnp.asarray(a) for name, a in arrange([items], tokens, **shape).items()})

    def loss(vision):
        features = features_in_order(vision(images), images.index).astype(jnp.float32)
        return jnp.sum(jnp.sin(features)), features

    found = []
    for dtype in ("float32", "bfloat16"):
        tower = Vision(micro(vision=replace(VISION, merge=merge), dtype=dtype), jax.random.key(0))
        (_, features), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(tower)
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(gradient))
        found.append(np.asarray(features))
    assert np.abs(found[1] - found[0]).max() < 0.03 * np.abs(found[0]).max()


@pytest.mark.parametrize("change", [{"hidden_size": 15}, {"head_dim": 6}, {"projector_norm_eps": 0.0}, {"merge": 0}])
def test_a_tower_that_cannot_be_is_refused(change):
    with pytest.raises(ConfigError, match=f"VisionConfig.{next(iter(change))} must be"):
        replace(VISION, **change)


def test_text_alone_runs_no_tower(seeing):
    tokens = jnp.ones((1, 16), jnp.int32)
    costs = [jax.jit(lambda m, t: m(t)).lower(m, tokens).cost_analysis() for m in (seeing, create(micro()))]
    assert costs[0] == costs[1]


def test_images_need_a_tower(seeing):
    images = images_of(
        random_items(np.random.default_rng(4), GRIDS[:1]), GRIDS[:1], one_row_of_media(GRIDS[:1]), rows=1, patches=8
    )
    with pytest.raises(ValueError, match="vision"):
        create(micro())(jnp.ones((1, 2), jnp.int32), images=images)


@pytest.mark.parametrize(
    "mesh",
    [{"data": 2}, {"context": 2}, {"tensor": 2}, {"data": 2, "context": 2, "tensor": 2}, {"expert": 2, "fsdp": True}],
)
def test_every_mesh_computes_the_features_and_gradients_of_one_device(seeing, mesh):
    rng = np.random.default_rng(5)
    tokens = np.array([[1, *[9] * 2, 3, *[9] * 3, 4], [*[9] * 1, 2, *[9] * 4, 5, 6]], np.int32)
    images = images_of(random_items(rng, GRIDS[:4]), GRIDS[:4], tokens, rows=4, patches=16, media=9)
    w = jnp.asarray(rng.normal(size=(*tokens.shape, seeing.config.hidden_size)), jnp.float32)

    def loss(model, images, tokens, w):
        return jnp.sum(w * model.embedded(tokens, images))

    want, d_want = jax.jit(jax.value_and_grad(loss))(seeing, images, jnp.asarray(tokens), w)
    with jax.set_mesh(make_mesh(MeshConfig(**mesh))) as _:
        current = jax.sharding.get_mesh()
        model = jax.device_put(seeing, shardings(seeing, current, at_rest=mesh.get("fsdp", False)))
        rows, text = spec("patch_row", "patch"), spec("batch", "time")
        placed = {
            name: jax.device_put(getattr(images, name), jax.NamedSharding(current, text if name == "index" else rows))
            for name in ("patches", "item", "position", "grid", "feature", "index")
        }
        args = Images(**placed), jax.device_put(tokens, jax.NamedSharding(current, text))
        residual = jax.device_put(w, jax.NamedSharding(current, P(*spec("batch", "sequence"), None)))
        got, d_got = jax.jit(jax.value_and_grad(loss))(model, *args, residual)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), d_got.vision, d_want.vision)
