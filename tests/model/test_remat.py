"""What a backward pass computes a second time under every preset of `TrainConfig.remat`."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from helpers import micro
from jax import lax

from k3jax.config import MLAConfig
from k3jax.model import kda as kda_layer
from k3jax.model import moe as moe_layer
from k3jax.model.k3 import K3
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

    def count(remat) -> dict[str, int]:
        gradient = jax.grad(lambda model: jnp.sum(model.features(tokens, remat=remat)[0]))
        text = jax.jit(gradient).lower(model).as_text()
        return {mark: text.count(f".{mark} ") for mark in ("cbrt", "tan", "erf", "dot_general")}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kda_layer, "kda", lambda *args, **_: kda(*args))
        patch.setattr(moe_layer, "expert_mlp", lambda z, w13, w2, weights, *_: experts(z, w13, w2, weights))
        patch.setattr(cudnn, "refusal", lambda *_: None)
        patch.setattr(cudnn, "forward", forward_of_attention)
        patch.setattr(cudnn, "backward", backward_of_attention)
        return {remat: count(remat) for remat in ("none", "products", "layer", "sublayer", "block")}


@pytest.mark.parametrize("kernel", ["cbrt", "tan", "erf"])
def test_only_block_runs_the_large_kernels_again(counts, kernel):
    once = counts["none"][kernel]
    assert once > 0
    assert [counts[remat][kernel] for remat in ("products", "layer", "sublayer")] == [once] * 3
    assert counts["block"][kernel] == 2 * once


def test_products_multiplies_nothing_again(counts):
    assert counts["products"]["dot_general"] == counts["none"]["dot_general"] < counts["layer"]["dot_general"]
