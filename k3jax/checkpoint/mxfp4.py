"""Experts between MXFP4 as the release packs it and values: all that import and export ask of a codec.

Leading axes are free; the last one is the tensor's input dimension, in groups of 32 that share a scale 2^(byte − 127).
Two E2M1 codes lie in a byte, the low nibble first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from k3jax.checkpoint.layout import GROUP

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(packed: jax.Array, scale: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Values [..., n] of codes [..., n / 2] and scales [..., n / 32], both uint8; exact for scales 2 to 254."""
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1, GROUP)
    table = jnp.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], jnp.float32)
    return (table[codes] * _power(scale)[..., None]).reshape(*packed.shape[:-1], -1).astype(dtype)


def encode(values: jax.Array, kept: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of float32 values [..., n], by the OCP rule: exponent of the largest magnitude, less two.

    Args:
        kept: scales [..., n / 32] that stay wherever all values of a group are exact with them. What was decoded with
            them then gets its codes back, whichever rule made them.
    """
    groups = values.reshape(*values.shape[:-1], -1, GROUP)
    largest = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(groups), axis=-1), jnp.int32) >> 23
    scale = jnp.clip(largest - 2, 1, 254).astype(jnp.uint8)
    codes = _codes(groups, scale)
    if kept is not None:
        before = _codes(groups, kept)
        exact = jnp.all(decode(_packed(before), kept, groups.dtype).reshape(groups.shape) == groups, axis=-1)
        scale, codes = jnp.where(exact, kept, scale), jnp.where(exact[..., None], before, codes)
    return _packed(codes), scale


def _power(scale: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(scale.astype(jnp.uint32) << 23, jnp.float32)


def _codes(groups: jax.Array, scale: jax.Array) -> jax.Array:
    """Nearest codes, ties to the even one, the largest for what lies above."""
    a = jnp.abs(groups / _power(scale)[..., None])
    above = (a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5)
    return sum(jnp.uint8(x) for x in above) | (jnp.uint8(jnp.signbit(groups)) << 3)


def _packed(codes: jax.Array) -> jax.Array:
    flat = codes.reshape(*codes.shape[:-2], -1)
    return flat[..., ::2] | (flat[..., 1::2] << 4)
