"""`k3jax.ops.attn_res`: the arrangement that shares one pass over the bank, against the direct softmax."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_rows_close, relmax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops import attn_res_pallas
from k3jax.ops.attn_res import BankRead, attn_res, mix, mix_norm, query_read, read_bank
from k3jax.ops.common import wide
from k3jax.ops.mosaic import h200_mesh

EPS = 1e-5


def make(seed=0, N=3, Q=4, B=2, T=5, D=32, dtype="float64", scale=1.0):
    """A bank, the partial sums and queries of Q sublayers, and weights that make a loss of the mixes."""
    keys = jax.random.split(jax.random.key(seed), 4)
    wide = jnp.promote_types(dtype, jnp.float32)
    bank = (scale * jax.random.normal(keys[0], (N, B, T, D), wide)).astype(dtype)
    partials = (scale * jax.random.normal(keys[1], (Q, B, T, D), wide)).astype(dtype)
    queries = jax.random.normal(keys[2], (Q, D), wide)
    return bank, partials, queries, jax.random.normal(keys[3], (Q, B, T, D), wide)


def shared(bank, partials, queries, valid=None):
    """Every mix of a block; the first has no partial; queries in two groups."""
    Q = len(queries)
    first, rest = read_bank(bank, [queries[0], queries[1:].reshape(Q - 1, 1, -1)], EPS, valid)
    reads = [first, *(query_read(query_read(rest, q), 0) for q in range(Q - 1))]
    mixes, weights = zip(*[mix(bank, reads[q], partials[q], queries[q], EPS, q > 0) for q in range(Q)])
    return jnp.stack(mixes), jnp.stack(weights)


def direct(bank, partials, queries):
    mixes = [attn_res(bank, partials[q] if q else None, queries[q], EPS)[0] for q in range(len(queries))]
    return jnp.stack(mixes)


def value_and_grads(mixes, weights, *args):
    return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(mixes(*a) * weights), (0, 1, 2)))(*args)


@pytest.mark.parametrize("N", [1, 2, 5])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
def test_one_read_of_the_bank_equals_the_direct_softmax_in_value_and_every_gradient(x64, N, scale):
    *data, weights = make(N=N, scale=scale)
    got = value_and_grads(lambda *a: shared(*a)[0], weights, *data)
    want = value_and_grads(direct, weights, *data)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relmax(a, b) <= 1e-12


def test_rows_that_do_not_exist_yet_take_no_part(x64):
    bank, partials, queries, weights = make(N=4)
    valid = jnp.arange(4) < 3
    got = value_and_grads(lambda *a: shared(*a, valid)[0], weights, bank, partials, queries)
    want = value_and_grads(direct, weights, bank[:3], partials, queries)
    assert relmax(got[0], want[0]) <= 1e-13
    assert np.all(np.asarray(got[1][0][3]) == 0)
    for a, b in zip((got[1][0][:3], *got[1][1:]), want[1], strict=True):
        assert relmax(a, b) <= 1e-12


def test_bfloat16_sources_keep_float32_sums():
    """Against float64 on the same bfloat16 sources: only the rounding of the results remains."""
    bank, partials, queries, weights = make(D=512, T=32, dtype="bfloat16")
    weights = weights.astype(jnp.bfloat16)
    got = shared(bank, partials, queries)[0]
    grads = value_and_grads(lambda *a: shared(*a)[0].astype(jnp.float32), weights, bank, partials, queries)[1]
    with jax.enable_x64(True):
        exact = [np.asarray(a, np.float64) for a in (bank, partials, queries, weights)]
        want = direct(*map(jnp.asarray, exact[:3]))
        expected = value_and_grads(direct, jnp.asarray(exact[3]), *map(jnp.asarray, exact[:3]))[1]
    assert got.dtype == grads[0].dtype == grads[1].dtype == jnp.bfloat16
    assert relmax(got, want) <= 2**-8
    for a, b, limit in zip(grads, expected, (2**-8, 2**-8, 1e-5), strict=True):
        assert relmax(a, b) <= limit


def test_zero_queries_average_the_sources(x64):
    bank, partials, queries, _ = make()
    mixes, weights = shared(bank, partials, 0 * queries)
    np.testing.assert_allclose(mixes[1:], (bank.sum(0) + partials[1:]) / 4, rtol=1e-13)
    np.testing.assert_allclose(mixes[0], bank.mean(0), rtol=1e-13)
    np.testing.assert_allclose(weights[0, :, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-13)
    np.testing.assert_allclose(weights[1], 1 / 4, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_tokens_leave_the_mixes_of_earlier_ones_bitwise_unchanged(dtype):
    bank, partials, queries, noise = make(T=20, dtype=dtype)
    noise = noise.at[:, :, :11].set(0).astype(dtype)
    mixes = jax.jit(lambda bank, partials: shared(bank, partials, queries)[0])
    a, b = mixes(bank, partials), mixes(bank + noise[:3], partials + noise)
    np.testing.assert_array_equal(a[:, :, :11], b[:, :, :11])


def test_neither_a_stack_of_sources_nor_a_float32_value_per_query_is_held():
    N, Q, B, T, D = 3, 8, 2, 64, 128
    bank, partials, queries, weights = make(N=N, Q=Q, B=B, T=T, D=D, dtype="bfloat16")
    weights = weights.astype(jnp.bfloat16)

    def loss(bank, partials, queries):
        def layer(total, xs):
            read, partial, query, weight = xs
            mixed, _ = mix(fixed, read, partial, query, EPS)
            return total + jnp.sum((mixed * weight).astype(jnp.float32)), None

        (reads,) = read_bank(bank, [queries], EPS)
        fixed = jax.lax.stop_gradient(bank)
        return jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), 0.0, (reads, partials, queries, weights))[0]

    args = (tuple(bank), partials, queries)
    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).as_text()
    wide = {m for m in re.findall(r"tensor<([\dx]+)xf32>", text)}
    sizes = {int(np.prod([int(n) for n in shape.split("x")])) for shape in wide}
    assert max(sizes) <= B * T * D, sorted(sizes)
    arrays = [int(np.prod([int(n) for n in m.split("x")])) for m in re.findall(r"tensor<([\dx]+)xbf16>", text)]
    assert max(arrays) <= Q * B * T * D  # the cotangents of a block's mixes


def backward_kernel_and_autodiff(include, interpret, **shape):
    """By name: what the kernel gives, and what autodiff of mix, then norm, in float32."""
    bank, partials, queries, weights = make(Q=1, dtype="bfloat16", **shape)
    partial, query, d_out = partials[0], 0.1 * queries[0], weights[0].astype(jnp.bfloat16)
    norm, d_partial = 1 + 0.1 * queries[0], jnp.flip(d_out, axis=1)
    (read,) = read_bank(bank, [query], EPS)

    def exact(read, partial, query, norm):
        x, _, partial = mix_norm(bank.astype(jnp.float32), read, partial, query, norm, EPS, include)
        return x, partial

    high = (BankRead(read.logits, read.weights_slot, read.mix_slot.astype(jnp.float32)), wide(partial), query, norm)
    d_read, *want = jax.vjp(exact, *high)[1]((wide(d_out), wide(d_partial)))
    flat = lambda a: a.reshape(-1, a.shape[-1])  # noqa: E731
    bias = jnp.array([0.0 if include else -jnp.inf])
    grads = attn_res_pallas.mix_norm_backward(
        tuple(map(flat, bank)),
        *map(flat, (partial, d_out, d_partial)),
        read.logits.reshape(len(bank), -1),
        query,
        norm,
        bias,
        EPS,
        interpret=interpret,
    )
    expected = attn_res_pallas.MixGrads(d_read.mix_slot, want[0], d_read.logits, d_read.weights_slot, *want[1:])
    return {name: (a, b.reshape(a.shape)) for name, a, b in zip(grads._fields, grads, expected, strict=True)}


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("N", [1, 3])
def test_the_backward_kernel_matches_autodiff_of_mix_then_norm(N, include):
    for name, (got, expected) in backward_kernel_and_autodiff(include, True, N=N, T=6, D=512).items():
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        assert np.linalg.norm(got - expected) <= 5e-3 * np.linalg.norm(expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize(("N", "T", "D"), [(2, 6, 256), (3, 1000, 1536), (8, 2050, 2048)])
def test_the_backward_kernel_matches_autodiff_on_a_gpu(N, T, D, include):
    pairs = backward_kernel_and_autodiff(include, False, N=N, T=T, D=D)
    for name, (got, expected) in pairs.items():
        # the weights alone come before any rounding
        assert_rows_close(got, expected, 1e-5 if name == "weights_NM" else 4e-3, name)


def test_the_backward_kernel_lowers_for_hopper():
    args = jax.eval_shape(lambda: make(N=4, Q=1, B=1, T=64, D=1536, dtype="bfloat16")[:3])
    bank, partials, queries = args
    row, logits = partials.update(shape=(64, 1536)), queries.update(shape=(4, 64))
    vector, bias = queries.update(shape=(1536,)), queries.update(shape=(1,))
    call = lambda *a: attn_res_pallas.mix_norm_backward(*a, EPS)  # noqa: E731
    with jax.sharding.use_abstract_mesh(h200_mesh()):
        traced = jax.jit(call).trace((row,) * 4, row, row, row, logits, vector, vector, bias)
        traced.lower(lowering_platforms=("cuda",))


def test_the_kernel_is_refused_with_the_reason_where_it_cannot_run():
    bank, partials, queries, _ = make(N=1, Q=1, dtype="float32")
    (read,) = read_bank(bank, [queries[0]], EPS)
    args = (bank, read, partials[0], queries[0], queries[0], EPS)
    for name, reason in (("pallas", "must be bfloat16"), ("triton", "unknown implementation")):
        with pytest.raises(ValueError, match=reason):
            mix_norm(*args, implementation=name)


@pytest.mark.parametrize("spec", [P("data"), P("data", "context")], ids=["batch", "batch and sequence"])
def test_the_backward_kernel_on_shards_of_the_tokens_changes_nothing(monkeypatch, spec):
    monkeypatch.setattr("k3jax.ops.mosaic.why_not_here", lambda: None)
    kernel = partial(attn_res_pallas.mix_norm_backward, interpret=True)
    monkeypatch.setattr("k3jax.ops.attn_res_pallas.mix_norm_backward", kernel)
    bank, partials, queries, weights = make(N=2, Q=1, T=8, D=256, dtype="bfloat16")

    def grads(bank, partial, query, weight):
        def loss(bank, partial, query, norm):
            (read,) = read_bank(bank, [query], EPS)
            x, _, partial = mix_norm(bank, read, partial, query, norm, EPS, implementation="pallas")
            return jnp.sum(wide(x) * weight) + jnp.sum(wide(partial) * weight[::-1])

        return jax.grad(loss, (0, 1, 2, 3))(bank, partial, query, 1 + query)

    args = (tuple(bank), partials[0], 0.1 * queries[0], weights[0])
    want = jax.jit(grads)(*args)
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)):
        place = lambda a: jax.device_put(a, spec)  # noqa: E731
        query = jax.device_put(args[2], P())
        got = jax.jit(grads)(tuple(map(place, args[0])), place(args[1]), query, place(args[3]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relmax(a, b) <= 1e-5
