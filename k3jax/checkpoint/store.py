"""Checkpoints of a run: written in the background, complete or absent, read back by shape and sharding.

    RUN_DIR/checkpoints/<step>/     one checkpoint; appears by an atomic rename when all of it is on disk
        model/                      parameters and router biases (all that generation needs)
        training/                   optimizer state, step, RNG
        _CHECKPOINT_METADATA        `RunRecord` as JSON: resolved configuration, tokenizer, data position

`CheckpointStore` is that, `ArrayStore` the same for any items. A directory is local, or anything else that etils and
Orbax take as a path (`gs://…`, with its own way to commit). Restoring holds `RESTORE_BYTES` of what it reads at a time.

Arrays are stored under dotted paths of plain names (`model` / `params.segments.0.runs.1.mixer.q_proj`), without a word
of the classes that held them. This is the only file that imports Orbax: its v1 API still lives in `experimental`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import orbax.checkpoint.experimental.v1 as ocp
from etils import epath
from jax.experimental import multihost_utils

FORMAT = 1
RESTORE_BYTES = 1 << 30
"""Bytes that a process holds at a time of what it reads, or a little more than its largest shard if that is more."""
# Orbax's own policies do not satisfy its own protocol types
_KEEP: Any = ocp.training.preservation_policies
_SAVE: Any = ocp.training.save_decision_policies


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or that belongs to another run; the message says what differs."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a checkpoint says about its run beside the arrays (JSON types only)."""

    config: dict[str, Any]
    """`config.to_dict` of the resolved `RunConfig`."""
    tokenizer: dict[str, Any]
    """Identity of the tokenizer: name, vocabulary size, hash of its ranks."""
    source: dict[str, Any]
    """Identity of the training text: hash of the file list, bytes."""
    data: dict[str, Any]
    """Position of the data iterator, as its `get_state` gave it."""


def to_paths(tree: Any) -> dict[str, Any]:
    """A pytree as nested dicts of its leaves, keyed by plain attribute names, dict keys and list positions.

    Parameters of an NNX module come out under the paths of `nnx.to_pure_dict`: the `.value` level is dropped.

    Raises:
        ValueError: two leaves that would get the same path.
    """
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, name = _names(path)
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
        if name in node:
            raise ValueError(f"two leaves at {'.'.join(_names(path))}")
        node[name] = leaf
    return out


def from_paths(like: Any, values: dict[str, Any]) -> Any:
    """Inverse of `to_paths`: the leaves of `values` in the structure of `like`."""
    leaves = []
    for path, _ in jax.tree_util.tree_leaves_with_path(like):
        node = values
        for name in _names(path):
            node = node[name]
        leaves.append(node)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def flat_paths(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by dotted path; raises as `to_paths`."""
    return _flat(to_paths(tree))


def from_flat(like: Any, values: dict[str, Any]) -> Any:
    """Inverse of `flat_paths`: the leaves of `values` in the structure of `like`."""
    paths = [".".join(_names(path)) for path, _ in jax.tree_util.tree_leaves_with_path(like)]
    return jax.tree.unflatten(jax.tree.structure(like), [values[path] for path in paths])


def _names(path: tuple[Any, ...]) -> list[str]:
    level = jax.tree_util.GetAttrKey("value")  # of NNX variables
    kept = [entry for entry in path[1:] if entry != level]
    return [jax.tree_util.keystr((entry,), simple=True) for entry in (*path[:1], *kept)]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in tree.items():
        out.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return out


class ArrayStore:
    """Versions of named trees of arrays in one directory. Opening it removes what a killed process left half-written or
    half-deleted.

    Args:
        directory: created if missing.
        keep_last: newest versions that are kept.
        keep_every: versions at multiples of this step are kept for good (None: none are).
        read_only: look only; nothing is cleaned, created or deleted.

    Raises:
        CheckpointError: `read_only` and no such directory.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        read_only: bool = False,
    ) -> None:
        self.directory = epath.Path(directory if "://" in str(directory) else Path(directory).absolute())
        policies: list[Any] = [_KEEP.LatestN(keep_last)]
        if keep_every is not None:
            policies.append(_KEEP.EveryNSteps(keep_every))
        if read_only:
            if not self.directory.is_dir():
                raise CheckpointError(f"{self.directory} does not exist")
        else:
            self._remove_stale(keep_last, keep_every)
        self._checkpointer = ocp.training.Checkpointer(
            str(self.directory),
            # the training loop decides when to save
            save_decision_policy=_SAVE.FixedIntervalPolicy(1),
            preservation_policy=_KEEP.PreserveAll() if read_only else _KEEP.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=not read_only,
        )

    def _remove_stale(self, keep_last: int, keep_every: int | None) -> None:
        """Removes versions past their time: a process killed while deleting one leaves part of it."""
        if jax.process_index() == 0:
            steps = sorted(int(p.name) for p in self.directory.glob("*") if p.name.isdigit())
            for step in steps[:-keep_last]:
                if keep_every is None or step % keep_every:
                    (self.directory / str(step)).rmtree()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("k3jax.checkpoint.remove_stale")

    @property
    def steps(self) -> list[int]:
        """Steps of the versions, ascending: complete ones, and one that is being written."""
        return [c.step for c in self._checkpointer.checkpoints]

    @property
    def latest(self) -> int | None:
        """Step of the newest version."""
        return self.steps[-1] if self.steps else None

    def reload(self) -> None:
        """Looks again at what another process has written or deleted since."""
        self._checkpointer.reload()

    def save_items(self, step: int, items: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Starts writing a version and returns when the arrays may be donated again.

        A save in flight is waited for first. Does nothing when this step is already saved.

        Args:
            items: trees of arrays by name.
            metadata: JSON types.

        Raises:
            CheckpointError: an earlier save failed in the background.
        """
        if step in self.steps:
            return
        _trim()  # of the save before
        with self._writing():
            self._checkpointer.save_checkpointables_async(
                step, {name: to_paths(tree) for name, tree in items.items()}, force=True, custom_metadata=metadata
            )

    def read_metadata(self, step: int | None = None) -> dict[str, Any]:
        """The metadata of a version (default: the latest), without reading an array.

        Raises:
            CheckpointError: no such version, or a damaged one.
        """
        step = self._resolve(step)
        with self._reading(step):
            values: Any = dict(cast(Any, self._checkpointer.checkpointables_metadata(step).custom_metadata or {}))
            if not values:
                raise ValueError("_CHECKPOINT_METADATA holds no record")
        return values

    def read_shapes(self, item: str, step: int | None = None) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every stored array of an item by dotted path, without reading the arrays."""
        tree = self._stored(item, self._resolve(step))
        return {path: (tuple(m.shape), str(m.dtype)) for path, m in tree.items()}

    def _stored(self, item: str, step: int) -> dict[str, Any]:
        """Orbax's description of every stored array by dotted path."""
        with self._reading(step):
            return _flat(cast(Any, self._checkpointer.checkpointables_metadata(step).metadata)[item])

    def load(self, item: str, abstract: Any, step: int | None = None, *, cast: bool = False) -> Any:
        """One item in the structure, shapes, dtypes and shardings of `abstract`.

        Args:
            abstract: pytree of `jax.ShapeDtypeStruct` with shardings on real devices.
            cast: convert stored values to the dtypes asked for; otherwise another dtype is refused.

        Raises:
            CheckpointError: no such version, a damaged one, or arrays that are missing, left over or of another shape
                or dtype.
        """
        step = self._resolve(step)
        wanted, stored = to_paths(abstract), self._stored(item, step)
        self._compare({p: (tuple(m.shape), str(m.dtype)) for p, m in stored.items()}, _flat(wanted), step, cast)
        largest = max((_read_bytes(stored[path], leaf) for path, leaf in _flat(wanted).items()), default=0)
        context = ocp.Context()
        # Orbax waits for bytes to come free, and refuses what would never fit
        context.memory_options.read_concurrent_bytes = max(RESTORE_BYTES, largest + 1)
        with self._reading(step), context:
            values = self._checkpointer.load_checkpointables(step, {item: wanted})[item]
        _trim()
        return from_paths(abstract, values)

    def _compare(
        self, stored: dict[str, tuple[tuple[int, ...], str]], wanted: dict[str, Any], step: int, cast: bool
    ) -> None:
        problems = [f"{p}: not in the checkpoint" for p in sorted(wanted.keys() - stored.keys())]
        problems += [f"{p}: in the checkpoint only" for p in sorted(stored.keys() - wanted.keys())]
        for path in sorted(wanted.keys() & stored.keys()):
            (shape, dtype), leaf = stored[path], wanted[path]
            if shape != tuple(leaf.shape) or (dtype != str(leaf.dtype) and not cast):
                problems.append(f"{path}: {dtype}{list(shape)} stored, {leaf.dtype}{list(leaf.shape)} wanted")
        if problems:
            more = [f"… and {len(problems) - 20} more"] if len(problems) > 20 else []
            raise CheckpointError(
                f"{self.directory / str(step)} does not fit this model or optimizer:\n  "
                + "\n  ".join(problems[:20] + more)
            )

    def _resolve(self, step: int | None) -> int:
        self.wait()  # a save in flight is already in `steps`
        if step is None:
            step = self.latest
        if step is None or step not in self.steps:
            found = ", ".join(map(str, self.steps)) or "none"
            raise CheckpointError(f"no checkpoint{'' if step is None else f' {step}'} in {self.directory}; has {found}")
        return step

    @contextlib.contextmanager
    def _reading(self, step: int) -> Generator[None]:
        """Says which checkpoint could not be read, and what to do."""
        try:
            yield
        except Exception as error:  # Orbax, TensorStore and JSON each raise their own
            others = ", ".join(str(s) for s in self.steps if s != step)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise CheckpointError(
                f"{self.directory / str(step)} cannot be read, files in it may be damaged or missing"
                + (f"; delete this directory to use another checkpoint (there are {others})" if others else "")
                + f". {reason[:400]}"
            ) from error

    @contextlib.contextmanager
    def _writing(self) -> Generator[None]:
        """Says where a save failed, this one or one in the background; what was complete stays as it was."""
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore reports a full disk as a ValueError
            reason = " ".join(str(error).split())
            raise CheckpointError(f"cannot save in {self.directory}: {reason[:400]}") from error

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointError: a save failed in the background.
        """
        with self._writing():
            self._checkpointer.wait()

    def close(self) -> None:
        """Finishes a save in flight; raises as `wait`."""
        with self._writing():
            self._checkpointer.close()


def _trim() -> None:
    """Gives freed memory back: glibc keeps it, more from save to save, in the arenas of Orbax's threads."""
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _read_bytes(stored: Any, wanted: jax.ShapeDtypeStruct) -> int:
    """Bytes that Orbax counts for reading a shard of an array: whole chunks of the file."""
    chunk, whole = stored.storage_metadata.chunk_shape, stored.shape
    shard = wanted.sharding.shard_shape(wanted.shape) if wanted.sharding else wanted.shape
    sizes = [
        min(-(-size // part) * part, (-(-cut // part) + (cut % part > 0)) * part)
        for size, cut, part in zip(whole, shard, chunk)
    ]
    return math.prod(sizes) * jnp.dtype(stored.dtype).itemsize


class CheckpointStore:
    """The checkpoints of a run, in one directory or in two.

    Args:
        copy: a second directory that receives every checkpoint too, such as a remote one. What the first has not is
            read from there. A save waits until the one before is complete in both.
        directory, keep_last, keep_every, read_only: see `ArrayStore`; the last three hold for both directories.

    Raises:
        CheckpointError: see `ArrayStore`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        copy: str | Path | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        read_only: bool = False,
    ) -> None:
        directories = [directory] if copy is None else [directory, copy]
        self._stores = [
            ArrayStore(d, keep_last=keep_last, keep_every=keep_every, read_only=read_only) for d in directories
        ]
        self.directory = self._stores[0].directory

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending: complete ones, and one that is being written."""
        return sorted(set().union(*(store.steps for store in self._stores)))

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self.steps[-1] if self.steps else None

    def _holder(self, step: int | None) -> tuple[ArrayStore, int | None]:
        """The first directory that has this checkpoint (default: the latest), or just the first."""
        step = self.latest if step is None else step
        return next((store for store in self._stores if step in store.steps), self._stores[0]), step

    def save(self, step: int, *, model: Any, training: Any, record: RunRecord) -> None:
        """Starts writing a checkpoint; see `ArrayStore.save_items`."""
        for store in self._stores:
            store.save_items(
                step,
                {"model": model, "training": training},
                {"format": FORMAT, **dataclasses.asdict(record)},
            )

    def read_record(self, step: int | None = None) -> RunRecord:
        """The record of a checkpoint (default: the latest), without reading an array.

        Raises:
            CheckpointError: no such checkpoint, one of an unknown format, or a damaged one.
        """
        store, step = self._holder(step)
        values = store.read_metadata(step)
        found = values.pop("format", None)
        if found != FORMAT:
            raise CheckpointError(f"{store.directory / str(step)} has format {found}, this version reads {FORMAT}")
        return RunRecord(**values)

    def read_shapes(self, item: str, step: int | None = None) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every stored array of an item; see `ArrayStore.read_shapes`."""
        store, step = self._holder(step)
        return store.read_shapes(item, step)

    def load(self, item: str, abstract: Any, step: int | None = None, *, cast: bool = False) -> Any:
        """One item ("model" or "training"); see `ArrayStore.load`."""
        store, step = self._holder(step)
        return store.load(item, abstract, step, cast=cast)

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointError: a save failed in the background.
        """
        for store in self._stores:
            store.wait()

    def close(self) -> None:
        """Finishes saves in flight; raises as `wait`."""
        with contextlib.ExitStack() as stack:
            for store in self._stores:
                stack.callback(store.close)
