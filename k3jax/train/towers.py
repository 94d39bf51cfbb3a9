"""The vision tower of a pipeline: each rank runs it for its share of the micro-batches.

Its parameters and their optimizer state are those of chunk 0. In a step

    copies of the parameters go to every rank
    forwards of the first P micro-batches are issued up front, one on each rank, and another after each that chunk 0
    takes: they run where a rank waits for the pipeline. Features go to chunk 0 and wait there for its backward, and
    nothing else of the tower is kept
    their cotangents go back to the rank that made the features, which computes the tower again
    the ranks' sums of gradients go to chunk 0, into its own

after the report's mechanism ("the backward mirrors this"). A cotangent's backward is issued with the next pass of
chunk 0: its rank would otherwise wait for chunk 0's backward with what it can do before.

Legend: M micro-batches, P ranks, B sequences of a micro-batch, T time, R rows of patches, G features of one, D hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import RunConfig
from k3jax.model.k3 import Stage
from k3jax.model.vision import Images, Vision
from k3jax.parallel.pipeline import StagePrograms, local_bytes, send
from k3jax.sharding import spec, to_rest
from k3jax.train.batch import PATCH_KEYS, Batch, PatchRows, abstract_batch, packed
from k3jax.train.step import compiler_options

Tree = Any


class Towers:
    """The passes of chunk 0 with images (`StagePrograms`), and the towers that they need.

    Args:
        meshes: of every rank.
        chunk: chunk 0, whose `partial` are features [R, G, D], or None without images.
        vision: types of the tower's parameters on rank 0.
    """

    def __init__(
        self,
        config: RunConfig,
        meshes: Sequence[jax.sharding.Mesh],
        images: PatchRows,
        chunk: StagePrograms,
        vision: Vision,
    ) -> None:
        self.images, self.chunk = images, chunk
        self.ranks = [_Tower(config, mesh, images, vision) for mesh in meshes[: config.train.accumulation]]
        self.peak = 0
        """Bytes of features that a device of rank 0 held at most."""

    def describe(self) -> str:
        """A line for the log."""
        choices = " or ".join(map(str, self.images.choices))
        return (
            f"vision      the tower runs on ranks 0 to {len(self.ranks) - 1}, a micro-batch with images on each in "
            f"turn: {choices} rows of {self.images.patches} patches"
        )

    @property
    def gradients_type(self) -> Vision:
        """Types of what `unload` returns."""
        return self.ranks[0].grads

    def lower(self) -> list[tuple[dict[str, Any], str, Any]]:
        """(where it goes, its name, the program) for the usual number of rows."""
        first = self.ranks[0]
        with jax.set_mesh(first.mesh):
            add = jax.jit(_add, donate_argnums=0).lower(first.grads, first.grads)
        of_ranks = ((tower, tower.lower()) for tower in self.ranks)
        return [(first.programs, "add", add)] + [
            (tower.programs, name, program) for tower, lowered in of_ranks for name, program in lowered.items()
        ]

    def place(self, batch: dict[str, Any], placed: Sequence[Sequence[Batch]]) -> None:
        """Adds the images of a host batch [M·B, T] to the micro-batches `placed` of the ranks: patches where the tower
        runs, and what stands for which token on rank 0.

        Raises:
            DataError: images that do not fit in their rows.
        """
        turn = cycle(range(len(self.ranks)))
        size = len(batch["tokens"]) // len(placed[0])
        for micro in range(len(placed[0])):
            rows = slice(micro * size, (micro + 1) * size)
            part = {key: batch[key][rows] for key in ("images", "tokens")}
            arrays = packed(part, 1, self.ranks[0].mesh, self.images)
            if arrays is None:
                continue
            rank = next(turn)
            placed[rank][micro].update(self.ranks[rank].place(arrays))
            placed[0][micro].update(self.ranks[0].place({"media_index": arrays["media_index"]}))

    def load(self, vision: Vision, batches: Sequence[Sequence[Batch]], *, train: bool) -> None:
        """What the next passes work on.

        Args:
            vision: parameters on rank 0.
            batches: of every rank, as of `place`.
            train: whether features are kept for a backward pass.
        """
        self._train = train
        self._home = {m: r for r, batch in enumerate(batches) for m, b in enumerate(batch) if "patches" in b}
        self._batch = {m: {key: batches[r][m][key] for key in self.ranks[r].keys} for m, r in self._home.items()}
        self._vision = {r: send(vision, self.ranks[r].places) for r in sorted(set(self._home.values()))}
        self._queue = deque(sorted(self._home))
        self._features: dict[int, jax.Array] = {}
        self._back: tuple[int, jax.Array] | None = None
        self._sums: dict[int, Vision] = {}
        for _ in self.ranks:
            self._issue_forward()

    def forward(self, micro: int, rows: tuple, partial: None) -> tuple[Any, tuple]:
        self._issue_backward()
        if micro not in self._home:
            return self.chunk.forward(micro, rows, None)
        while micro not in self._features:
            self._issue_forward()
        features = self._features[micro] if self._train else self._features.pop(micro)
        out = self.chunk.forward(micro, rows, features)
        self._issue_forward()
        return out

    def backward(self, micro: int, rows: tuple, partial: None, d_partial: Any, d_pushed: tuple, d_rows: tuple) -> Any:
        self._issue_backward()
        features = self._features.pop(micro, None)
        d_features, d_rows = self.chunk.backward(micro, rows, features, d_partial, d_pushed, d_rows)
        if d_features is not None:
            self._back = micro, send(d_features, self.ranks[self._home[micro]].features)
        return None, d_rows

    def unload(self) -> Vision:
        """Gradients of the backward passes since `load`, at rest on rank 0."""
        self._issue_backward()
        first = self.ranks[0]
        total = self._sums.pop(0) if 0 in self._sums else first.programs["zeros"]()
        for sums in self._sums.values():
            total = first.programs["add"](total, send(sums, first.rests))
        self.clear()
        return total

    def clear(self) -> None:
        """Lets go of what was loaded."""
        del self._home, self._batch, self._vision, self._features, self._sums

    def memory(self) -> list[dict[str, int]]:
        """For each rank with a tower bytes on one of its devices: copies of parameters, sums of gradients and features;
        and the temporaries of the program that has the most."""
        out = []
        for rank, tower in enumerate(self.ranks):
            held = local_bytes(tower.grads) + (local_bytes(tower.vision) if rank else self.peak)
            temporary = max(program.memory_analysis().temp_size_in_bytes for program in tower.programs.values())
            out.append({"tower": held, "temporary": temporary})
        return out

    def _issue_forward(self) -> None:
        """The next tower, if there is one to come."""
        if not self._queue:
            return
        micro = self._queue.popleft()
        rank = self._home[micro]
        features = self.ranks[rank].forward(self._vision[rank], self._batch[micro])
        self._features[micro] = send(features, self.ranks[0].features)
        self.peak = max(self.peak, local_bytes(self._features))

    def _issue_backward(self) -> None:
        """The tower's backward whose cotangent has been issued, if there is one."""
        if self._back is None:
            return
        (micro, d_features), self._back = self._back, None
        rank = self._home[micro]
        tower = self.ranks[rank]
        sums = self._sums[rank] if rank in self._sums else tower.programs["zeros"]()
        self._sums[rank] = tower.backward(self._vision[rank], self._batch[micro], d_features, sums)


class _Tower:
    """The tower's programs on one rank."""

    def __init__(self, config: RunConfig, mesh: jax.sharding.Mesh, images: PatchRows, vision: Vision) -> None:
        self.config, self.mesh, self.images = config, mesh, images
        self.keys = (*PATCH_KEYS, "media_index")
        self.places = jax.tree.map(lambda leaf: NamedSharding(mesh, leaf.sharding.spec), vision)
        self.vision = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), vision, self.places
        )
        with jax.set_mesh(mesh):
            self.grads = jax.eval_shape(to_rest, self.vision)
            types = {rows: abstract_batch(config, mesh, images, rows) for rows in images.choices}
        self.rests = jax.tree.map(lambda leaf: NamedSharding(mesh, leaf.sharding.spec), self.grads)
        self.batch = {rows: {key: _of_one(batch[key]) for key in self.keys} for rows, batch in types.items()}
        self.features = features_type(config, mesh, images, images.usual).sharding
        self.programs: dict[str, Any] = {}

    def place(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Arrays of a micro-batch on the rank."""
        like = self.batch[self.images.usual]
        return {key: jax.device_put(array, like[key].sharding) for key, array in arrays.items()}

    def lower(self) -> dict[str, Any]:
        """The programs for the usual number of rows."""
        with jax.set_mesh(self.mesh):
            zeros = jax.jit(self._zeros).lower()
        usual = self.images.usual
        passes = {pass_name(kind, usual): self.lower_pass(kind, usual) for kind in ("forward", "backward")}
        return passes | {"zeros": zeros}

    def lower_pass(self, kind: str, rows: int) -> Any:
        """A pass over so many rows of patches."""
        held, options = (self.vision, self.batch[rows]), compiler_options(self.mesh)
        with jax.set_mesh(self.mesh):
            if kind == "forward":
                return jax.jit(self._forward, compiler_options=options).lower(*held)
            d_features = features_type(self.config, self.mesh, self.images, rows)
            backward = jax.jit(self._add_backward, donate_argnames="sums", compiler_options=options)
            return backward.lower(*held, d_features, self.grads)

    def forward(self, vision: Vision, batch: Batch) -> jax.Array:
        """Features [R, G, D]."""
        return self._program("forward", batch)(vision, batch)

    def backward(self, vision: Vision, batch: Batch, d_features: jax.Array, sums: Vision) -> Vision:
        """`sums`, which are given up, and gradients."""
        return self._program("backward", batch)(vision, batch, d_features, sums)

    def _program(self, kind: str, batch: Batch) -> Any:
        rows = len(batch["patches"])
        name = pass_name(kind, rows)
        if name not in self.programs:
            self.programs[name] = self.lower_pass(kind, rows).compile()
        return self.programs[name]

    def _zeros(self) -> Vision:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding), self.grads)

    def _forward(self, vision: Vision, batch: Batch, *, remat: bool = False) -> jax.Array:
        with jax.named_scope("vision"):
            images = Images.of(batch)
            assert images is not None
            return vision(images, remat=remat)

    def _add_backward(self, vision: Vision, batch: Batch, d_features: jax.Array, sums: Vision) -> Vision:
        remat = self.config.train.remat != "none"
        _, pull = jax.vjp(lambda vision: self._forward(vision, batch, remat=remat), vision)
        return _add(sums, to_rest(pull(d_features)[0]))


def features_type(config: RunConfig, mesh: jax.sharding.Mesh, images: PatchRows, rows: int) -> jax.ShapeDtypeStruct:
    """Of the features [R, G, D] of a micro-batch on a rank's mesh."""
    shape = (rows, images.patches // images.merge**2, config.model.hidden_size)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, spec("patch_row", "patch", None))
    return jax.ShapeDtypeStruct(shape, jnp.dtype(config.model.dtype), sharding=sharding)


def without_tower(stage: Stage) -> Stage:
    """What chunk 0 computes with."""
    stage = jax.tree.map(lambda leaf: leaf, stage)
    del stage.vision
    return stage


def with_tower(stage: Stage, vision: Vision) -> Stage:
    """The parameters of chunk 0, or another tree of their structure."""
    stage = jax.tree.map(lambda leaf: leaf, stage)
    stage.vision = vision
    return stage


def _of_one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The type of a micro-batch of a batch [M, …]."""
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def pass_name(kind: str, patch_rows: int) -> str:
    """Of a pass over so many rows of patches."""
    return f"{kind}/{patch_rows}" if patch_rows else kind


def _add(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)
