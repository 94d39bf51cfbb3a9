"""Directories in the released layout, made and read with the `safetensors` library alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from helpers import GOLDEN
from safetensors import safe_open
from safetensors.numpy import save_file

TINY = GOLDEN / "g9_checkpoint" / "tiny_k3"
PACKED = GOLDEN / "g9_checkpoint" / "tiny_k3_mxfp4"
INDEX = "model.safetensors.index.json"
LM = "language_model."


def read(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a directory."""
    out = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            out |= {name: opened.get_tensor(name) for name in opened.keys()}
    return out


def write(directory: Path, tensors: dict[str, np.ndarray], values: dict[str, Any], files: int = 3) -> Path:
    """A directory of `files` shards with index and `config.json`."""
    directory.mkdir(parents=True)
    names, weight_map = sorted(tensors), {}
    for i in range(files):
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        held = names[i::files]
        save_file({name: np.ascontiguousarray(tensors[name]) for name in held}, directory / file)
        weight_map |= dict.fromkeys(held, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def values_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def changed(source: Path, to: Path, change) -> Path:
    """A copy of a directory with its tensors changed by `change(tensors)`."""
    tensors = read(source)
    change(tensors)
    return write(to, tensors, values_of(source))


def copied(source: Path, to: Path) -> Path:
    shutil.copytree(source, to)
    for path in to.iterdir():
        path.chmod(0o644)
    return to


def assert_same_tensors(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Names, shapes, dtypes and every byte."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name
