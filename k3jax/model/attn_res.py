"""Parameters of one attention-residual mix; the maths is in `k3jax.ops.attn_res`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import ModelConfig
from k3jax.model import init
from k3jax.sharding import gathered


class AttnResQuery(nnx.Module):
    """Pseudo-query `proj` [D] and key-norm weight `norm` [D] of one sublayer. Only their product acts.

    `proj` starts at zero: every mix is then the plain mean of its sources (arXiv 2603.15031).
    """

    def __init__(self, config: ModelConfig, key: jax.Array):
        make = init.Maker(config, key)
        self.norm = make("embed", config.hidden_size, init=init.ones)
        self.proj = make("embed", config.hidden_size, init=init.zeros)

    def query(self) -> jax.Array:
        """γ ⊙ w in at least float32, [..., D]."""
        wide = jnp.promote_types(self.norm[...].dtype, jnp.float32)
        norm, proj = gathered((self.norm, self.proj))
        return norm[...].astype(wide) * proj[...].astype(wide)
