"""What a backward pass computes a second time under every preset of `TrainConfig.remat`."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import flat_arrays, micro, relmax
from jax import lax

from k3jax.config import ConfigError, MLAConfig, TrainConfig, from_dict, to_dict
from k3jax.model import kda as kda_layer
from k3jax.model import moe as moe_layer
from k3jax.model.k3 import K3, create
from k3jax.ops.attention import cudnn


def marked(mark, fn):
    """`fn` as a kernel: differentiated by its own rule, which keeps the arguments; `mark` shows where it runs."""

    @jax.custom_vjp
    def kernel(*args):
        return mark(fn(*args))

    kernel.defvjp(lambda *args: (kernel(*args), args), lambda args, d: jax.vjp(fn, *args)[1](d))
    return kernel


def forward_of_attention(q, k, v, *, scale, lengths=None):
    o = lax.tan((v * (q + k)[..., : v.shape[-1]]).astype(jnp.float32)).astype(v.dtype)
    return o, jnp.swapaxes(jnp.sum(q * k, axis=-1), 1, 2).astype(jnp.float32)


def backward_of_attention(q, k, v, o, lse, d_o, *, scale, lengths=None):
    d = jnp.pad(d_o * o, ((0, 0),) * 3 + ((0, q.shape[-1] - v.shape[-1]),)) * jnp.swapaxes(lse, 1, 2)[..., None]
    return (d * q).astype(q.dtype), (d * k).astype(k.dtype), (d_o * v).astype(v.dtype)


@pytest.fixture(scope="module")
def counts() -> dict[str, dict[str, int]]:
    """By preset, in the program of a gradient: the kernels of KDA ("cbrt"), attention ("tan") and the experts ("erf"),
    which stand-ins leave there, and the matrix products."""
    kda = marked(lax.cbrt, lambda q, k, v, g, beta: v * q * k * g * beta[..., None])
    experts = marked(lax.erf, lambda z, w13, w2, weights: z * jnp.sum(w13) * jnp.sum(w2) * jnp.sum(weights))
    mla = MLAConfig(2, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, implementation="cudnn")
    config = micro(num_layers=4, mla_layers=(2,), mla=mla)
    model, tokens = jax.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0))), jnp.zeros((1, 32), jnp.int32)

    def count(remat, **named) -> dict[str, int]:
        gradient = jax.grad(lambda model: jnp.sum(model.features(tokens, remat=remat, remat_policy=named)[0]))
        text = jax.jit(gradient).lower(model).as_text()
        return {mark: text.count(f".{mark} ") for mark in ("cbrt", "tan", "erf", "dot_general")}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kda_layer, "kda", lambda *args, **_: kda(*args))
        patch.setattr(moe_layer, "expert_mlp", lambda z, w13, w2, weights, *_: experts(z, w13, w2, weights))
        patch.setattr(cudnn, "refusal", lambda *_: None)
        patch.setattr(cudnn, "forward", forward_of_attention)
        patch.setattr(cudnn, "backward", backward_of_attention)
        presets = {remat: count(remat) for remat in ("none", "products", "layer", "sublayer", "block")}
        return presets | {
            "layer, kda again": count("layer", kda="recompute"),
            "block, but experts": count("block", experts="save"),
            "products, all compressed": count("products", kda="fp8", attention="fp8", experts="fp8", operand="fp8"),
        }


@pytest.mark.parametrize("kernel", ["cbrt", "tan", "erf"])
def test_only_block_runs_the_large_kernels_again(counts, kernel):
    once = counts["none"][kernel]
    assert once > 0
    assert [counts[remat][kernel] for remat in ("products", "layer", "sublayer")] == [once] * 3
    assert counts["block"][kernel] == 2 * once


def test_products_multiplies_nothing_again(counts):
    assert counts["products"]["dot_general"] == counts["none"]["dot_general"] < counts["layer"]["dot_general"]


def test_policies_by_name_decide_otherwise_than_the_preset(counts):
    none = counts["none"]

    def again(case) -> dict[str, int]:
        return {kernel: counts[case][kernel] // none[kernel] for kernel in ("cbrt", "tan", "erf")}

    assert again("layer, kda again") == {"cbrt": 2, "tan": 1, "erf": 1}
    assert again("block, but experts") == {"cbrt": 2, "tan": 2, "erf": 1}
    assert again("products, all compressed") == {"cbrt": 1, "tan": 1, "erf": 1}
    assert counts["products, all compressed"]["dot_general"] == none["dot_general"]


POLICIES = {
    "layer": {"operand": "offload", "kda": "offload", "attention": "recompute"},
    "products": {"operand": "recompute", "experts": "offload", "expert_weights": "offload"},
    "sublayer": {"operand": "save"},
    "block": {"kda": "save", "attention": "offload", "experts": "save"},
}


@pytest.fixture(scope="module")
def gradient():
    """(remat, policy, unroll) → summed squares of the features of a batch with two documents, and their gradients."""
    model = create(micro())
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, 32)), jnp.int32)
    segments = jnp.asarray(np.repeat([[1, 2]], 16, axis=1).repeat(2, axis=0), jnp.int32)

    def compute(remat="none", named=None, unroll=False):
        def loss(model):
            return jnp.sum(model.features(tokens, segments, remat=remat, remat_policy=named, unroll=unroll)[0] ** 2)

        value, grads = jax.jit(jax.value_and_grad(loss))(model)
        return float(value), flat_arrays(grads)

    return compute


@pytest.mark.slow
@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("remat", POLICIES)
def test_policies_other_than_fp8_change_no_gradient(gradient, remat, unroll):
    value, expected = gradient()
    other, found = gradient(remat, POLICIES[remat], unroll)
    assert other == pytest.approx(value, rel=1e-6)
    assert {name: e for name, e in ((n, relmax(found[n], g)) for n, g in expected.items()) if e > 1e-4} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "named"),
    [
        ("products", ("operand", "kda", "attention", "experts", "expert_weights")),
        ("layer", ("kda", "attention", "experts", "expert_weights")),
        ("block", ("operand", "kda", "experts")),
    ],
)
def test_fp8_leaves_the_loss_alone_and_the_gradients_near(gradient, remat, named):
    value, expected = gradient(remat)
    other, found = gradient(remat, dict.fromkeys(named, "fp8"))
    assert other == pytest.approx(value, rel=1e-6)
    ours, theirs = (np.concatenate([g[name].ravel() for name in expected]) for g in (found, expected))
    error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
    assert 1e-4 < error < 2.0**-3


def test_policies_that_make_no_sense_are_refused_with_what_would():
    for policy, message in (
        ({"operands": "save"}, "names are kda, attention, experts, keys, expert_weights, operand"),
        ({"kda": "host"}, "legal are save, fp8, offload, recompute"),
        ({"keys": "fp8"}, "log-sum-exp of the exact keys; legal: save, offload, recompute"),
        ({"operand": "fp8"}, "use remat 'products', or 'attention': 'recompute'"),
    ):
        with pytest.raises(ConfigError, match=message):
            TrainConfig(remat="layer", remat_policy=policy)
    with pytest.raises(ConfigError, match="needs another remat than 'none'"):
        TrainConfig(remat_policy={"kda": "offload"})
    TrainConfig(remat="products", remat_policy={"operand": "fp8"})
    TrainConfig(remat="layer", remat_policy={"operand": "fp8", "attention": "recompute"})
    config = TrainConfig(remat="layer", remat_policy={"kda": "fp8"})
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config
