"""What a mesh would cost before it is rented: memory, traffic, operations and time of a training step.

    python -m k3jax.plan configs/k3.py --mesh pipe=8,data=16,expert=32 --batch 16384 --micro-batches 32 --chip H200

    >>> from k3jax.config import MeshConfig
    >>> from k3jax.plan import plan
    >>> from k3jax.train.config_file import load_config
    >>> result = plan(load_config("configs/proxy.py"), MeshConfig(data=2), chip="H200")
    >>> result.devices, result.fits
    (2, True)

`print(result)` shows all of it; `result.memory.peak` and `result.time.predicted` are bytes and seconds.

No device is touched and nothing is allocated. What is exact and what is an estimate is said with every row.
"""

from __future__ import annotations

from k3jax.plan.geometry import sizes
from k3jax.plan.ranking import Candidate, search
from k3jax.plan.report import Plan, Row, plan, predict

__all__ = ["Candidate", "Plan", "Row", "plan", "predict", "search", "sizes"]
