"""What the benchmarks share: the machine, timing, and results as JSON."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jaxlib

RESULTS = Path(__file__).parent / "results"


def device_line() -> str:
    """The machine and the versions that a measurement belongs to."""
    device = jax.devices()[0]
    software = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, Python {platform.python_version()}"
    return f"{device.device_kind} ({device.platform}); {software}"


def measure(fn: Callable[..., Any], *args: Any, batches: int = 7, calls: int = 4) -> tuple[float, float, float]:
    """Milliseconds of one call of a jitted `fn`: median, smallest and largest over batches of back-to-back calls."""
    jax.block_until_ready(fn(*args))  # compiles
    jax.block_until_ready(fn(*args))
    times = []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            out = fn(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / calls * 1e3)
    return median(times), min(times), max(times)


def write_results(name: str, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes `results/<name>.json`: {"device", "rows"}."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"device": device_line(), "rows": list(rows)}, indent=1) + "\n")
    return path
