"""Two processes import and export together; their files make one directory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from released import PACKED, TINY, assert_same_tensors, read

ROOT = Path(__file__).parents[2]


def exchange(out: Path, plan: str = "", source: Path = TINY) -> list[dict]:
    """What each of two processes with two devices printed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = os.environ | {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    common["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    command = [sys.executable, str(Path(__file__).with_name("exchange_driver.py")), str(source), str(out), plan]
    processes = [
        subprocess.Popen(
            command,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended):
        assert process.returncode == 0, errors[-4000:]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "source"), [("", TINY), ("packed", PACKED)], ids=["plain", "packed"])
def test_two_processes_read_their_share_and_write_one_directory(tmp_path, plan, source):
    first, second = exchange(tmp_path / "x", plan, source)
    assert (first["error"], second["error"]) == ("", "")
    tensors = read(source)
    assert_same_tensors(read(tmp_path / "x"), tensors)
    experts = sum(value.nbytes for name, value in tensors.items() if ".experts." in name)
    others = sum(value.nbytes for value in tensors.values()) - experts
    for process in (first, second):
        assert experts / 2 < process["read"] <= experts / 2 + others


@pytest.mark.slow
def test_what_fails_in_one_process_fails_in_both_and_leaves_nothing(tmp_path):
    errors = [process["error"] for process in exchange(tmp_path / "x", "nan")]
    assert any("model.norm.weight" in error for error in errors)
    assert all(errors)
    assert list(tmp_path.iterdir()) == []
