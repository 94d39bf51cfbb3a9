"""Options that K3 leaves off but Kimi-Linear and ablations need: each traces, forward, backward and decoding."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import micro

from k3jax.config import ConfigError, KDAConfig
from k3jax.model.k3 import K3, init_cache
from k3jax.ops.quantile_balancing import qb_update

BASE = micro()
VARIANTS = {
    "softplus_gate": {"kda": replace(BASE.kda, gate="softplus")},
    "low_rank_output_gate": {"kda": replace(BASE.kda, full_rank_output_gate=False)},
    "no_attention_residuals": {"attn_res_block_size": None},
    "one_block": {"attn_res_block_size": 8},
    "block_of_one_layer": {"attn_res_block_size": 1},
    "no_q_lora": {"mla": replace(BASE.mla, q_lora_rank=None)},
    "no_mla_gate": {"mla": replace(BASE.mla, output_gate=False)},
    "no_shared_key": {"mla": replace(BASE.mla, qk_rope_head_dim=0)},
    "no_latent": {"moe": replace(BASE.moe, latent_size=None)},
    "no_latent_norm": {"moe": replace(BASE.moe, latent_norm=False)},
    "no_shared_experts": {"moe": replace(BASE.moe, num_shared_experts=0)},
    "softmax_router_in_groups": {
        "moe": replace(BASE.moe, router_activation="softmax", num_groups=4, topk_groups=2, renormalize=False)
    },
    "top_1": {"moe": replace(BASE.moe, experts_per_token=1)},
    "no_dense_layer": {"num_dense_layers": 0},
    "dense_layers_only": {"num_dense_layers": 3},
    "kda_only": {"mla_layers": ()},
    "mla_only": {"mla_layers": (0, 1, 2)},
    "one_layer": {"num_layers": 1, "mla_layers": ()},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_traces_forward_backward_balancing_and_decoding(name):
    config = micro(**{"num_layers": 3, "mla_layers": (2,)} | VARIANTS[name])
    model = nnx.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    bias = jax.ShapeDtypeStruct((config.num_moe_layers, config.moe.num_experts), jnp.float32)

    def step(model, tokens, bias):
        def loss(model):
            x, aux = model.features(tokens, tokens, router_bias=bias, histogram=True, depth=True, remat="layer")
            return jnp.sum(x), aux

        grads, aux = jax.grad(loss, has_aux=True)(model)
        return grads, qb_update(aux.histogram, bias, experts_per_token=config.moe.experts_per_token)

    grads, new_bias = jax.eval_shape(step, model, tokens, bias)
    assert [g.shape for g in jax.tree.leaves(grads)] == [p.shape for p in jax.tree.leaves(model)]
    assert new_bias.shape == bias.shape
    cache = jax.eval_shape(lambda: init_cache(config, 2, 12))
    for length in (9, 1):
        _, aux = jax.eval_shape(lambda m, t, c: m(t, cache=c), model, tokens.update(shape=(2, length)), cache)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), aux.cache) == jax.tree.map(
            lambda a: (a.shape, a.dtype), cache
        )


def test_a_convolution_of_one_tap_is_refused():
    with pytest.raises(ConfigError, match="conv_size"):
        KDAConfig(num_heads=1, head_dim=16, conv_size=1)
