"""Newton-Schulz: the orthogonal matrix next to a given one, nearly, by products alone. The heart of Muon.

    X ← a X + b G X + c G² X,  G = X Xᵀ        (Moonlight §2.1, arXiv 2502.16982)

"xla" takes three full products a step. "pallas" (Hopper) computes half of the two that are symmetric, G and b G + c G²,
with `symmetric_product_gpu`.
"""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops import symmetric_product_gpu
from k3jax.ops.mosaic import why_not_here, xla_or_pallas

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of the quintic iteration (Moonlight §2.1)."""

Implementation = Literal["xla", "pallas"]


def resolve_implementation(implementation: Implementation | None, shape: tuple[int, int], dtype: Any) -> Implementation:
    """What runs for blocks of this shape (rows, columns).

    Raises:
        ValueError: the name is unknown, or the kernel was asked for and cannot run here; the message says why. Blocks
            that the kernel does not take (see `symmetric_product_gpu.why_not`) use "xla" in any case.
    """
    chosen = xla_or_pallas("newton_schulz", implementation, why_not_here)
    return "xla" if symmetric_product_gpu.why_not(min(shape), max(shape), dtype) else chosen


def normalized(x: jax.Array) -> jax.Array:
    """Blocks [..., rows, columns] over their Frobenius norms."""
    # written once: XLA would otherwise form it twice from the gradient and a copy of the momentum, four times the bytes
    x = jax.lax.optimization_barrier(x)
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    norm = jnp.sqrt(jnp.sum(jnp.square(x32), axis=(-2, -1), keepdims=True))
    return (x32 / (norm + 1e-8)).astype(x.dtype)


def newton_schulz(
    y: jax.Array, steps: int, implementation: Implementation | None = None, *, interpret: bool = False
) -> tuple[jax.Array, float]:
    """The quintic iteration on blocks that are `normalized`.

    It runs on Y = X / aᵏ after k steps, so that what is added never has a factor:

        G = Y Yᵀ        Y ← (β G + γ G²) Y + Y        β = b/a · a²ᵏ        γ = c/a · a⁴ᵏ

    A block with more rows than columns has G = Yᵀ Y on its right.

    Args:
        y: [..., rows, columns], multiplied in their dtype; for "pallas" bfloat16 [n, rows, columns]. XLA folds
            additions into products with one leading axis only.
        steps: of the iteration.
        implementation: see `resolve_implementation`.
        interpret: run the kernel on the interpreter (any device).

    Returns:
        Y in the same dtype, and the factor of it that makes the result: a to the power of `steps`.

    Raises:
        ValueError: as `resolve_implementation`.
    """
    if not interpret:
        implementation = resolve_implementation(implementation, (y.shape[-2], y.shape[-1]), y.dtype)
    result = _half(y, steps, interpret) if implementation == "pallas" else _full(y, steps)
    return result, COEFFICIENTS[0] ** steps


def _half(y: jax.Array, steps: int, interpret: bool) -> jax.Array:
    """With half of each symmetric product."""
    a, b, c = COEFFICIENTS
    if y.shape[1] > y.shape[2]:
        return _half(y.swapaxes(1, 2), steps, interpret).swapaxes(1, 2)
    for k in range(steps):
        gram = symmetric_product_gpu.symmetric_product(y, interpret=interpret)
        factors = jnp.asarray([c / a * a ** (4 * k), b / a * a ** (2 * k)], jnp.float32)
        polynomial = symmetric_product_gpu.symmetric_product(gram, factors, interpret=interpret)
        y = jnp.einsum("nij,njk->nik", polynomial, y) + y
    return y


def _full(y: jax.Array, steps: int) -> jax.Array:
    """With three full products: V = γ G Y + Y, then Y ← β G V + Y.

    A GPU's matrix product multiplies by a constant and adds an array on its way out: a step is three products and no
    other pass over memory. XLA folds a constant into one product of a program only, for arrays of one shape; so none is
    used twice, and all blocks of one shape go through one call.
    """
    a, b, c = COEFFICIENTS
    batch, tall = tuple(range(y.ndim - 2)), y.shape[-2] > y.shape[-1]
    # TF32 would make the float32 setting a lie on NVIDIA GPUs
    precision = None if y.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST

    def product(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
        contracted = ((y.ndim - 2 + axes[0],), (y.ndim - 2 + axes[1],))
        return jax.lax.dot_general(left, right, (contracted, (batch, batch)), precision=precision)

    def step(y: jax.Array, beta: jax.Array, gamma: jax.Array) -> jax.Array:
        gram = product(y, y, (0, 0) if tall else (1, 1))
        times = (lambda v: product(v, gram, (1, 0))) if tall else (lambda v: product(gram, v, (1, 0)))
        return times(times(y) * gamma + y) * beta + y

    betas, gammas = (np.asarray([f * a ** (2 * k) for k in range(steps)], y.dtype) for f in (b / a, c / b))
    if y.dtype != jnp.bfloat16:  # nothing is folded, and a loop takes half the time to compile
        return jax.lax.scan(lambda y, f: (step(y, *f), None), y, (jnp.asarray(betas), jnp.asarray(gammas)))[0]
    for k in range(steps):
        y = step(y, jnp.asarray(betas[k]), jnp.asarray(gammas[k]))
    return y
