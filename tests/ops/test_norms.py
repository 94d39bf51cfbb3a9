"""The gated norm's own backward pass."""

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.norms import gated_rms_norm


def test_gated_norm_and_every_gradient_match_the_definition(x64):
    rng = np.random.default_rng(0)
    x, gate, cotangent = (rng.normal(size=(2, 3, 4, 8)) for _ in range(3))
    weight = rng.normal(size=8)

    def defined(x, weight, gate):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * weight / (1 + jnp.exp(-gate))

    np.testing.assert_allclose(gated_rms_norm(x, weight, gate, 1e-5), defined(x, weight, gate), rtol=1e-12)
    ours = jax.grad(lambda *a: jnp.sum(gated_rms_norm(*a, 1e-5) * cotangent), argnums=(0, 1, 2))(x, weight, gate)
    theirs = jax.grad(lambda *a: jnp.sum(defined(*a) * cotangent), argnums=(0, 1, 2))(x, weight, gate)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
