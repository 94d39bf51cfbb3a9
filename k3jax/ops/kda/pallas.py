"""KDA on Hopper: the Mosaic GPU kernels behind `kda(..., implementation="pallas")`, as one differentiable function.

Forward: `prepare` (token-parallel) and `scan` (over chunks of 64). Backward: both again from the raw inputs, the
reverse scan, and `gradients`. Nothing is kept between the two but the inputs, and for long rows the states at segment
borders.

Rows with too few heads to fill the GPU are cut in segments that run side by side. Each is first run from a zero state
and, to learn what it does to an incoming one, from the identity; a short chain of products then gives every segment's
true initial state, and all run again from there. It is exact: nothing is assumed to be forgotten.

Shape suffixes: B batch, T time, N tokens of all rows, padded to chunks, H heads, K key dim (= value dim), R runs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from k3jax.ops.mosaic import why_not_here
from k3jax.ops.remat import checkpoint_name

from .borders import refuse_gradient
from .chunkwise import Raw, same_varying
from .gates import Activation
from .pallas_grad import gradients
from .pallas_prep import CHUNK, Prepared, Tokens
from .pallas_prep import prepare as prepare_kernel
from .pallas_scan import Borders, reverse_scan, scan
from .segments import align_to_chunks, document_starts

# Segments pay where the heads leave most of an H200's 132 multiprocessors idle and the chain is long.
PROGRAMS = 132
MIN_SEGMENTS = 8
MIN_SEGMENT_CHUNKS = 16


# Lowering a kernel takes seconds of Python. Before jax 0.12 Mosaic also numbers what it lowers and finds a compiled
# kernel by a hash with the number in it: every copy is compiled again, in series. Under `jit` there is one copy.
prepare = jax.jit(prepare_kernel, static_argnames=("how", "interpret"))

Shaped = Array | jax.ShapeDtypeStruct


def unsupported(q: Shaped, k: Shaped, v: Shaped, g: Shaped, how: Activation) -> str | None:
    """Which condition of the kernels these inputs miss; None if they meet all but that of the device."""
    dtypes = {x.dtype for x in (q, k, v, g)}
    if dtypes != {jnp.dtype(jnp.bfloat16)}:
        return f"q, k, v and g must be bfloat16, not {', '.join(sorted(map(str, dtypes)))}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] not in (64, 128):
        return f"K = V must be 64 or 128 (K = {q.shape[-1]}, V = {v.shape[-1]})"
    if not how.beta_is_logit:
        return "beta must be a logit (beta_is_logit=True): its gradient is taken through the sigmoid"
    return None


def unavailable(q: Shaped, k: Shaped, v: Shaped, g: Shaped, how: Activation) -> str | None:
    """Why the kernels cannot run these inputs here; None if they can."""
    return unsupported(q, k, v, g, how) or why_not_here()


class Layout(NamedTuple):
    """Where the tokens of each row lie among the N tokens of the kernels, and who works on which."""

    tokens: Tokens | None  # None: all real, one document a row
    runs_R2: Array  # first chunk and number of chunks
    source_N: Array | None = None  # of sequences packed end to end: see `segments.Aligned`
    position_T: Array | None = None


def _marks(real_N: Array, starts_N: Array | None) -> Tokens:
    real = real_N.reshape(-1, CHUNK)
    starts = jnp.zeros_like(real) if starts_N is None else starts_N.reshape(-1, CHUNK)
    index = jnp.cumsum(starts, axis=1)
    last = index[:, -1:]
    rows = jnp.stack([index, real, index == 0, index == last, index]).astype(jnp.float32)
    return Tokens(rows.reshape(len(rows), -1), (last[:, 0] == 0).astype(jnp.float32))


def _layout(batch: int, length: int, segment_ids: Array | None, cu_seqlens: Array | None) -> Layout:
    if cu_seqlens is not None:
        aligned = align_to_chunks(cu_seqlens, length, CHUNK)
        counts = -(-jnp.diff(cu_seqlens) // CHUNK)
        runs = jnp.stack([jnp.cumsum(counts) - counts, counts], axis=1).astype(jnp.int32)
        return Layout(_marks(aligned.source < length, None), runs, aligned.source, aligned.position)
    chunks = -(-length // CHUNK)
    runs = jnp.stack([jnp.arange(batch) * chunks, jnp.full(batch, chunks)], axis=1).astype(jnp.int32)

    def padded(x_BT: Array) -> Array:
        return jnp.pad(x_BT, ((0, 0), (0, chunks * CHUNK - length)))

    if segment_ids is not None:
        return Layout(_marks(padded(segment_ids != 0), padded(document_starts(segment_ids))), runs)
    if length % CHUNK:
        return Layout(_marks(padded(jnp.ones((batch, length), bool)), None), runs)
    return Layout(None, runs)


def _spread(x_BT: Array, layout: Layout) -> Array:
    """[B, T, ...] → [N, ...], zeros where no token is."""
    if layout.source_N is not None:
        return jnp.take(x_BT[0], layout.source_N, axis=0, mode="fill", fill_value=0)
    padding = -x_BT.shape[1] % CHUNK
    if padding:
        x_BT = jnp.pad(x_BT, [(0, 0), (0, padding)] + [(0, 0)] * (x_BT.ndim - 2))
    return x_BT.reshape(-1, *x_BT.shape[2:])


def _gather(x_N: Array, layout: Layout, batch: int, length: int) -> Array:
    """[N, ...] → [B, T, ...]: the inverse of `_spread`, zero past the last sequence."""
    if layout.position_T is not None:
        return jnp.take(x_N, layout.position_T, axis=0, mode="fill", fill_value=0)[None]
    return x_N.reshape(batch, -1, *x_N.shape[1:])[:, :length]


class _Inputs(NamedTuple):
    """The kernels' view of the raw inputs."""

    q: Array  # [N, H, K]
    k: Array
    v: Array
    g: Array
    beta: Array  # [H, N] float32, after the sigmoid, 0 where no token is
    rate: Array  # [H] float32
    bias: Array  # [H, K] float32


def _inputs(raw: Raw, layout: Layout) -> _Inputs:
    q, k, v, g, beta = (_spread(x, layout) for x in (raw.q, raw.k, raw.v, raw.g, raw.beta))
    beta = jax.nn.sigmoid(beta.astype(jnp.float32))
    if layout.tokens is not None:
        beta = jnp.where(layout.tokens.rows[1][:, None] > 0, beta, 0)
    heads, dim = q.shape[1:]
    rate = jnp.zeros(heads) if raw.A_log is None else jnp.exp(raw.A_log.astype(jnp.float32))
    bias = jnp.zeros((heads, dim)) if raw.dt_bias is None else raw.dt_bias.astype(jnp.float32)
    return _Inputs(q, k, v, g, beta.T, rate.astype(jnp.float32), bias.astype(jnp.float32))


def segments_of(rows: int, heads: int, chunks: int) -> int:
    """In how many segments each row is cut; 1 where cutting would not pay."""
    count = 1
    while chunks % (2 * count) == 0 and 2 * count * rows * heads <= PROGRAMS:
        count *= 2
    return count if count >= MIN_SEGMENTS and chunks // count >= MIN_SEGMENT_CHUNKS else 1


def _cut(runs_R2: Array, segments: int) -> Array:
    size = runs_R2[:, 1:] // segments
    first = runs_R2[:, :1] + size * jnp.arange(segments, dtype=jnp.int32)
    return jnp.stack([first, jnp.broadcast_to(size, first.shape)], axis=-1).reshape(-1, 2)


def _chain(state_R: Array, transitions: Array, local: Array, reverse: bool = False) -> Array:
    """State that each segment starts from: s ← s P + local, in the order of the segments.

    state_R [R, H, V, K]; transitions [R·S, H, K, K]; local [R·S, H, V, K]; reverse goes from the last segment down with
    the transposed transitions.
    """
    runs = state_R.shape[0]
    by_segment = [jnp.moveaxis(x.reshape(runs, -1, *x.shape[1:]), 1, 0) for x in (transitions, local)]

    def step(state, x):
        transition, own = x
        product = jnp.einsum(
            "rhvk,rhlk->rhvl" if reverse else "rhvk,rhkl->rhvl", state, transition, precision=jax.lax.Precision.HIGHEST
        )
        return product + own, state

    _, starts = jax.lax.scan(step, state_R, tuple(by_segment), reverse=reverse)
    return jnp.moveaxis(starts, 0, 1).reshape(-1, *state_R.shape[1:])


class _Cut(NamedTuple):
    """Runs of all segments, the state each starts from, and what each does to its incoming state."""

    runs_R2: Array
    initial: Array
    transitions: Array | None


def _segmented(prepared: Prepared, initial: Array, layout: Layout, segments: int, interpret: bool) -> _Cut:
    if segments == 1:
        return _Cut(layout.runs_R2, initial, None)
    runs = _cut(layout.runs_R2, segments)
    shape = (runs.shape[0], *initial.shape[1:])
    identity = jnp.broadcast_to(jnp.eye(shape[-1], dtype=jnp.float32), shape)
    transitions = scan(prepared, identity, runs, outputs=False, values=False, interpret=interpret).final
    local = scan(prepared, jnp.zeros(shape), runs, outputs=False, interpret=interpret).final
    return _Cut(runs, _chain(initial, transitions, local), transitions)


def _segment_count(raw: Raw, layout: Layout) -> int:
    batch, length, heads = raw.q.shape[:3]
    return 1 if layout.source_N is not None else segments_of(batch, heads, -(-length // CHUNK))


def _last_of_each_row(final: Array, runs: int) -> Array:
    return final.reshape(runs, -1, *final.shape[1:])[:, -1]


def _run(
    raw: Raw, layout: Layout, how: Activation, interval: int | None, interpret: bool
) -> tuple[tuple[Array, Array, Array | None], _Cut]:
    batch, length = raw.q.shape[:2]
    x = _inputs(raw, layout)
    prepared = prepare(*x, layout.tokens, how, interpret=interpret)
    initial = jnp.swapaxes(raw.initial_state, -1, -2)
    cut = _segmented(prepared, initial, layout, _segment_count(raw, layout), interpret)
    count = None if interval is None else length // interval
    wanted = Borders(-(-length // CHUNK), interval // CHUNK) if interval and count else None
    out = scan(prepared, cut.initial, cut.runs_R2, borders=wanted, interpret=interpret)
    assert out.o is not None
    final = _last_of_each_row(out.final, initial.shape[0])
    borders = None if count is None else jnp.zeros((batch, 0, *initial.shape[1:]))
    if out.borders is not None:
        borders = jnp.swapaxes(out.borders[:, :count], -1, -2)  # one more where a last chunk is full but for padding
    return (_gather(out.o, layout, batch, length), jnp.swapaxes(final, -1, -2), borders), cut


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _kda(
    raw: Raw, layout: Layout, how: Activation, interval: int | None, interpret: bool
) -> tuple[Array, Array, Array | None]:
    return _run(raw, layout, how, interval, interpret)[0]


def _kda_fwd(raw, layout, how, interval, interpret):
    out, cut = _run(raw, layout, how, interval, interpret)
    if cut.transitions is not None:
        # for a rematerialisation to keep: without them, the backward pass begins with the scans that found them
        cut = checkpoint_name(cut, "kda", exact=True)
    return out, (raw, layout, cut)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # see `prepare`: every stack of layers has a backward pass
def _kda_bwd(how, interval, interpret, residuals, cotangents):
    raw, layout, cut = residuals
    d_o, d_final, _ = cotangents  # `refuse_gradient` lets no cotangent of the states at borders through
    batch, length = raw.q.shape[:2]
    x = _inputs(raw, layout)
    d_o = _spread(d_o, layout)
    if layout.tokens is not None:
        d_o = jnp.where(layout.tokens.rows[1][:, None, None] > 0, d_o, 0)
    d_final = jnp.swapaxes(d_final, -1, -2)
    prepared = prepare(*x, layout.tokens, how, interpret=interpret)
    forward = scan(prepared, cut.initial, cut.runs_R2, outputs=False, residuals=True, interpret=interpret)
    if cut.transitions is not None:
        shape = cut.initial.shape
        local = reverse_scan(prepared, d_o, jnp.zeros(shape), cut.runs_R2, residuals=False, interpret=interpret)
        d_final = _chain(d_final, cut.transitions, local.initial, reverse=True)
    backward = reverse_scan(prepared, d_o, d_final, cut.runs_R2, interpret=interpret)
    inputs = x.q, x.k, x.g, x.beta, x.rate, x.bias
    args = (*inputs, prepared.decay, prepared.inverse, d_o, forward, backward, layout.tokens, how)
    grads = gradients(*args, interpret=interpret)
    d_A_log, d_bias = _parameter_gradients(grads.g, x, layout, how)
    d_initial = backward.initial.reshape(raw.initial_state.shape[0], -1, *backward.initial.shape[1:])[:, 0]

    def back(g_N: Array, like: Array) -> Array:
        return _gather(g_N, layout, batch, length).astype(like.dtype)

    d_raw = Raw(
        q=back(grads.q, raw.q),
        k=back(grads.k, raw.k),
        v=back(grads.v, raw.v),
        g=back(grads.g, raw.g),
        beta=back(grads.beta_logit.T, raw.beta),
        A_log=None if raw.A_log is None else d_A_log.astype(raw.A_log.dtype),
        dt_bias=None if raw.dt_bias is None else d_bias.astype(raw.dt_bias.dtype),
        initial_state=jnp.swapaxes(d_initial, -1, -2).astype(raw.initial_state.dtype),
    )
    return d_raw, None


_kda.defvjp(_kda_fwd, _kda_bwd)


def _parameter_gradients(d_raw: Array, x: _Inputs, layout: Layout, how: Activation) -> tuple[Array, Array]:
    """Of A_log [H] and dt_bias [H, K], from the cotangent of the raw gate [N, H, K]."""
    d = d_raw.astype(jnp.float32)
    z = x.g.astype(jnp.float32) + x.bias
    if layout.tokens is not None:
        z = jnp.where(layout.tokens.rows[1][:, None, None] > 0, z, 0)
    # dg/dA_log over dg/dx: z for a gate of e^A_log z, softplus(z) / softplus'(z) for e^A_log softplus(z)
    ratio = jax.nn.softplus(z) * (1 + jnp.exp(-z)) if how.gate == "softplus" else z
    return jnp.sum(d * ratio, axis=(0, 2)), jnp.sum(d, axis=0)


@functools.partial(jax.jit, static_argnames=("how", "state_interval", "interpret"))
def kda_pallas(
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
    state_interval: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array, Array | None]:
    """`kda` where `unsupported` is None. Returns (o [B, T, H, V], final state, states at borders)."""
    batch, length, heads, dim = q.shape
    rows = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = jnp.zeros((rows, heads, dim, dim), jnp.float32)
    layout = _layout(batch, length, segment_ids, cu_seqlens)
    raw = Raw(q, k, v, g, beta, A_log, dt_bias, initial_state.astype(jnp.float32))
    o, final, borders = _kda(same_varying(raw), layout, how, state_interval, interpret)
    return o, final, None if borders is None else refuse_gradient(borders)
