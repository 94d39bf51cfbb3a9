"""The kernels that gather and sum rows, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.grouped_matmul.gather import gather_rows, sum_rows
from k3jax.ops.mosaic import h200_mesh


@pytest.mark.parametrize("D", [128, 384, 512])
def test_rows_are_copied_bit_for_bit_and_an_index_past_the_end_gives_zeros(D):
    rng = np.random.default_rng(0)
    x, index = jnp.asarray(rng.standard_normal((11, D)), jnp.bfloat16), jnp.asarray(rng.integers(0, 15, 24), jnp.int32)
    want = x.at[index].get(mode="fill", fill_value=0)
    np.testing.assert_array_equal(gather_rows(x, index, interpret=True), want)


@pytest.mark.parametrize(("N", "K"), [(5, 3), (6, 1)])
@pytest.mark.parametrize("D", [128, 384, 512])
def test_rows_are_summed_in_float32_in_order_and_an_index_past_the_end_adds_nothing(N, K, D):
    rng = np.random.default_rng(1)
    x, index = (
        jnp.asarray(rng.standard_normal((11, D)), jnp.bfloat16),
        jnp.asarray(rng.integers(0, 15, (N, K)), jnp.int32),
    )
    want = np.zeros((N, D), np.float32)
    for k in range(K):
        want += np.asarray(x.at[index[:, k]].get(mode="fill", fill_value=0), np.float32)
    np.testing.assert_array_equal(sum_rows(x, index, interpret=True), jnp.asarray(want).astype(x.dtype))


@pytest.mark.parametrize(("N", "K", "M", "D"), [(16_384, 8, 131_520, 768), (4096, 16, 72_600, 3584)])
def test_both_lower_for_an_h200(N, K, M, D):
    shape = jax.ShapeDtypeStruct
    args = shape((N, D), jnp.bfloat16), shape((M,), jnp.int32), shape((M, D), jnp.bfloat16), shape((N, K), jnp.int32)
    with jax.sharding.use_abstract_mesh(h200_mesh()):
        traced = jax.jit(lambda z, i, y, j: (gather_rows(z, i), sum_rows(y, j))).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
