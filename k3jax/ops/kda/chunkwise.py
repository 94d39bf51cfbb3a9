"""KDA chunk by chunk in plain JAX: matrix products inside chunks, one scan over the chunk states.

In a chunk of C tokens with incoming state S and G the running sum of the log-decay (Kimi Linear, arXiv 2510.26692,
chunkwise form):

    M_ij = beta_i <k_i e^{G_i - G_j}, k_j>  (j < i)        T = (I + M)^-1
    W = T Diag(beta) (K e^G)    U = T Diag(beta) V         V' = U - W S
    A_ij = <q_i e^{G_i - G_j}, k_j>  (j <= i)              O = (Q e^G) S + A V'
    S' = Diag(e^{G_C}) S + (K e^{G_C - G})^T V'

Everything but the lines with S is computed for all chunks at once. The backward pass keeps the raw inputs and the chunk
states, recomputes the rest, and runs one reverse scan.

Shape suffixes: B batch, T time, N chunks, H heads, C tokens of a chunk, K key dim, V value dim, S sequences.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from .borders import refuse_gradient, scan_with_borders
from .gates import Activation, activate, compute_dtype
from .intra import TILE, decay_sums, matmul, tile_scores, unbounded_scores, unit_lower_inverse
from .segments import Aligned, align_to_chunks, document_starts


class Raw(NamedTuple):
    """The differentiable inputs, as given."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    A_log: Array | None
    dt_bias: Array | None
    initial_state: Array


class Layout(NamedTuple):
    """Which tokens are real and whom they belong to; None where there is nothing to say."""

    real_BT: Array | None = None
    starts_BT: Array | None = None
    aligned: Aligned | None = None


class Terms(NamedTuple):
    """What each chunk computes without its incoming state; chunks lead, so that they can be scanned over."""

    q_NBHCK: Array  # reads the incoming state: q e^G
    k_NBHCK: Array  # writes to the outgoing state: k e^{G_C - G}
    w_NBHCK: Array
    u_NBHCV: Array
    a_NBHCC: Array
    decay_NBHK: Array  # of the incoming state over the whole chunk


def _chunked(x: Array, layout: Layout, chunk: int) -> Array:
    """[B, T, H, ...] -> [N, B, H, C, ...], zeros at the end or between aligned sequences."""
    if layout.aligned is not None:
        x = jnp.take(x, layout.aligned.source, axis=1, mode="fill", fill_value=0)
    chunks = max(1, -(-x.shape[1] // chunk))
    x = jnp.pad(x, [(0, 0), (0, chunks * chunk - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(x.shape[0], chunks, chunk, *x.shape[2:])
    return jnp.moveaxis(jnp.moveaxis(x, 3, 1), 2, 0)


def _unchunked(x: Array, layout: Layout, length: int) -> Array:
    """[N, B, H, C, ...] -> [B, T, H, ...]: the inverse of `_chunked` on real tokens, zero on the others."""
    x = jnp.moveaxis(jnp.moveaxis(x, 0, 2), 1, 3)
    x = x.reshape(x.shape[0], -1, *x.shape[3:])
    if layout.aligned is not None:
        return jnp.take(x, layout.aligned.position, axis=1, mode="fill", fill_value=0)
    return x[:, :length]


def _terms(raw: Raw, layout: Layout, how: Activation, chunk: int, dtype: DTypeLike, anchor: int) -> Terms:
    """`Terms` from the raw inputs, in `dtype` but for the decay. `anchor`: see `intra`; 0 keeps rows free of later
    tokens to the last bit."""
    inputs = activate(raw.q, raw.k, raw.v, raw.g, raw.beta, raw.A_log, raw.dt_bias, how, layout.real_BT)
    q, k, v, g, beta = (_chunked(x, layout, chunk) for x in inputs)
    tiles = (*g.shape[:-2], chunk // TILE, TILE, g.shape[-1])
    if how.gate == "lower_bound":
        sums = decay_sums(g.reshape(tiles), anchor)
        scores_q, scores_k = tile_scores(q, k, sums, True, dtype)
    else:
        # exp of this is 0, so a steeper decay changes nothing; but it would take the digits of the sums it enters.
        g = jnp.maximum(g, -800.0 if g.dtype == jnp.float64 else -110.0)
        sums = decay_sums(g.reshape(tiles), 0)
        scores_q, scores_k = unbounded_scores(q, k, g, sums, dtype)
    strict = jnp.asarray(np.tri(chunk, k=-1, dtype=bool))
    from_start = jnp.exp(sums.before[..., None, :] + sums.prefix).reshape(g.shape)
    to_end = jnp.exp(sums.rest + sums.after[..., None, :]).reshape(g.shape)
    decay = from_start[..., -1, :]
    if layout.starts_BT is not None:
        same, reads, writes, keeps = _document_masks(layout.starts_BT, chunk)
        strict = strict & same
        from_start, to_end = jnp.where(reads, from_start, 0), jnp.where(writes, to_end, 0)
        decay = jnp.where(keeps, decay, 0)
    a = jnp.where(strict, scores_q, 0) + jnp.eye(chunk, dtype=g.dtype) * jnp.sum(q * k, axis=-1, keepdims=True)
    inverse = unit_lower_inverse(jnp.where(strict, scores_k, 0) * beta[..., None])
    return Terms(
        q_NBHCK=(q * from_start).astype(dtype),
        k_NBHCK=(k * to_end).astype(dtype),
        w_NBHCK=matmul("...ij,...jk->...ik", inverse, beta[..., None] * k * from_start, dtype).astype(dtype),
        u_NBHCV=matmul("...ij,...jv->...iv", inverse, beta[..., None] * v, dtype).astype(dtype),
        a_NBHCC=a.astype(dtype),
        decay_NBHK=decay,
    )


def _document_masks(starts_BT: Array, chunk: int) -> tuple[Array, Array, Array, Array]:
    """Which pairs of tokens are in one document, which tokens read the incoming state, which write to the outgoing
    one, and which chunks pass the state on."""
    batch, length = starts_BT.shape
    chunks = -(-length // chunk)
    starts = jnp.pad(starts_BT, ((0, 0), (0, chunks * chunk - length)))
    starts = jnp.moveaxis(starts.reshape(batch, chunks, 1, chunk), 1, 0)  # N B 1 C
    # Counted within the chunk: 0 is the document of the incoming state.
    index = jnp.sum(np.tri(chunk, dtype=bool) & starts[..., None, :], axis=-1)
    last = index[..., -1:]
    return index[..., :, None] == index[..., None, :], (index == 0)[..., None], (index == last)[..., None], last == 0


def _scan_states(step, state: Array, inputs: tuple[Array, ...], layout: Layout, reverse: bool = False):
    """Scan `step` over chunks. Aligned sequences each have a state, and a chunk works on that of its sequence."""
    if layout.aligned is None:
        return jax.lax.scan(step, state, inputs, reverse=reverse)

    def step_of_owner(states_SHKV, x):
        s, x = x
        new, y = step(states_SHKV[s][None], x)
        return states_SHKV.at[s].set(new[0]), y

    return jax.lax.scan(step_of_owner, state, (layout.aligned.owner, inputs), reverse=reverse)


def _forward(
    raw: Raw, layout: Layout, how: Activation, chunk: int, interval: int | None
) -> tuple[tuple[Array, Array, Array | None], Array]:
    """(o [B, T, H, V], the final state, those after each `interval` tokens), and the state each chunk starts from."""
    dtype, borders = _matmul_dtype(raw), None
    terms = _terms(raw, layout, how, chunk, dtype, 0)

    def step(state, x):
        k, w, u, decay = x
        read = state.astype(dtype)
        v = (u - matmul("bhck,bhkv->bhcv", w, read, dtype)).astype(dtype)
        return decay[..., None] * state + matmul("bhck,bhcv->bhkv", k, v, dtype), (read, v)

    inputs = (terms.k_NBHCK, terms.w_NBHCK, terms.u_NBHCV, terms.decay_NBHK)
    if interval is None:
        final, (states, v) = _scan_states(step, raw.initial_state, inputs, layout)
    else:
        count = raw.q.shape[1] // interval
        final, (states, v), borders = scan_with_borders(step, raw.initial_state, inputs, interval // chunk, count)
        borders = jnp.moveaxis(borders, 0, 1)
    o = matmul("...ck,...kv->...cv", terms.q_NBHCK, states, dtype)
    o = o + matmul("...cd,...dv->...cv", terms.a_NBHCC, v, dtype)
    return (_unchunked(o.astype(raw.v.dtype), layout, raw.q.shape[1]), final, borders), states


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _kda(
    raw: Raw, layout: Layout, how: Activation, chunk: int, interval: int | None
) -> tuple[Array, Array, Array | None]:
    return _forward(raw, layout, how, chunk, interval)[0]


def _kda_fwd(raw, layout, how, chunk, interval):
    out, states = _forward(raw, layout, how, chunk, interval)
    return out, (raw, layout, states)


def _kda_bwd(how, chunk, interval, residuals, cotangents):
    raw, layout, states = residuals
    d_o, d_final, _ = cotangents  # `refuse_gradient` lets no cotangent of the states at borders through
    dtype = _matmul_dtype(raw)
    terms, terms_vjp = jax.vjp(lambda raw: _terms(raw, layout, how, chunk, dtype, TILE // 2), raw)
    if layout.real_BT is not None:
        d_o = jnp.where(layout.real_BT[..., None, None], d_o, 0)
    d_o = _chunked(d_o, layout, chunk).astype(dtype)
    v = (terms.u_NBHCV - matmul("...ck,...kv->...cv", terms.w_NBHCK, states, dtype)).astype(dtype)
    # What the outputs alone say about v' and the incoming state depends on no other chunk.
    d_v_local = matmul("...cd,...cv->...dv", terms.a_NBHCC, d_o, dtype)
    d_state_local = matmul("...ck,...cv->...kv", terms.q_NBHCK, d_o, dtype)

    def step(d_state, x):
        k, w, decay, d_v, d_read = x
        passed = d_state.astype(dtype)
        d_v = (d_v + matmul("bhck,bhkv->bhcv", k, passed, dtype)).astype(dtype)
        d_start = decay[..., None] * d_state + d_read - matmul("bhck,bhcv->bhkv", w, d_v, dtype)
        return d_start, (passed, d_v)

    inputs = (terms.k_NBHCK, terms.w_NBHCK, terms.decay_NBHK, d_v_local, d_state_local)
    d_start, (d_states, d_v) = _scan_states(step, d_final, inputs, layout, reverse=True)
    d_terms = Terms(
        q_NBHCK=matmul("...cv,...kv->...ck", d_o, states, dtype).astype(dtype),
        k_NBHCK=matmul("...cv,...kv->...ck", v, d_states, dtype).astype(dtype),
        w_NBHCK=-matmul("...cv,...kv->...ck", d_v, states, dtype).astype(dtype),
        u_NBHCV=d_v,
        a_NBHCC=matmul("...cv,...dv->...cd", d_o, v, dtype).astype(dtype),
        decay_NBHK=jnp.sum(states.astype(d_start.dtype) * d_states.astype(d_start.dtype), axis=-1),
    )
    (d_raw,) = terms_vjp(d_terms)
    return d_raw._replace(initial_state=d_start), None


_kda.defvjp(_kda_fwd, _kda_bwd)


def _matmul_dtype(raw: Raw) -> DTypeLike:
    """bfloat16 products, accumulated in float32, for bfloat16 inputs; otherwise at least float32."""
    inputs = jnp.result_type(raw.q, raw.k, raw.v)
    return inputs if inputs == jnp.bfloat16 else compute_dtype(raw.q, raw.k, raw.v, raw.g, raw.beta)


def same_varying(raw: Raw) -> Raw:
    """Under `shard_map`, mark every input as varying over the mesh axes that any of them varies over.

    An input that all devices share gets its gradient summed over them here, outside the custom backward pass.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(raw)))

    def mark(x: Array) -> Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, raw)


@functools.partial(jax.jit, static_argnames=("how", "chunk_size", "state_interval"))
def kda_chunkwise(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None,
    dt_bias: Array | None,
    initial_state: Array | None,
    segment_ids: Array | None,
    cu_seqlens: Array | None,
    how: Activation,
    chunk_size: int,
    state_interval: int | None = None,
) -> tuple[Array, Array, Array | None]:
    """`kda` for every argument. Returns (o [B, T, H, V], final state, states at borders)."""
    length = q.shape[1]
    if state_interval is not None:
        chunk_size = math.gcd(chunk_size, state_interval)  # chunks must end at every border
    chunk = min(chunk_size, -(-length // TILE) * TILE)
    layout = Layout()
    if segment_ids is not None:
        layout = Layout(real_BT=segment_ids != 0, starts_BT=document_starts(segment_ids))
    elif cu_seqlens is not None:
        aligned = align_to_chunks(cu_seqlens, length, chunk)
        layout = Layout(real_BT=(jnp.arange(length) < cu_seqlens[-1])[None], aligned=aligned)
    if initial_state is None:
        rows = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
        initial_state = jnp.zeros((rows, 1, 1, 1))
    # Adding what depends on no value gives the carry its shape, its sharding and its varying axes.
    outer = jnp.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None, :], dtype=compute_dtype(q, k, v, g, beta))
    raw = Raw(q, k, v, g, beta, A_log, dt_bias, initial_state.astype(outer.dtype) + outer)
    o, final, borders = _kda(same_varying(raw), layout, how, chunk, state_interval)
    return o, final, None if borders is None else refuse_gradient(borders)
