"""`k3jax.ops.grouped_matmul`: products against a loop over experts, and the layout's bijection."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.ops.grouped_matmul import (
    GroupLayout,
    combine,
    default_implementation,
    dispatch,
    group_layout,
    grouped_matmul,
    padded_rows,
    xla,
)

IMPLEMENTATIONS = ["reference", "ragged", "blocked"]
E, D, F, ALIGN = 5, 6, 7, 4
SIZES = {
    "uneven": [8, 0, 4, 16, 0],
    "one group": [0, 0, 32, 0, 0],
    "first and last": [4, 0, 0, 0, 12],
    "full": [8, 4, 4, 8, 8],
    "none": [0, 0, 0, 0, 0],
}
UNALIGNED = {"uneven": [7, 0, 3, 15, 1], "ones": [1, 1, 1, 1, 1], "one group": [0, 29, 0, 0, 0]}
CASES = [(name, key, SIZES[key]) for name in IMPLEMENTATIONS for key in SIZES] + [
    (name, f"unaligned {key}", UNALIGNED[key]) for name in ("reference", "ragged") for key in UNALIGNED
]


def make(seed, rows=32, dtype="float64"):
    rng = np.random.default_rng(seed)
    shapes = (rows, D), (E, D, F), (rows, F)
    return tuple(rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes)


def loop_over_experts(x, w, sizes, dy):
    """y, dx, dw in NumPy float64."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros(w.shape)
    ends = np.cumsum(sizes)
    for e, (start, end) in enumerate(zip(ends - sizes, ends)):
        rows = slice(start, end)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return y, dx, dw


def run(implementation, x, w, sizes, dy, align=ALIGN, **options):
    sizes = np.asarray(sizes, np.int32)
    align = align if implementation == "blocked" else 1

    def all_outputs(x, w, sizes, dy):
        product = partial(grouped_matmul, align=align, implementation=implementation, **options)
        y, pullback = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
        return y, *pullback(dy.astype(y.dtype))

    return jax.tree.map(np.asarray, jax.jit(all_outputs)(x, w, sizes, dy))


def assert_per_expert(got, want, sizes, tolerance):
    """Largest error of each expert's own rows and gradient, so that one bad expert cannot hide among many."""
    ends = np.cumsum(sizes)
    for e, (start, end) in enumerate(zip(ends - sizes, ends)):
        pairs = (
            (got[0][start:end], want[0][start:end]),
            (got[1][start:end], want[1][start:end]),
            (got[2][e], want[2][e]),
        )
        for name, (a, b) in zip(("y", "dx", "dw"), pairs):
            error = np.abs(np.asarray(a, np.float64) - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30)
            assert error < tolerance, f"{name} of expert {e}: {error}"


@pytest.mark.parametrize(("implementation", "case", "sizes"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_each_expert_multiplies_its_own_rows(x64, implementation, case, sizes):
    x, w, dy = make(1)
    assert_per_expert(run(implementation, x, w, sizes, dy), loop_over_experts(x, w, sizes, dy), sizes, 1e-13)


@pytest.mark.parametrize(("implementation", "case", "sizes"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_poisoned_tail_and_empty_experts_give_exact_zeros(implementation, case, sizes):
    x, w, dy = make(2, dtype="float32")
    total = sum(sizes)
    x[total:], dy[total:] = np.nan, np.inf
    x[total::2] = np.inf
    y, dx, dw = run(implementation, x, w, sizes, dy)
    clean = run(implementation, *make(2, dtype="float32")[:2], sizes, make(2, dtype="float32")[2])
    assert np.all(y[total:] == 0)
    assert np.all(dx[total:] == 0)
    assert np.all(dw[np.asarray(sizes) == 0] == 0)
    for a, b in zip((y, dx, dw), clean):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("limit", [1, 3 * D * F, 4 * D * F, 8 * D * F])
def test_gathering_weights_in_batches_changes_nothing(x64, monkeypatch, limit):
    monkeypatch.setattr(xla, "_BATCH_ELEMENTS", limit)
    x, w, dy = make(3)
    x[28:], dy[28:] = np.nan, np.nan
    got, sizes = run("blocked", x, w, SIZES["uneven"], dy), SIZES["uneven"]
    assert_per_expert(got, loop_over_experts(x, w, sizes, dy), sizes, 1e-13)


@pytest.mark.parametrize("implementation", ["ragged", "blocked"])
def test_bfloat16_is_accumulated_in_float32(implementation):
    x, w, dy = make(4, dtype="bfloat16")
    sizes = SIZES["full"]
    want = loop_over_experts(x, w, sizes, dy)
    got = run(implementation, x, w, sizes, dy)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 3
    assert_per_expert(got, want, sizes, 2**-8)
    wide = run(implementation, x, w, sizes, dy, preferred_element_type=jnp.float32)
    assert wide[0].dtype == np.float32
    assert wide[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(wide[0], want[0], rtol=0, atol=1e-5)


def test_expert_gradients_do_not_drift_with_many_blocks():
    rng = np.random.default_rng(5)
    x, dy = (rng.standard_normal((2048, n)).astype(jnp.bfloat16) for n in (D, F))
    w, sizes = make(5, dtype="bfloat16")[1], [1024, 0, 4, 1000, 16]
    assert_per_expert(run("blocked", x, w, sizes, dy), loop_over_experts(x, w, sizes, dy), sizes, 2**-8)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_whole_path_runs_inside_shard_map_and_scan(x64, implementation, check_vma):
    rng = np.random.default_rng(6)
    N, K = 16, 3
    x, w, weights = rng.standard_normal((N, D)), rng.standard_normal((E, D, D)), rng.random((N, K))
    experts = rng.integers(0, E, (N, K)).astype(np.int32)
    align = ALIGN if implementation == "blocked" else 1

    def experts_of(x, w, weights, experts):
        layout = group_layout(experts, experts != 2, E, align)

        def layer(x, _):
            rows = dispatch(x, layout)
            y = grouped_matmul(rows, w, layout.group_sizes_E, align=align, implementation=implementation)
            return x + jnp.tanh(combine(y, layout, weights)), None

        return jax.lax.scan(layer, x, length=2)[0]

    def dense(x, w, weights, experts):
        p_NE = jnp.einsum("nk,nke->ne", weights * (experts != 2), jax.nn.one_hot(experts, E, dtype=x.dtype))
        for _ in range(2):
            x = x + jnp.tanh(jnp.einsum("ne,nd,edf->nf", p_NE, x, w))
        return x

    def sharded(x, w, weights, experts):
        specs = {"in_specs": (P("data"), P(), P("data"), P("data")), "out_specs": P("data")}
        return jax.shard_map(experts_of, **specs, check_vma=check_vma)(x, w, weights, experts)

    def value_and_grads(fn, *args):
        loss = lambda *args: jnp.sum(fn(*args, experts) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)

    want = value_and_grads(dense, x, w, weights)
    single = value_and_grads(experts_of, x, w, weights)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        experts = jax.device_put(experts, P("data"))
        got = value_and_grads(sharded, jax.device_put(x, P("data")), w, jax.device_put(weights, P("data")))
    for tree in (single, got):
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(want)):
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


layouts = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.tuples(*[st.integers(0, E - 1)] * 3), min_size=n, max_size=n),
        st.none() | st.lists(st.tuples(*[st.booleans()] * 3), min_size=n, max_size=n),
        st.sampled_from([1, 2, 4]),
    )
)
_layout = jax.jit(group_layout, static_argnums=(2, 3))


def padded_layout(experts, valid, align):
    """The layout of up to 12 tokens, the rest invalid: one compilation for each `align`."""
    spare = 12 - len(experts)
    valid = np.ones((len(experts), 3), bool) if valid is None else np.asarray(valid)
    experts = np.pad(np.asarray(experts, np.int32), ((0, spare), (0, 0)))
    valid = np.pad(valid, ((0, spare), (0, 0)))
    return experts, valid, jax.tree.map(np.asarray, _layout(experts, valid, E, align))


@settings(max_examples=150, deadline=None)
@given(layouts)
def test_layout_is_a_bijection_sorted_by_expert_then_token(case):
    align = case[2]
    experts, valid, layout = padded_layout(*case)
    M, slots = padded_rows(experts.size, E, align), experts.size
    assert layout.slot_of_row.shape == (M,)
    assert M % align == 0
    flat, ok, row = experts.reshape(-1), valid.reshape(-1), layout.row_of_NK.reshape(-1)
    assert np.all(row[~ok] == M)
    np.testing.assert_array_equal(layout.slot_of_row[row[ok]], np.flatnonzero(ok))
    assert np.sum(layout.slot_of_row < slots) == np.sum(ok)
    assert np.all(layout.slot_of_row[layout.slot_of_row >= slots] == slots)
    np.testing.assert_array_equal(layout.counts_E, np.bincount(flat[ok], minlength=E))
    np.testing.assert_array_equal(layout.group_sizes_E, -(-layout.counts_E // align) * align)
    assert layout.group_sizes_E.sum() <= M
    ends = np.cumsum(layout.group_sizes_E)
    for e in range(E):
        inside = layout.slot_of_row[ends[e] - layout.group_sizes_E[e] : ends[e]]
        np.testing.assert_array_equal(inside[: layout.counts_E[e]], np.flatnonzero(ok & (flat == e)))
        assert np.all(inside[layout.counts_E[e] :] == slots)


def test_the_row_bound_is_reached_by_the_worst_split():
    experts = np.minimum(np.arange(12), E - 1).astype(np.int32)[:, None]  # E − 1 groups of one, and the rest
    layout = group_layout(experts, None, E, ALIGN)
    assert np.sum(layout.group_sizes_E) == padded_rows(12, E, ALIGN)
    assert padded_rows(2, E, ALIGN) == 2 * ALIGN  # no more groups than slots


def test_a_mask_of_ones_equals_no_mask():
    experts = np.random.default_rng(7).integers(0, E, (9, 2)).astype(np.int32)
    masked, plain = group_layout(experts, np.ones((9, 2), bool), E, ALIGN), group_layout(experts, None, E, ALIGN)
    for a, b in zip(masked, plain):
        np.testing.assert_array_equal(a, b)


def plain_dispatch(x, layout: GroupLayout):
    K = layout.row_of_NK.shape[1]
    return jnp.where((layout.slot_of_row < layout.row_of_NK.size)[:, None], x[layout.slot_of_row // K], 0)


def plain_combine(y, layout: GroupLayout, weights):
    inside = layout.row_of_NK < y.shape[0]
    return jnp.sum(jnp.where(inside[..., None], weights[..., None] * y[layout.row_of_NK], 0), axis=1)


@pytest.mark.parametrize("align", [1, 4])
def test_dispatch_and_combine_match_autodiff_of_plain_indexing(x64, align):
    rng = np.random.default_rng(8)
    experts, valid = rng.integers(0, E, (10, 3)).astype(np.int32), rng.random((10, 3)) < 0.8
    layout = jax.tree.map(np.asarray, group_layout(experts, valid, E, align))
    M = layout.slot_of_row.shape[0]
    x, y, weights, out = (rng.standard_normal(shape) for shape in [(10, D), (M, D), (10, 3), (M, D)])
    for ours, plain, args in [
        (lambda x: dispatch(x, layout), lambda x: plain_dispatch(x, layout), (jnp.asarray(x),)),
        (lambda y, w: combine(y, layout, w), lambda y, w: plain_combine(y, layout, w), (jnp.asarray(y), weights)),
    ]:

        def outputs(fn, *args):
            value, pullback = jax.vjp(fn, *args)
            return value, *pullback(out[: value.shape[0]])

        for a, b in zip(jax.jit(partial(outputs, ours))(*args), jax.jit(partial(outputs, plain))(*args)):
            np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)


def test_combine_reads_no_padding_row_and_sums_in_float32():
    experts = np.array([[0, 1], [1, 3], [3, 0]], np.int32)
    valid = np.array([[True, True], [True, False], [False, False]])
    layout = jax.tree.map(np.asarray, group_layout(experts, valid, E, ALIGN))
    y = np.full((layout.slot_of_row.shape[0], D), np.nan, jnp.bfloat16)
    y[layout.slot_of_row < 6] = 1 + 2**-7
    weights = np.array([[0.5, 2**-12], [1, 5], [7, 7]], np.float32)
    out, pullback = jax.vjp(lambda y, w: combine(y, layout, w), y, weights)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[:, 0], (1 + 2**-7) * np.array([0.5 + 2**-12, 1, 0], np.float32))
    dy, dweights = pullback(jnp.ones_like(out))
    assert np.all(np.asarray(dy)[layout.slot_of_row == 6] == 0)
    np.testing.assert_array_equal(np.asarray(dweights)[~valid], 0)


def test_no_gradient_is_an_unordered_scatter():
    experts = np.random.default_rng(9).integers(0, E, (16, 2)).astype(np.int32)
    x, w, _ = make(9, dtype="float32")

    def loss(x, w, weights):
        layout = group_layout(experts, None, E, ALIGN)
        y = grouped_matmul(dispatch(x, layout), w, layout.group_sizes_E, align=ALIGN, implementation="blocked")
        return jnp.sum(combine(y, layout, weights))

    args = x[:16], w, np.ones((16, 2), np.float32)
    assert "scatter-add" not in str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*args))


def test_bad_input_is_refused_with_the_reason():
    x, w, _ = make(10, dtype="float32")
    sizes = np.asarray(SIZES["uneven"], np.int32)
    for message, args, options in [
        ("must be", (x[:, 1:], w, sizes), {}),
        ("must be", (x, w, sizes[1:]), {}),
        ("one dtype", (x, w.astype(jnp.bfloat16), sizes), {}),
        ("got 1 for 32", (x, w, sizes), {"implementation": "blocked"}),
        ("got 5 for 32", (x, w, sizes), {"implementation": "blocked", "align": 5}),
        ("must be one of", (x, w, sizes), {"implementation": "dense"}),
        ("bfloat16 or float16, not float32", (x, w, sizes), {"implementation": "pallas"}),
    ]:
        with pytest.raises(ValueError, match=message):
            grouped_matmul(*args, **options)
    assert default_implementation(32, 4, x.dtype, D, F) == "blocked"
    assert default_implementation(32, 1, x.dtype, D, F) == "ragged"
