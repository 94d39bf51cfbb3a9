"""`router_logits`: a float32 product from bfloat16 pieces."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.router import _thirds, router_logits


def test_logits_of_bfloat16_tokens_are_those_of_a_float32_product():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((96, 300)), jnp.bfloat16)
    w, d = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((300, 20), (96, 20)))
    logits, pullback = jax.jit(lambda x, w: jax.vjp(router_logits, x, w))(x, w)
    dx, dw = jax.jit(pullback)(d)
    assert (logits.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    x, w, d = (np.asarray(a, np.float64) for a in (x, w, d))
    for got, want, tolerance in ((logits, x @ w, 3e-7), (dw, x.T @ d, 3e-7), (dx, d @ w.T, 2**-8)):
        assert np.linalg.norm(np.asarray(got, np.float64) - want) < tolerance * np.linalg.norm(want)


def test_three_parts_hold_every_bit_even_when_compiled():
    x = jnp.asarray(np.random.default_rng(1).standard_normal(1000) * 10.0 ** np.arange(-10, 10).repeat(50), jnp.float32)
    parts = jax.jit(_thirds)(x)
    np.testing.assert_array_equal(sum(np.asarray(p, np.float64) for p in parts), np.asarray(x, np.float64))


def test_wider_tokens_are_multiplied_in_their_own_precision(x64):
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((7, 30)), rng.standard_normal((30, 5))
    np.testing.assert_allclose(router_logits(jnp.asarray(x), jnp.asarray(w)), x @ w, rtol=1e-13)
