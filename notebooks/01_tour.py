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
# # A tour of Kimi K3
#
# K3 small enough for a laptop: same mechanisms, nine layers, bytes as tokens. Each section asks one question of it.
#
# 1. Where do the parameters sit, and which layer does what?
# 2. What goes in, what comes out, and do packed documents see each other?
# 3. Which depths does a sublayer read (attention residuals)?
# 4. What does quantile balancing do to the expert loads?
# 5. How long does each KDA head remember?
# 6. Does cached decoding give what a full pass gives?
#
# "Report" is the Kimi K3 report, arXiv 2607.24653. The model is a pytree of parameters and its call is a pure function,
# so `jax.jit`, `jax.tree.map` and `jax.grad` apply directly.

# %%
import dataclasses
import inspect
import string
import sysconfig
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import k3jax
from k3jax.data.tokenizers import load_tokenizer
from k3jax.generate import decode, prefill
from k3jax.model.plan import plan_layers
from k3jax.ops.kda.gates import log_decay
from k3jax.ops.norms import rms_norm
from k3jax.ops.quantile_balancing import qb_update
from k3jax.train.flops import parameter_counts
from k3jax.train.loop import use_compile_cache
from k3jax.train.step import max_violation

use_compile_cache()  # compiled programs are kept between runs, so only the first run of this notebook is slow
jax.config.update("jax_default_matmul_precision", "highest")  # float32 means float32 on a GPU too: we compare results
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# **Change this cell to try something else**, then run all. Block sizes from 1 to 9 give other depth maps in section 3,
# other numbers of experts per token give other loads in section 4. With `RUN` set, every section shows a trained model
# instead of a fresh one (`make train` makes `runs/nano` in about five minutes).

# %%
RUN: str | None = None  # "../runs/nano"
config = k3jax.nano(attn_res_block_size=4)
config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, experts_per_token=4, num_experts=16))

# %% [markdown]
# ## 1 · Where do the parameters sit, and which layer does what?
#
# `k3jax.create(config)` builds a model.

# %%
if RUN is None:
    model, tokenizer = k3jax.create(config), load_tokenizer("bytes")
    router_bias = jnp.zeros((config.num_moe_layers, config.moe.num_experts))
else:
    run = k3jax.load(RUN)
    model, tokenizer, router_bias, config = run.model, run.tokenizer, run.router_bias, run.config.model

counts = parameter_counts(config)
assert counts.total == sum(leaf.size for leaf in jax.tree.leaves(model))
print(f"{'mechanism':<18}{'parameters':>12}{'share':>9}")
for name, number in sorted(counts.by_mechanism.items(), key=lambda item: -item[1]):
    print(f"{name.replace('_', ' '):<18}{number:>12,}{number / counts.total:>9.1%}")
print(f"{'total':<18}{counts.total:>12,}{1:>9.1%}")
print(f"{'active per token':<18}{counts.active:>12,}{counts.active / counts.total:>9.1%}")

# %% [markdown]
# Three KDA layers, then one MLA layer; the last layer is MLA whatever its number. Layers of one kind are stacked and
# scanned, so that the 93 layers of the released model are no more to compile than the pattern they repeat.
# `model.layer(5)` gives the parameters of one layer by its number.

# %%
size = config.attn_res_block_size or config.num_layers
print("block  layer  mixer  feed-forward")
for number, layer in enumerate(config.layers):
    print(f"{number // size if number % size == 0 else '':>5}{number:>7}  {layer.mixer.upper():<5}  {layer.ffn}")

released = k3jax.k3()
print(f"\nK3 as released, {parameter_counts(released).total:,} parameters:")
for segment in plan_layers(released):
    units = []
    for repeat in segment.repeats:
        unit = ", ".join(f"{r.count} {r.spec.mixer.upper()}{' dense' * (r.spec.ffn == 'dense')}" for r in repeat.runs)
        units.append(f"{repeat.count} × ({unit})" if repeat.count > 1 else unit)
    print(f"  from layer {segment.first_layer:>2}: {segment.num_blocks} block(s) of", ", ".join(units))

# %% [markdown]
# ## 2 · What goes in, what comes out, and do packed documents see each other?
#
# Documents stand end to end in a row of tokens; `segment_ids` numbers them from 1, and 0 is padding. Convolution tails
# and KDA states restart at every border, MLA masks across it, and the router sees positions within the document only.
# So document 2 must not care what document 1 says, nor whether there is one.

# %%
T = 256


def pack(*documents: list[int]) -> tuple[jax.Array, jax.Array]:
    """Documents end to end in one row [1, T], padded, and their segment ids."""
    tokens, segment_ids = np.zeros((2, 1, T), np.int32)
    begin = 0
    for number, document in enumerate(documents, start=1):
        tokens[0, begin : begin + len(document)] = document
        segment_ids[0, begin : begin + len(document)] = number
        begin += len(document)
    return jnp.asarray(tokens), jnp.asarray(segment_ids)


@jax.jit
def forward(model: k3jax.K3, tokens: jax.Array, segment_ids: jax.Array, router_bias: jax.Array):
    """Logits [B, T, V] and the auxiliary outputs, depth-attention weights included."""
    return model(tokens, segment_ids, router_bias=router_bias, return_aux=True, depth=True)


texts = [inspect.getsource(textwrap.dedent), inspect.getsource(string.capwords)]
first, second = (tokenizer.encode(text)[: T // 2 - 1] + [tokenizer.eos_id] for text in texts)
for number, document in enumerate((first, second), start=1):
    print(textwrap.indent(tokenizer.decode(document[:-1]), f"{number} | ", lambda line: True))

tokens, segment_ids = pack(first, second)
logits, aux = forward(model, tokens, segment_ids, router_bias)
print(f"\ntokens {tokens.shape} → logits {logits.shape}, largest {jnp.abs(logits).max():.2f}")

# %% [markdown]
# The last line is the counter-check: with the border taken away, document 2 does change.

# %%
n, m = len(first), len(second)


def change(row: tuple[jax.Array, jax.Array], begin: int = n) -> float:
    """Largest change of the logits of document 2, which begins at `begin` in the other row."""
    other, _ = forward(model, *row, router_bias)
    return float(jnp.abs(other[0, begin : begin + m] - logits[0, n : n + m]).max())


reversed_first, alone = change(pack(first[::-1], second)), change(pack(second), begin=0)
joined = change(pack(first + second))
print("largest change of the logits of document 2")
print(f"document 1 reversed   {reversed_first:.1e}")
print(f"document 1 left out   {alone:.1e}")
print(f"both as one document  {joined:.1e}")
TOLERANCE = 1e-4 if config.dtype == "float32" else 5e-2
assert max(reversed_first, alone) < TOLERANCE * joined

# %% [markdown]
# ## 3 · Which depths does a sublayer read?
#
# With block attention residuals (arXiv 2603.15031) a sublayer's input is not the running sum but a mix over depth. The
# sources $V_i$ are the embedding, the sums of the finished blocks, and the partial sum of the present one. Sublayer $l$
# has a learned pseudo-query $w_l$ and a key norm $\gamma_l$:
#
# $$ h_l = \sum_i \alpha_{l,i} V_i, \qquad
# \alpha_{l,i} = \mathrm{softmax}_i\big((\gamma_l \odot w_l) \cdot \mathrm{rms}(V_i)\big) $$
#
# Queries start at zero, so a fresh model averages its sources. With other queries each sublayer reads other depths, and
# since the keys are activations, each token does so differently: the means on the right stay near uniform while single
# tokens (below) choose sharply. Here we draw queries with logits of standard deviation 2; training finds better ones.
# Grey: the source does not exist yet.


# %%
def draw_queries(model: k3jax.K3, seed: int, deviation: float = 2.0) -> k3jax.K3:
    """The same model with random pseudo-queries; every other leaf is shared."""
    random = np.random.default_rng(seed)

    def redraw(path: tuple, leaf: jax.Array) -> jax.Array:
        if "_res.proj" not in jax.tree_util.keystr(path):
            return leaf
        return jnp.asarray(random.normal(scale=deviation * leaf.shape[-1] ** -0.5, size=leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(redraw, model)


_, drawn = forward(draw_queries(model, 0), tokens, segment_ids, router_bias)
as_built, drawn = np.asarray(aux.depth)[:, :, 0], np.asarray(drawn.depth)[:, :, 0]  # [sublayers + 1, sources, T]

exists = as_built[:, :, :1] > 0
if RUN is None:
    np.testing.assert_allclose(as_built, (exists / exists.sum(1, keepdims=True)).repeat(T, 2), rtol=1e-6)

sources = ["embedding", *(f"block {b}" for b in range(config.num_blocks - 1)), "partial"]
kinds = {"kda": "KDA", "mla": "MLA", "dense": "MLP", "moe": "MoE"}
sublayers = [f"{l} {kinds[kind]}" for l, spec in enumerate(config.layers) for kind in (spec.mixer, spec.ffn)]
sublayers += ["output"]

fig = plt.figure(figsize=(9, 8), layout="constrained")
grid = fig.add_gridspec(2, 2, height_ratios=[3.2, 1])
colours = plt.get_cmap("viridis").with_extremes(bad="0.85")
for place, weights, title in (
    (grid[0, 0], as_built, "as built (queries zero)" if RUN is None else "trained queries"),
    (grid[0, 1], drawn, "random queries"),
):
    axis = fig.add_subplot(place)
    mean = weights[..., : n + m].mean(-1)
    image = axis.imshow(np.where(mean > 0, mean, np.nan), aspect="auto", vmin=0, vmax=1, cmap=colours)
    for (row, column), value in np.ndenumerate(mean):
        if value > 0:
            colour = "white" if value < 0.6 else "black"
            axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(sources)), sources)
    axis.set_yticks(range(len(sublayers)), sublayers)
    axis.set(title=f"Mean over tokens, {title}", xlabel="source")
fig.axes[0].set_ylabel("layer and sublayer")
axis = fig.add_subplot(grid[1, :])
by_token, whose = (drawn, "random queries") if RUN is None else (as_built, "trained queries")
axis.imshow(by_token[-1, :, : n + m], aspect="auto", vmin=0, vmax=1, cmap=colours, interpolation="nearest")
axis.axvline(n - 0.5, color="white", linestyle="--")
axis.set_yticks(range(len(sources)), sources)
axis.set(title=f"Output mix token by token, {whose} (dashed: document 2 begins)", xlabel="token", ylabel="source")
fig.colorbar(image, ax=fig.axes, label="depth-attention weight", shrink=0.6)
plt.show()

# %% [markdown]
# ## 4 · What does quantile balancing do to the expert loads?
#
# The router picks the $k$ experts with the largest $s_{ij} + b_j$. Token $i$ admits expert $j$ exactly when
# $b_j \ge \alpha_i - s_{ij}$, with $\alpha_i$ the $(k{+}1)$-th largest biased score. An expert gets its fair share
# $k/E$ of the tokens when $b_j$ is the $k/E$ quantile of those margins, which is what one update sets it to (report
# §2.3.3):
#
# $$ b_j \leftarrow Q_{k/E}\big(\{\alpha_i - s_{ij}\}_i\big) - \text{mean} $$
#
# All experts move at once and so do the $\alpha_i$; hence a few updates on the same text, not one. No gradient, no
# learning rate, no auxiliary loss. We start from zero biases. The violation of a layer is the load of its busiest
# expert over the mean, minus 1.

# %%
MODULES = "argparse ast bdb calendar cmd code codecs configparser".split()
HELD_OUT = "copy csv difflib dis fractions ftplib glob gzip".split()


def rows(modules: list[str]) -> jax.Array:
    """T tokens from the middle of the source of each standard-library module."""
    files = [Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in modules]
    return jnp.asarray([tokenizer.encode(text[len(text) // 2 :])[:T] for text in files], jnp.int32)


@jax.jit
def balance(model: k3jax.K3, tokens: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loads [MoE layers, E] under `bias`, and the bias for the next step."""
    _, aux = model.features(tokens, router_bias=bias, histogram=True)
    return aux.load, qb_update(aux.histogram, bias, experts_per_token=config.moe.experts_per_token)


text, bias = rows(MODULES), jnp.zeros_like(router_bias)
loads = []
for _ in range(9):
    load, new_bias = balance(model, text, bias)
    loads.append(load)
    bias, used = new_bias, bias
violation = np.stack([max_violation(load) for load in loads])
unseen = [max_violation(balance(model, rows(HELD_OUT), b)[0]).max() for b in (jnp.zeros_like(used), used)]
print("max violation of the worst layer by update:", *(f"{v:.0%}" for v in violation.max(1)))
print(f"on text the biases have not seen: {unseen[0]:.0%} without, {unseen[1]:.0%} with them")

# %%
worst = int(violation[0].argmax())
fair = text.size * config.moe.experts_per_token / config.moe.num_experts
fig, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
for axis, load, title in ((axes[0], loads[0], "before"), (axes[1], loads[-1], f"after {len(loads) - 1} updates")):
    axis.bar(range(config.moe.num_experts), load[worst], color="C0" if axis is axes[0] else "C2")
    axis.axhline(fair, color="black", linestyle="--", linewidth=1, label=f"fair share {fair:.0f}")
    axis.set(title=f"Layer {worst + config.num_dense_layers}, {title}", xlabel="expert")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(loc="upper right", frameon=False)
axes[0].set(ylabel="tokens", ylim=(0, 1.2 * loads[0][worst].max()))
axes[1].sharey(axes[0])
for layer in range(config.num_moe_layers):
    label = f"layer {layer + config.num_dense_layers}"
    axes[2].plot(
        100 * violation[:, layer], marker=".", color=plt.get_cmap("viridis")(layer / config.num_moe_layers), label=label
    )
axes[2].set(title="Max violation", xlabel="updates", ylabel="busiest expert above mean (%)", ylim=(0, None))
axes[2].legend(frameon=False, fontsize=7, ncols=2)
plt.show()

# %% [markdown]
# ## 5 · How long does each KDA head remember?
#
# The KDA state $S \in \mathbb{R}^{K \times V}$ of a head forgets channel by channel,
# $S_t = \mathrm{Diag}(e^{g_t}) S_{t-1} + \dots$, with a decay that is bounded below (report §2.1) so that the products
# of decays within a tile of tokens stay finite:
#
# $$ g_t = -5\,\sigma\big(e^{A_h}\,(W_b W_a x_t + \delta)\big) \in (-5, 0), \qquad
# \text{half-life} = \frac{\ln 2}{-g_t} \text{ tokens} $$
#
# $A_h$ is one scalar per head (`A_log`, from 0) and $\delta$ one per channel (`dt_bias`, drawn as in Mamba). We take
# layer 0: its attention reads the embedding alone, so its input is known without running anything.

# %%
layer = model.layer(0)
x = rms_norm(model.embed[...][tokens], layer.input_norm[...], config.norm_eps)[:, : n + m]
mixer = layer.mixer
raw = jnp.einsum("btd,dr,rhk->bthk", x, mixer.f_a[...], mixer.f_b[...])  # W_b W_a x, [B, T, heads, K]


def half_life(A_log: jax.Array) -> np.ndarray:
    """Tokens until half of a channel is left, [T, heads, K]."""
    g = log_decay(raw, A_log, mixer.dt_bias[...], config.kda.gate, config.kda.gate_lower_bound)
    return np.asarray(jnp.log(2) / -g)[0]


A_log, heads = mixer.A_log[...], config.kda.num_heads
spread = jnp.log(jnp.geomspace(0.5, 2, heads))
present, other = half_life(A_log), half_life(A_log + spread)
print("head  median half-life   spread over channels   spread over tokens   (standard deviations of log₂)")
for head, life in enumerate(np.log2(present).swapaxes(0, 1)):
    median = np.median(present[:, head])
    print(f"{head:>4}{median:>11.1f} tokens{life.mean(0).std():>18.2f}{life.std(0).mean():>22.3f}")

# %% [markdown]
# A fresh model forgets by channel and hardly by token, and its heads differ only in what was drawn for $\delta$;
# training changes both. To see what the one scalar of a head can do, the second histogram multiplies its rate
# $e^{A_h}$: a higher rate pushes the sigmoid of a negative argument towards 0 and so lengthens the memory.

# %%
bins = np.geomspace(0.1, 1e6, 70)
fig, axes = plt.subplots(1, heads, figsize=(10, 2.8), sharex=True, sharey=True, layout="constrained")
for head, axis in enumerate(axes):
    axis.hist(present[:, head].ravel(), bins, color="0.75", label="as it is")
    label = f"rate × {np.exp(spread[head]):.2f}"
    axis.hist(other[:, head].ravel(), bins, histtype="step", color=f"C{head}", linewidth=1.5, label=label)
    axis.axvline(np.log(2) / -config.kda.gate_lower_bound, color="black", linestyle=":", linewidth=1)
    axis.set(title=f"Head {head}", xlabel="half-life (tokens)", xscale="log")
    axis.legend(frameon=False, fontsize=7, loc="upper right")
axes[0].set_ylabel("tokens × channels")
fig.suptitle("Layer 0: half-life of every channel at every token (dotted: the shortest that the bound allows)")
plt.show()

# %% [markdown]
# ## 6 · Does cached decoding give what a full pass gives?
#
# The cache of a row is, per KDA layer, one state and three convolution tails (constant size) and, per MLA layer, one
# latent a token; decoding uses the absorbed form of MLA. The check feeds document 1 token by token behind a prefill and
# compares with the logits of section 2.

# %%
PREFILL, LENGTH = 64, 128
cache = k3jax.init_cache(config, batch=1, length=LENGTH)
step, cache = prefill(model, router_bias, tokens[:, :PREFILL], segment_ids[:, :PREFILL], cache)
stepwise = [step]
for t in range(PREFILL, PREFILL + 16):
    step, cache = decode(model, router_bias, tokens[:, t], cache)
    stepwise.append(step)
full = logits[0, PREFILL - 1 : PREFILL + 16]
difference = jnp.abs(jnp.concatenate(stepwise) - full).max() / jnp.abs(full).max()
print(f"prefill of {PREFILL} tokens + 16 decode steps against one pass: {difference:.1e} of the largest logit")
assert difference < TOLERANCE

# %% [markdown]
# A fresh model writes noise. After `make train`, two lines are enough:
#
# ```python
# run = k3jax.load("../runs/nano")
# print(k3jax.generate_text(run.model, run.router_bias, run.tokenizer, "def ", max_tokens=200, temperature=0.8))
# ```
#
# or set `RUN` at the top and run this notebook again: the depth map, the loads and the half-lives are then those of the
# trained model. In a shell: `python -m k3jax.generate runs/nano --prompt "class "`.

# %%
print(repr(k3jax.generate_text(model, router_bias, tokenizer, "def ", max_tokens=24, temperature=0.8, seed=1)))
