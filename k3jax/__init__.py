"""Kimi K3 in JAX.

import k3jax
model = k3jax.create(k3jax.nano())  # or k3jax.load("runs/nano").model, k3jax.load_pretrained("Kimi-K3").model
logits = model(tokens, segment_ids=segment_ids)
"""

from typing import TYPE_CHECKING, Any

from k3jax.config import ModelConfig, RunConfig, k3, nano, proxy
from k3jax.model.k3 import K3, create, init_cache

if TYPE_CHECKING:
    from k3jax.checkpoint.export import export_pretrained
    from k3jax.checkpoint.load import Pretrained, load_pretrained
    from k3jax.generate import Loaded, generate_text, load, stream_text

__version__ = "0.1.0"

__all__ = [
    "K3",
    "Loaded",
    "ModelConfig",
    "Pretrained",
    "RunConfig",
    "create",
    "export_pretrained",
    "generate_text",
    "init_cache",
    "k3",
    "load",
    "load_pretrained",
    "nano",
    "proxy",
    "stream_text",
]


def __getattr__(name: str) -> Any:
    # imported when used: `python -m k3jax.generate` would otherwise run a module that the package has already imported
    if name == "export_pretrained":
        from k3jax.checkpoint import export as home
    elif name in ("Pretrained", "load_pretrained"):
        from k3jax.checkpoint import load as home
    elif name in __all__:
        from k3jax import generate as home
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(home, name)
