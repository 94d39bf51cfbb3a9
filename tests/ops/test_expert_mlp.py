"""`expert_mlp`: every implementation against every expert on every token, forward and all gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_rows_close, wide_copy
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops import mosaic
from k3jax.ops.grouped_matmul import ExpertOptions, Tiling, expert_mlp, group_layout
from k3jax.ops.situ import situ_glu, situ_glu_backward

INTERPRET = Tiling(columns=128, stages=2, blocks=2, interpret=True)
ALIGN = {"reference": 1, "ragged": 1, "blocked": 4, "pallas": 8}


def make(seed, N, K, E, L, F, dtype):
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permutation(E)[:K] for _ in range(N)]).astype(np.int32)
    z, w13, w2 = rng.standard_normal((N, L)), rng.standard_normal((E, L, 2 * F)), rng.standard_normal((E, F, L))
    arrays = [jnp.asarray(a, dtype) for a in (z, w13 / L**0.5, w2 / F**0.5)]
    wide = jnp.promote_types(dtype, jnp.float32)
    return experts, rng.random(N) < 0.8, (*arrays, jnp.asarray(rng.random((N, K)), wide))


def dense(z, w13, w2, weights, experts, valid):
    p_NE = jnp.einsum("nk,nke->ne", weights * valid[:, None], jax.nn.one_hot(experts, w2.shape[0], dtype=weights.dtype))
    gate, up = jnp.split(jnp.einsum("nl,elf->nef", z, w13), 2, axis=-1)
    return jnp.einsum("ne,nef,efl->nl", p_NE, situ_glu(gate, up), w2)


def grouped(z, w13, w2, weights, experts, valid, name, tiling=INTERPRET, align=None):
    align = align or ALIGN[name]
    options = ExpertOptions(4.0, 25.0, align, name, tiling)
    layout = group_layout(experts, jnp.broadcast_to(valid[:, None], experts.shape), w2.shape[0], align)
    return expert_mlp(z, w13, w2, weights, layout, options)


def value_and_grads(fn, args, d_out):
    value, pullback = jax.vjp(fn, *args)
    return value, *pullback(d_out.astype(value.dtype))


@pytest.mark.parametrize("name", ["reference", "ragged", "blocked"])
def test_experts_equal_the_dense_mixture(x64, name):
    experts, valid, args = make(1, 13, 3, 5, 6, 7, jnp.float64)
    d_out = jnp.asarray(np.random.default_rng(2).standard_normal(args[0].shape))
    got = jax.jit(partial(value_and_grads, partial(grouped, experts=experts, valid=valid, name=name)))(args, d_out)
    want = value_and_grads(partial(dense, experts=experts, valid=valid), args, d_out)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_the_kernels_form_the_same_layer_within_bfloat16():
    experts, valid, args = make(3, 16, 2, 3, 128, 128, jnp.bfloat16)
    d_out = jnp.asarray(np.random.default_rng(4).standard_normal(args[0].shape), jnp.bfloat16)
    layer = partial(grouped, experts=experts, valid=valid, name="pallas")
    got = jax.jit(partial(value_and_grads, layer))(args, d_out)
    exact = [jnp.asarray(a, jnp.float32) for a in args]
    want = value_and_grads(partial(dense, experts=experts, valid=valid), exact, d_out)
    for a, b, like in zip(got, want, (args[0], *args)):
        assert a.dtype == like.dtype
        assert jnp.linalg.norm(a.astype(jnp.float32) - b) < 8e-3 * jnp.linalg.norm(b)


@pytest.mark.gpu
@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize(
    ("N", "K", "E", "L", "F"), [(500, 3, 7, 256, 384), (1024, 4, 16, 768, 512), (11, 1, 4, 128, 128)]
)
def test_the_kernels_form_the_same_layer_on_a_gpu(N, K, E, L, F, align):
    experts, valid, args = make(8, N, K, E, L, F, jnp.bfloat16)
    experts[np.isin(experts, (0, E // 2, E - 1))] = 1  # which leaves three groups empty
    d_out = jnp.asarray(np.random.default_rng(9).standard_normal(args[0].shape), jnp.bfloat16)
    layer = partial(grouped, experts=experts, valid=valid, name="pallas", tiling=Tiling(), align=align)
    got = jax.jit(partial(value_and_grads, layer))(args, d_out)
    with jax.enable_x64(True):
        exact = partial(value_and_grads, partial(dense, experts=experts, valid=valid))
        want = jax.tree.map(np.asarray, jax.jit(exact)(wide_copy(args), wide_copy(d_out)))
    for name, a, b, like in zip(("y", "d_z", "d_w13", "d_w2", "d_weights"), got, want, (args[0], *args)):
        assert a.dtype == like.dtype
        # rows are tokens, experts' matrices, or the k-th weight of all tokens
        rows = np.transpose if name == "d_weights" else lambda x: np.reshape(x, (len(x), -1))
        assert_rows_close(rows(a), rows(b), 4e-3, name)


@pytest.mark.parametrize("remat", [False, True])
def test_the_backward_pass_repeats_nothing_but_the_first_product(monkeypatch, remat):
    monkeypatch.setattr(mosaic, "why_not_here", lambda: None)
    experts, valid, args = make(5, 24, 2, 5, 128, 128, jnp.bfloat16)
    layer = partial(grouped, experts=experts, valid=valid, name="pallas", tiling=Tiling())
    layer = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def loss(*args):
        return jnp.sum(jax.lax.scan(lambda z, _: (layer(z, *args[1:]).astype(z.dtype), None), args[0], length=2)[0])

    with jax.sharding.use_abstract_mesh(mosaic.h200_mesh()):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*args).lower(lowering_platforms=("cuda",))
    # forward: two; backward: the first again, dx of the second, dw of both, dx of the first
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 2 + 5


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_the_written_backward_of_situ_is_that_of_autodiff(x64, linear_beta):
    rng = np.random.default_rng(6)
    gate, up, d_out = (jnp.asarray(3 * rng.standard_normal((5, 7))) for _ in range(3))
    scale = jnp.asarray(rng.random(5))
    fn = lambda gate, up, scale: situ_glu(gate, up, 4.0, linear_beta, scale)  # noqa: E731
    out, pullback = jax.vjp(fn, gate, up, scale)
    for a, b in zip(situ_glu_backward(gate, up, d_out, scale, 4.0, linear_beta), (out, *pullback(d_out))):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["blocked", "ragged"])
def test_experts_run_inside_shard_map(x64, name):
    experts, valid, args = make(7, 16, 3, 5, 6, 7, jnp.float64)
    fn = partial(grouped, name=name)
    sharded = jax.shard_map(fn, in_specs=(P("data"), P(), P(), P("data"), P("data"), P("data")), out_specs=P("data"))
    loss = lambda fn, *args: jnp.sum(fn(*args) ** 2)  # noqa: E731
    want = jax.grad(partial(loss, fn), (0, 1, 2, 3))(*args, experts, valid)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        z, w13, w2, weights = args
        z, weights, experts, valid = (jax.device_put(a, P("data")) for a in (z, weights, experts, valid))
        got = jax.jit(jax.grad(partial(loss, sharded), (0, 1, 2, 3)))(z, w13, w2, weights, experts, valid)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
