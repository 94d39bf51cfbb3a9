"""Weights of a run for others while it goes on: numbered versions, each complete or absent, proved before they serve.

    publisher = Publisher("runs/x/published", address="127.0.0.1:7000")
    publisher.publish(snapshot(params, router_bias, version=step, config=config, prompt=ids))

    follower = Follower(Directory("runs/x/published"))   # or `Stream("127.0.0.1:7000")`
    while not follower.poll(): ...                       # or in the background: `with follower.following(seconds)`
    served = follower.current                            # take it once for each text; caches belong to its version

    follower.take(snapshot(...))                         # in one process: from mesh to mesh, neither disk nor network

A version is the number of optimizer steps. A directory holds them as Orbax writes them: sharded, each appearing by an
atomic rename, so that the newest one that is there is the pointer to the latest, and nothing else can disagree with it.
A consumer holds two of them while it changes from one to the other. `k3jax.checkpoint.version` says what one is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from k3jax.checkpoint import stream
from k3jax.checkpoint.store import ArrayStore, CheckpointError, flat_paths, from_flat
from k3jax.checkpoint.version import (
    CANARY_LENGTH,
    CANARY_TOLERANCE,
    Manifest,
    PublicationError,
    PublishedWeights,
    abstract_weights,
    canary,
    checksums,
    to_serve,
)
from k3jax.config import ConfigError, RunConfig, from_dict
from k3jax.model.k3 import K3
from k3jax.sharding import shardings


class Publisher:
    """Where a run publishes: a directory, a stream (`k3jax.checkpoint.stream`), or both.

    Args:
        directory: created if missing; what a killed publisher left half-written there is removed.
        keep: newest versions that the directory keeps.
        address: HOST:PORT to listen at. The stream has the newest version only, in host memory.

    Raises:
        ConfigError: an address that cannot be listened at, or a stream of a run of several processes.
    """

    def __init__(self, directory: str | Path | None, *, keep: int = 2, address: str | None = None) -> None:
        self._server: stream.StreamServer | None = None
        if address is not None:
            if jax.process_count() > 1:
                raise ConfigError(
                    "train.publish.address: a stream sends the arrays of one process, and this run has "
                    f"{jax.process_count()}; publish in a directory that consumers can read"
                )
            self._server = stream.StreamServer(address)
        self._store = ArrayStore(directory, keep_last=keep) if directory is not None else None

    def publish(self, weights: PublishedWeights) -> None:
        """Offers a version: returns when it has left the devices; in the directory it appears when it is complete.

        Raises:
            CheckpointError: the version before could not be written.
        """
        manifest = weights.manifest
        if self._store is not None:
            self._store.save_items(manifest.version, {"weights": weights.arrays}, manifest.to_json())
        if self._server is not None:
            self._server.offer(manifest.version, manifest.to_json(), [weights.arrays[p] for p in manifest.tensors])

    @property
    def address(self) -> str | None:
        """Where the stream is."""
        return self._server.address if self._server else None

    def wait(self) -> None:
        """Returns when the directory has what was published; raises as `publish`."""
        if self._store is not None:
            self._store.wait()

    def close(self) -> None:
        """Finishes what is being written, and closes the stream."""
        with contextlib.ExitStack() as stack:
            for part in (self._store, self._server):
                if part is not None:
                    stack.callback(part.close)


class Source(Protocol):
    """Where versions come from; every method raises `CheckpointError` for what may be tried again later."""

    def versions(self) -> list[int]:
        """Versions on offer, newest first."""
        ...

    def fetch(self, version: int, places: Callable[[Manifest], dict[str, jax.ShapeDtypeStruct]]) -> PublishedWeights:
        """One of them, in the layout that `places` gives for its manifest (or refuses)."""
        ...

    def close(self) -> None: ...


class Directory:
    """A `Source`: the directory of a `Publisher`, which need not exist yet. Restores slices of each array only."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = directory
        self._store: ArrayStore | None = None

    def _opened(self) -> ArrayStore:
        if self._store is None:
            self._store = ArrayStore(self._directory, read_only=True)
        self._store.reload()
        return self._store

    def versions(self) -> list[int]:
        return self._opened().steps[::-1]

    def fetch(self, version: int, places: Callable[[Manifest], dict[str, jax.ShapeDtypeStruct]]) -> PublishedWeights:
        store = self._opened()
        manifest = Manifest.from_json(store.read_metadata(version))
        return PublishedWeights(manifest, store.load("weights", places(manifest), version))

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


class Stream:
    """A `Source`: the address of a `Publisher`, HOST:PORT, where nobody need listen yet."""

    def __init__(self, address: str) -> None:
        self._address = address

    def versions(self) -> list[int]:
        return stream.versions(self._address)

    def fetch(self, version: int, places: Callable[[Manifest], dict[str, jax.ShapeDtypeStruct]]) -> PublishedWeights:
        manifest: Manifest | None = None

        def in_order(values: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
            nonlocal manifest
            manifest = Manifest.from_json(values)
            wanted = places(manifest)
            return {path: wanted[path] for path in manifest.tensors}

        arrays = stream.pull(self._address, version, in_order)
        assert manifest is not None
        return PublishedWeights(manifest, arrays)

    def close(self) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Served:
    """One version, ready to use; experts that were published or trained as MXFP4 are held as codes."""

    version: int
    model: K3
    router_bias: jax.Array
    config: RunConfig


class Follower:
    """A consumer: keeps the newest version that proved right, and goes on serving it while others fail.

    Args:
        source: None where versions come by `take` alone.
        mesh: where the model goes; None: the mesh that is set, or the first device.
        report: hears why a version was refused, once for each reason.
    """

    def __init__(
        self,
        source: Source | None = None,
        *,
        mesh: jax.sharding.Mesh | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self.current: Served | None = None
        """Replaced as a whole, never changed: what is read from it once belongs together."""
        self._source, self._report, self._said = source, report, ""
        self._mesh = jax.sharding.get_mesh() if mesh is None else mesh
        self._taking, self._closed = threading.Lock(), threading.Event()

    def poll(self) -> bool:
        """Takes the newest version of the source that is newer than the one at hand and proves right.

        Returns:
            Whether `current` is another one now. Failures are reported and may be tried again.
        """
        assert self._source is not None, "a follower without a source takes what it is given"
        try:
            versions = self._source.versions()
        except CheckpointError as error:
            self._say(str(error))
            return False
        if not versions and self.current is None:
            self._say("nothing is published there yet")
        for version in versions:
            if self.current is not None and version <= self.current.version:
                break
            try:
                self.take(self._source.fetch(version, self._places))
                return True
            except CheckpointError as error:
                self._say(f"version {version} is not taken: {error}")
        return False

    def _say(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._report(reason)

    @contextlib.contextmanager
    def following(self, seconds: float) -> Generator[Follower]:
        """Polls in the background, that often, inside the block."""

        def work() -> None:
            while not self._closed.wait(seconds):
                try:
                    self.poll()
                except Exception as error:  # memory that is short, say: what is served is served on
                    self._say(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=work, name="k3jax.follower", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._closed.set()
            thread.join()
            if self._source is not None:
                self._source.close()

    def take(self, weights: PublishedWeights) -> None:
        """Proves a version and serves it from then on; arrays that lie elsewhere are moved to this mesh.

        Raises:
            PublicationError: names, shapes, dtypes, checksums or the canary's log-probabilities are not what they
                should be. What was served before still is.
        """
        with self._taking, self._on_mesh():
            manifest, places = weights.manifest, self._places(weights.manifest)
            arrays = jax.device_put(weights.arrays, {path: leaf.sharding for path, leaf in places.items()})
            found = checksums(arrays)
            wrong = [path for path, tensor in manifest.tensors.items() if found[path] != tensor.checksum]
            if wrong:
                raise PublicationError(
                    f"wrong checksum of {', '.join(wrong[:5])} ({len(wrong)} of {len(found)} tensors)"
                )
            config = from_dict(RunConfig, manifest.config)
            tree = from_flat(abstract_weights(config.model, manifest.experts), arrays)
            model, router_bias = to_serve(tree, config.model, manifest.experts), tree["router_bias"]
            log_probs = np.asarray(canary(model, router_bias, np.asarray(manifest.prompt, np.int32)))
            gap = float(np.mean(np.abs(log_probs - np.asarray(manifest.log_probs))))
            if not gap <= CANARY_TOLERANCE[config.model.dtype]:  # NaN fails
                raise PublicationError(
                    f"the canary's log-probabilities differ from the trainer's by {gap:.3g} on average"
                )
            self.current, self._said = Served(manifest.version, model, router_bias, config), ""

    @contextlib.contextmanager
    def _on_mesh(self) -> Generator[None]:
        if self._mesh.empty:
            yield
        else:
            with jax.set_mesh(self._mesh):  # a mesh is set for one thread
                yield

    def _places(self, manifest: Manifest) -> dict[str, jax.ShapeDtypeStruct]:
        """Where the arrays of a version go, if it is one of the model that its configuration describes."""
        try:
            model = from_dict(RunConfig, manifest.config).model
            if self.current is not None and model != self.current.config.model:
                raise PublicationError("it is of another model than the one that is served")
            with self._on_mesh():
                tree = abstract_weights(model, manifest.experts)
                device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
                layouts = jax.tree.map(lambda _: device, tree) if self._mesh.empty else shardings(tree, self._mesh)
        except ConfigError as error:
            raise PublicationError(str(error)) from error
        wanted, where = flat_paths(tree), flat_paths(layouts)
        problems = [f"{path}: missing" for path in sorted(wanted.keys() - manifest.tensors.keys())]
        problems += [f"{path}: unexpected" for path in sorted(manifest.tensors.keys() - wanted.keys())]
        for path in wanted.keys() & manifest.tensors.keys():
            tensor, leaf = manifest.tensors[path], wanted[path]
            if (tensor.shape, tensor.dtype) != (tuple(leaf.shape), str(leaf.dtype)):
                problems.append(f"{path}: {tensor.dtype}{list(tensor.shape)}, wanted {leaf.dtype}{list(leaf.shape)}")
        if len(manifest.prompt) != CANARY_LENGTH or len(manifest.log_probs) != CANARY_LENGTH - 1:
            problems.append(f"canary: {len(manifest.prompt)} tokens, {len(manifest.log_probs)} log-probabilities")
        if problems:
            raise PublicationError("; ".join(problems[:10]))
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where[path]) for path, leaf in wanted.items()
        }
