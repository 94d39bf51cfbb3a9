"""One decoding step of the KDA layer between its projections, on a pool of states, in place.

For every row b of the batch, with its slot s of the pool, and for every head: the convolutions of q, k and v take one
token and their tails move on; q and k are normalised; the state S_s decays, is corrected and is read; the output is
normed and gated. What crosses memory is the state, once each way; the rest is small.

    S <- Diag(e^g) S;  S <- S + beta k (v - S^T k)^T;  o = scale * S^T q          (report §2.1)
    y = rms_norm(o) * weight * sigmoid(output gate)

The GPU kernel gives each (row, head) one warpgroup, and each thread of it one column of S: sums over K then stay in the
thread. With p = S^T Diag(e^g) k and r = S^T Diag(e^g) q it needs S once for both sums and once for the update:
o = r + <q, k> beta (v - p).

Shape suffixes: B rows, P slots of the pool, H heads, K key dim, V value dim, W taps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.mosaic import Kit, along_columns, along_rows, why_not_here, xla_or_pallas
from k3jax.ops.norms import gated_rms_norm
from k3jax.ops.short_conv import conv_tail, short_conv

from .gates import L2_EPS, Activation, activate
from .reference import recurrence_step

DecodeImplementation = Literal["xla", "pallas"]
Tails = tuple[Array, Array, Array]

DIM = 128  # of keys and values in the kernel: one thread a value column
ROWS = 16  # of the state in registers at a time: few enough for three blocks on a multiprocessor
TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((1, DIM), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)  # [any rows, 128]: a thread holds one column
OWN = TILE.reduce(0)  # [128]: a thread holds one value
ALL = TILE.reduce(1)  # [rows]: every thread holds all values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """The parameters of a KDA layer that a decoding step reads.

    Args:
        q_conv, k_conv, v_conv: [H, K, W].
        A_log: [H]; dt_bias: [H, K].
        norm: [V], of the output norm.
    """

    q_conv: Array
    k_conv: Array
    v_conv: Array
    A_log: Array
    dt_bias: Array
    norm: Array


def resolve_decode(
    state: Array, tails: Tails, dtype: Any, implementation: DecodeImplementation | None = None
) -> DecodeImplementation:
    """The implementation that runs on inputs of this dtype; None means the kernel where it can run.

    Raises:
        ValueError: the kernel was asked for and cannot run here or on these arrays; the message says why.
    """
    return xla_or_pallas(
        "kda_decode", implementation, lambda: _unsupported(state, tails, jnp.dtype(dtype)) or why_not_here()
    )


def _unsupported(state: Array, tails: Tails, dtype: Any) -> str | None:
    if state.shape[-2:] != (DIM, DIM):
        return f"K and V must be {DIM}, not {state.shape[-2]} and {state.shape[-1]}"
    if state.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the state must be float32 or bfloat16, not {state.dtype}"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"the inputs must be float32 or bfloat16, not {dtype}"
    if any(tail.dtype != dtype for tail in tails):
        return f"the tails must be {dtype} like the inputs, not {', '.join(str(t.dtype) for t in tails)}"
    return None


def kda_decode(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    output_gate: Array,
    state: Array,
    tails: Tails,
    slots: Array,
    weights: Weights,
    *,
    gate: Literal["lower_bound", "softplus"] = "lower_bound",
    lower_bound: float = -5.0,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    implementation: DecodeImplementation | None = None,
) -> tuple[Array, Array, Tails]:
    """One token for each of B sequences whose states live in a pool.

    Donate `state` and `tails` to the enclosing `jax.jit` and the step happens in place.

    Args:
        q, k, v, g: [B, H, K], the projections before the convolutions, and the raw gate; one dtype.
        beta: [B, H], the logit; output_gate: [B, H, V], before its sigmoid.
        state: [P, H, K, V], float32 (bfloat16: half the memory and time, and rounded after every token).
        tails: for q, k and v [P, W - 1, H, K], the last inputs of the convolutions, oldest first.
        slots: [B] int32, whose state and tails each row has; no two rows may have one slot. -1: the row is not active,
            its output is 0 and no slot changes.
        weights: the layer's.
        gate, lower_bound, scale: as in `kda`; q and k are always normalised.
        norm_eps: of the output norm.
        implementation: "xla" is plain JAX; None is `resolve_decode`.

    Returns:
        (normed and gated output [B, H, V] in the dtype of v, the pool of states, the pools of tails).

    Raises:
        ValueError: a shape does not fit, or "pallas" was asked for and cannot run.
    """
    _check(q, k, v, g, beta, output_gate, state, tails, slots, weights)
    if gate not in ("lower_bound", "softplus"):
        raise ValueError(f"kda_decode: gate must be 'lower_bound' or 'softplus', not {gate!r}")
    how = Activation(gate, float(lower_bound), True, True, q.shape[-1] ** -0.5 if scale is None else float(scale))
    chosen = resolve_decode(state, tails, q.dtype, implementation)
    run = decode_reference if chosen == "xla" else decode_kernel
    return run(q, k, v, g, beta, output_gate, state, tails, slots, weights, how, norm_eps)


def _check(q, k, v, g, beta, output_gate, state, tails, slots, weights: Weights) -> None:
    (B, H, K), W = q.shape, weights.q_conv.shape[-1]
    V, P = v.shape[-1], state.shape[0]
    expected = {
        "k": (k, (B, H, K)), "v": (v, (B, H, V)), "g": (g, (B, H, K)), "beta": (beta, (B, H)),
        "output_gate": (output_gate, (B, H, V)), "state": (state, (P, H, K, V)), "slots": (slots, (B,)),
        "q tails": (tails[0], (P, W - 1, H, K)), "k tails": (tails[1], (P, W - 1, H, K)),
        "v tails": (tails[2], (P, W - 1, H, V)), "q_conv": (weights.q_conv, (H, K, W)),
        "k_conv": (weights.k_conv, (H, K, W)), "v_conv": (weights.v_conv, (H, V, W)),
        "A_log": (weights.A_log, (H,)), "dt_bias": (weights.dt_bias, (H, K)), "norm": (weights.norm, (V,)),
    }  # fmt: skip
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ValueError(f"kda_decode: {name} has shape {x.shape}, expected {shape}")


def decode_reference(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    output_gate: Array,
    state: Array,
    tails: Tails,
    slots: Array,
    weights: Weights,
    how: Activation,
    norm_eps: float,
) -> tuple[Array, Array, Tails]:
    """`kda_decode` from the other ops: gather, step, scatter."""
    active = slots >= 0
    source, target = jnp.maximum(slots, 0), jnp.where(active, slots, state.shape[0])
    convolved, new_tails = [], []
    for x, taps, pool in zip((q, k, v), (weights.q_conv, weights.k_conv, weights.v_conv), tails):
        tail = pool[source]
        convolved.append(short_conv(x[:, None], taps, tail=tail)[:, 0])
        new = conv_tail(x[:, None], taps.shape[-1], tail=tail).astype(pool.dtype)
        new_tails.append(pool.at[target].set(new, mode="drop"))
    q, k, v = convolved
    inputs = activate(q, k, v, g, beta, weights.A_log, weights.dt_bias, how, active)
    o, new_state = recurrence_step(state[source].astype(inputs[0].dtype), *inputs)
    y = gated_rms_norm(o.astype(v.dtype), weights.norm, output_gate.astype(v.dtype), norm_eps)
    y = jnp.where(active[:, None, None], y, 0)
    q_tail, k_tail, v_tail = new_tails
    return y, state.at[target].set(new_state.astype(state.dtype), mode="drop"), (q_tail, k_tail, v_tail)


def decode_kernel(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    output_gate: Array,
    state: Array,
    tails: Tails,
    slots: Array,
    weights: Weights,
    how: Activation,
    norm_eps: float,
    interpret: bool = False,
) -> tuple[Array, Array, Tails]:
    """`kda_decode` as one Mosaic GPU kernel; `interpret` runs it without a GPU."""
    (B, H, _), width = q.shape, weights.q_conv.shape[-1]
    kit = Kit(interpret)
    pools = tuple(jax.new_ref(x) for x in (state, *tails))
    convs = (weights.q_conv, weights.k_conv, weights.v_conv)
    params = {} if interpret else {"compiler_params": plgpu.CompilerParams(approx_math=True)}
    y = kit.kernel(
        functools.partial(_body, kit, how, norm_eps),
        out_type=jax.ShapeDtypeStruct((B, H, DIM), v.dtype),
        grid=(B, H),
        grid_names=("row", "head"),
        num_threads=1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((DIM, DIM), state.dtype),
            plgpu.SMEM((3, width, DIM), q.dtype),
            plgpu.SMEM((DIM,), v.dtype),
            *[plgpu.SMEM((DIM,), jnp.float32)] * 4,
            plgpu.Barrier(num_arrivals=6),
            plgpu.Barrier(),
        ],
        kernel_name="kda_decode",
        **params,
    )(q, k, v, g, beta, output_gate, *convs, weights.A_log, weights.dt_bias, weights.norm, slots, *pools)
    state, q_tail, k_tail, v_tail = (jax.freeze(ref) for ref in pools)
    return y, state, (q_tail, k_tail, v_tail)


def _body(kit: Kit, how: Activation, norm_eps: float, *refs: Any) -> None:
    (*inputs_g, g_g, beta_g, gate_g), convs_g, (A_g, bias_g, norm_g, slots_g) = refs[:6], refs[6:9], refs[9:13]
    state_g, tails_g, y_g = refs[13], refs[14:17], refs[17]
    S, window, y_s, decayed_k, decayed_q, decay, key, inputs_here, state_here = refs[18:]
    width = window.shape[1]
    b, h = lax.axis_index("row"), lax.axis_index("head")
    slot = slots_g[b]

    def own(ref: Any) -> Array:
        return kit.load(ref, OWN, optimized=False).astype(jnp.float32)

    def convolved(i: int) -> Array:
        z = functools.reduce(jnp.add, [own(convs_g[i].at[h, :, j]) * own(window.at[i, j]) for j in range(width)])
        return z * _sigmoid(z)

    @pl.when(slot < 0)
    def _():
        y_s[...] = jnp.zeros((DIM,), y_s.dtype)

    @pl.when(slot >= 0)
    def _():
        for i in range(3):  # each convolution's window: its tail, then the new token
            plgpu.copy_gmem_to_smem(tails_g[i].at[slot, :, h], window.at[i, pl.ds(0, width - 1)], inputs_here)
            plgpu.copy_gmem_to_smem(inputs_g[i].at[b, h], window.at[i, width - 1], inputs_here)
        plgpu.copy_gmem_to_smem(state_g.at[slot, h], S, state_here)
        z = own(g_g.at[b, h]) + own(bias_g.at[h])
        rate = jnp.exp(A_g[h].astype(jnp.float32))
        alpha = jnp.exp(how.lower_bound * _sigmoid(rate * z) if how.gate == "lower_bound" else -rate * _softplus(z))
        beta = _sigmoid(beta_g[b, h].astype(jnp.float32))
        open_ = own(norm_g) * _sigmoid(own(gate_g.at[b, h]))
        plgpu.barrier_wait(inputs_here)
        q, k, v = (convolved(i) for i in range(3))
        for i in range(3):
            plgpu.copy_smem_to_gmem(window.at[i, pl.ds(1, width - 1)], tails_g[i].at[slot, :, h])
        k = k * lax.rsqrt(jnp.sum(k * k) + L2_EPS)
        q = q * (lax.rsqrt(jnp.sum(q * q) + L2_EPS) * how.scale)
        decayed_k[...], decayed_q[...], decay[...], key[...] = k * alpha, q * alpha, alpha, k
        plgpu.barrier_wait(state_here)
        error, o = _read(kit, S, decayed_k, decayed_q, v)
        error = beta * error
        o = o + jnp.sum(q * k) * error
        _update(kit, S, decay, key, error)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(S, state_g.at[slot, h])
        y_s[...] = (o * lax.rsqrt(jnp.sum(o * o) * (1 / DIM) + norm_eps) * open_).astype(y_s.dtype)

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(y_s, y_g.at[b, h])
    plgpu.wait_smem_to_gmem(0)


def _row_values(kit: Kit, ref: Any, rows: Any) -> Array:
    return along_rows(kit.load(ref.at[rows], ALL, optimized=False), (ROWS, DIM))


def _read(kit: Kit, S: Any, decayed_k: Any, decayed_q: Any, v: Array) -> tuple[Array, Array]:
    """v - S^T (decayed k) and S^T (decayed q)."""

    def step(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        error, o = sums
        rows = pl.ds(i * ROWS, ROWS)
        tile = kit.load(S.at[rows], TILE, optimized=False).astype(jnp.float32)
        error = error - jnp.sum(tile * _row_values(kit, decayed_k, rows), axis=0)
        return error, o + jnp.sum(tile * _row_values(kit, decayed_q, rows), axis=0)

    return lax.fori_loop(0, DIM // ROWS, step, (v, jnp.zeros_like(v)))


def _update(kit: Kit, S: Any, decay: Any, key: Any, error: Array) -> None:
    """S <- Diag(decay) S + key error^T."""

    @pl.loop(0, DIM // ROWS)
    def _(i):
        rows = pl.ds(i * ROWS, ROWS)
        tile = kit.load(S.at[rows], TILE, optimized=False).astype(jnp.float32) * _row_values(kit, decay, rows)
        tile = tile + _row_values(kit, key, rows) * along_columns(error, (ROWS, DIM))
        S[rows, :] = tile.astype(S.dtype)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def _softplus(x: Array) -> Array:
    return jnp.maximum(x, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(x)))
