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
# # How does a KDA head remember?
#
# Kimi Delta Attention (Kimi Linear, arXiv 2510.26692; Kimi K3, arXiv 2607.24653) keeps one matrix a head instead of all
# keys and values. By hand, in NumPy:
#
# 1. the recurrence, token by token, against `k3jax.ops.kda`,
# 2. what the delta rule is for: overwriting,
# 3. what the gate is for: forgetting,
# 4. the chunkwise form, step by step, which computes the same with matrix products,
# 5. where it breaks: why the gate is bounded and tiles have 16 tokens.
#
# Shapes are written behind names: T time, C tokens of a chunk, K key channels, V value channels.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from k3jax.ops.kda import kda
from k3jax.train.loop import use_compile_cache

use_compile_cache()  # compiled programs are kept between runs
jax.config.update("jax_enable_x64", True)  # to compare with the op in float64
plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# **Change this cell to try something else**, then run all. `HALF_LIVES` are those of the shortest and the longest
# channel of the head, in tokens; the others are spread evenly between their logarithms.

# %%
T, K, V = 256, 32, 32
CHUNK = 64
HALF_LIVES = 2.0, 200.0
BOUND = -5.0  # K3's lower bound of the log-decay of one token
random = np.random.default_rng(0)

# %% [markdown]
# ## 1 · The recurrence
#
# The state forgets channel by channel, then learns one pair: what it holds for the key $k_t$ is moved towards $v_t$ by
# the share $\beta_t$. The output is read with the query.
#
# $$ S \leftarrow \mathrm{Diag}(e^{g_t})\, S, \qquad S \leftarrow S + \beta_t\, k_t\, (v_t - S^\top k_t)^\top, \qquad
# o_t = S^\top q_t / \sqrt K $$


# %%
def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def recurrence(q_TK, k_TK, v_TV, g_TK, beta_T, delta: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [T, V] and the state after every token [T, K, V]; `delta` False: plain linear attention, S += β k vᵀ."""
    S, outputs, states = np.zeros((k_TK.shape[1], v_TV.shape[1])), [], []
    for q, k, v, g, beta in zip(q_TK, k_TK, v_TV, g_TK, beta_T):
        S = np.exp(g)[:, None] * S
        S = S + beta * np.outer(k, v - S.T @ k if delta else v)
        outputs.append(S.T @ q / np.sqrt(len(k)))
        states.append(S)
    return np.array(outputs), np.array(states)


def raw_gate(g: np.ndarray) -> np.ndarray:
    """The z behind a log-decay g = BOUND · σ(z)."""
    return np.log(g / (BOUND - g))


def op(q, k, v, g, beta, dtype, **options) -> np.ndarray:
    """`k3jax.ops.kda` on one head, with K3's bounded gate."""
    row = [jnp.asarray(x, dtype)[None, :, None] for x in (q, k, v, raw_gate(g))]
    A_log = jnp.zeros(1, dtype)
    o = kda(
        *row, jnp.asarray(beta, dtype)[None, :, None], A_log=A_log, gate="lower_bound", lower_bound=BOUND, **options
    )
    return np.asarray(o)[0, :, 0]


q, k = unit(random.normal(size=(2, T, K)))
v, beta = random.normal(size=(T, V)), random.uniform(0.2, 1, T)
half_life = np.geomspace(*HALF_LIVES, K)
g = -np.log(2) / half_life * random.uniform(0.5, 1.5, (T, K))
inputs = q, k, v, g, beta

by_hand, states = recurrence(*inputs)
for name in ("reference", "xla"):
    difference = np.abs(op(*inputs, np.float64, implementation=name, chunk_size=CHUNK) - by_hand).max()
    print(f"k3jax.ops.kda, {name:9} in float64: {difference:.1e} from the loop above")
    assert difference < 1e-12

# %% [markdown]
# ## 2 · Overwriting
#
# A dictionary of 8 keys; again and again one of them gets a new value. After each write we read all keys. Plain linear
# attention adds: what is read is the sum of all values that a key ever had. The delta rule takes the old value out
# first. With orthogonal keys that is exact; among random ones each write disturbs the others. There is no decay here,
# and β = 1.


# %%
def read_error(keys: np.ndarray, delta: bool, writes: int = 120) -> np.ndarray:
    """After every write: root mean square error of what is read for all keys written so far, over the values' own."""
    rng = np.random.default_rng(1)
    which = np.concatenate([np.arange(len(keys)), rng.integers(0, len(keys), writes - len(keys))])
    values = rng.normal(size=(writes, V))
    written = keys[which]
    _, states = recurrence(written, written, values, 0 * written, np.ones(writes), delta)
    errors = []
    for t in range(writes):
        latest = {key: values[s] for s, key in enumerate(which[: t + 1])}
        read = keys[list(latest)] @ states[t]
        errors.append(np.sqrt(np.mean((read - np.array(list(latest.values()))) ** 2)))
    return np.array(errors)


orthogonal = np.linalg.qr(random.normal(size=(K, K)))[0]
fig, axes = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
for axis, keys, title in (
    (axes[0], orthogonal[:8], "8 orthogonal keys"),
    (axes[1], unit(random.normal(size=(8, K))), "8 random keys"),
):
    axis.plot(read_error(keys, False), color="0.5", label="linear attention")
    axis.plot(read_error(keys, True), color="C0", label="delta rule")
    axis.axvline(7.5, color="black", linestyle=":", linewidth=1)
    axis.set(title=f"{title}, K = {K}", xlabel="writes (dotted: each key has one)")
axes[0].set_ylabel("error of what is read\n(over the values' size)")
axes[0].legend(frameon=False)
plt.show()
assert read_error(orthogonal[:8], True).max() < 1e-12

# %% [markdown]
# ## 3 · Forgetting
#
# Each channel keeps $e^{g}$ of itself at every token. K3 bounds the gate, $g = -5\,\sigma(e^{A}(z + \delta))$, so a
# token leaves at least $e^{-5}$ = 0.7 %; Kimi Linear's softplus gate has no bound. On the right is what is left of a
# write after some tokens: short channels hold the last words, long ones hold the document.

# %%
z = np.linspace(-12, 6, 300)
fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for A, colour in ((-1, "C0"), (0, "C1"), (1, "C2")):
    bounded = -BOUND / (1 + np.exp(-np.exp(A) * z))
    axes[0].semilogy(z, np.log(2) / bounded, color=colour, label=f"bounded, A = {A}")
    axes[0].semilogy(z, np.log(2) / (np.exp(A) * np.log1p(np.exp(z))), color=colour, ls="--", lw=0.8)
axes[0].axhline(np.log(2) / -BOUND, color="black", linestyle=":", linewidth=1)
axes[0].set(xlabel="raw gate z + δ", ylabel="half-life (tokens)", ylim=(2e-2, 1e5), title="dashed: softplus gate")
axes[0].legend(frameon=False)
left = np.exp(-np.log(2) * np.arange(T) / half_life[:, None])
image = axes[1].imshow(left, aspect="auto", cmap="magma", vmin=0, vmax=1, origin="lower")
axes[1].contour(left, levels=[0.5], colors="white", linewidths=0.8)
axes[1].set(xlabel="tokens since the write", ylabel="key channel", title="this head (white: half is left)")
fig.colorbar(image, ax=axes[1], label="share left")
plt.show()

# %% [markdown]
# What does the state hold after all? Ask it at time t for every earlier key: 1 on the scale means that the value comes
# back whole. A matrix of K × V cannot hold 256 pairs of random keys: without decay the delta rule forgets by
# overwriting, about K writes back; plain linear attention keeps all of them, under more of the others than it can be
# heard through.


# %%
def recall(states: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[t, s]: the part of v_s in what the state after token t gives for k_s; and of all else, over the size of v_s."""
    read = np.einsum("tkv,sk->tsv", states, k)
    part = (read * v).sum(-1) / (v**2).sum(-1)
    noise = np.linalg.norm(read - part[..., None] * v, axis=-1) / np.linalg.norm(v, axis=-1)
    future = np.triu(np.ones((T, T), bool), 1)
    return np.where(future, np.nan, np.stack([part, noise]))


ones = np.ones(T)
memories = {
    "linear attention": recall(recurrence(q, k, v, 0 * g, ones, delta=False)[1], k, v),
    "delta rule": recall(recurrence(q, k, v, 0 * g, ones)[1], k, v),
    "delta rule with decay": recall(recurrence(q, k, v, g, ones)[1], k, v),
}
fig, axes = plt.subplots(2, 3, figsize=(10, 5), layout="constrained", height_ratios=[1.6, 1])
for column, (title, (part, noise)) in zip(axes.T, memories.items()):
    image = column[0].imshow(part, cmap="viridis", vmin=0, vmax=1)
    column[0].set(title=title, xlabel="key of token s")
    for values, style, label in ((part, "-", "its value"), (noise, "--", "others'")):
        by_age = [np.nanmean(np.diagonal(values, -age)) for age in range(T - 20)]
        column[1].plot(by_age, style, color="C0" if style == "-" else "0.5", label=label)
    column[1].set(xlabel="age t − s (tokens)", ylim=(0, 3))
axes[0, 0].set_ylabel("asked after token t")
axes[1, 0].set_ylabel("size of what is read\n(mean, over the value's)")
axes[1, 0].legend(frameon=False)
fig.colorbar(image, ax=axes[0], label="share of the value")
plt.show()

# %% [markdown]
# ## 4 · The chunkwise form
#
# A loop over tokens keeps no GPU busy. In a chunk of C tokens with incoming state $S$, let $G_i$ be the sum of $g$ up
# to token $i$, and $v'_i$ what token $i$ writes: β times its bracket in the recurrence. It depends on the earlier ones
# of the chunk, through the keys and the decay between them:
#
# $$ v'_i = \beta_i\Big(v_i - S^\top (k_i e^{G_i}) - \sum_{j<i} \langle k_i e^{G_i - G_j}, k_j\rangle\, v'_j\Big) $$
#
# That is a triangular system, $(I + M)\, V' = \mathrm{Diag}(\beta)\,(V - (K e^G) S)$, with $M_{ij} = \beta_i \langle
# k_i e^{G_i-G_j}, k_j \rangle$ below the diagonal. Its inverse does not contain $S$, so everything but the last three
# lines is computed for all chunks at once.


# %%
def scores(x_CK: np.ndarray, k_CK: np.ndarray, G_CK: np.ndarray) -> np.ndarray:
    """[C, C]: <x_i e^{G_i - G_j}, k_j> for j ≤ i, decay by decay (no factoring yet)."""
    decay = np.exp(np.minimum(G_CK[:, None] - G_CK, 0))
    return np.tril(np.einsum("ik,jk,ijk->ij", x_CK, k_CK, decay))


def chunk(q, k, v, g, beta, S, scores=scores) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Outputs [C, V] and the state after the chunk from that before it, and the matrices between."""
    q, G = q / np.sqrt(q.shape[-1]).astype(q.dtype), np.cumsum(g, axis=0)
    M = beta[:, None] * np.tril(scores(k, k, G), -1)
    inverse = np.linalg.inv(np.eye(len(M), dtype=M.dtype) + M)
    W = inverse @ (beta[:, None] * k * np.exp(G))  # what the incoming state contributes
    U = inverse @ (beta[:, None] * v)  # what the values do
    A = scores(q, k, G)
    new_v = U - W @ S
    o = (q * np.exp(G)) @ S + A @ new_v
    S = np.exp(G[-1])[:, None] * S + (k * np.exp(G[-1] - G)).T @ new_v
    return o, S, {"M": M, "(I + M)⁻¹": inverse, "A": A}


def chunkwise(q, k, v, g, beta, size: int, scores=scores) -> np.ndarray:
    S, outputs = np.zeros((k.shape[1], v.shape[1]), k.dtype), []
    for begin in range(0, len(q), size):
        o, S, matrices = chunk(*(x[begin : begin + size] for x in (q, k, v, g, beta)), S, scores)
        outputs.append(o)
    return np.concatenate(outputs)


for size in (16, CHUNK, T):
    difference = np.abs(chunkwise(*inputs, size) - by_hand).max()
    print(f"chunks of {size:3}: {difference:.1e} from the recurrence")
    assert difference < 1e-12

*_, matrices = chunk(*(x[:CHUNK] for x in inputs), np.zeros((K, V)))
fig, axes = plt.subplots(1, 3, figsize=(10, 3), layout="constrained")
for axis, (name, matrix) in zip(axes, matrices.items()):
    shown = matrix - np.eye(CHUNK) if name.startswith("(") else matrix
    limit = np.abs(shown).max()
    image = axis.imshow(shown, cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set(title=name + (" − I" if name.startswith("(") else ""), xlabel="token j of the chunk")
    fig.colorbar(image, ax=axis, shrink=0.8)
axes[0].set_ylabel("token i of the chunk")
plt.show()

# %% [markdown]
# ## 5 · Where does it break?
#
# `scores` above forms a [C, C, K] array. To be matrix products, $e^{G_i - G_j}$ has to be split around an anchor $a$,
# into $(x_i e^{G_i - G_a})(k_j e^{G_a - G_j})$. Anchored at the start of the chunk, the second factor grows as
# $e^{-G_j}$: at the bound −5, to $e^{315}$ at the last of 64 tokens, and float32 ends at $e^{88.7}$. k3jax anchors
# pairs of different 16-token tiles at the start of the later one (no exponent above 0), and those of one tile at its
# first token: 15 steps of −5 are $e^{75}$. Bound and tile go together; without a bound no tile is small enough.


# %%
def tiled_scores(tile: int):
    """`scores` as products of factors, anchored by tiles of so many tokens."""

    def scores(x_CK: np.ndarray, k_CK: np.ndarray, G_CK: np.ndarray) -> np.ndarray:
        out = np.zeros((len(x_CK), len(k_CK)), x_CK.dtype)
        for begin in range(0, len(x_CK), tile):
            end = begin + tile
            anchor = G_CK[begin]
            rows = x_CK[begin:end] * np.exp(G_CK[begin:end] - anchor)
            out[begin:end, :end] = rows @ (k_CK[:end] * np.exp(anchor - G_CK[:end])).T
        return np.tril(out)

    return scores


steepness = np.array([0.1, 0.2, 0.5, 1, 1.3, 1.5, 2, 2.5, 3, 4, 4.99])
results = {tile: [] for tile in (64, 32, 16)}
ours, largest = [], {tile: [] for tile in results}
for steep in steepness:
    steep_inputs = q, k, v, np.full((T, K), -steep), beta
    exact, _ = recurrence(*steep_inputs)
    single = [x.astype(np.float32) for x in steep_inputs]

    def error(o: np.ndarray, exact: np.ndarray = exact) -> float:
        return float(np.linalg.norm(o - exact) / np.linalg.norm(exact))

    with np.errstate(over="ignore", invalid="ignore"):
        for tile in results:
            results[tile].append(error(chunkwise(*single, 64, tiled_scores(tile))))
    ours.append(error(op(*steep_inputs, jnp.float32, implementation="xla", chunk_size=64)))
    for tile in results:
        largest[tile].append(steep * (tile - 1))

fig, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for number, tile in enumerate(results):
    axes[0].plot(steepness, largest[tile], ".-", color=f"C{number}", label=f"anchor every {tile} tokens")
    values = np.array(results[tile])
    axes[1].semilogy(steepness, values, ".-", color=f"C{number}")
    bad = ~np.isfinite(values)
    axes[1].plot(steepness[bad], np.full(bad.sum(), 3e-2 * 2**-number), "x", color=f"C{number}")
axes[0].axhline(np.log(np.finfo(np.float32).max), color="black", linestyle=":", label="float32 overflows")
axes[0].set(xlabel="−g of every token", ylabel="largest exponent", title="what has to be held")
axes[0].legend(frameon=False)
axes[1].semilogy(steepness, ours, "k--", lw=0.8, label="k3jax.ops.kda")
axes[1].set(xlabel="−g of every token", ylabel="relative error in float32", title="chunks of 64 (crosses: NaN)")
axes[1].legend(frameon=False)
plt.show()
assert np.isfinite(results[16]).all()
assert max(ours) < 1e-5
assert not np.isfinite(results[64][-1])

# %% [markdown]
# The gate of Kimi Linear has no bound; for it, `k3jax.ops.kda` cuts tiles down to single tokens (`ops/kda/intra.py`).
