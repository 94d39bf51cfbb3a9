"""A training state in parts, one for each rank of a pipeline, and as a whole.

The part of a rank is a `TrainState` whose parameters are `{"chunk_3": Stage, …}`, with the router biases of its layers;
step, RNG and the counters of the optimizer are on every rank. Checkpoints hold the whole, in the tree of `K3`, so that
any mesh restores what another wrote. The way between the two goes through host memory, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from k3jax.config import ModelConfig
from k3jax.model.plan import plan_layers
from k3jax.train.optimizer import path_names
from k3jax.train.state import TrainState

Tree = Any
Path = tuple[str, ...]
_ENDS = {"embed": 0, "vision": 0, "output_res": -1, "final_norm": -1, "lm_head": -1}
"""Parameters outside the layers, by the first name of their path that is here → the chunk that has them."""


def chunk_name(chunk: int) -> str:
    """Of a chunk's parameters in the part of its rank."""
    return f"chunk_{chunk}"


@dataclass(frozen=True)
class Slice:
    """What a rank holds of a leaf at `path`: a slot of the leading axis, or all of it."""

    rank: int
    path: Path
    slot: int | None = None


@dataclass(frozen=True)
class Stages:
    """How a model is cut: chunk c = layers `bounds[c][0] … bounds[c][1] - 1`, on rank c modulo `ranks`."""

    model: ModelConfig
    ranks: int
    bounds: tuple[tuple[int, int], ...]

    def chunks(self, rank: int) -> range:
        """Chunks of a rank."""
        return range(rank, len(self.bounds), self.ranks)

    def moe_layers(self, rank: int) -> list[int]:
        """Rows of the model's router biases that a rank holds, in its order."""
        dense = self.model.num_dense_layers
        bounds = (self.bounds[chunk] for chunk in self.chunks(rank))
        return [layer - dense for start, stop in bounds for layer in range(max(start, dense), stop)]

    @cached_property
    def _layers(self) -> dict[int, tuple[int, Path, int]]:
        """Layer → its chunk, the path of its stack there and its slot."""
        out: dict[int, tuple[int, Path, int]] = {}
        for chunk, bounds in enumerate(self.bounds):
            for i, plan in enumerate(plan_layers(self.model, *bounds)):
                for j, (_, numbers) in enumerate(plan.run_layers()):
                    stack = (chunk_name(chunk), "segments", str(i), "runs", str(j))
                    out.update((number, (chunk, stack, slot)) for slot, number in enumerate(numbers))
        return out

    def places(self, path: Path) -> tuple[list[Slice], bool]:
        """Where the leaf at `path` of a whole state lies, and whether the slices are those of its leading axis, in its
        order; otherwise they are copies of it."""
        if path[0] == "router_bias":
            rows = [(row, Slice(r, path, i)) for r in range(self.ranks) for i, row in enumerate(self.moe_layers(r))]
            return [place for _, place in sorted(rows, key=lambda item: item[0])], True
        if "segments" in path:
            at = path.index("segments")
            _, numbers = plan_layers(self.model)[int(path[at + 1])].run_layers()[int(path[at + 3])]
            found = (self._layers[number] for number in numbers)
            return [
                Slice(c % self.ranks, (*path[:at], *stack, *path[at + 4 :]), slot) for c, stack, slot in found
            ], True
        for at, name in enumerate(path):
            if name in _ENDS:
                chunk = range(len(self.bounds))[_ENDS[name]]
                return [Slice(chunk % self.ranks, (*path[:at], chunk_name(chunk), *path[at:]))], False
        return [Slice(rank, path) for rank in range(self.ranks)], False


def to_whole(stages: Stages, parts: Sequence[TrainState], like: Tree) -> Tree:
    """What `like` asks for, in host memory: copies, so that the parts may be given up.

    Args:
        like: shapes of the `TrainState` of a whole model, or of some of its fields as a mapping.
    """
    found = [_flat(part) for part in parts]
    out = {}
    for path, leaf in _flat(like).items():
        slices, layered = stages.places(path)
        if layered:
            values = [np.asarray(found[place.rank][place.path])[place.slot] for place in slices]
            out[path] = np.stack(values) if values else np.zeros(leaf.shape, leaf.dtype)
        else:
            out[path] = np.array(found[slices[0].rank][slices[0].path])
    return _filled(like, out)


def from_whole(stages: Stages, whole: TrainState, abstract: Sequence[TrainState]) -> tuple[TrainState, ...]:
    """The parts of a whole state in host memory, on the devices that `abstract` names."""
    out = [{path: np.zeros(leaf.shape, leaf.dtype) for path, leaf in _flat(like).items()} for like in abstract]
    for path, leaf in _flat(whole).items():
        slices, layered = stages.places(path)
        for value, place in zip(leaf if layered else [leaf] * len(slices), slices, strict=True):
            out[place.rank][place.path][... if place.slot is None else place.slot] = value
    filled = tuple(_filled(like, values) for like, values in zip(abstract, out))
    return jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), filled, tuple(abstract))


def on_host[T](like: T) -> T:
    """Shapes and dtypes of `like` as NumPy arrays without memory: `CheckpointStore.load` reads such on the host."""
    return jax.tree.map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), like)


def _flat(tree: Tree) -> dict[Path, Any]:
    return {tuple(path_names(path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _filled(like: Tree, values: dict[Path, Any]) -> Tree:
    """`values` in the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [values[path] for path in _flat(like)])
