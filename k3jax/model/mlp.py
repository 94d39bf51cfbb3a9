"""SiTU-GLU feed-forward: the dense first layer and the fused shared experts."""

from __future__ import annotations

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from k3jax.config import ModelConfig
from k3jax.model import init
from k3jax.ops.situ import situ_glu
from k3jax.sharding import contract, whole_sequence


class MLP(nnx.Module):
    """down( SiTU(gate x, up x) ): x [B, T, D] → [B, T, D] through width F."""

    def __init__(self, config: ModelConfig, size: int, key: jax.Array):
        make = init.Maker(config, key)
        self.config = config
        self.gate = make("embed mlp", config.hidden_size, size)
        self.up = make("embed mlp", config.hidden_size, size)
        self.down = make("mlp embed", size, config.hidden_size)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate, up, down = (w[...].astype(x_BTD.dtype) for w in (self.gate, self.up, self.down))
        x = whole_sequence(x_BTD)
        hidden = situ_glu(x @ gate, x @ up, self.config.situ_beta, self.config.situ_linear_beta)
        return contract("btf,fd->btd", checkpoint_name(hidden, "operand"), down, x_BTD)
