"""The choice of experts: counting and sorting pick the same, ties included."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops import router


def run(logits, bias, positions, weight, **options):
    """Every field of `route`, and the gradient of its weights."""
    pick = partial(router.route, bias_E=bias, positions_N=positions, **options)
    return *pick(logits), jax.grad(lambda x: jnp.sum(pick(x).weights_NK * weight))(logits)


@pytest.mark.parametrize("options", [{}, {"num_groups": 4, "topk_groups": 1}, {"activation": "softmax"}])
@pytest.mark.parametrize("k", [1, 3])
def test_counting_picks_what_sorting_picks(monkeypatch, options, k):
    rng = np.random.default_rng(k)
    logits = rng.integers(-2, 3, (50, 12)) / 2  # many ties
    bias, weight = rng.integers(-1, 2, 12) / 8, rng.standard_normal((50, k))
    logits, bias, weight = (jnp.asarray(a, jnp.float32) for a in (logits, bias, weight))
    args = logits.at[0].set(0), bias, jnp.arange(50, dtype=jnp.int32) % 17, weight
    counted = run(*args, experts_per_token=k, **options)
    monkeypatch.setattr(router, "_COUNTED", 0)
    for a, b in zip(counted, run(*args, experts_per_token=k, **options)):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        if a.dtype == jnp.int32:
            np.testing.assert_array_equal(a, b)
