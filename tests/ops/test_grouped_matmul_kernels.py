"""The Mosaic kernels of `k3jax.ops.grouped_matmul`: interpreted against a loop over experts, lowered for an H200."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.grouped_matmul import Tiling, grouped_matmul, mosaic, ragged, why_not_pallas
from k3jax.ops.grouped_matmul.glu import Glu
from k3jax.ops.mosaic import h200_mesh
from k3jax.ops.situ import situ_glu

D, F = 128, 128
INTERPRET = Tiling(columns=128, stages=2, blocks=2, interpret=True)
SPLITS = {  # sizes, rows
    "unaligned": ([70, 5, 130, 1, 64], 296),
    "empty first, middle and last": ([0, 67, 0, 0, 133, 0], 208),
    "multiples of 8": ([8, 64, 128, 0, 72], 272),
    "one group": ([0, 200, 0], 200),
    "short groups": ([1, 2, 3, 0, 4, 5, 6, 7, 9], 64),
    "no rows": ([0, 0], 72),
    "long tail": ([3, 0, 90], 304),
    "rows of no multiple": ([50, 13], 67),
    "few rows": ([4, 0, 3], 9),
}


def make(seed, sizes, rows, dtype=jnp.bfloat16):
    """x, w, dy; NaN past the last group in x and dy."""
    rng = np.random.default_rng(seed)
    x, dy = rng.standard_normal((rows, D)), rng.standard_normal((rows, F))
    x[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.nan
    return jnp.asarray(x, dtype), jnp.asarray(rng.standard_normal((len(sizes), D, F)), dtype), jnp.asarray(dy, dtype)


def dense(x, w, sizes, dy):
    """y, dx, dw in float64, one expert at a time."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((len(x), w.shape[2])), np.zeros(x.shape), np.zeros(w.shape)
    ends = np.cumsum(sizes)
    for e, (start, end) in enumerate(zip(ends - sizes, ends)):
        rows = slice(start, end)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
    return y, dx, dw


@partial(jax.jit, static_argnames=("tiling", "dtype"))
def products(x, w, sizes, dy, tiling, dtype=None):
    product = partial(grouped_matmul, implementation="pallas", tiling=tiling, preferred_element_type=dtype)
    y, pullback = jax.vjp(lambda x, w: product(x, w, sizes), x, w)
    return y, *pullback(dy.astype(y.dtype))


def assert_groups_match(got, want, sizes, tolerance):
    """Relative to the largest entry of each expert's own part, so that one bad expert cannot hide among many."""
    ends = np.cumsum(sizes)
    for e, (start, end) in enumerate(zip(ends - sizes, ends)):
        parts = [(a[start:end], b[start:end]) for a, b in zip(got[:2], want)] + [(got[2][e], want[2][e])]
        for name, (a, b) in zip(("y", "dx", "dw"), parts):
            error = np.abs(np.asarray(a, np.float64) - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30)
            assert error < tolerance, f"{name} of expert {e}: {error}"


@pytest.mark.parametrize("split", SPLITS)
def test_kernels_match_a_loop_over_experts_and_ignore_poisoned_tails(split):
    sizes, rows = SPLITS[split]
    x, w, dy = make(1, sizes, rows)
    got = products(x, w, np.asarray(sizes, np.int32), dy, INTERPRET)
    assert_groups_match(got, dense(x, w, sizes, dy), sizes, 2**-8)
    y, dx, dw = map(np.asarray, got)
    assert np.all(y[sum(sizes) :] == 0)
    assert np.all(dx[sum(sizes) :] == 0)
    assert np.all(dw[np.asarray(sizes) == 0] == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", [Tiling(), Tiling(128, 6), Tiling(largest_first=True)], ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_compiled_kernels_match_a_loop_over_experts(split, tiling):
    sizes, rows = SPLITS[split]
    x, w, dy = make(1, sizes, rows)
    y, dx, dw = got = products(x, w, np.asarray(sizes, np.int32), dy, tiling)
    assert_groups_match(got, dense(x, w, sizes, dy), sizes, 2**-8)
    for rest in (y[sum(sizes) :], dx[sum(sizes) :], dw[np.asarray(sizes) == 0]):
        assert not np.asarray(rest).any()


@pytest.mark.parametrize("seed", range(3))
def test_random_splits(seed):
    rng = np.random.default_rng(seed)
    rows, E = 256, 6
    cuts = np.sort(rng.integers(0, rows + 1, E))
    sizes = np.diff(cuts, prepend=0).astype(np.int32)
    x, w, dy = make(seed, sizes, rows)
    assert_groups_match(products(x, w, sizes, dy, INTERPRET), dense(x, w, sizes, dy), sizes, 2**-8)


def test_one_experts_nan_stays_its_own():
    sizes = np.asarray([21, 50, 9], np.int32)
    x, w, dy = make(2, sizes, 80)
    clean = products(x, w, sizes, dy, INTERPRET)
    bad = products(x.at[21:71].set(jnp.nan), w, sizes, dy.at[21:71].set(jnp.inf), INTERPRET)
    for a, b in zip(bad[:2], clean):
        np.testing.assert_array_equal(np.delete(a, range(21, 71), 0), np.delete(b, range(21, 71), 0))
    np.testing.assert_array_equal(np.delete(bad[2], 1, 0), np.delete(clean[2], 1, 0))


def test_wide_matrices_get_an_unrounded_gradient():
    sizes = np.asarray([40, 0, 33], np.int32)
    x, w, dy = make(3, sizes, 80)
    wide = jnp.asarray(w, jnp.float32)
    y, dx, dw = products(x, wide, sizes, dy, INTERPRET, jnp.float32)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    want = dense(x, w, sizes, dy)
    np.testing.assert_allclose(y, want[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(dw, want[2], rtol=0, atol=1e-4)


def test_the_grid_the_ring_and_the_order_of_groups_change_no_bit():
    sizes = np.asarray([70, 5, 58], np.int32)
    x, w, dy = make(4, sizes, 136)
    one = products(x, w, sizes, dy, INTERPRET)
    for tiling in (Tiling(128, 3, 1, True), Tiling(64, 4, 5, True), replace(INTERPRET, largest_first=True)):
        for a, b in zip(products(x, w, sizes, dy, tiling), one):
            np.testing.assert_array_equal(a, b)


def test_parts_of_an_operand_equal_their_concatenation():
    sizes, rows = np.asarray([13, 0, 60], np.int32), 80
    x, w, dy = make(5, sizes, rows)
    other, w13 = make(6, sizes, rows)[2], jnp.concatenate([w, w[::-1]], axis=2)
    tiles = ragged.row_tiles(sizes, rows)
    both = jnp.concatenate([dy, other], axis=1)
    dx = partial(mosaic.rows_times_matrices, w=w13, tiles=tiles, transpose=True, tiling=INTERPRET)
    np.testing.assert_array_equal(jax.jit(dx)((dy, other)), jax.jit(dx)(both))
    dw = partial(mosaic.outer_products, x, sizes_E=sizes, tiling=INTERPRET)
    np.testing.assert_array_equal(jax.jit(dw)((dy, other)), jax.jit(dw)(both))


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_the_fused_activation_is_situ_of_both_products(linear_beta):
    sizes, rows = np.asarray([13, 0, 67], np.int32), 88
    x, w, _ = make(7, sizes, rows)
    w13 = jnp.concatenate([w, w[::-1]], axis=2) / 8
    scale = jnp.asarray(np.random.default_rng(8).random(rows), jnp.float32)
    glu = Glu(scale, 4.0, linear_beta)
    got = jax.jit(partial(mosaic.rows_times_matrices, glu=glu, tiling=INTERPRET))(x, w13, ragged.row_tiles(sizes, rows))
    both = jnp.asarray(dense(x, w13, sizes, np.zeros((rows, 2 * F)))[0], jnp.float32)
    want = situ_glu(both[:, :F], both[:, F:], 4.0, linear_beta, scale)
    np.testing.assert_allclose(np.asarray(got, np.float32)[:80], want[:80], rtol=2**-7, atol=2**-7)
    assert np.all(np.asarray(got)[80:] == 0)


def test_every_row_is_stored_once_or_to_the_same_place_by_its_own_group():
    rng = np.random.default_rng(9)
    E, rows = 7, 488
    cut = jax.jit(partial(ragged.row_tiles, rows=rows))
    for high in np.geomspace(1, rows + 1, 100).astype(int):
        sizes = np.diff(np.sort(rng.integers(0, high, E)), prepend=0).astype(np.int32)
        table, count = map(np.asarray, cut(sizes))
        assert count[0] <= len(table)
        owner = np.repeat(np.arange(E + 1), np.append(sizes, rows - sizes.sum()))
        covered = np.zeros(rows, bool)
        for group, row_a, row_b, low_a, high_a, low_b, high_b, _ in table[: count[0]]:
            for row, low, high in ((row_a, low_a, high_a), (row_b, low_b, high_b)):
                assert row % 8 == 0
                assert 0 <= row <= rows - 64
                assert np.all(owner[row + low : row + high] == group)
                covered[row + low : row + high] = True
        assert covered.all()


@pytest.mark.parametrize(
    ("rows", "E", "D", "F"), [(131_520, 64, 768, 768), (16_384, 32, 3584, 3072)], ids=["proxy", "k3"]
)
def test_every_product_lowers_for_an_h200(rows, E, D, F):
    shape = jax.ShapeDtypeStruct
    x, dy, hidden = shape((rows, D), jnp.bfloat16), shape((rows, F), jnp.bfloat16), shape((rows, 2 * F), jnp.bfloat16)
    w, w13, sizes = shape((E, D, F), jnp.bfloat16), shape((E, D, 2 * F), jnp.bfloat16), shape((E,), jnp.int32)

    def products(x, dy, both, w, w13, sizes, scale):
        tiles = ragged.row_tiles(sizes, rows)
        multiply = partial(mosaic.rows_times_matrices, tiles=tiles)
        return (
            multiply(x, w),
            multiply(dy, w, transpose=True),
            multiply((dy, dy), w13, transpose=True),
            multiply(x, w13, glu=Glu(scale, 4.0, 25.0)),
            mosaic.outer_products(x, dy, sizes),
            mosaic.outer_products(x, (dy, dy), sizes, out_dtype=jnp.float32),
            mosaic.outer_products(x, dy, sizes, tiling=Tiling(largest_first=True)),
        )

    with jax.sharding.use_abstract_mesh(h200_mesh()):
        traced = jax.jit(products).trace(x, dy, hidden, w, w13, sizes, shape((rows,), jnp.float32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 7


def test_the_reason_against_the_kernel_is_named():
    assert "not float32" in why_not_pallas(jnp.float32, 128, 128)
    assert "not 100 and 128" in why_not_pallas(jnp.bfloat16, 100, 128)
    assert "compute capability 9.0" in why_not_pallas(jnp.bfloat16, 128, 128)
    assert why_not_pallas(jnp.bfloat16, 128, 128, interpret=True) is None
    x, w, _ = make(10, [8], 8)
    with pytest.raises(ValueError, match=r"'pallas' cannot run: .* GPU"):
        grouped_matmul(x, w, np.asarray([8], np.int32), implementation="pallas")
