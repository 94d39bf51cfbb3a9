"""SiTU between the two products of an expert, in the first one's registers.

    hidden = scale · SiTU(gate, up)     gate, up = x w13_e

Legend: M rows.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Glu(NamedTuple):
    """scale · SiTU(gate, up) on values in registers."""

    scale_M: jax.Array  # float32
    beta: float | None
    linear_beta: float | None

    def apply(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Without the scale; 1 / (1 + e^-g) keeps its relative accuracy where the sigmoid is near 0."""
        if self.linear_beta is not None:
            up = self.linear_beta * jnp.tanh(up * (1 / self.linear_beta))
        bounded = gate if self.beta is None else self.beta * jnp.tanh(gate * (1 / self.beta))
        return bounded * up / (1 + jnp.exp(-gate))
