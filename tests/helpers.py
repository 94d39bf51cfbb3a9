"""What several tests share: comparisons, micro models, and golden tensors in module form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.checkpoint import hf, layout
from k3jax.checkpoint.hf_config import config_from_hf
from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig

GOLDEN = Path(__file__).parent / "golden"


def golden_cases(group: str) -> dict[str, dict]:
    return json.loads((GOLDEN / group / "cases.json").read_text())


def relmax(a: Any, b: Any) -> float:
    """max|a − b| / max|b|."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30))


def assert_rows_close(got: Any, want: Any, tolerance: float, name: str = "") -> None:
    """Relative L2 of the whole, and within twice that of every row (the last axis), which could hide in the whole."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (name, got.shape, want.shape)
    errors, sizes = (np.linalg.norm(a, axis=-1) for a in (got - want, want))
    whole = np.linalg.norm(errors) / max(np.linalg.norm(sizes), 1e-30)
    assert whole <= tolerance, f"{name}: relative L2 error {whole:.1e}"
    worst = np.max(errors / np.maximum(sizes, 1e-30))
    assert worst <= 2 * tolerance, f"{name}: relative L2 error {worst:.1e} in a row"


def wide_copy(tree: Any) -> Any:
    """float64 copies of all floating arrays; to be made and used under `jax.enable_x64`."""
    return jax.tree.map(lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree)


def micro(**overrides: Any) -> ModelConfig:
    """Every mechanism of K3 in five small layers: KDA + dense, KDA, KDA | MLA, MLA."""
    values: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 32,
        "num_layers": 5,
        "mla_layers": (3, 4),
        "dense_size": 48,
        "attn_res_block_size": 2,
        "kda": KDAConfig(num_heads=2, head_dim=16, chunk_size=16),
        "mla": MLAConfig(
            num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6
        ),
        "moe": MoEConfig(num_experts=8, experts_per_token=2, expert_size=16, latent_size=16, qb_bins=100),
    }
    return ModelConfig(**(values | overrides))


def config_of_case(case: dict) -> ModelConfig:
    """`ModelConfig` of a golden layer case (which leaves out what a layer does not need)."""
    values = case["config"] | {"vocab_size": 8, "num_hidden_layers": 4, "first_k_dense_replace": 1}
    return config_from_hf(values)


def fill(module: nnx.Module, arrays: dict[str, np.ndarray], dtype: Any = jnp.float32) -> nnx.Module:
    """`module` with every parameter replaced by the array of the same dotted path."""
    graph, state = nnx.split(module)
    pure: dict = {}
    for path, value in arrays.items():
        layout.put(pure, path, jnp.asarray(value, dtype))
    assert jax.tree.structure(pure) == jax.tree.structure(nnx.to_pure_dict(state)), (pure.keys(), state)
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graph, state)


def read_mixer(
    entries: list[layout.Entry], shapes: dict, data: dict[str, np.ndarray], group: str
) -> dict[str, np.ndarray]:
    """Golden `param.*` or `grad.*` arrays of a mixer as {our name: array}."""
    out = {}
    for entry in entries:
        ours = entry.path.removeprefix("mixer.").removeprefix("ffn.")
        theirs = entry.name.removeprefix("self_attn.").removeprefix("block_sparse_moe.").removeprefix("mlp.")
        if entry.kind not in ("k_b", "v_b"):
            out[ours] = hf.to_param(layout.leaf(entry, shapes[ours]), data[f"{group}.{theirs}"], theirs)
    return out


def shapes_of(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Dotted path → shape of every parameter."""
    flat = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module)))
    return {".".join(str(p.key) for p in path): tuple(leaf.shape) for path, leaf in flat}


def flat_arrays(module: nnx.Module) -> dict[str, np.ndarray]:
    """Dotted path → array of every parameter (or gradient)."""
    flat = jax.tree.leaves_with_path(nnx.to_pure_dict(nnx.state(module)))
    return {".".join(str(p.key) for p in path): np.asarray(leaf) for path, leaf in flat}
