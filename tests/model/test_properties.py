"""What the model must satisfy whatever its weights: decoding, packing, causality, remat, sharding."""

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import flat_arrays, micro, relmax

from k3jax.config import MeshConfig
from k3jax.model.k3 import K3, init_cache
from k3jax.model.mla import MLA, mla_cache
from k3jax.ops.router import route
from k3jax.sharding import make_mesh, shardings

WIDE = {"dtype": "float64", "param_dtype": "float64"}


def build(seed=0, **overrides):
    """A micro model whose every parameter is random, biases included (zero queries would hide AttnRes)."""

    def make():
        leaves, tree = jax.tree.flatten(K3(micro(**overrides), rngs=nnx.Rngs(seed)))
        keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
        noisy = [a + 0.2 * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, noisy)

    return jax.jit(make, compiler_options={"xla_backend_optimization_level": 0})()


def random_bias(config, seed=5):
    return 0.1 * jax.random.normal(jax.random.key(seed), (config.num_moe_layers, config.moe.num_experts))


def random_tokens(config, batch, length, seed=3):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, config.vocab_size)


@lru_cache
def jitted():
    return jax.jit(lambda m, t, s, b: m(t, s, router_bias=b))


def test_prefill_then_decode_equals_one_pass(x64):
    model = build(**WIDE)
    bias, tokens = random_bias(model.config), random_tokens(model.config, 2, 11)
    expected = jitted()(model, tokens, None, bias)

    @jax.jit
    def advance(model, tokens, cache):
        logits, aux = model(tokens, router_bias=bias, cache=cache)
        return logits, aux.cache

    for split in ([11], [5, 6], [5, *[1] * 6], [1] * 11):
        cache, parts, start = init_cache(model.config, 2, 16), [], 0
        for length in split:
            logits, cache = advance(model, tokens[:, start : start + length], cache)
            parts.append(logits)
            start += length
        assert relmax(jnp.concatenate(parts, axis=1), expected) <= 1e-12, split


def test_left_padded_prefill_then_decode_equals_the_unpadded_prompt(x64):
    model = build(**WIDE)
    bias, tokens = random_bias(model.config), random_tokens(model.config, 1, 9)
    expected = jitted()(model, tokens, None, bias)
    padded = jnp.pad(tokens[:, :7], ((0, 0), (5, 0)))
    ids = (jnp.arange(12) >= 5).astype(jnp.int32)[None]
    advance = jax.jit(lambda m, t, s, c: m(t, s, router_bias=bias, cache=c))
    logits, aux = advance(model, padded, ids, init_cache(model.config, 1, 16))
    assert relmax(logits[:, 5:], expected[:, :7]) <= 1e-12
    for i in (7, 8):
        logits, aux = advance(model, tokens[:, i : i + 1], None, aux.cache)
        assert relmax(logits[:, 0], expected[:, i]) <= 1e-12


def test_absorbed_mla_equals_expanded(x64):
    config = micro(**WIDE)
    layer = MLA(config, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 7, config.hidden_size), jnp.float64)
    expected, _, _ = layer(x, None, None)
    step, cache = jax.jit(lambda m, x, c, t: m(x, None, c, t)), mla_cache(config, 2, 8)
    for t in range(7):
        y, cache, _ = step(layer, x[:, t : t + 1], cache, t)
        assert relmax(y[:, 0], expected[:, t]) <= 1e-13


@pytest.mark.parametrize("attn_res_block_size", [2, None])
def test_packed_documents_equal_separate_documents(x64, attn_res_block_size):
    model = build(**WIDE, attn_res_block_size=attn_res_block_size)
    bias, lengths = random_bias(model.config), (3, 1, 17, 9)
    tokens = random_tokens(model.config, 1, sum(lengths))
    ids = jnp.asarray(np.repeat(np.arange(1, 5), lengths))[None]
    packed = jitted()(model, jnp.pad(tokens, ((0, 0), (0, 4))), jnp.pad(ids, ((0, 0), (0, 4))), bias)
    start = 0
    for length in lengths:
        alone = jitted()(model, tokens[:, start : start + length], None, bias)
        assert relmax(packed[:, start : start + length], alone) <= 1e-12
        start += length


def test_later_tokens_do_not_change_earlier_logits():
    """To the float32 floor: attention and experts see other shapes of sums, not other values."""
    model = build()
    bias, tokens = random_bias(model.config), random_tokens(model.config, 2, 40)
    changed = tokens.at[:, 25:].set((tokens[:, 25:] + 7) % model.config.vocab_size)
    a, b = jitted()(model, tokens, None, bias), jitted()(model, changed, None, bias)
    assert relmax(a[:, :25], b[:, :25]) <= 1e-5
    assert relmax(a[:, 25:], b[:, 25:]) > 1e-3


def test_adding_a_constant_to_every_router_bias_changes_nothing():
    model = build()
    bias, tokens = random_bias(model.config), random_tokens(model.config, 2, 16)
    np.testing.assert_array_equal(
        jitted()(model, tokens, None, bias), jitted()(model, tokens, None, bias + jnp.float32(0.5))
    )


def test_a_bias_moves_the_choice_but_not_the_weights():
    logits = jax.random.normal(jax.random.key(0), (64, 8))
    bias = jnp.zeros(8).at[3].set(10.0)
    routing = route(logits, bias, jnp.arange(64), experts_per_token=2)
    assert bool(jnp.all(jnp.any(routing.experts_NK == 3, axis=1)))
    scores = jax.nn.sigmoid(logits)
    picked = jnp.take_along_axis(scores, routing.experts_NK, axis=1)
    np.testing.assert_allclose(routing.weights_NK, picked / picked.sum(1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize("logit", [-20.0, -50.0, -100.0, -200.0])
def test_scores_that_all_vanish_keep_weights_and_gradients_finite(logit):
    def weighted(logits):
        routing = route(logits, jnp.zeros(8), jnp.arange(3), experts_per_token=2)
        return jnp.sum(routing.weights_NK * jnp.array([1.0, 2.0]))

    value, gradient = jax.value_and_grad(weighted)(jnp.full((3, 8), logit) + 0.1 * jnp.arange(8))
    assert jnp.isfinite(value)
    assert jnp.all(jnp.isfinite(gradient))
    assert jnp.max(jnp.abs(gradient)) < 1


def test_equal_scores_load_all_experts_equally_and_by_document_position_only():
    positions = jnp.arange(64)
    routing = route(jnp.zeros((64, 16)), jnp.zeros(16), positions, experts_per_token=4)
    np.testing.assert_array_equal(np.bincount(np.asarray(routing.experts_NK).ravel(), minlength=16), [16] * 16)
    shuffled = jax.random.permutation(jax.random.key(0), 64)
    again = route(jnp.zeros((64, 16)), jnp.zeros(16), positions[shuffled], experts_per_token=4)
    np.testing.assert_array_equal(again.experts_NK, routing.experts_NK[shuffled])


def loss_and_stats(remat="none", unroll=False):
    def loss(model, tokens, ids, bias):
        x, aux = model.features(tokens, ids, router_bias=bias, remat=remat, unroll=unroll, histogram=True)
        logits = x @ model.lm_head[...]
        logp = jax.nn.log_softmax(logits[:, :-1])
        keep = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
        target = jax.nn.one_hot(tokens[:, 1:], logits.shape[-1], dtype=logp.dtype)
        return -jnp.sum(logp * target * keep[..., None]) / jnp.sum(keep), aux

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def packed_batch(config, batch=8, length=24):
    ids = jnp.asarray(np.repeat([1, 2, 3, 0], (7, 1, 12, 4)))[None].repeat(batch, 0)
    return random_tokens(config, batch, length), ids


def assert_same(a, b, tol):
    (loss_a, aux_a), grads_a = a
    (loss_b, aux_b), grads_b = b
    assert abs(float(loss_a) - float(loss_b)) <= tol * abs(float(loss_b))
    for name in ("load", "histogram"):
        np.testing.assert_array_equal(getattr(aux_a, name), getattr(aux_b, name))
    assert relmax(aux_a.max_logit, aux_b.max_logit) <= 1e-6
    mine, theirs = flat_arrays(grads_a), flat_arrays(grads_b)
    for name, value in theirs.items():
        assert np.max(np.abs(mine[name] - value)) <= tol * max(np.max(np.abs(value)), 1e-3), name


@pytest.mark.slow
def test_every_remat_preset_and_unrolling_give_the_same_loss_gradients_and_histograms(x64):
    model = build(**WIDE)
    tokens, ids = packed_batch(model.config, batch=2)
    bias = random_bias(model.config)
    plain = loss_and_stats("none")(model, tokens, ids, bias)
    counts = np.asarray(plain[0][1].histogram)
    np.testing.assert_array_equal(counts.sum(-1), int(jnp.sum(ids != 0)))  # padding is not counted
    np.testing.assert_array_equal(plain[0][1].load.sum(-1), int(jnp.sum(ids != 0)) * 2)
    for remat in ("products", "sublayer", "layer", "block"):
        assert_same(loss_and_stats(remat)(model, tokens, ids, bias), plain, 1e-9)
    assert_same(loss_and_stats("products", unroll=True)(model, tokens, ids, bias), plain, 1e-9)


@pytest.mark.parametrize(
    ("implementation", "remat", "unroll"),
    [
        ("blocked", "layer", False),
        pytest.param("dense", "layer", False, marks=pytest.mark.slow),
        pytest.param("blocked", "products", True, marks=pytest.mark.slow),
    ],
)
def test_eight_data_shards_compute_the_single_device_function(x64, implementation, remat, unroll):
    config = micro(**WIDE)
    model = build(**WIDE, moe=replace(config.moe, implementation=implementation))
    tokens, ids = packed_batch(model.config)
    bias = random_bias(model.config)
    single = loss_and_stats("layer")(model, tokens, ids, bias)
    mesh = make_mesh(MeshConfig(data=8))
    with jax.set_mesh(mesh):
        placed = jax.tree.map(jax.device_put, model, shardings(model, mesh))
        rows = jax.sharding.PartitionSpec("data")
        sharded = loss_and_stats(remat, unroll)(
            placed, jax.device_put(tokens, rows), jax.device_put(ids, rows), jax.device_put(bias, jax.P())
        )
        assert_same(sharded, single, 1e-9)


def test_one_device_mesh_is_the_plain_model(x64):
    model = build(**WIDE)
    tokens, ids = packed_batch(model.config, batch=2)
    bias = random_bias(model.config)
    plain = loss_and_stats()(model, tokens, ids, bias)
    with jax.set_mesh(make_mesh(MeshConfig())):
        assert_same(loss_and_stats()(model, tokens, ids, bias), plain, 1e-12)


def test_bfloat16_compute_gives_float32_logits_and_master_gradients_near_the_float32_loss():
    model = build()
    low = jax.tree.unflatten(jax.tree.structure(build(dtype="bfloat16")), jax.tree.leaves(model))
    tokens, ids = packed_batch(model.config)
    bias = random_bias(model.config)
    assert jax.eval_shape(low, tokens).dtype == jnp.float32
    (loss, _), _ = loss_and_stats()(model, tokens, ids, bias)
    (low_loss, _), grads = loss_and_stats()(low, tokens, ids, bias)
    # rounding flips close router decisions, so single logits move; the mean over tokens does not
    assert abs(float(low_loss) - float(loss)) <= 0.02 * float(loss)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
