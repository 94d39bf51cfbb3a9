"""Attention of the MLA layers: q, k 192 wide, v 128, bfloat16, on cuDNN and in plain JAX.

    python benchmarks/attention.py [--only errors bias documents time tiles peak] [--quick]

Prints relative errors and signed biases against float64, then milliseconds (median, smallest, largest) of forward, of
forward and backward, and of the pass for the largest logit, with and without packed documents. TFLOP/s count visible
pairs; backward is 2.5 times forward. Writes results/attention.json.
"""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import device_line, measure, write_results
from k3jax.ops.attention import attention, blockwise, cudnn, resolve_implementation
from k3jax.ops.attention import peak as kernel

K, V = 192, 128
SCALE = K**-0.5
Row = dict[str, Any]


def inputs(seed: int, B: int, T: int, H: int, dtype: str = "bfloat16") -> list[jax.Array]:
    """q, k, v and a cotangent of o, normal."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return [jax.random.normal(key, (B, T, H, n), dtype) for key, n in zip(keys, (K, K, V, V))]


def packed(seed: int, B: int, T: int, mean: float) -> np.ndarray:
    """[B, T] documents of exponentially distributed length, cut at the ends of the rows."""
    starts = np.random.default_rng(seed).random((B, T)) < 1 / mean
    return 1 + np.cumsum(starts, axis=1, dtype=np.int32)


def pairs(ids: np.ndarray | None, B: int, T: int) -> float:
    """Visible (query, key) pairs of one head."""
    if ids is None:
        return B * T * (T + 1) / 2
    lengths = np.concatenate([np.unique(row[row > 0], return_counts=True)[1] for row in ids])
    return float(np.sum(lengths * (lengths + 1.0) / 2))


def forward(implementation: str, **options: Any) -> Callable[..., jax.Array]:
    run = functools.partial(attention, scale=SCALE, implementation=implementation, return_max_logit=False, **options)
    return jax.jit(lambda q, k, v, ids: run(q, k, v, segment_ids=ids)[0])


def with_gradients(implementation: str, **options: Any) -> Callable[..., tuple[jax.Array, ...]]:
    run = forward(implementation, **options)

    def both(q, k, v, d_o, ids):
        o, pullback = jax.vjp(lambda *x: run(*x, ids), q, k, v)
        return o, *pullback(d_o.astype(o.dtype))

    return jax.jit(both)


def exact(arrays: list[jax.Array], ids: Any) -> list[np.ndarray]:
    """o, dq, dk, dv of the reference in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        return [np.asarray(x) for x in with_gradients("reference")(*wide, ids)]


def distance(got: Any, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def errors() -> list[Row]:
    """Relative L2 errors against float64 on a small slice."""
    rows = []
    several = np.concatenate([packed(1, 1, 600, 90), packed(2, 1, 600, 9), packed(3, 1, 600, 1e9)])
    several[0, 500:] = 0
    for label, ids in (("causal", None), ("documents", several)):
        arrays = inputs(1, 3, 600, 4)
        want = exact(arrays, ids)
        for name in implementations():
            got = with_gradients(name)(*arrays, ids)
            found = {part: distance(a, b) for part, a, b in zip(("o", "dq", "dk", "dv"), got, want)}
            finite = all(bool(jnp.all(jnp.isfinite(x))) for x in got)
            zero = ids is None or all(not np.any(np.asarray(x, np.float32)[ids == 0]) for x in got)
            show(f"errors {label} {name}", **found, finite=finite, zero_padding=zero)
            rows.append({"what": "errors", "mask": label, "implementation": name, **found, "finite": finite})
    return rows


def bias() -> list[Row]:
    """How much of the error is systematic, where it shows most: a cotangent along o.

    "gain" is ⟨error, exact⟩ / ⟨exact, exact⟩, "mean" is the mean error over the exact root mean square.
    """
    rows = []
    arrays = inputs(2, 2, 1024, 4)
    arrays[2] = (arrays[2] + 1).astype(jnp.bfloat16)  # values with a mean, so that o does not average out
    o = exact([*arrays], None)[0]
    for label, d_o in (("random", arrays[3]), ("along o", jnp.asarray(o, jnp.bfloat16))):
        arrays[3] = d_o
        want = exact(arrays, None)
        for name in implementations():
            found = {}
            got = with_gradients(name)(*arrays, None)
            for part, a, b in list(zip(("o", "dq", "dk", "dv"), got, want))[1:]:
                error = np.asarray(a, np.float64) - b
                found[f"{part} error"] = distance(a, b)
                found[f"{part} gain"] = float(np.sum(error * b) / np.sum(b * b))
                found[f"{part} mean"] = float(np.mean(error) / np.sqrt(np.mean(b * b)))
            show(f"bias {label} {name}", **found)
            rows.append({"what": "bias", "cotangent": label, "implementation": name, **found})
    return rows


def documents() -> list[Row]:
    """Documents that are not runs must take the slow branch and stay exact."""
    ids = packed(4, 2, 700, 120)
    ids[0, 300] = 0
    arrays = inputs(4, 2, 700, 2)
    want = exact(arrays, ids)
    found = {}
    for name in implementations():
        got = with_gradients(name)(*arrays, ids)
        found[name] = max(distance(a, b) for a, b in zip(got, want))
    show("padding inside a document, largest error", **found)
    return [{"what": "padding inside a document", **found}]


SHAPES = [
    ("proxy", 4, 4096, 12, None),
    ("proxy, documents of 600", 4, 4096, 12, 600.0),
    ("proxy, documents of 150", 4, 4096, 12, 150.0),
    ("proxy, documents of 8000", 4, 4096, 12, 8000.0),
    ("8192 × 96", 1, 8192, 96, None),
    ("8192 × 96, documents of 2000", 1, 8192, 96, 2000.0),
]


def timings(label: str, shape: tuple, name: str, **options: Any) -> Row:
    B, T, H, mean = shape
    q, k, v, d_o = inputs(3, B, T, H)
    ids = None if mean is None else packed(5, B, T, mean)
    on_device = None if ids is None else jnp.asarray(ids)
    ahead = measure(forward(name, **options), q, k, v, on_device)
    both = measure(with_gradients(name, **options), q, k, v, d_o, on_device)
    work = 2e-9 * pairs(ids, B, T) * H * (K + V)  # GFLOP = TFLOP/s · ms
    fields = {"forward": ahead, "both": both, "forward TFLOP/s": work / ahead[0], "both TFLOP/s": 3.5 * work / both[0]}
    show(f"{label}: {name} {options or ''}", **fields)
    return {"what": "time", "shape": label, "implementation": name, **options, **fields}


def speed(quick: bool) -> list[Row]:
    rows = []
    for label, *shape in SHAPES[:2] if quick else SHAPES:
        found = [timings(label, tuple(shape), name) for name in implementations()[-1 if quick else 0 :]]
        rows += found
        if len(found) == 2:
            ratios = {part: found[0][part][0] / found[1][part][0] for part in ("forward", "both")}
            show(f"{label}: xla / cudnn", **ratios)
    return rows


def tiles() -> list[Row]:
    """Size of the masked tiles of packed documents, on cuDNN."""
    if "cudnn" not in implementations():
        return []
    label, *shape = SHAPES[1]
    return [timings(label, tuple(shape), "cudnn", block_size=size) for size in (64, 128, 256, 512)]


def peak(quick: bool) -> list[Row]:
    """The pass for the largest logit alone; and cuDNN's log Σ exp at 4096 times the scale, which is nearly it."""
    rows: list[Row] = []
    for label, B, T, H, _ in (SHAPES[0],) if quick else (SHAPES[0], SHAPES[4]):
        q, k, v, _ = inputs(3, B, T, H)
        for size in (512,) if quick else (256, 512, 1024):
            run = jax.jit(functools.partial(blockwise.largest_logit, scale=SCALE, block_size=size))
            found = measure(run, q, k, None)
            show(f"largest logit {label}, blocks of {size}", time=found)
            rows.append({"what": "largest logit", "shape": label, "block": size, "time": found})
        if kernel.refusal("bfloat16", K) is None:
            found = measure(jax.jit(functools.partial(kernel.largest_logit, scale=SCALE)), q, k, None)
            show(f"largest logit {label}, Mosaic kernel", time=found)
            rows.append({"what": "largest logit", "shape": label, "block": "mosaic", "time": found})
        if "cudnn" in implementations() and not quick:
            sharp = jax.jit(lambda *x: cudnn.forward(*x, scale=4096 * SCALE)[1].max((0, 2)) / 4096)
            want = jnp.max(blockwise.largest_logit(q, k, None, SCALE, 512), axis=0)
            found, error = measure(sharp, q, k, v), float(jnp.max(jnp.abs(sharp(q, k, v) - want)))
            show(f"largest logit {label}, sharp log Σ exp", time=found, error=error)
            rows.append({"what": "sharp log sum exp", "shape": label, "time": found, "error": error})
    return rows


@functools.cache
def implementations() -> tuple[str, ...]:
    best = resolve_implementation(dtype="bfloat16", key_width=K, value_width=V)
    return ("xla",) if best == "xla" else ("xla", best)


def show(label: str, **fields: Any) -> None:
    def text(value: Any) -> str:
        if isinstance(value, tuple):
            return "{:.3f} ms ({:.3f}–{:.3f})".format(*value)
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    print(f"{label:52s} " + "  ".join(f"{name} {text(value)}" for name, value in fields.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="errors, and the times that training sees")
    parser.add_argument("--only", nargs="+", help="sections to run")
    arguments = parser.parse_args()
    sections: dict[str, Callable[[], list[Row]]] = {
        "errors": errors,
        "documents": documents,
        "time": functools.partial(speed, arguments.quick),
        "tiles": tiles,
        "peak": functools.partial(peak, arguments.quick),
        "bias": bias,
    }
    print(device_line(), f"cuDNN {cudnn.cudnn_version()}; runs: {', '.join(implementations())}", sep="\n")
    if reason := cudnn.refusal("bfloat16", K, V):
        print(f"no cuDNN: {reason}")
    rows, failed = [], []
    for name in arguments.only or (("time", "peak", "errors") if arguments.quick else sections):
        begin = perf_counter()
        try:
            rows += sections[name]()
        except Exception:  # one section must not hide the others
            failed.append(name)
            traceback.print_exc()
        print(f"-- {name}: {perf_counter() - begin:.1f} s")
    print(f"wrote {write_results('attention', rows)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
