"""Backward of one AttnRes mix with the RMS norm that follows it, in one pass over its sources: a Mosaic GPU kernel.

Per token and sublayer it reads the bank rows, the partial sum and two cotangents once and writes two rows; everything
else stays in registers. A warp owns a token, so that sums over D need shuffles only; gradients of the two vectors are
summed in shared memory, per warp, and reduced outside.

Legend: N bank rows, M tokens, D hidden, C thread blocks, R tokens at once in one.
"""

from __future__ import annotations

import math
from functools import partial as bind
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import along_columns, along_rows

R = 4  # one token a warp
_BLOCKS = 264  # two on each of 132 multiprocessors
_SPAN = 256  # columns that the 32 lanes of a warp hold in 16-byte pieces
MAX_WIDTH = 2048  # more columns do not fit in registers

_LAYOUT = plgpu.Layout.TILED(plgpu.Tiling(((R, _SPAN), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
_ROW, _COLUMN = _LAYOUT.reduce(1), _LAYOUT.reduce(0)


class MixGrads(NamedTuple):
    mix_MD: jax.Array  # of the mix, bfloat16
    partial_MD: jax.Array
    logits_NM: jax.Array
    weights_NM: jax.Array  # the softmax weights of the rows, not a gradient
    query_D: jax.Array
    norm_D: jax.Array


def why_not(shape: tuple[int, ...], *dtypes: Any) -> str | None:
    """Why the kernel does not take sources [..., D] of these dtypes; None if it does."""
    D, tokens = shape[-1], math.prod(shape[:-1])
    wrong = [str(dtype) for dtype in dtypes if dtype != jnp.bfloat16]
    if wrong:
        return f"sources must be bfloat16, not {wrong[0]}"
    if D % _SPAN or D > MAX_WIDTH:
        return f"the hidden size must be a multiple of {_SPAN} up to {MAX_WIDTH}, not {D}"
    return f"the tokens of a device must be a multiple of {R}, not {tokens}" if tokens % R else None


@bind(jax.jit, static_argnames=("eps", "interpret"))  # lowered once for all layers
def mix_norm_backward(
    rows: tuple[jax.Array, ...],
    partial_MD: jax.Array,
    d_out_MD: jax.Array,
    d_partial_MD: jax.Array,
    logits_NM: jax.Array,
    query_D: jax.Array,
    norm_D: jax.Array,
    bias: jax.Array,
    eps: float,
    *,
    interpret: bool = False,
) -> MixGrads:
    """Gradients of `rms_norm(mix)` from its inputs.

    Args:
        rows: N × [M, D] bfloat16.
        d_out_MD: cotangent of the normed mix.
        d_partial_MD: cotangent of the partial from its other uses, added to the result.
        logits_NM: float32, −inf where a row takes no part.
        query_D: float32.
        bias: [1] float32, 0, or −inf to leave the partial out.
    """
    (M, D), N = partial_MD.shape, len(rows)
    blocks = min(_BLOCKS, M // R)
    out, f32 = jax.ShapeDtypeStruct, jnp.float32
    run = plgpu.kernel(
        bind(_body, N, M, D, blocks, eps, interpret),
        out_type=[out((M, D), jnp.bfloat16)] * 2 + [out((N, M), f32)] * 2 + [out((blocks, R, D), f32)] * 2,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((R, D), f32)] * 2,
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    operands = (*rows, partial_MD, d_out_MD, d_partial_MD, logits_NM, query_D, norm_D.astype(f32), bias)
    d_mix, d_partial, d_logits, weights, d_query, d_norm = run(*operands)
    return MixGrads(d_mix, d_partial, d_logits, weights, jnp.sum(d_query, (0, 1)), jnp.sum(d_norm, (0, 1)))


def _store(ref: Any, value: jax.Array, interpret: bool) -> None:
    """Stores what does not fill whole sectors or has bank conflicts: jax 0.12 wants to be told, 0.11 cannot be."""
    if interpret or jax.__version_info__ < (0, 12):
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)


def _body(N: int, M: int, D: int, blocks: int, eps: float, interpret: bool, *refs: Any) -> None:
    rows = refs[:N]
    p_ref, d_out_ref, d_p_ref, logits_ref, query_ref, norm_ref, bias_ref = refs[N : N + 7]
    d_mix_out, d_p_out, d_logits_out, weights_out, d_query_out, d_norm_out, d_query_sum, d_norm_sum = refs[N + 7 :]
    block, shape, f32, bf16 = lax.axis_index("block"), (R, D), jnp.float32, jnp.bfloat16

    def load(ref: Any, layout: Any = _LAYOUT) -> jax.Array:
        value = ref[...] if interpret else plgpu.load(ref, layout=layout, optimized=False)
        return value.astype(f32)

    def across(values: jax.Array) -> jax.Array:
        return along_rows(values, shape)

    def down(ref: Any) -> jax.Array:
        return along_columns(load(ref, _COLUMN), shape)

    store = bind(_store, interpret=interpret)
    zeros = jnp.zeros(shape, f32) if interpret else plgpu.layout_cast(jnp.zeros(shape, f32), _LAYOUT)
    store(d_query_sum, zeros)
    store(d_norm_sum, zeros)

    def tile(k: jax.Array, carry: None) -> None:
        at = pl.ds((block + k * blocks) * R, R)
        p = load(p_ref.at[at])
        rstd = lax.rsqrt(jnp.sum(p * p, axis=1) / D + eps)
        dot = jnp.sum(p * down(query_ref), axis=1)
        logits = [load(logits_ref.at[i, at], _ROW) for i in range(N)] + [dot * rstd + bias_ref[0]]
        peak = logits[0]
        for logit in logits[1:]:
            peak = jnp.maximum(peak, logit)
        powers = [jnp.exp(logit - peak) for logit in logits]
        scale = 1.0 / sum(powers[1:], powers[0])
        weights = [power * scale for power in powers]

        mixed = across(weights[N]) * p
        for i in range(N):
            mixed += across(weights[i]) * load(rows[i].at[at])
        mixed = mixed.astype(bf16).astype(f32)
        norm_rstd = lax.rsqrt(jnp.sum(mixed * mixed, axis=1) / D + eps)
        d_out = load(d_out_ref.at[at])
        normed = (mixed * across(norm_rstd)).astype(bf16).astype(f32)
        store(d_norm_sum, load(d_norm_sum) + d_out * normed)
        d_normed = d_out * down(norm_ref)
        along = jnp.sum(d_normed * mixed, axis=1) * norm_rstd * norm_rstd * norm_rstd / D
        d_mix = d_normed * across(norm_rstd) - mixed * across(along)
        store(d_mix_out.at[at], d_mix.astype(bf16))

        d_weights = [jnp.sum(d_mix * load(rows[i].at[at]), axis=1) for i in range(N)] + [jnp.sum(d_mix * p, axis=1)]
        mean = weights[0] * d_weights[0]
        for weight, d_weight in zip(weights[1:], d_weights[1:]):
            mean += weight * d_weight
        for i in range(N):
            store(d_logits_out.at[i, at], weights[i] * (d_weights[i] - mean))
            store(weights_out.at[i, at], weights[i])
        d_logit = weights[N] * (d_weights[N] - mean)
        d_dot = d_logit * rstd
        shrink = d_dot * dot * rstd * rstd / D
        d_p = load(d_p_ref.at[at]) + across(weights[N]) * d_mix + across(d_dot) * down(query_ref) - across(shrink) * p
        store(d_p_out.at[at], d_p.astype(bf16))
        store(d_query_sum, load(d_query_sum) + across(d_dot) * p)

    tiles = M // R
    lax.fori_loop(0, (tiles - block + blocks - 1) // blocks, tile, None)
    store(d_query_out.at[block], load(d_query_sum))
    store(d_norm_out.at[block], load(d_norm_sum))
