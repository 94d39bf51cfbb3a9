"""Every test runs on eight simulated CPU devices, with a compile cache that outlives the checkout."""

import os
from pathlib import Path

# level 0: tests compile far more than they compute
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)

# subprocesses of tests share it
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "k3jax" / "tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax
import numpy as np
import pytest

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def x64():
    """float64 for one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def golden():
    """Loads `tests/golden/<group>/<case>.npz` as a dict of arrays."""

    def load(group: str, case: str) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / group / f"{case}.npz") as data:
            return dict(data)

    return load


def pytest_collection_modifyitems(items):
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        if "gpu" in item.keywords and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
