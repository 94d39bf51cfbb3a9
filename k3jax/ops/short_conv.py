"""Causal depthwise convolution of width W with SiLU, restarted at every document.

    y_t[c] = SiLU( Σ_j w[c, j] · u_{t−W+1+j}[c] )          w[..., W−1] multiplies the current token

The backward pass keeps only the inputs and recomputes the rest; between passes over memory there is nothing wider than
the inputs.

Legend: B batch, T time, C channels (any trailing axes), W taps; "lag" s = W−1−j, how many tokens back a tap reaches.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from k3jax.ops import short_conv_gpu
from k3jax.ops.common import vary_alike, wide
from k3jax.ops.mosaic import xla_or_pallas

Implementation = Literal["xla", "pallas"]


def resolve_implementation(
    u: jax.Array, weight: jax.Array, segment_ids: jax.Array | None, implementation: Implementation | None = None
) -> Implementation:
    """The implementation that runs when `implementation` is asked for; None means "pallas" where it can run.

    Shapes and dtypes decide: `jax.ShapeDtypeStruct`s do as arguments.

    Raises:
        ValueError: the kernels were asked for and cannot run here or on these arrays; the message says why.
    """
    return xla_or_pallas("short_conv", implementation, lambda: short_conv_gpu.why_not(u, weight, segment_ids))


def short_conv(
    u: jax.Array,
    weight: jax.Array,
    segment_ids: jax.Array | None = None,
    tail: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Short convolution and SiLU.

    Args:
        u: [B, T, *C] pre-activation inputs.
        weight: [*C, W].
        segment_ids: [B, T] int32; a tap reaches only tokens of the same non-zero id. None: one document a row.
        tail: [B, W−1, *C], the inputs before the first one (a decode cache), of the first token's document;
            None: zeros.
        implementation: "pallas" (kernels for an NVIDIA GPU; C is [H, 128]), "xla"; None is `resolve_implementation`.

    Returns:
        [B, T, *C] in `u.dtype`; accumulated in at least float32.

    Raises:
        ValueError: "pallas" cannot run; the message says why.
    """
    before = 0 if tail is None else tail.shape[1]
    if tail is not None:
        u = jnp.concatenate([tail.astype(u.dtype), u], axis=1)
        if segment_ids is not None:
            segment_ids = jnp.concatenate([segment_ids[:, :1]] * before + [segment_ids], axis=1)
    chosen = resolve_implementation(u, weight, segment_ids, implementation)
    u, weight = vary_alike(u, weight)
    return _conv(u, weight, segment_ids, chosen)[:, before:]


def _shift(x: jax.Array, lag: int) -> jax.Array:
    """`out[:, t] = x[:, t − lag]`, zero where there is no such token."""
    lag = max(-x.shape[1], min(lag, x.shape[1]))
    return jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (lag, -lag, 0)] + [(0, 0, 0)] * (x.ndim - 2))


def _reaches(segment_ids: jax.Array, lag: int, ndim: int) -> jax.Array:
    """Whether the tap at this lag stays inside the token's document, [B, T, 1, …]."""
    same = (_shift(segment_ids, lag) == segment_ids) & (segment_ids != 0)
    return same[(..., *(None,) * (ndim - 2))]


def _tap(u: jax.Array, segment_ids: jax.Array | None, lag: int) -> jax.Array:
    """What the tap at this lag sees of each token's past, in `u.dtype`."""
    past = _shift(u, lag)
    return past if segment_ids is None or lag == 0 else jnp.where(_reaches(segment_ids, lag, u.ndim), past, 0)


def _pre_activation(u: jax.Array, weight: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    W = weight.shape[-1]
    taps = [wide(_tap(u, segment_ids, W - 1 - j)) * wide(weight[..., j]) for j in range(W)]
    return sum(taps[1:], taps[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _conv(u: jax.Array, weight: jax.Array, segment_ids: jax.Array | None, implementation: Implementation) -> jax.Array:
    if implementation == "pallas":
        return short_conv_gpu.forward(u, weight, segment_ids)
    return jax.nn.silu(_pre_activation(u, weight, segment_ids)).astype(u.dtype)


def _conv_fwd(u, weight, segment_ids, implementation):
    return _conv(u, weight, segment_ids, implementation), (u, weight, segment_ids)


def _conv_bwd(implementation, residuals, d_y):
    u, weight, segment_ids = residuals
    if implementation == "pallas":
        return *short_conv_gpu.backward(u, weight, segment_ids, d_y), None
    W = weight.shape[-1]
    z = _pre_activation(u, weight, segment_ids)
    gate = jax.nn.sigmoid(z)
    # Rounded like d_y, and behind a barrier: read W times below, it must not be recomputed W times.
    d_z = jax.lax.optimization_barrier((wide(d_y) * gate * (1 + z * (1 - gate))).astype(d_y.dtype))
    d_u = wide(d_z) * wide(weight[..., W - 1])
    for lag in range(1, W):
        back = d_z if segment_ids is None else jnp.where(_reaches(segment_ids, lag, u.ndim), d_z, 0)
        d_u = d_u + wide(_shift(back, -lag)) * wide(weight[..., W - 1 - lag])
    d_w = [jnp.sum(wide(d_z) * wide(_tap(u, segment_ids, W - 1 - j)), axis=(0, 1)) for j in range(W)]
    return d_u.astype(u.dtype), jnp.stack(d_w, axis=-1).astype(weight.dtype), None


_conv.defvjp(_conv_fwd, _conv_bwd)


def conv_tail(
    u: jax.Array, width: int, segment_ids: jax.Array | None = None, tail: jax.Array | None = None
) -> jax.Array:
    """The last `width − 1` inputs [B, W−1, *C] to carry into the next call, zero where another document's."""
    before = jnp.zeros_like(u[:, :1]).repeat(width - 1, axis=1) if tail is None else tail.astype(u.dtype)
    joined = jnp.concatenate([before, u], axis=1)[:, -(width - 1) :]
    if segment_ids is None:
        return joined
    ids = jnp.concatenate([segment_ids[:, :1]] * (width - 1) + [segment_ids], axis=1)[:, -(width - 1) :]
    keep = ids == segment_ids[:, -1:]
    return jnp.where(keep[(..., *(None,) * (u.ndim - 2))], joined, 0)
