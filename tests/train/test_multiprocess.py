"""Several processes on loopback train as one does, stop together, and leave one log."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
from micro import micro_config, micro_model
from processes import Processes, run

from k3jax.checkpoint.store import CheckpointStore
from k3jax.config import ImagesConfig, MeshConfig, RunConfig, VisionConfig
from k3jax.train.metrics import read_records

SMALL = {"num_layers": 1, "mla_layers": (0,), "num_dense_layers": 0, "dtype": "float64", "param_dtype": "float64"}


def build(text_folder, folder: Path, **parts) -> RunConfig:
    """A run in float64, where sums in another order differ by less than 1e-9."""
    folder.mkdir(exist_ok=True)
    parts = {"model": micro_model(**SMALL), "optimizer": {"muon_ns_dtype": "float64"}} | parts
    return micro_config(text_folder, folder / "run", **parts)


def losses(config: RunConfig, kind: str = "train") -> dict[int, float]:
    """By step; every step has one record."""
    records = [r for r in read_records(Path(config.run_dir) / "metrics.jsonl") if r["kind"] == kind]
    found = {r["step"]: r["loss"] for r in records}
    assert len(found) == len(records)
    return found


def rows(out: Path, accumulation: int = 1) -> list[list]:
    """Global batches that the processes of a run placed, step by step.

    In these meshes every process holds as many rows as any other, of each micro-batch the next ones.
    """
    parts = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(out.glob("rows-*.jsonl"))]
    micro = [
        [[p[m * (n := len(p) // accumulation) : (m + 1) * n] for m in range(accumulation)] for p in part]
        for part in parts
    ]
    return [[row for m in range(accumulation) for process in step for row in process[m]] for step in zip(*micro)]


def assert_close(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    for step, loss in expected.items():
        assert found[step] == pytest.approx(loss, rel=1e-9), step


def test_two_processes_train_as_one_does(text_folder, tmp_path):
    parts = {"train": {"steps": 3}, "mesh": MeshConfig(data=2)}
    one, two = build(text_folder, tmp_path / "one", **parts), build(text_folder, tmp_path / "two", **parts)
    alone = Processes(one, 1, 2, out=tmp_path / "one")
    printed = run(two, 2, 1, out=tmp_path / "two")
    ((status, _, errors),) = alone.wait()
    assert status == 0, errors
    assert_close(losses(two), losses(one))
    assert rows(tmp_path / "two") == rows(tmp_path / "one")
    assert "devices     2 × cpu (cpu) in 2 processes; mesh: data 2" in printed[0]
    assert "step 3/3" in printed[0]
    assert "step" not in printed[1]
    saved = [CheckpointStore(Path(c.run_dir) / "checkpoints", read_only=True).read_record() for c in (one, two)]
    assert saved[0].data == saved[1].data
    assert None not in saved[1].data["cursors"]


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_processes_without_losing_or_repeating_a_row(text_folder, tmp_path):
    """Four processes, stopped by a SIGTERM to one of them; two, stopped likewise; one.

    Both axes of the batch, FSDP, two micro-batches.
    """
    train = {"steps": 8, "checkpoint_interval": 8, "eval_interval": 4, "sample_interval": 8, "sample_tokens": 4}
    train["accumulation"] = 2
    parts = {"train": train, "mesh": MeshConfig(data=2, expert=2, fsdp=True), "data": {"batch_size": 8}}
    one, many = build(text_folder, tmp_path / "one", **parts), build(text_folder, tmp_path / "many", **parts)
    run(one, 1, 4, out=tmp_path / "one")
    seen = []
    for count, devices, victim in ((4, 1, 2), (2, 2, 0), (1, 4, None)):
        out = tmp_path / f"of{count}"
        out.mkdir()
        plan = {} if victim is None else {"term": [victim, 2]}
        printed = run(many, count, devices, out=out, plan=plan)
        if victim is not None:
            # asked before the second step, heard while the third one ran
            assert f"SIGTERM: stopped after step {len(seen) + 3}" in printed[0]
        assert not any("step" in text for text in printed[1:])
        seen += rows(out, 2)
    assert seen == rows(tmp_path / "one")
    assert_close(losses(many), losses(one))
    assert_close(losses(many, "eval"), losses(one, "eval"))


@pytest.mark.slow
def test_two_processes_with_images_train_as_one_does(text_folder, tmp_path):
    """Each packs the images of its own rows; one packs them all together."""
    tower = VisionConfig(
        hidden_size=16, num_layers=1, num_heads=2, head_dim=8, mlp_size=24, patch_size=8, position_grid=(2, 8)
    )
    parts = {
        "model": micro_model(**SMALL, vision=tower),
        "mesh": MeshConfig(data=2, tensor=2),
        "data": {"batch_size": 8, "sequence_length": 64, "images": ImagesConfig("digits", share=0.5, patches=64)},
        "train": {"steps": 3, "accumulation": 2},
    }
    one, two = build(text_folder, tmp_path / "one", **parts), build(text_folder, tmp_path / "two", **parts)
    run(one, 1, 4)
    run(two, 2, 2)
    assert_close(losses(two), losses(one))


@pytest.mark.slow
def test_processes_that_do_not_fit_the_run_are_refused_by_name(text_folder, tmp_path):
    config = build(text_folder, tmp_path, mesh=MeshConfig(data=4))
    for status, _, errors in Processes(config, 2, [2, 1]).wait():
        assert status == 2
        assert "the mesh is of 4 devices, but 2 processes have 3 (process 0 on " in errors
        assert "less than its share of 2 has process 1 on " in errors
    config = dataclasses.replace(config, mesh=MeshConfig(data=2))
    for status, _, errors in Processes(config, 2, 1, of={1: ["--data.seed", "1"]}).wait():
        assert status == 2
        assert "configuration of process 1 is another than process 0's" in errors
    for rank, (status, _, errors) in enumerate(Processes(config, 2, 1, of={1: ["--data.source", "/nowhere"]}).wait()):
        assert status == 2
        assert ("/nowhere" if rank else "process 1 failed to start") in errors


@pytest.mark.slow
def test_a_step_that_is_not_finite_stops_all_and_names_the_documents_of_all(text_folder, tmp_path):
    config = build(text_folder, tmp_path, mesh=MeshConfig(data=2))
    out = tmp_path / "out"
    out.mkdir()
    for status, _, errors in Processes(config, 2, 1, plan={"nan": [1, 3]}, out=out).wait():
        assert status == 1
        assert "stopped: step 3 is not finite" in errors
    facts = json.loads((Path(config.run_dir) / "nonfinite_step_3.json").read_text())
    texts = [(text_folder / name).read_text() for name in facts["documents"].values()]
    for row in rows(out)[2]:
        start = bytes(token for token in row if token < 256)[:12].decode()
        assert any(start in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_when_a_process_fails_the_others_end_and_the_run_can_go_on(text_folder, tmp_path, how):
    config = build(text_folder, tmp_path / "one", mesh=MeshConfig(data=2))
    other = build(text_folder, tmp_path / "two", mesh=MeshConfig(data=2))
    run(config, 1, 2)
    started = time.monotonic()
    results = Processes(other, 2, 1, ["--launch.heartbeat", "10"], plan={how: [1, 4]}).wait()
    assert all(status != 0 for status, _, _ in results)
    assert time.monotonic() - started < 120
    run(other, 2, 1)
    assert_close(losses(other), losses(config))
