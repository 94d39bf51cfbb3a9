"""SiTU-GLU, the bounded activation of every feed-forward part of K3 (report §2.3).

SiTU(g, u) = [β · tanh(g/β) · sigmoid(g)] · [λ · tanh(u/λ)]        β = 4, λ = 25, so |out| < 100
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def situ_glu(gate: jax.Array, up: jax.Array, beta: float = 4.0, linear_beta: float | None = 25.0) -> jax.Array:
    """SiTU of `gate` times the soft-clipped `up`, same shapes, in at least float32, cast once to `gate.dtype`.

    `linear_beta` None leaves `up` as it is. Small inputs give SiLU(gate) · up.
    """
    wide = jnp.promote_types(gate.dtype, jnp.float32)
    g, u = gate.astype(wide), up.astype(wide)
    if linear_beta is not None:
        u = linear_beta * jnp.tanh(u / linear_beta)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)
