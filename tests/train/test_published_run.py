"""A run publishes while it trains; no consumer serves what the run did not publish, and all go on after any death."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from micro import micro_model
from processes import free_port, run

from k3jax.checkpoint.publish import Directory, Follower, Publisher
from k3jax.checkpoint.store import flat_paths
from k3jax.config import ConfigError, MeshConfig, PublishConfig, to_dict
from k3jax.generate import load, source_of, versions
from k3jax.sharding import make_mesh
from k3jax.train import loop
from k3jax.train.metrics import read_records

ROOT = Path(__file__).parents[2]


def train(config) -> None:
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        loop.train(config, mesh)


def losses(config) -> list[float]:
    return [r["loss"] for r in read_records(Path(config.run_dir) / "metrics.jsonl") if r["kind"] == "train"]


def served_by(config) -> tuple[int, dict[str, np.ndarray]]:
    served = next(versions(source_of(f"{config.run_dir}/published"), 0.01))
    return served.version, {path: np.asarray(x) for path, x in flat_paths((served.model, served.router_bias)).items()}


def saved_by(config) -> tuple[int, dict[str, np.ndarray]]:
    loaded = load(config.run_dir)
    return loaded.step, {path: np.asarray(x) for path, x in flat_paths((loaded.model, loaded.router_bias)).items()}


def test_a_run_publishes_what_it_saves_and_trains_as_without(micro_run, tmp_path):
    parts = {"steps": 4, "checkpoint_interval": 2}
    config = micro_run(train=parts | {"publish": PublishConfig(interval=2)})
    train(config)
    assert sorted(int(p.name) for p in (tmp_path / "run/published").iterdir()) == [2, 4]
    (version, served), (step, saved) = served_by(config), saved_by(config)
    assert version == step == 4
    for path, value in saved.items():
        np.testing.assert_array_equal(served[path], value, err_msg=path)
    published = losses(config)
    (tmp_path / "run").rename(tmp_path / "published-run")
    train(micro_run(train=parts))
    assert losses(config) == published
    train(micro_run(train=parts | {"publish": PublishConfig(interval=1), "checkpoint_copy": str(tmp_path / "copy")}))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(data=2, expert=2, fsdp=True), MeshConfig(pipe=2), MeshConfig(data=2)])
def test_every_mesh_publishes_what_it_saves(micro_run, mesh):
    publish = PublishConfig(interval=2)
    config = micro_run(
        model=micro_model(num_layers=4, mla_layers=(1, 3)),
        train={"steps": 2, "checkpoint_interval": 2, "publish": publish, "accumulation": 2},
        data={"batch_size": 8},
        mesh=mesh,
    )
    if mesh == MeshConfig(data=2):
        run(config, 2, 1)  # two processes
    else:
        train(config)
    (version, served), (step, saved) = served_by(config), saved_by(config)
    assert version == step == 2
    for path, value in saved.items():
        np.testing.assert_array_equal(served[path], value, err_msg=path)


def test_a_stream_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="this run has 2; publish in a directory"):
        Publisher(None, address="127.0.0.1:0")


class Process:
    """A `publish_driver.py`."""

    def __init__(self, log: Path, *arguments: str):
        self.log = log
        environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        command = [sys.executable, str(Path(__file__).with_name("publish_driver.py")), *arguments]
        self.process = subprocess.Popen(command, env=environment, stdout=log.open("a"), stderr=subprocess.STDOUT)

    def died(self) -> None:
        assert self.process.wait(timeout=200) == -signal.SIGKILL, self.log.read_text()[-3000:]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def lines(path: Path) -> list[tuple[int, str]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(path: Path, version: int, *processes: Process) -> None:
    deadline = time.monotonic() + 200
    while not any(v == version for v, _ in lines(path)):
        for process in processes:
            assert process.process.poll() is None, process.log.read_text()[-3000:]
        assert time.monotonic() < deadline, [p.log.read_text()[-3000:] for p in processes]
        time.sleep(0.1)


@pytest.mark.slow
def test_no_death_and_no_damage_makes_a_consumer_serve_what_was_not_published(micro_run, tmp_path):
    """A trainer and two consumers on loopback, one at the directory, one at the stream.

    The trainer is killed while it writes version 2 and while it sends version 4, and resumes each time; a consumer is
    killed within a pull; a byte of version 6 changes on disk, and one on the way.
    """
    publish = PublishConfig(
        interval=1, address=f"127.0.0.1:{free_port()}", directory=str(tmp_path / "versions"), keep=3
    )
    config = micro_run(train={"steps": 8, "checkpoint_interval": 1, "keep_last": 9, "publish": publish})
    values, directory, address = json.dumps(to_dict(config)), publish.directory, publish.address
    served = {name: tmp_path / f"{name}.jsonl" for name in ("by-directory", "by-stream", "killed", "flipped")}

    def start_trainer(plan: str) -> Process:
        return Process(tmp_path / "trainer.log", "trainer", values, plan)

    def start_consumer(name: str, source: str, plan: str = "") -> Process:
        return Process(tmp_path / f"{name}.log", "consumer", source, str(served[name]), plan)

    followers = [start_consumer("by-directory", directory), start_consumer("by-stream", address)]
    everyone = list(followers)
    try:
        start_trainer("directory 2").died()
        assert {p.name for p in Path(directory).iterdir()} > {"1"}
        assert not any(v == 2 for v, _ in lines(served["by-directory"]))
        start_trainer("stream 4").died()
        trainer = start_trainer("stay")
        everyone += [trainer]
        wait_for(served["by-directory"], 8, *followers, trainer)
        wait_for(served["by-stream"], 8, *followers, trainer)

        killed = start_consumer("killed", address, "kill")
        everyone += [killed]
        killed.died()
        assert not lines(served["killed"])
        everyone += [start_consumer("killed", address), start_consumer("flipped", address, "flip")]
        wait_for(served["killed"], 8, trainer)
        wait_for(served["flipped"], 8, trainer)
        assert "wrong checksum" in (tmp_path / "flipped.log").read_text()
    finally:
        for process in everyone:
            process.end()

    newest = Path(directory) / "8"
    file = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    said: list[str] = []
    follower = Follower(Directory(directory), report=said.append)
    assert follower.poll()
    assert follower.current is not None
    assert follower.current.version == 7
    assert "version 8 is not taken" in said[0]

    truth = set(lines(Path(config.run_dir) / "truth.jsonl"))
    assert {v for v, _ in truth} == set(range(1, 9))
    assert len(truth) == 8  # a version that is published again after a death is the same
    for path in served.values():
        assert set(lines(path)) <= truth, path
        assert [v for v, _ in lines(path)] == sorted({v for v, _ in lines(path)})
