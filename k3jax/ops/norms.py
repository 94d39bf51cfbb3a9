"""Root-mean-square norms. Statistics in at least float32.

Legend: … any leading axes, D the normalised axis.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.ops.common import wide


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x · rsqrt(mean(x²) + eps)`, rounded to `x.dtype`, then times `weight` [D] in that dtype → [..., D]."""
    x32 = wide(x)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


def gated_rms_norm(x: jax.Array, weight: jax.Array, gate: jax.Array, eps: float) -> jax.Array:
    """`rms_norm(x) · weight · sigmoid(gate)`, all in at least float32 with one rounding at the end (report §2.1).

    Args:
        x: [..., D] with `weight` [D] shared by all leading axes.
        gate: [..., D] pre-sigmoid.
    """
    x32 = wide(x)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * wide(weight) * jax.nn.sigmoid(wide(gate))).astype(gate.dtype)
