"""Newton-Schulz on blocks of a model: half of each symmetric product (kernel) against three full products (XLA).

    python -m benchmarks.newton_schulz --shapes 384x768x768 62x1536x1536

Prints medians with spread of five steps in bfloat16, their ratio, of single products the rate, and errors against
float64 relative to the norm. Writes results/newton_schulz.json.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.common import device_line, measure, write_results
from k3jax.ops.newton_schulz import COEFFICIENTS, newton_schulz, normalized
from k3jax.ops.symmetric_product_gpu import symmetric_product

STEPS = 5


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to time."""

    shapes: tuple[str, ...] = ("384x768x768", "62x1536x1536", "12x768x1536")
    """Blocks × rows × columns."""


def error(x: jax.Array, y: jax.Array) -> float:
    """Of the first block, against the iteration in float64."""
    a, b, c = COEFFICIENTS
    exact = np.asarray(x[0], np.float64)
    for _ in range(STEPS):
        gram = exact @ exact.T
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    return float(np.linalg.norm(np.asarray(y[0], np.float64) * a**STEPS - exact) / np.linalg.norm(exact))


def timed(fn: Any, x: jax.Array) -> dict[str, float]:
    return dict(zip(("median_ms", "min_ms", "max_ms"), measure(fn, x)))


def rows_of(shape: str) -> list[dict[str, Any]]:
    n, rows, columns = map(int, shape.split("x"))
    x = normalized(jax.random.normal(jax.random.key(0), (n, rows, columns), jnp.bfloat16))
    found = []
    for who in ("xla", "pallas"):
        iterate = jax.jit(lambda x, who=who: newton_schulz(x, STEPS, who)[0])
        times = timed(iterate, x)
        found.append({"shape": shape, "what": f"{STEPS} steps", "who": who, "error": error(x, iterate(x))} | times)
    useful = 2 * n * rows * rows * columns
    full = jax.jit(lambda x: jnp.einsum("nik,njk->nij", x, x))
    for who, product in (("xla", full), ("pallas", jax.jit(symmetric_product))):
        times = timed(product, x)
        found.append({"shape": shape, "what": "A Aᵀ", "who": who, "tflops": useful / times["median_ms"] / 1e9} | times)
    return found


def run(arguments: Arguments) -> None:
    print(device_line())
    found = [row for shape in arguments.shapes for row in rows_of(shape)]
    for row in found:
        rest = f"error {row['error']:.2e}" if "error" in row else f"{row['tflops']:.0f} TFLOP/s of a full product"
        spread = f"({row['min_ms']:.3f}-{row['max_ms']:.3f})"
        print(f"{row['shape']:14} {row['what']:8} {row['who']:8} {row['median_ms']:8.3f} ms {spread:20} {rest}")
    print(f"written to {write_results('newton_schulz', found)}")


if __name__ == "__main__":
    run(tyro.cli(Arguments))
