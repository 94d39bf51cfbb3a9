"""SiTU-GLU, the bounded activation of every feed-forward part of K3 (report §2.3).

SiTU(g, u) = [β · tanh(g/β) · sigmoid(g)] · [λ · tanh(u/λ)]        β = 4, λ = 25, so |out| < 100
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def situ_glu(
    gate: jax.Array,
    up: jax.Array,
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
    scale: jax.Array | None = None,
) -> jax.Array:
    """SiTU of `gate` times the soft-clipped `up`, same shapes, in at least float32, cast once to `gate.dtype`.

    `linear_beta` None leaves `up` as it is, and `beta` None makes it SiLU(gate) · up, to which small inputs come close.
    `scale`, one value for each row [...], multiplies the result before the cast.
    """
    g, u = _wide(gate, up)
    if linear_beta is not None:
        u = linear_beta * jnp.tanh(u / linear_beta)
    bounded = g if beta is None else beta * jnp.tanh(g / beta)
    out = bounded * jax.nn.sigmoid(g) * u
    return (out if scale is None else out * scale[..., None]).astype(gate.dtype)


def situ_glu_backward(
    gate: jax.Array,
    up: jax.Array,
    d_out: jax.Array,
    scale: jax.Array,
    beta: float | None = 4.0,
    linear_beta: float | None = 25.0,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The output of `situ_glu(..., scale)` and the gradients of gate, up and scale, from one reading of the inputs.

    The outputs have the dtype of `gate`, the gradient of `scale` at least float32.
    """
    g, u, d = _wide(gate, up, d_out)
    s = jax.nn.sigmoid(g)
    t = None if beta is None else jnp.tanh(g / beta)
    bounded, slope = (g, 1.0) if beta is None or t is None else (beta * t, 1 - t * t)
    v = u if linear_beta is None else jnp.tanh(u / linear_beta)
    dv = jnp.ones_like(u) if linear_beta is None else 1 - v * v
    v = v if linear_beta is None else linear_beta * v
    out, scaled = bounded * s * v, d * scale[..., None]
    d_gate = scaled * v * s * (slope + bounded * (1 - s))
    d_up = scaled * (bounded * s) * dv
    dtype = gate.dtype
    return (out * scale[..., None]).astype(dtype), d_gate.astype(dtype), d_up.astype(dtype), jnp.sum(out * d, axis=-1)


def _wide(*arrays: jax.Array) -> list[jax.Array]:
    return [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in arrays]
