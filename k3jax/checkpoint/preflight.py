"""What a directory in the released layout holds, and whether it is what its `config.json` promises.

Only `config.json`, the index and the headers of the shards are read. Every mismatch is reported at once.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3jax.checkpoint.hf_config import config_from_hf, quantization, text_of
from k3jax.checkpoint.layout import (
    PREFIX,
    CheckpointFormatError,
    Leaf,
    leaves,
    packed_leaves,
    stored_wide,
)
from k3jax.checkpoint.safetensors_io import TensorInfo, read_header
from k3jax.config import ConfigError, ModelConfig

INDEX = "model.safetensors.index.json"
_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
_SHOWN = 20
"""Mismatches of one kind that a message lists by name."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory whose tensors are all there, with the names, shapes and dtypes of its configuration."""

    directory: Path
    values: dict[str, Any]
    """The `config.json`."""
    config: ModelConfig
    """Its model; computes and keeps parameters in the dtype of the checkpoint."""
    tensors: dict[str, TensorInfo]
    leaves: list[Leaf]
    packed: bool
    """Whether routed experts are MXFP4."""

    @property
    def total_bytes(self) -> int:
        return sum(info.stop - info.start for info in self.tensors.values())

    def lines(self) -> list[str]:
        """What is in it, for people."""
        files = len({info.file for info in self.tensors.values()})
        elements = sum(math.prod(found.stack) * math.prod(found.held) for found in self.leaves)
        c = self.config
        out = [
            f"{self.directory}: {len(self.tensors):,} tensors in {files} files, {self.total_bytes:,} bytes",
            f"model: {c.num_layers} layers, hidden {c.hidden_size}, {elements:,} numbers, {c.param_dtype}; "
            f"{c.moe.num_experts} experts, {'MXFP4' if self.packed else 'plain'}",
        ]
        if c.vision is not None:
            out.append(f"vision: {c.vision.num_layers} blocks, hidden {c.vision.hidden_size}")
        return out


def preflight(directory: str | Path, *, any_float: bool = False) -> Checkpoint:
    """Checks a directory without reading a tensor.

    Args:
        any_float: accept other floating-point dtypes than the release's, as converted checkpoints have.

    Raises:
        CheckpointFormatError: with every missing, unexpected and misshapen tensor, wrong dtypes, missing and truncated
            shards, or a configuration that this model does not implement.
    """
    directory = Path(directory)
    values = _read_json(directory / "config.json")
    try:
        config = config_from_hf(values)
    except ConfigError as error:
        raise CheckpointFormatError(f"{directory / 'config.json'}: {error}") from None
    declared = quantization(values)
    tensors, lost, problems = _read_headers(directory)
    names = tensors.keys() | lost
    packed = any(name.endswith(".weight_packed") for name in names)
    if packed and not declared:
        problems["file"].append(f"{directory / 'config.json'} has no quantization_config, but tensors are packed")
    dtype = text_of(values).get("dtype") or values.get("dtype") or text_of(values).get("torch_dtype") or "bfloat16"
    if dtype not in _DTYPES:
        raise CheckpointFormatError(f"{directory / 'config.json'}: dtype {dtype!r}; legal are {', '.join(_DTYPES)}")
    config = config_from_hf(values, dtype=dtype, param_dtype=dtype)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
    found = leaves(config, prefix)
    expected = _expected(found, _DTYPES[dtype], packed)
    if tensors:
        _compare(tensors, {name: want for name, want in expected.items() if name not in lost}, any_float, problems)
    _raise(directory, problems)
    return Checkpoint(directory, values, config, tensors, found, packed)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointFormatError(f"{path} does not exist") from None
    except OSError as error:
        raise CheckpointFormatError(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointFormatError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointFormatError(f"{path} holds no JSON object")
    return values


Problems = dict[str, list[str]]


def _read_headers(directory: Path) -> tuple[dict[str, TensorInfo], set[str], Problems]:
    """Every tensor of the directory, those that the index puts into files that cannot be read, and what is wrong."""
    problems: Problems = {"file": [], "index": []}
    lost: set[str] = set()
    promised: dict[str, str] = {}
    if (directory / INDEX).exists():
        promised = _read_json(directory / INDEX).get("weight_map", {})
        if not isinstance(promised, dict) or not all(isinstance(file, str) for file in promised.values()):
            raise CheckpointFormatError(f"{directory / INDEX}: weight_map does not give each tensor's file")
        files = sorted(set(promised.values()))
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
    if not files:
        problems["file"].append(f"{directory} holds no .safetensors file")
    by_file: dict[str, list[str]] = {}
    for name, file in promised.items():
        by_file.setdefault(file, []).append(name)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        names = by_file.get(file, [])
        try:
            header = read_header(directory / file)
        except CheckpointFormatError as error:
            held = f" (holds {len(names)} tensors, {names[0]} first)" if names else ""
            problems["file"].append(f"{error}{held}")
            lost.update(names)
            continue
        wrong = [f"{name}: {INDEX} says {file}, which does not hold it" for name in names if name not in header]
        wrong += [
            f"{name}: in {tensors[name].file.name} and in {file}" for name in sorted(header.keys() & tensors.keys())
        ]
        if promised:
            stray = [name for name in header if promised.get(name) != file]
            wrong += [f"{name}: in {file}, but {INDEX} does not say so" for name in stray]
        problems["index"] += wrong
        tensors |= header
    return tensors, lost, problems


def _expected(found: list[Leaf], dtype: str, packed: bool) -> dict[str, tuple[str, tuple[tuple[int, ...], ...]]]:
    """Dtype and legal shapes of every tensor by name."""
    out: dict[str, tuple[str, tuple[tuple[int, ...], ...]]] = {}
    for one in found:
        wide = "F32" if stored_wide(one.template) else dtype
        shapes = (one.shape,)
        if one.template.endswith("A_log"):  # without padding elsewhere, and with axes for batch and time
            heads = one.held[0]
            shapes = (one.shape, (heads,), (1, 1, heads, 1))
        if one.experts is not None and packed:
            for part in packed_leaves(one):
                out |= dict.fromkeys(part.names(), ("U8", (part.shape,)))
        else:
            out |= dict.fromkeys(one.names(), (wide, shapes))
    return out


def _compare(tensors: dict[str, TensorInfo], expected: dict[str, Any], any_float: bool, problems: Problems) -> None:
    problems |= {"missing": [], "unexpected": [], "shape": [], "dtype": []}
    for name, (dtype, shapes) in expected.items():
        info = tensors.get(name)
        if info is None:
            problems["missing"].append(f"{name}: missing, expected {dtype}{list(shapes[0])}")
            continue
        if info.shape not in shapes:
            text = f"{name}: shape {list(info.shape)} in {info.file.name}, expected {list(shapes[0])}"
            problems["shape"].append(text)
        floats = any_float and dtype != "U8" and info.dtype in ("BF16", "F16", "F32")
        if info.dtype != dtype and not floats:
            problems["dtype"].append(f"{name}: dtype {info.dtype} in {info.file.name}, expected {dtype}")
    for name in tensors.keys() - expected.keys():
        info = tensors[name]
        text = f"{name}: not part of this model ({info.dtype}{list(info.shape)} in {info.file.name})"
        problems["unexpected"].append(text)


def _raise(directory: Path, problems: Problems) -> None:
    lines: list[str] = []
    for kind, found in problems.items():
        found.sort()
        lines += found[:_SHOWN] + ([f"… and {len(found) - _SHOWN:,} more ({kind})"] if len(found) > _SHOWN else [])
    if lines:
        every = [text for found in problems.values() for text in found]
        raise CheckpointFormatError(f"{directory} cannot be loaded:\n  " + "\n  ".join(lines), every)
