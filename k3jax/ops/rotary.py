"""Rotary position encoding of the vision tower; the text model has none.

Legend: … any leading axes, H heads, K head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.ops.common import wide


def rotate_pairs(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Turns the adjacent pairs (2j, 2j + 1) of `x` [..., H, K], as complex numbers, by `angles` [..., K/2].

    Computed in at least float32, returned in the dtype of `x`.
    """
    pairs = wide(x).reshape(*x.shape[:-1], -1, 2)
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    real, imaginary = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
