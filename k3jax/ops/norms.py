"""Root-mean-square norms. Statistics in at least float32.

Legend: … any leading axes, D the normalised axis.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x · rsqrt(mean(x²) + eps)`, rounded to `x.dtype`, then times `weight` [D] in that dtype → [..., D]."""
    wide = _wide(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def gated_rms_norm(x: jax.Array, weight: jax.Array, gate: jax.Array, eps: float) -> jax.Array:
    """`rms_norm(x) · weight · sigmoid(gate)`, all in at least float32 with one rounding at the end (report §2.1).

    Args:
        x: [..., D] with `weight` [D] shared by all leading axes.
        gate: [..., D] pre-sigmoid.
    """
    wide = _wide(x)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (normed * _wide(weight) * jax.nn.sigmoid(_wide(gate))).astype(gate.dtype)
