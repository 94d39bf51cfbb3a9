"""Where every array of a training state lies: spec and bytes a device, by tensor.

rows = placements(abstract_state(config, optimizer, mesh, fsdp=True))
print(*placement_lines(rows), sep="\\n")
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from k3jax.sharding import logical_axes
from k3jax.train.optimizer import path_names
from k3jax.train.state import TrainState

Kind = Literal["parameter", "optimizer", "other"]
KINDS: tuple[Kind, ...] = ("parameter", "optimizer", "other")


@dataclass(frozen=True)
class Placement:
    """One array of a `TrainState`."""

    kind: Kind
    tensor: str
    """Path of the parameter, also for the optimizer state that belongs to one."""
    part: str
    """Of optimizer state: its name there ("trace", "mu", "nu"); empty otherwise."""
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axes; empty where an array has none."""
    spec: PartitionSpec
    bytes: int
    """Of the whole array."""
    bytes_per_device: int
    on_host: bool = False
    """In pinned host memory; `bytes_per_device` are then those that the host holds for a device."""


def placements(state: TrainState) -> list[Placement]:
    """Every array of a state or of its abstract form (`abstract_state`), in the order of the tree.

    Raises:
        ValueError: an array that is not on a mesh.
    """
    rows: list[Placement] = []
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable):
        field, *names = path_names(path)
        axes = logical_axes(node) if is_variable(node) and jax.tree.leaves(node) else ()
        for leaf in jax.tree.leaves(node):
            kind, part, tensor = _kind(field, names)
            rows.append(_placement(kind, "/".join(tensor) or field, part, axes, leaf))
    return rows


def _kind(field: str, names: list[str]) -> tuple[Kind, str, list[str]]:
    """Kind, part and tensor of the array at `field/names…` of a state."""
    if field != "opt_state":
        return ("parameter", "", names) if field == "params" else ("other", "", names)
    for part in ("trace", "mu", "nu"):
        if part in names:
            return "optimizer", part, names[names.index(part) + 1 :]
    return "other", "", ["opt_state", *names]


def _placement(kind: Kind, tensor: str, part: str, axes: tuple[str, ...], leaf: Any) -> Placement:
    spec = getattr(leaf.sharding, "spec", None)
    if spec is None:
        raise ValueError(f"{tensor} {tuple(leaf.shape)} is not on a mesh: its sharding is {leaf.sharding}")
    size, local = (
        math.prod(shape) * leaf.dtype.itemsize for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape))
    )
    on_host = leaf.sharding.memory_kind == "pinned_host"
    return Placement(kind, tensor, part, tuple(leaf.shape), axes, spec, size, local, on_host)


def placement_lines(rows: list[Placement]) -> list[str]:
    """The rows as a table: a line per parameter with the state that the optimizer keeps of it, then totals.

    Bytes are those of one device.
    """
    state: dict[str, list[Placement]] = {}
    for row in rows:
        if row.kind == "optimizer":
            state.setdefault(row.tensor, []).append(row)
    table = [("tensor", "shape", "logical axes", "spec", "bytes", "optimizer state", "bytes")]
    for row in rows:
        if row.kind == "parameter":
            kept = state.get(row.tensor, [])
            names = " ".join(part.part for part in kept)
            table.append(
                (row.tensor, "×".join(map(str, row.shape)), " ".join(row.axes), _text(row.spec))
                + (f"{row.bytes_per_device:,}", f"{names} {_text(kept[0].spec)}" if kept else "-")
                + (f"{sum(part.bytes_per_device for part in kept):,}",)
            )
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    right = (4, 6)
    lines = [
        "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in table
    ]
    return [line.rstrip() for line in lines] + _totals(rows)


def _totals(rows: list[Placement]) -> list[str]:
    sums = [(kind, [row for row in rows if row.kind == kind and not row.on_host]) for kind in KINDS]
    host = [row for row in rows if row.on_host]
    sums += [("on the host", host)] if host else []
    return [
        f"{name:<11} {sum(r.bytes_per_device for r in found):>19,} bytes a device of {sum(r.bytes for r in found):,}"
        for name, found in [*sums, ("total", [row for row in rows if not row.on_host])]
    ]


def _text(spec: PartitionSpec) -> str:
    """A spec with a word for each axis that is cut: "(-, data·expert, -)"; "whole" if none is."""
    if not any(spec):
        return "whole"
    words = ("-" if not entry else entry if isinstance(entry, str) else "·".join(entry) for entry in spec)
    return f"({', '.join(words)})"
