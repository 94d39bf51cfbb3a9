"""A look inside a model or a run.

python -m k3jax.inspect RUN_DIR [--out FILE]     # one HTML file that needs no network

import k3jax
from k3jax import inspect

run = k3jax.load("runs/nano")
inspect.parameters(run.model, run.config.model)
inspect.router(run.model, tokens, segment_ids, router_bias=run.router_bias).table()
inspect.saved_for_backward(run.config, remat="layer")
"""

from __future__ import annotations

from k3jax.inspect.model import (
    QUANTILES,
    DepthAttention,
    Gates,
    Mechanism,
    Router,
    depth_attention,
    gates,
    parameters,
    router,
)
from k3jax.inspect.saved import Saved, saved_for_backward

__all__ = [
    "QUANTILES",
    "DepthAttention",
    "Gates",
    "Mechanism",
    "Router",
    "Saved",
    "depth_attention",
    "gates",
    "parameters",
    "router",
    "saved_for_backward",
]
