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
# # What is in a released checkpoint, and does it come out as it went in?
#
# 1. preflight: is everything there, and where do the bytes sit?
# 2. inside the MXFP4 experts: codes, scales, and what they say about who made them,
# 3. what the choice of a scale rule costs,
# 4. load, and compare logits with those of another implementation,
# 5. export, and compare bytes.

# %%
import collections
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import k3jax
from k3jax.checkpoint.preflight import Checkpoint, preflight
from k3jax.ops.mx import GROUP, dequantize, quantize, unpack
from k3jax.train.loop import use_compile_cache

use_compile_cache()  # compiled programs are kept between runs
jax.config.update("jax_default_matmul_precision", "highest")  # float32 means float32 on a GPU too: we compare results
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# **Change this cell to try something else**, then run all. `DIRECTORY` may be a real one, such as a download of
# Kimi-K3: sections 1 to 3 read headers and `EXPERTS` experts only. Sections 4 and 5 load and write all of it; set
# `LOAD` to False where it does not fit. (On many devices: `python -m k3jax.checkpoint import DIR RUN_DIR --mesh.expert
# 8`.)

# %%
DIRECTORY: str | None = None  # the nine-layer checkpoint that the tests use
EXPERTS = 64
LOAD = True

root = next(folder for folder in (Path.cwd(), *Path.cwd().parents) if (folder / "tests" / "golden").exists())
golden = root / "tests" / "golden" / "g9_checkpoint"
directory = golden / "tiny_k3_mxfp4" if DIRECTORY is None else Path(DIRECTORY).expanduser()

# %% [markdown]
# ## 1 · What is in it?
#
# `preflight` reads `config.json` and the headers of the shards, derives every name, shape and dtype from the
# configuration, and lists all that is missing, unexpected or misshapen, at once. Nothing else is touched.

# %%
checkpoint = preflight(directory)
lines = checkpoint.lines()
print(lines[0].replace(str(directory), directory.name), *lines[1:], sep="\n")

templates = collections.defaultdict(list)
for name, info in checkpoint.tensors.items():
    templates[re.sub(r"\.(\d+)\.", ".#.", re.sub(r"\.(\d+)\.", ".#.", name))].append(info)
print(f"\n{len(templates)} kinds of names; those with the most bytes:")
largest = sorted(templates.items(), key=lambda item: -sum(i.stop - i.start for i in item[1]))
for name, infos in largest[:12]:
    print(f"{len(infos):>7,} × {infos[0].dtype:4} {str(infos[0].shape):14} {name.removeprefix('language_model.')}")

# %%
MECHANISMS = {
    "routed experts": r"\.experts\.",
    "shared experts": r"shared_experts",
    "other MoE": r"block_sparse_moe",
    "tower, projector": r"vision|projector",
    "attention residuals": r"_res_",
    "mixers (KDA, MLA)": r"self_attn",
    "dense MLP": r"\.mlp\.",
    "embedding, head": r"embed_tokens|lm_head",
    "norms": r"norm",
}
sizes: dict[str, collections.Counter] = {mechanism: collections.Counter() for mechanism in MECHANISMS}
for name, info in checkpoint.tensors.items():
    mechanism = next(m for m, pattern in MECHANISMS.items() if re.search(pattern, name))
    sizes[mechanism][info.dtype] += info.stop - info.start

fig, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
names, left = list(sizes), np.zeros(len(sizes))
unit, unit_name = (2**30, "GiB") if checkpoint.total_bytes > 2**30 else (2**10, "KiB")
for dtype in sorted({dtype for size in sizes.values() for dtype in size}):
    values = np.array([sizes[name][dtype] for name in names]) / unit
    axis.barh(names, values, left=left, label=dtype)
    left += values
axis.invert_yaxis()
axis.set(xlabel=unit_name, title=f"{directory.name}: bytes by mechanism and stored type")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## 2 · Inside the experts
#
# Routed experts are MXFP4: 32 numbers along the input share a power of two (uint8, bias 127), and each is a 4-bit code
# for ±{0, ½, 1, 1½, 2, 3, 4, 6}; two codes to a byte. 4.25 bits a number.


# %%
def raw(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """The bytes of a tensor as uint8, in its shape if it is uint8 itself."""
    info = checkpoint.tensors[name]
    data = np.fromfile(info.file, np.uint8, info.stop - info.start, offset=info.start)
    return data.reshape(info.shape) if info.dtype == "U8" else data


packed_names = [name for name in checkpoint.tensors if name.endswith(".weight_packed")]
assert packed_names, f"{directory} has plain experts: sections 2 and 3 are about packed ones"
chosen = packed_names[:: max(1, len(packed_names) // EXPERTS)][:EXPERTS]
stored = [(raw(checkpoint, name), raw(checkpoint, name.replace("_packed", "_scale"))) for name in chosen]
weights = [dequantize(codes, scales, np.float32, format="mxfp4") for codes, scales in stored]
elements = np.concatenate([unpack(codes, format="mxfp4").reshape(-1, GROUP) for codes, _ in stored])  # [groups, 32]
exponents = np.concatenate([scales.ravel() for _, scales in stored]).astype(int) - 127
print(f"{len(chosen)} matrices of {weights[0].shape}, {exponents.size:,} groups, {elements.size:,} numbers")

LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
normal = np.random.default_rng(0).normal(size=(20_000, GROUP)).astype(np.float32)
of_normal = unpack(quantize(normal, format="mxfp4", scale_rule="outlier")[0], format="mxfp4")

fig, axes = plt.subplots(1, 3, figsize=(10, 2.9), layout="constrained", width_ratios=[1.5, 1, 1])
signed = np.concatenate([-LEVELS[:0:-1], [0], LEVELS[1:]])
order = [*range(15, 8, -1), 0, *range(1, 8)]  # code 8 is −0
counts = [np.bincount(x.ravel(), minlength=16) for x in (elements, of_normal)]
for count, style in zip(counts, ({"color": "C0", "label": "here"}, {"fill": False, "label": "normal, “outlier”"})):
    count[0] += count[8]
    axes[0].bar(range(15), 100 * count[order] / count[order].sum(), **style)
axes[0].set_xticks(range(15), [f"{x:g}" for x in signed], fontsize=7)
axes[0].set(xlabel="code", ylabel="numbers (%)", title="codes")
axes[0].legend(frameon=False, fontsize=7)
values, count = np.unique(exponents, return_counts=True)
axes[1].bar(values, 100 * count / count.sum())
axes[1].set(xlabel="log₂ of the scale", ylabel="groups (%)", title="scales")
axes[1].xaxis.get_major_locator().set_params(integer=True)
example = weights[0]
limit = np.abs(example).max()
image = axes[2].imshow(example[:64, :64], cmap="RdBu", vmin=-limit, vmax=limit)
axes[2].set(title="a matrix", xlabel="input", ylabel="output")
fig.colorbar(image, ax=axes[2], label="weight")
plt.show()

# %% [markdown]
# Which rule made the scales? The report does not say, but the largest code of a group tells something. With $a =
# m\,2^k$ the largest number of the group, "floor" always takes the scale $2^{k-2}$, "ceil" the next one from $m > 1.5$
# (so that nothing is cut off at 6), "even" and "outlier" from $m \ge 1.75$. So a largest code of 3 betrays "ceil" (or
# scales with room to spare), and between the others the shares of 4 and 6 decide, if the weights were normal before.

# %%
RULES = ("floor", "ceil", "even", "outlier")
top = {"here": elements}
for rule in RULES:
    top[rule] = unpack(quantize(normal, format="mxfp4", scale_rule=rule)[0], format="mxfp4")
share = {name: np.bincount((codes & 7).max(-1), minlength=8) / len(codes) for name, codes in top.items()}
fig, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
for number, (name, values) in enumerate(share.items()):
    place = np.arange(8) + 0.16 * (number - 2)
    label = name if name == "here" else f"normal numbers, {name}"
    axis.bar(place, 100 * values, 0.15, label=label, color="black" if name == "here" else f"C{number - 1}")
axis.set_xticks(range(8), [f"{x:g}" for x in LEVELS])
axis.set(xlabel="largest code of a group, without sign", ylabel="groups (%)")
axis.legend(frameon=False, fontsize=7)
plt.show()
distance = {rule: np.abs(share[rule] - share["here"]).sum() / 2 for rule in RULES}
print("apart from what is here:", *(f"{rule} {100 * d:.1f} %" for rule, d in distance.items()), sep="  ")

# %% [markdown]
# ## 3 · What does a rule cost?
#
# The error of a group depends on where its largest number lies between two powers of two; on the right it is moved
# along there. "floor" cuts off what exceeds 1.5, which in the end costs more than the coarser grid that "ceil" has from
# there on; "even" and "outlier" (the same for MXFP4) change over at 1.75.


# %%
def error(x: np.ndarray, rule: str, format: str = "mxfp4") -> np.ndarray:
    """Root mean square error of each group over that of its numbers."""
    back = dequantize(*quantize(x, format=format, scale_rule=rule), np.float32, format=format)
    return np.sqrt(((back - x) ** 2).mean(-1) / (x**2).mean(-1))


rng = np.random.default_rng(1)
samples = {"normal": normal, "heavy tails (t₃)": rng.standard_t(3, normal.shape).astype(np.float32)}
m = np.linspace(1, 2, 65, endpoint=False)
scaled = normal[:4000] / np.abs(normal[:4000]).max(-1, keepdims=True)
fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
labels = [f"{format.upper()}, {name}" for format in ("mxfp4", "mxfp8") for name in samples]
for number, rule in enumerate(RULES):
    heights = [100 * error(x, rule, format).mean() for format in ("mxfp4", "mxfp8") for x in samples.values()]
    axes[0].bar(np.arange(4) + 0.2 * (number - 1.5), heights, 0.18, color=f"C{number}", label=rule)
    by_m = [100 * error(scaled * np.float32(x), rule).mean() for x in m]
    axes[1].plot(m, by_m, color=f"C{number}", linestyle="--" if rule == "outlier" else "-", label=rule)
axes[0].set_xticks(range(4), [label.replace(", ", "\n") for label in labels], fontsize=7)
axes[0].set_ylabel("error of a group (%, root mean square)")
axes[0].legend(frameon=False)
axes[1].set(xlabel="largest of the group over the power of two below", ylabel="error of a group (%)", title="MXFP4")
plt.show()

# %% [markdown]
# Numbers that are on a grid already must come back as the same bytes. A group whose largest code is 4 or 6 does under
# every rule; others need the old scales, which `export_pretrained` passes on.

# %%
kept = {}
for rule in RULES:
    same = [quantize(w, format="mxfp4", scale_rule=rule)[1] == scales for w, (_, scales) in zip(weights, stored)]
    kept[rule] = np.mean(same)
again = [
    quantize(w, format="mxfp4", scale_rule="outlier", source_scales=scales) for w, (_, scales) in zip(weights, stored)
]
exact = all(np.array_equal(x, y) for pair, old in zip(again, stored) for x, y in zip(pair, old))
print("scales that come back from the numbers alone:", *(f"{rule} {x:.1%}" for rule, x in kept.items()))
print(f"codes and scales with the old scales at hand: {'all the same' if exact else 'DIFFERENT'}")
assert exact

# %% [markdown]
# ## 4 · Load it
#
# Each device reads the byte ranges that it holds. For the checkpoint of the tests there are logits of an independent
# implementation, computed in float64; ours are in float32.

# %%
if LOAD:
    loaded = k3jax.load_pretrained(directory, dtype="float32", param_dtype="float32")
    print(
        f"{sum(x.size for x in jax.tree.leaves(loaded.model)):,} parameters and {loaded.router_bias.size} router biases"
    )
if LOAD and DIRECTORY is None:
    with np.load(golden / "mxfp4_logits_and_dequant.npz") as data:
        tokens, expected = data["in.input_ids"], data["ref64.logits"].astype(np.float64)
    run = jax.jit(lambda model, tokens, bias: model(tokens, router_bias=bias))
    logits = np.asarray(run(loaded.model, jnp.asarray(tokens), loaded.router_bias), np.float64)
    difference = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    print(f"logits {logits.shape}: {difference:.1e} from the reference; the likeliest tokens agree at", end=" ")
    print(f"{(logits.argmax(-1) == expected.argmax(-1)).mean():.0%} of the places")
    assert difference < 1.5e-4

    fig, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    axes[0].plot(expected.ravel(), logits.ravel(), ".", markersize=1)
    axes[0].set(xlabel="logits of the reference", ylabel="ours")
    apart = np.abs(logits - expected)
    axes[1].hist(np.log10(apart[apart > 0]), 60)
    axes[1].set(xlabel="log₁₀ of the difference", ylabel="logits")
    plt.show()

# %% [markdown]
# ## 5 · Write it
#
# `export_pretrained` writes the layout back. With `like=` the source, what did not change has the bytes that it came
# with, scales included. Then one weight of one expert is changed, and only its row may differ.


# %%
def different(a: Checkpoint, b: Checkpoint) -> dict[str, int]:
    """Tensors that differ, and in how many bytes."""
    assert a.tensors.keys() == b.tensors.keys()
    for name, info in a.tensors.items():
        assert (info.dtype, info.shape) == (b.tensors[name].dtype, b.tensors[name].shape), name
    found = {name: int((raw(a, name) != raw(b, name)).sum()) for name in a.tensors}
    return {name: count for name, count in found.items() if count}


def exported(model: k3jax.K3) -> dict[str, int]:
    """What differs after an export."""
    with tempfile.TemporaryDirectory() as folder:
        k3jax.export_pretrained(model, loaded.router_bias, Path(folder) / "out", like=directory)
        return different(checkpoint, preflight(Path(folder) / "out"))


if LOAD:
    unchanged = exported(loaded.model)
    print(f"{len(checkpoint.tensors):,} tensors written, {len(unchanged)} differ")
    assert not unchanged

    def nudge(path: tuple, leaf: jax.Array) -> jax.Array:
        first = jax.tree_util.keystr(path, simple=True, separator="/").startswith("segments/0/runs/1/ffn/w1")
        return leaf.at[0, 5, 7, 11].add(0.1) if first else leaf  # layer, expert, input, output

    nudged = exported(jax.tree_util.tree_map_with_path(nudge, loaded.model))
    for name, count in nudged.items():
        print(f"{count} bytes of {name.removeprefix('language_model.')}")
