"""Who a process is, and how all of them meet."""

import socket
import threading
import time

import pytest

from k3jax.config import ConfigError, LaunchConfig
from k3jax.parallel.launch import LaunchError, Place, find_place, first_host, local_devices, meet

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",  # of the job; the step has 8
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}


def find(environ, **config) -> Place | None:
    return find_place(LaunchConfig(**config), environ)


def test_torchrun_says_who_a_process_is():
    assert find(TORCHRUN | LOCAL) == Place("torchrun", "gpu1:29500", 8, 5, 4, 1)
    assert find(TORCHRUN) == Place("torchrun", "gpu1:29500", 8, 5, 1, 0)  # a process per node, by hand
    # torchrun itself listens on MASTER_PORT
    assert find(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).coordinator == "gpu1:29501"
    assert find(SLURM | TORCHRUN).launcher == "torchrun"
    alone = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE")}
    assert find(alone, coordinator="head:1234").coordinator == "head:1234"


def test_slurm_says_who_a_process_is():
    assert find(SLURM) == Place("slurm", f"gpu003:{61440 + 70003 % 4096}", 8, 5, 4, 1)
    assert find(SLURM, coordinator="head:1234").coordinator == "head:1234"
    per_node = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x8)", "SLURM_LOCALID": "0"}
    assert find(per_node).local_count == 1
    for nodes, host in (
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[003-005,9],other", "gpu003"),
        ("gpu[7,9]-ib", "gpu7-ib"),
        ("a-1-[12-13]", "a-1-12"),
    ):
        assert first_host(nodes) == host


def test_without_several_processes_there_is_one():
    assert find({}) is None
    assert find({"RANK": "0", "WORLD_SIZE": "1"}) is None
    batch_script = {k: v for k, v in SLURM.items() if "STEP" not in k}
    assert find(batch_script | {"SLURM_JOB_NODELIST": "gpu[003-004]"}) is None  # no srun: nobody else runs this


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT not; or give --launch.coordinator"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE must be a number, got 'two'"),
        (TORCHRUN | {"RANK": "8"}, "impossible numbers"),
        (TORCHRUN | {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "impossible numbers"),
    ],
)
def test_variables_that_make_no_sense_are_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        find(environ)
    for coordinator in ("head", ":1", "head:0", "head:x", "head:70000"):
        with pytest.raises(ConfigError, match="must be HOST:PORT"):
            LaunchConfig(coordinator=coordinator)


def test_a_process_takes_one_gpu_or_all_of_its_node():
    several, alone = Place("slurm", "a:1", 8, 5, 4, 1), Place("slurm", "a:1", 8, 5, 1, 0)
    assert local_devices(several, None, {}) == [1]
    assert local_devices(alone, None, {}) is None
    assert local_devices(alone, "gpu", {}) == [0]
    assert local_devices(several, "gpu", {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == [1]
    assert local_devices(several, "gpu", {"CUDA_VISIBLE_DEVICES": "5"}) == [0]  # bound by the launcher
    with pytest.raises(ConfigError, match="mode 'node' is one process a node, but slurm started 4"):
        local_devices(several, "node", {})
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES shows 2 GPUs"):
        local_devices(Place("slurm", "a:1", 8, 6, 4, 2), "gpu", {"CUDA_VISIBLE_DEVICES": "0,1"})


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def meet_all(indices, count: int, timeout: float = 20, port: int | None = None, delays=None, counts=None) -> dict:
    """What each of these processes (threads here) gets from `meet`: hosts, or the error."""
    port, results = port or free_port(), {}

    def one(index: int) -> None:
        time.sleep((delays or {}).get(index, 0))
        place = Place("torchrun", f"127.0.0.1:{port}", (counts or {}).get(index, count), index, 1, 0)
        try:
            results[index] = meet(place, f"host{index}", timeout)
        except LaunchError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in indices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_processes_meet_whoever_comes_first():
    hosts = ["host0", "host1", "host2", "host3"]
    assert meet_all(range(4), 4, delays={0: 1}) == dict.fromkeys(range(4), hosts)
    assert meet_all(range(4), 4, delays={3: 0.5}) == dict.fromkeys(range(4), hosts)


def test_a_port_that_an_earlier_run_still_holds_and_strangers_do_no_harm():
    port = free_port()
    held = socket.create_server(("", port))
    threading.Timer(0.6, held.close).start()

    def stranger() -> None:
        time.sleep(1.5)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")

    threading.Thread(target=stranger).start()
    results = meet_all(range(2), 2, port=port, delays={1: 3})
    assert results == {0: ["host0", "host1"], 1: ["host0", "host1"]}


def test_missing_processes_are_named_to_all_that_came():
    results = meet_all((0, 2), 4, timeout=1.5)
    assert results[0] == results[2]
    assert results[0] == "processes missing after 1.5 s: 1, 3 of 4; came: 0 on host0, 2 on host2"


def test_without_process_0_the_others_give_up_and_say_where_they_looked():
    started = time.monotonic()
    (message,) = meet_all((1,), 2, timeout=1).values()
    assert time.monotonic() - started < 10
    assert message.startswith("process 1 on host1: no answer from process 0 at 127.0.0.1:")


def test_processes_of_different_runs_are_told_apart():
    results = meet_all(range(2), 2, counts={1: 3})
    assert results[0] == results[1] == "process 1 on host1 was told of 3 processes, process 0 on host0 of 2"
