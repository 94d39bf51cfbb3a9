"""Published weights over TCP, for consumers that share no directory with the run.

    request   one line of JSON: {"want": null} or {"want": VERSION}
    answer    one line of JSON: {"versions": [VERSION]}, or {"manifest": …} and then the bytes of its tensors, one after
              the other in the manifest's order, or {"error": …}

The server sends the newest version from host memory; who began to pull an older one gets it to its end. A consumer
receives tensors in buckets: while one goes to the devices the next one arrives, and it holds no more than those two.
Nobody is asked who they are: listen only where everyone may read the weights.

`jax.experimental.transfer` would do without host memory, but what it is told to hand out can be pulled once, cannot be
taken back and stays allocated if nobody comes for it: each consumer that is killed would cost the trainer a copy.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, cast

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint.store import CheckpointError
from k3jax.config import ConfigError

BUCKET_BYTES = 64 << 20
"""Of tensors that go to the devices together; a larger tensor is a bucket of its own."""
TIMEOUT = 30.0
"""Seconds that either side waits for the other's next byte."""
_REQUEST_BYTES = 1024
_ANSWER_BYTES = 64 << 20  # of a manifest

Places = dict[str, jax.ShapeDtypeStruct]


class StreamError(CheckpointError):
    """The other side of a stream is gone, late, or does not have what was asked for."""


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class StreamServer:
    """Sends the newest version to whoever asks, a thread each.

    Args:
        address: HOST:PORT to listen at; port 0 takes a free one.

    Raises:
        ConfigError: nobody can listen there.
    """

    def __init__(self, address: str) -> None:
        host, port = _split(address)
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise ConfigError(f"train.publish.address: cannot listen at {address}: {error}") from error
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._offered: tuple[int, dict[str, Any], list[np.ndarray]] | None = None
        threading.Thread(target=self._accept, name="k3jax.stream", daemon=True).start()

    def offer(self, version: int, manifest: dict[str, Any], arrays: list[jax.Array]) -> None:
        """Copies a version to the host, and sends it from now on instead of the one before."""
        self._offered = version, manifest, [np.asarray(x) for x in jax.device_get(arrays)]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), name="k3jax.stream", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        # a consumer that is gone or talks nonsense is no concern of the run
        with connection, contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            connection.settimeout(TIMEOUT)
            with connection.makefile("rb") as stream:
                want = json.loads(stream.readline(_REQUEST_BYTES))["want"]
            offered = self._offered
            if want is None:
                _send_line(connection, {"versions": [offered[0]] if offered else []})
            elif offered is None or offered[0] != want:
                _send_line(connection, {"error": f"version {want} is not on offer any more"})
            else:
                _send_line(connection, {"manifest": offered[1]})
                for array in offered[2]:
                    connection.sendall(_bytes(array))

    def close(self) -> None:
        """Stops listening; who is being sent a version gets the rest of it while this process lives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()


def _send_line(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def _bytes(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


@contextlib.contextmanager
def _asked(address: str, want: int | None) -> Generator[tuple[dict[str, Any], BinaryIO]]:
    """The answer to a request, and the stream behind it."""
    try:
        with socket.create_connection(_split(address), timeout=TIMEOUT) as connection:
            _send_line(connection, {"want": want})
            with connection.makefile("rb", buffering=1 << 20) as stream:
                answer = json.loads(stream.readline(_ANSWER_BYTES))
                if "error" in answer:
                    raise StreamError(f"{address}: {answer['error']}")
                yield answer, cast(BinaryIO, stream)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StreamError(f"no published weights from {address}: {error or type(error).__name__}") from error


def versions(address: str) -> list[int]:
    """What a server has, newest first.

    Raises:
        StreamError: nobody there.
    """
    with _asked(address, None) as (answer, _):
        return list(map(int, answer["versions"]))


def pull(address: str, version: int, places: Callable[[dict[str, Any]], Places]) -> dict[str, jax.Array]:
    """The arrays of a version.

    Args:
        places: from the manifest (JSON) shapes, dtypes and shardings of what follows it, in that order; it raises for
            a manifest that it does not like, before anything is allocated.

    Raises:
        StreamError: the server is gone, also on the way, or has another version by now.
    """
    with _asked(address, version) as (answer, stream), ThreadPoolExecutor(1) as pool:
        wanted, arrays = places(answer["manifest"]), {}
        arriving = None
        for names in [*_buckets(wanted), []]:
            coming = pool.submit(_receive, stream, [wanted[name] for name in names])
            if arriving is not None:
                arrays |= _placed(arriving[0], arriving[1].result(), wanted)
            arriving = names, coming
        return arrays


def _buckets(wanted: Places) -> Iterator[list[str]]:
    names, size = [], 0
    for name, leaf in wanted.items():
        nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        if names and size + nbytes > BUCKET_BYTES:
            yield names
            names, size = [], 0
        names, size = [*names, name], size + nbytes
    yield names


def _receive(stream: Any, leaves: list[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    arrays = [np.empty(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves]
    for array in arrays:
        buffer = _bytes(array)
        while buffer:
            count = stream.readinto(buffer)
            if not count:
                raise ConnectionError("the stream ended early")
            buffer = buffer[count:]
    return arrays


def _placed(names: list[str], values: list[np.ndarray], wanted: Places) -> dict[str, jax.Array]:
    arrays = jax.device_put(values, [wanted[name].sharding for name in names])
    return dict(zip(names, jax.block_until_ready(arrays)))
