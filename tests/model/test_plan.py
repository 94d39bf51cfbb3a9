"""Layer plan, parameter counts at full size, and trace size."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers import micro

from k3jax.config import k3, nano, proxy
from k3jax.model.k3 import K3, create
from k3jax.model.plan import plan_layers


def abstract(config):
    return nnx.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0)))


def count(config):
    return sum(leaf.size for leaf in jax.tree.leaves(abstract(config)))


def test_parameter_counts_are_those_of_the_release():
    config = k3()
    trained = count(config)
    router_bias = config.num_moe_layers * config.moe.num_experts
    kda_layers = config.num_layers - len(config.mla_layers)
    a_log_padding = kda_layers * (-config.kda.num_heads % 128)
    assert (trained, router_bias, a_log_padding) == (2_779_484_393_568, 82_432, 2_208)
    assert trained + router_bias + a_log_padding == 2_779_484_478_208
    assert count(nano()) == 3_092_296
    assert round(count(proxy()) / 1e9, 2) == 1.74


def test_every_layer_appears_once_with_its_kind():
    for config in (nano(), proxy(), k3(), micro(), micro(attn_res_block_size=None)):
        seen = {}
        for plan in plan_layers(config):
            for spec, numbers in plan.run_layers():
                assert not set(numbers) & set(seen)
                seen |= dict.fromkeys(numbers, spec)
        assert [seen[i] for i in range(config.num_layers)] == list(config.layers)


def test_layer_by_number_reads_the_stack():
    model = create(micro())
    run = model.segments[0].runs[1]  # layer 1
    np.testing.assert_array_equal(model.layer(1).mixer.q_proj[...], run.mixer.q_proj[...][0])
    assert model.layer(3).spec.mixer == "mla"


def test_depth_adds_scan_steps_not_equations():
    """Trace size of 93 layers equals that of 45: three segments either way."""

    def equations(num_layers):
        config = k3(num_layers=num_layers, mla_layers=tuple(sorted({*range(3, num_layers, 4), num_layers - 1})))
        tokens = jax.ShapeDtypeStruct((1, 16), jnp.int32)
        jaxpr = jax.make_jaxpr(lambda m, t: m(t))(abstract(config), tokens)
        return len(str(jaxpr).splitlines())

    assert equations(93) <= 1.02 * equations(45)
