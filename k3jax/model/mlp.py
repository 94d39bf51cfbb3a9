"""SiTU-GLU feed-forward: the dense first layer and the fused shared experts."""

from __future__ import annotations

import jax
from flax import nnx

from k3jax.config import ModelConfig
from k3jax.model import init
from k3jax.ops.remat import checkpoint_name
from k3jax.ops.situ import situ_glu


class MLP(nnx.Module):
    """down( SiTU(gate x, up x) ): x [..., D] → [..., D] through width F."""

    def __init__(self, config: ModelConfig, size: int, key: jax.Array):
        make = init.Maker(config, key)
        self.config = config
        self.gate = make("embed mlp", config.hidden_size, size)
        self.up = make("embed mlp", config.hidden_size, size)
        self.down = make("mlp embed", size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up, down = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
        hidden = situ_glu(x @ gate, x @ up, self.config.situ_beta, self.config.situ_linear_beta)
        return checkpoint_name(hidden, "operand") @ down
