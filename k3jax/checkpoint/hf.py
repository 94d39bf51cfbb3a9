"""Tensors of the released layout in memory: a model from a mapping of numpy arrays, and back.

For small models and tests; directories of any size go through `k3jax.checkpoint.load` and `export`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from k3jax.checkpoint.hf_config import config_from_hf
from k3jax.checkpoint.layout import ROUTER_BIAS, CheckpointFormatError, Leaf, abstract_model, get, leaves, put
from k3jax.config import ModelConfig
from k3jax.model.k3 import K3


def to_param(found: Leaf, tensor: np.ndarray, name: str) -> np.ndarray:
    """What a tensor gives of a parameter.

    Raises:
        CheckpointFormatError: wrong number of elements, or padding that is not zero.
    """
    if found.template.endswith("A_log"):
        heads = found.held[0]
        tensor = tensor.reshape(-1)
        if tensor.size < heads or np.any(tensor[heads:] != 0):
            raise CheckpointFormatError(f"{name}: expected {heads} values and zero padding, got shape {tensor.shape}")
        return tensor[:heads]
    if tensor.size != np.prod(found.view):
        raise CheckpointFormatError(f"{name}: shape {tensor.shape}, expected {found.shape}")
    return found.to_param(tensor)


def from_hf(tensors: Mapping[str, np.ndarray], config: ModelConfig) -> tuple[K3, jax.Array]:
    """Model and router biases [MoE layers, E] from tensors in the released layout, experts plain.

    Raises:
        CheckpointFormatError: a tensor is missing or has the wrong shape.
    """
    graph, state = nnx.split(abstract_model(config))
    dtypes = jax.tree.map(lambda a: a.dtype, nnx.to_pure_dict(state))
    pure: dict = {}
    bias = jnp.zeros((0, config.moe.num_experts), jnp.float32)
    for found in leaves(config):
        parts = []
        for name in found.names():
            if name not in tensors:
                raise CheckpointFormatError(f"tensor {name} is missing")
            parts.append(to_param(found, tensors[name], name))
        value = np.stack(parts).reshape(*found.stack, *parts[0].shape)
        if found.path == ROUTER_BIAS:
            bias = jnp.asarray(value, jnp.float32)
        else:
            put(pure, found.path, jnp.asarray(value, get(dtypes, found.path)))
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graph, state), bias


def to_hf(params: K3) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of every parameter of `params` (or of a gradient of its shape) in the released layout.

    Router biases are not parameters and are not included.
    """
    pure = nnx.to_pure_dict(nnx.state(params))
    halves: dict[str, np.ndarray] = {}
    for found in leaves(params.config):
        if found.path == ROUTER_BIAS:
            continue
        value = np.asarray(get(pure, found.path))
        for index in np.ndindex(*found.stack):
            name, part = found.name(*index), np.ascontiguousarray(found.to_view(value[index]))
            if found.window is None:
                yield name, part.reshape(found.shape)
                continue
            axis, start, stop = found.window
            whole = halves.setdefault(name, np.zeros(found.view, part.dtype))
            whole[(slice(None),) * axis + (slice(start, stop),)] = part
            if found.path.endswith(("A_log", "v_b", "vision.blocks.v_proj")):  # the last part of its tensor
                yield name, halves.pop(name).reshape(found.shape)


def load_hf(directory: str | Path, **overrides: Any) -> tuple[K3, jax.Array]:
    """Model and router biases from a directory in the released layout with plain experts, read whole into memory.

    Args:
        overrides: fields of `ModelConfig` to replace, e.g. `dtype="bfloat16"`.

    Raises:
        CheckpointFormatError: no config or shards, or tensors that do not match the config.
    """
    directory = Path(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not (directory / "config.json").is_file() or not files:
        raise CheckpointFormatError(f"{directory} holds no config.json with .safetensors files beside it")
    config = config_from_hf(json.loads((directory / "config.json").read_text()), **overrides)
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors |= load_file(file)
    return from_hf(tensors, config)
