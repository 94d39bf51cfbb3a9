"""Causal depthwise convolution of width W with SiLU, restarted at every document.

    y_t[c] = SiLU( Σ_j w[c, j] · u_{t−W+1+j}[c] )          w[..., W−1] multiplies the current token

Legend: B batch, T time, C channels (any trailing axes), W taps.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def short_conv(
    u: jax.Array, weight: jax.Array, segment_ids: jax.Array | None = None, tail: jax.Array | None = None
) -> jax.Array:
    """Short convolution and SiLU.

    Args:
        u: [B, T, *C] pre-activation inputs.
        weight: [*C, W].
        segment_ids: [B, T] int32; a tap reaches only tokens of the same non-zero id. None: one document a row.
        tail: [B, W−1, *C], the inputs before the first one (a decode cache), of the first token's document;
            None: zeros.

    Returns:
        [B, T, *C] in `u.dtype`; accumulated in at least float32.
    """
    wide = jnp.promote_types(u.dtype, jnp.float32)
    T, W = u.shape[1], weight.shape[-1]
    channels = (None,) * (u.ndim - 2)
    if tail is None:
        padded = jnp.pad(u, ((0, 0), (W - 1, 0)) + ((0, 0),) * (u.ndim - 2))
    else:
        padded = jnp.concatenate([tail.astype(u.dtype), u], axis=1)
    ids = None
    if segment_ids is not None:
        before = segment_ids[:, :1] if tail is not None else jnp.zeros_like(segment_ids[:, :1])
        ids = jnp.concatenate([before] * (W - 1) + [segment_ids], axis=1)
    y = jnp.zeros_like(u, dtype=wide)
    for j in range(W):
        tap = padded[:, j : j + T].astype(wide)
        if segment_ids is not None and ids is not None and j < W - 1:
            same = (ids[:, j : j + T] == segment_ids) & (segment_ids != 0)
            tap = jnp.where(same[(..., *channels)], tap, 0)
        y = y + tap * weight[..., j].astype(wide)
    return jax.nn.silu(y).astype(u.dtype)


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
