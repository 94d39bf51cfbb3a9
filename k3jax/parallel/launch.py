"""Several processes of one run: who they are, whether all of them came, and what they tell each other.

    initialize(LaunchConfig(), expected_devices=8)      # before anything touches a device

Who a process is, its launcher says: torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, and LOCAL_RANK,
LOCAL_WORLD_SIZE where a node has several processes), else those that Slurm's `srun` sets. With neither there is one
process, and every function here is then free.

All processes first meet at the coordinator's port, where who is late or wrong is known by name and any failure is an
error; `jax.distributed` starts after that. It would abort the process on a missing peer, naming nobody, and crash when
it is tried again on a port in use.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import ConfigError, LaunchConfig


class LaunchError(RuntimeError):
    """The processes of a run did not come together, or another one of them failed; the message says which."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among those of its run."""

    launcher: Literal["torchrun", "slurm"]
    coordinator: str
    count: int
    index: int
    local_count: int
    """Processes on this node."""
    local_index: int


def find_place(config: LaunchConfig, environ: Mapping[str, str]) -> Place | None:
    """This process by the variables of its launcher; None: the only one.

    Raises:
        ConfigError: variables that are missing or no numbers.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:  # also inside a Slurm job that starts torchrun
        place = _torchrun(config, environ)
    elif "SLURM_STEP_NODELIST" in environ and "SLURM_PROCID" in environ:  # a batch script itself has no step
        place = _slurm(config, environ)
    else:
        return None
    if not (0 <= place.index < place.count and 0 <= place.local_index < place.local_count):
        raise ConfigError(f"{place.launcher} gave this process impossible numbers: {place}")
    return place if place.count > 1 else None


def _torchrun(config: LaunchConfig, environ: Mapping[str, str]) -> Place:
    count = _number(environ, "WORLD_SIZE")
    address = config.coordinator
    if address is None and count > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if missing:
            raise ConfigError(
                f"RANK and WORLD_SIZE are set but {' and '.join(missing)} not; or give --launch.coordinator"
            )
        port = _number(environ, "MASTER_PORT")
        # torchrun's own store listens on MASTER_PORT as long as the run lasts
        port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address = f"{environ['MASTER_ADDR']}:{port}"
    local = _number(environ, "LOCAL_RANK", 0)
    return Place(
        "torchrun",
        address or "",
        count,
        _number(environ, "RANK"),
        _number(environ, "LOCAL_WORLD_SIZE", local + 1),
        local,
    )


def _slurm(config: LaunchConfig, environ: Mapping[str, str]) -> Place:
    step = "SLURM_STEP_NUM_TASKS"  # SLURM_NTASKS is the job's: another number inside `srun -n`
    count = _number(environ, step if step in environ else "SLURM_NTASKS")
    address = config.coordinator
    if address is None:
        port = 61440 + (_number(environ, "SLURM_JOB_ID") + _number(environ, "SLURM_STEP_ID", 0)) % 4096
        address = f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}"
    local = _number(environ, "SLURM_LOCALID", 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", str(local + 1))  # "4(x2),3"
    most = max(int(n) for n in re.findall(r"(\d+)(?:\(x\d+\))?", tasks))
    return Place("slurm", address, count, _number(environ, "SLURM_PROCID"), most, local)


def first_host(nodelist: str) -> str:
    """`"gpu[003-005,9]-ib,other"` → `"gpu003-ib"`."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodelist)
    return "".join(part or "" for part in found.groups()) if found else nodelist


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdigit():
        raise ConfigError(f"environment variable {name} must be a number, got {value!r}")
    return int(value)


def local_devices(place: Place, mode: Literal["gpu", "node"] | None, environ: Mapping[str, str]) -> list[int] | None:
    """GPUs that this process takes, counted among those that it sees; None: all.

    Raises:
        ConfigError: a mode that does not fit what the launcher started, or a GPU that is not visible.
    """
    if (mode or ("gpu" if place.local_count > 1 else "node")) == "node":
        if place.local_count > 1:
            raise ConfigError(
                f"launch.mode 'node' is one process a node, but {place.launcher} started {place.local_count}; "
                "start one, or use launch.mode 'gpu'"
            )
        return None
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if len(visible) == 1:  # the launcher bound it already (--gpus-per-task, --gpu-bind)
        return [0]
    if visible and place.local_index >= len(visible):
        raise ConfigError(
            f"process {place.index} is number {place.local_index} of its node, where CUDA_VISIBLE_DEVICES shows "
            f"{len(visible)} GPUs: start as many processes a node as it has GPUs, or use launch.mode 'node'"
        )
    return [place.local_index]


def initialize(config: LaunchConfig, expected_devices: int) -> Place | None:
    """Starts `jax.distributed` if a launcher started several processes; call it before anything touches a device.

    Args:
        expected_devices: the product of the mesh. Every process of several must find just as many in all of them.

    Returns:
        This process's place; None in a run of one process.

    Raises:
        ConfigError: variables or a mode that make no sense, or another number of devices; the message says which
            process has how many.
        LaunchError: not all processes came in `config.timeout` seconds; the message says which.
    """
    place = find_place(config, os.environ)
    if place is None:
        return None
    devices = local_devices(place, config.mode, os.environ)
    hosts = meet(place, socket.gethostname(), config.timeout)
    # its handler would swallow a SIGTERM that the training loop has to see
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        place.coordinator,
        place.count,
        place.index,
        devices,
        cluster_detection_method="deactivate",
        initialization_timeout=config.timeout,
        heartbeat_timeout_seconds=config.heartbeat,
        shutdown_timeout_seconds=config.heartbeat,  # how long a process that fails waits for the others
    )
    check_devices(expected_devices, hosts)
    return place


def check_devices(expected: int, hosts: list[str]) -> None:
    """Refuses a run whose processes do not have as many devices as the mesh.

    Raises:
        ConfigError: the message says how many each process has, and which have fewer than their share.
    """
    if jax.device_count() == expected:
        return
    counts = [0] * jax.process_count()
    for device in jax.devices():
        counts[device.process_index] += 1
    share = expected / len(counts)
    few = [f"{i} on {hosts[i]}" for i, n in enumerate(counts) if n < share]
    found = ", ".join(f"process {i} on {host}: {n}" for i, (n, host) in enumerate(zip(counts, hosts)))
    raise ConfigError(
        f"the mesh is of {expected} devices, but {len(counts)} processes have {sum(counts)} ({found})"
        + (f"; less than its share of {share:g} has process {', '.join(few)}" if few else "; use a larger mesh")
    )


def meet(place: Place, host: str, timeout: float) -> list[str]:
    """Waits at the coordinator's port until every process has come.

    Returns:
        Host names by process.

    Raises:
        LaunchError: not all came in `timeout` seconds, or they do not belong together. Every process that came gets
            the same message.
    """
    try:
        answer = _receive(place, host, timeout) if place.index == 0 else _call(place, host, timeout)
    except OSError as error:
        raise LaunchError(
            f"process {place.index} on {host}: no answer from process 0 at {place.coordinator} in {timeout:g} s "
            f"({error}); is it running, and does this address reach its node?"
        ) from error
    if "error" in answer:
        raise LaunchError(answer["error"])
    return answer["hosts"]


def _waits() -> Generator[float]:
    """Seconds between attempts: a quarter, doubling to five."""
    wait = 0.25
    while True:
        yield wait
        wait = min(2 * wait, 5.0)


def _call(place: Place, host: str, timeout: float) -> dict[str, Any]:
    """Says who this process is, and hears the answer; tries again while process 0 is not there yet."""
    deadline = time.monotonic() + timeout
    name, _, port = place.coordinator.rpartition(":")
    for wait in _waits():
        try:
            left = max(deadline - time.monotonic(), 0.1)
            with socket.create_connection((name.strip("[]"), int(port)), timeout=left) as connection:
                connection.settimeout(left + 5)  # process 0 may have started later, and speaks at its own deadline
                stream = connection.makefile("rw")
                print(json.dumps({"process": place.index, "count": place.count, "host": host}), file=stream, flush=True)
                return json.loads(stream.readline())
        except (OSError, json.JSONDecodeError) as error:
            if time.monotonic() + wait > deadline:
                raise error if isinstance(error, OSError) else ConnectionError("the connection ended") from error
        time.sleep(wait)
    raise AssertionError


def _receive(place: Place, host: str, timeout: float) -> dict[str, Any]:
    """Hears all others, then answers all of them."""
    deadline = time.monotonic() + timeout
    hosts, waiting = {0: host}, []
    answer: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        with _listen(int(place.coordinator.rpartition(":")[2]), place.count, deadline) as server:
            while len(hosts) < place.count and not answer:
                try:
                    server.settimeout(max(deadline - time.monotonic(), 0.01))
                    connection = stack.enter_context(server.accept()[0])
                except TimeoutError:
                    missing = ", ".join(str(i) for i in range(place.count) if i not in hosts)
                    came = ", ".join(f"{i} on {h}" for i, h in sorted(hosts.items()))
                    answer = {
                        "error": f"processes missing after {timeout:g} s: {missing} of {place.count}; came: {came}"
                    }
                    break
                try:
                    connection.settimeout(5)
                    stream = stack.enter_context(connection.makefile("rw"))
                    hello = json.loads(stream.readline())
                    index, count = int(hello["process"]), int(hello["count"])
                except (OSError, ValueError, TypeError, KeyError):
                    continue  # not one of us
                waiting.append(stream)
                who = f"process {index} on {hello['host']}"
                if count != place.count:
                    answer = {"error": f"{who} was told of {count} processes, process 0 on {host} of {place.count}"}
                elif index in hosts and hosts[index] != hello["host"]:
                    answer = {"error": f"two processes are number {index}: on {hosts[index]} and on {hello['host']}"}
                hosts[index] = hello["host"]
        # the port is free again before anyone goes on to jax's service there
        answer = answer or {"hosts": [hosts[i] for i in range(place.count)]}
        for stream in waiting:
            with contextlib.suppress(OSError):
                print(json.dumps(answer), file=stream, flush=True)
    return answer


def _listen(port: int, count: int, deadline: float) -> socket.socket:
    """A socket at `port`, as soon as it is free: an earlier run may still be leaving."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    for wait in _waits():
        try:
            return socket.create_server(("", port), family=family, backlog=count, dualstack_ipv6=dual)
        except OSError:
            if time.monotonic() + wait > deadline:
                raise
        time.sleep(wait)
    raise AssertionError


def is_first() -> bool:
    """Whether this is process 0, which alone writes and prints."""
    return jax.process_index() == 0


def exchange(value: Any) -> list[Any]:
    """JSON values of all processes, by process; every one of them has to call."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(data.size)).reshape(-1)
    rows = multihost_utils.process_allgather(np.pad(data, (0, int(sizes.max()) - data.size)))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


@contextlib.contextmanager
def together(what: str) -> Generator[None]:
    """A block that succeeds in all processes or fails in all; it may not communicate.

    Raises:
        LaunchError: it failed in another process.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = [i for i, bad in enumerate(exchange(error is not None)) if bad]
    if error is not None:
        raise error
    if failed:
        raise LaunchError(f"process {', '.join(map(str, failed))} failed to {what}; see what it printed")


def require_same(facts: Mapping[str, Any]) -> None:
    """Refuses to go on if a fact (JSON) is not the same in all processes.

    Raises:
        ConfigError: the message names the fact and a process where it is another than in process 0.
    """
    every = exchange(dict(facts))
    for name in facts:
        for index, theirs in enumerate(every):
            if theirs[name] != every[0][name]:
                raise ConfigError(
                    f"{name} of process {index} is another than process 0's: {theirs[name]} and {every[0][name]}"
                )


class StopVote:
    """Lets all processes leave after the same step: what one of them was asked, all hear on the device.

    A vote is one tiny maximum over the mesh that nobody waits for; its result is read with the metrics of the step. It
    hears of SIGINT too, and of a signal within a step, where jax's preemption service looks once a second.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._size = mesh.size
        self._max = jax.jit(jnp.max)

    def cast(self, signal_name: str | None) -> jax.Array:
        """This process's word, int32 [] of all processes; each has to call. Read it with `name`."""
        number = signal.Signals[signal_name].value if signal_name else 0
        words = np.full(self._size, number, np.int32)
        return self._max(jax.make_array_from_callback(words.shape, self._sharding, lambda index: words[index]))

    @staticmethod
    def name(vote: int) -> str | None:
        """The signal that some process received."""
        return signal.Signals(vote).name if vote else None
