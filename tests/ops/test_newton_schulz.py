"""Newton-Schulz: the iteration, and the kernel of symmetric products, interpreted (on a GPU with -m gpu)."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.ops.mosaic import h200_mesh
from k3jax.ops.newton_schulz import COEFFICIENTS, newton_schulz, normalized, resolve_implementation
from k3jax.ops.symmetric_product_gpu import symmetric_product


def written_out(x: np.ndarray) -> np.ndarray:
    """The quintic iteration on one matrix (float64)."""
    a, b, c = COEFFICIENTS
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def expected_of(x: jax.Array) -> np.ndarray:
    blocks = np.asarray(x, np.float64).reshape(-1, *x.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    return np.stack([written_out(b.T).T if tall else written_out(b) for b in blocks]).reshape(x.shape)


def blocks(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@pytest.mark.parametrize("shape", [(3, 48, 48), (3, 96, 32), (2, 2, 32, 96)])
def test_newton_schulz_without_factors_is_the_quintic_iteration(x64, shape):
    x = jax.random.normal(jax.random.key(3), shape, jnp.float64)
    y, factor = newton_schulz(normalized(x), 5)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(factor * y, expected_of(x), rtol=1e-6, atol=1e-7)


def test_a_step_in_bfloat16_is_three_products_with_constants_of_their_own():
    """What XLA needs to fold every factor and every sum into the products."""
    jaxpr = jax.make_jaxpr(lambda x: newton_schulz(x, 5)[0])(jnp.ones((4, 16, 16), jnp.bfloat16))
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert [e.outvars[0].aval.dtype for e in products] == [jnp.bfloat16] * 15
    after = [e for e in jaxpr.eqns[jaxpr.eqns.index(products[0]) :] if e.primitive.name != "dot_general"]
    assert sorted({e.primitive.name for e in after} - {"convert_element_type", "broadcast_in_dim"}) == ["add", "mul"]
    a, b, c = COEFFICIENTS
    factors = {float(jnp.bfloat16(f * a ** (2 * k))) for k in range(5) for f in (b / a, c / b)}
    assert len(factors) == 10


def check_product(n: int, rows: int, columns: int, **where) -> None:
    x = blocks((n, rows, columns))
    gram = symmetric_product(x, **where)
    exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64).swapaxes(1, 2)
    np.testing.assert_allclose(np.asarray(gram, np.float64), exact, rtol=2**-8, atol=1e-4 * columns**0.5)
    np.testing.assert_array_equal(gram, gram.swapaxes(1, 2))
    got = symmetric_product(gram, jnp.asarray([0.5, -70.0], jnp.float32), **where)
    g = np.asarray(gram, np.float64)
    square, linear = 0.5 * g @ g, -70.0 * g
    np.testing.assert_allclose(
        np.asarray(got, np.float64), square + linear, rtol=2**-8, atol=1e-5 * np.abs(square).max()
    )
    np.testing.assert_array_equal(got, got.swapaxes(1, 2))


def check_iteration(shape: tuple[int, int, int], **where) -> None:
    """No farther from the exact iteration than three full products in bfloat16 are."""
    x = normalized(blocks(shape, 1))
    expected = expected_of(x)

    def error(implementation: str, **where) -> float:
        y, factor = newton_schulz(x, 5, implementation, **where)
        return np.linalg.norm(factor * np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)

    assert error("pallas", **where) < 1.2 * error("xla")


@pytest.mark.parametrize(("n", "rows", "columns", "grid"), [(2, 256, 384, 3), (1, 384, 384, 1), (3, 256, 256, 16)])
def test_half_of_a_symmetric_product_gives_all_of_it(n, rows, columns, grid):
    check_product(n, rows, columns, interpret=True, blocks=grid)


@pytest.mark.parametrize("shape", [(2, 256, 256), (1, 384, 256)])
def test_newton_schulz_with_half_products_is_as_exact(shape):
    check_iteration(shape, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "rows", "columns"), [(2, 256, 384), (64, 768, 768), (3, 1536, 1536), (1, 1536, 6144), (7, 384, 384)]
)
def test_symmetric_products_on_the_gpu(n, rows, columns):
    check_product(n, rows, columns)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 768, 768), (2, 1536, 768), (1, 6144, 1536)])
def test_newton_schulz_on_the_gpu(shape):
    check_iteration(shape)


@pytest.mark.parametrize("shape", [(2, 768, 768), (1, 256, 1536)])
def test_symmetric_products_lower_for_an_h200(shape):
    with jax.sharding.use_abstract_mesh(h200_mesh()):
        for arguments in ([blocks(shape)], [blocks((2, 256, 256)), jnp.ones(2, jnp.float32)]):
            text = jax.jit(symmetric_product).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
            assert re.search("mosaic_gpu", text)


def test_what_the_kernel_does_not_take_is_left_to_xla_and_a_name_that_cannot_run_is_refused():
    assert resolve_implementation(None, (256, 256), "bfloat16") == "xla"  # no GPU here
    with pytest.raises(ValueError, match="newton_schulz: implementation='pallas' cannot run: they need an NVIDIA GPU"):
        resolve_implementation("pallas", (256, 256), "bfloat16")
    with pytest.raises(ValueError, match="unknown implementation 'mosaic'"):
        resolve_implementation("mosaic", (256, 256), "bfloat16")  # type: ignore[arg-type]
