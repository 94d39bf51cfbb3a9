"""Experts held as MXFP4 codes, and activations rounded to MXFP8."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.grouped_matmul import ExpertOptions, Tiling, expert_mlp, group_layout, grouped_matmul, xla
from k3jax.ops.mx import PackedMX, fake_quant
from k3jax.ops.situ import situ_glu
from k3jax.parallel.expert import expert_mlp_over_ranks

INTERPRET = Tiling(columns=128, stages=2, blocks=2, interpret=True)
NAMES = ["reference", "ragged", "blocked"]


def make(seed, N=13, K=3, E=5, L=32, F=64, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(E)[:K] for _ in range(N)]).astype(np.int32)
    z, w13, w2 = rng.standard_normal((N, L)), rng.standard_normal((E, L, 2 * F)), rng.standard_normal((E, F, L))
    arrays = [jnp.asarray(a, dtype) for a in (z, w13 / L**0.5, w2 / F**0.5)]
    return experts, rng.random(N) < 0.8, *arrays, jnp.asarray(rng.random((N, K)), jnp.promote_types(dtype, jnp.float32))


def grouped(z, w13, w2, weights, experts, valid, name, rule=None, tiling=INTERPRET):
    align = {"blocked": 4, "pallas": 8}.get(name, 1)
    options = ExpertOptions(4.0, 25.0, align, name, tiling, rule)
    layout = group_layout(experts, jnp.broadcast_to(valid[:, None], experts.shape), w2.shape[0], align)
    return expert_mlp(z, w13, w2, weights, layout, options)


def packed(w):
    bank = PackedMX.of(w, scale_rule="even")
    return bank, bank.dequantize(w.dtype)


@pytest.mark.parametrize("name", NAMES)
def test_codes_multiply_as_their_numbers_do(name, monkeypatch):
    _, _, _, w, _, _ = make(0)
    bank, numbers = packed(w)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(48, 32)), jnp.float32)
    sizes = jnp.array([8, 0, 16, 4, 12], jnp.int32)  # eight rows past the last group
    product = jax.jit(partial(grouped_matmul, align=4, implementation=name))
    expected = product(x, numbers, sizes)
    np.testing.assert_array_equal(product(x, bank, sizes), expected)
    monkeypatch.setattr(xla, "_BATCH_ELEMENTS", w[0].size * 5)  # in batches
    np.testing.assert_array_equal(
        jax.jit(partial(grouped_matmul, align=4, implementation=name))(x, bank, sizes), expected
    )


@pytest.mark.parametrize("name", ["ragged", "blocked"])
def test_experts_of_codes_equal_experts_of_their_numbers(name):
    experts, valid, z, w13, w2, weights = make(2)
    (bank13, w13), (bank2, w2) = packed(w13), packed(w2)
    run = jax.jit(partial(grouped, experts=experts, valid=valid, name=name))
    np.testing.assert_array_equal(run(z, bank13, bank2, weights), run(z, w13, w2, weights))


@pytest.mark.slow
def test_kernels_take_codes():
    experts, valid, z, w13, w2, weights = make(3, 16, 2, 3, 128, 128, jnp.bfloat16)
    (bank13, w13), (bank2, w2) = packed(w13), packed(w2)
    run = jax.jit(partial(grouped, experts=experts, valid=valid, name="pallas"))
    np.testing.assert_array_equal(run(z, bank13, bank2, weights), run(z, w13, w2, weights))


def test_blocked_decodes_only_what_has_rows():
    # the whole bank in float32 would be larger than all temporaries
    w = jnp.asarray(np.random.default_rng(4).normal(size=(64, 128, 128)), jnp.float32)
    bank, _ = packed(w)
    run = jax.jit(partial(grouped_matmul, align=16, implementation="blocked"))
    x, sizes = jnp.ones((32, 128)), jnp.zeros(64, jnp.int32).at[jnp.array([3, 40])].set(16)
    memory = run.lower(x, bank, sizes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < w.size * 4 // 4


@pytest.mark.parametrize("balance", ["balanced", "home"])
def test_codes_travel_between_ranks(balance):
    R = 2
    experts, valid, z, w13, w2, weights = make(5, N=16, K=2, E=4)
    experts[:, 0], experts[:, 1] = 1, 3 - experts[:, 0] % 2  # expert 1 is busy, so copies of it are made
    (bank13, w13), (bank2, w2) = packed(w13), packed(w2)
    options = ExpertOptions(4.0, 25.0, 4, "blocked")
    mesh = jax.make_mesh((R,), ("expert",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:R])

    def run(w13, w2):
        fn = partial(expert_mlp_over_ranks, options=options, axis="expert", balance=balance)
        with jax.set_mesh(mesh):
            sharded = jax.shard_map(fn, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
            args = jax.device_put((z, w13, w2, jnp.asarray(experts), weights, jnp.asarray(valid)), P("expert"))
            return jax.jit(sharded)(*args)

    np.testing.assert_array_equal(run(bank13, bank2), run(w13, w2))


def dense(z, w13, w2, weights, experts, valid, rule):
    """As a server computes it: the routing weight multiplies what an expert returns."""
    p_NE = jnp.einsum("nk,nke->ne", weights * valid[:, None], jax.nn.one_hot(experts, w2.shape[0], dtype=weights.dtype))
    gate, up = jnp.split(jnp.einsum("nl,elf->nef", z, w13), 2, axis=-1)
    hidden = fake_quant(situ_glu(gate, up), format="mxfp8", scale_rule=rule)
    return jnp.einsum("ne,nef,efl->nl", p_NE, hidden, w2)


@pytest.mark.parametrize("name", NAMES)
def test_rounded_activations_and_every_gradient_equal_the_dense_mixture(x64, name):
    experts, valid, *args = make(6, dtype=jnp.float64)
    d_out = jnp.asarray(np.random.default_rng(7).standard_normal(args[0].shape))

    def value_and_grads(fn):
        value, pullback = jax.vjp(partial(fn, experts=experts, valid=valid, rule="outlier"), *args)
        return value, *pullback(d_out)

    plain = partial(grouped, experts=experts, valid=valid, name=name)(*args)
    got, want = value_and_grads(partial(grouped, name=name)), value_and_grads(dense)
    assert np.abs(plain - want[0]).max() > 1e-3
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_kernels_round_activations_within_bfloat16():
    experts, valid, *args = make(8, 16, 2, 3, 128, 128, jnp.bfloat16)
    d_out = jnp.asarray(np.random.default_rng(9).standard_normal(args[0].shape), jnp.bfloat16)

    def value_and_grads(name):
        fn = partial(grouped, experts=experts, valid=valid, name=name, rule="outlier")
        value, pullback = jax.vjp(fn, *args)
        return [np.asarray(a, np.float32) for a in (value, *pullback(d_out))]

    for kernel, plain in zip(value_and_grads("pallas"), value_and_grads("blocked")):
        assert np.linalg.norm(kernel - plain) < 2e-2 * np.linalg.norm(plain)
