"""Stopping, killing and resuming a run changes nothing; what would change something is refused."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import micro_config, micro_model

from k3jax.checkpoint.store import CheckpointError, CheckpointStore
from k3jax.config import ConfigError, MeshConfig, RunConfig, to_dict
from k3jax.data.loader import TextData, open_data
from k3jax.data.sources import DataError
from k3jax.sharding import make_mesh
from k3jax.train import loop
from k3jax.train import step as step_module
from k3jax.train.loop import NonFiniteError, StopRequest
from k3jax.train.metrics import read_records
from k3jax.train.resume import claimed


def train(config: RunConfig, allow_config_change: bool = False) -> None:
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        loop.train(config, mesh, allow_config_change=allow_config_change)


def read_only(config: RunConfig) -> CheckpointStore:
    return CheckpointStore(Path(config.run_dir) / "checkpoints", read_only=True)


def saved_arrays(config: RunConfig) -> tuple[int, dict[str, np.ndarray]]:
    """Step and all arrays of the latest checkpoint, by name."""
    store, device = read_only(config), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = {}
    for item in ("model", "training"):
        tree: dict = {}
        for path, (shape, dtype) in store.read_shapes(item).items():
            *parents, name = path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=device)
        for path, leaf in jax.tree_util.tree_leaves_with_path(store.load(item, tree)):
            arrays[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    store.close()
    return store.latest, arrays


def records(config: RunConfig, kind: str = "train") -> list[dict]:
    found = read_records(Path(config.run_dir) / "metrics.jsonl")
    timing = ("tokens_per_second", "mfu")
    return [{k: v for k, v in r.items() if k not in timing} for r in found if r["kind"] == kind]


def assert_same_end(a: RunConfig, b: RunConfig, curve: bool = True) -> None:
    """Both runs have the same last step, the same bits in every array, the same data position, the same curve."""
    (step_a, arrays_a), (step_b, arrays_b) = saved_arrays(a), saved_arrays(b)
    assert step_a == step_b
    assert arrays_a.keys() == arrays_b.keys()
    for name, value in arrays_a.items():
        assert value.tobytes() == arrays_b[name].tobytes(), name
    assert read_only(a).read_record().data == read_only(b).read_record().data
    if curve:
        assert records(a) == records(b)


@pytest.fixture(scope="session")
def uninterrupted(text_folder, tmp_path_factory):
    """One run of six steps from beginning to end."""
    config = micro_config(text_folder, tmp_path_factory.mktemp("uninterrupted") / "run")
    train(config)
    return config


def interrupt(monkeypatch, at_step: int) -> None:
    """Sends this process SIGTERM while the `at_step`-th step of the next run is being prepared."""
    calls, real = [], loop.place_batch

    def place_batch(*args):
        calls.append(1)
        if len(calls) == at_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(loop, "place_batch", place_batch)


def test_a_run_stopped_by_a_signal_saves_and_resumes_bit_for_bit(uninterrupted, micro_run, monkeypatch, capsys):
    config = micro_run()
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        train(config)
    assert read_only(config).latest == 3
    shown = capsys.readouterr().out
    assert "SIGTERM: stopped after step 3" in shown
    assert shown.index("compiling   the step") < shown.index("compiled    after") < shown.index("step 1/6")
    train(config)
    assert "resuming    from" in capsys.readouterr().out
    assert_same_end(config, uninterrupted)
    assert [r["step"] for r in records(config)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_asks_and_a_second_one_interrupts(number):
    before = signal.getsignal(number)
    with StopRequest().installed() as stop:
        os.kill(os.getpid(), number)
        assert stop.signal == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_evaluating_sampling_and_profiling_leave_no_trace_in_the_run(uninterrupted, micro_run, capsys):
    config = micro_run(
        train={"eval_interval": 2, "sample_interval": 6, "sample_tokens": 4, "profile_steps": (2, 3), "log_interval": 2}
    )
    train(config)
    assert_same_end(config, uninterrupted, curve=False)
    assert [r["step"] for r in records(config, "eval")] == [0, 2, 4, 6]
    assert [r["step"] for r in records(config)] == [2, 4, 6]
    assert list((Path(config.run_dir) / "profile").rglob("*.xplane.pb"))
    shown = capsys.readouterr().out
    assert "step 6: sample" in shown
    assert [r["step"] for r in read_records(Path(config.run_dir) / "samples.jsonl")] == [6]
    assert "unigram" in shown


def test_a_watch_sees_the_model_of_its_step_and_leaves_no_trace(uninterrupted, micro_run, capsys):
    config, seen = micro_run(), []

    def see(step, model, router_bias):
        seen.append((step, np.asarray(model.embed[...]), np.asarray(router_bias), len(records(config))))

    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        loop.train(config, mesh, watch=loop.Watch(see, 4), quiet=True)
    assert [(step, known) for step, _, _, known in seen] == [(0, 0), (4, 4), (6, 6)]
    assert capsys.readouterr().out == ""
    assert_same_end(config, uninterrupted)
    _, arrays = saved_arrays(config)
    _, embed, bias, _ = seen[-1]
    assert any(np.array_equal(embed, value) for name, value in arrays.items() if "embed" in name)
    assert any(np.array_equal(bias, value) for name, value in arrays.items() if "router_bias" in name)
    assert not np.array_equal(embed, seen[1][1])
    with pytest.raises(ValueError, match="interval"):
        loop.Watch(see, 0)


DRIVER = """
import json, os, signal, sys, time
import jax
from k3jax.config import RunConfig, from_dict
from k3jax.sharding import make_mesh
from k3jax.train import loop

values, mode, when = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = from_dict(RunConfig, values)
calls, real_place, real_save = [], loop.place_batch, loop.CheckpointStore.save

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def place_batch(*args):
    calls.append(1)
    if mode == "step" and len(calls) == when:
        die()
    if mode == "crash" and len(calls) == when:
        print("crash at", time.time(), flush=True)
        raise RuntimeError("crash")
    return real_place(*args)

def save(store, step, **parts):
    real_save(store, step, **parts)
    if mode == "save" and step >= when:
        die()

loop.place_batch, loop.CheckpointStore.save = place_batch, save
mesh = make_mesh(config.mesh)
with jax.set_mesh(mesh):
    loop.train(config, mesh)
"""


def run_process(config: RunConfig, mode: str = "none", when: int = 0) -> subprocess.CompletedProcess:
    """Trains in a process of its own that ends itself: before its `when`-th step, or while it saves step ≥ `when`."""
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    command = [sys.executable, "-c", DRIVER, json.dumps(to_dict(config)), mode, str(when)]
    return subprocess.run(command, env=os.environ | cache, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(("mode", "when"), [("step", 4), ("save", 4)])
def test_a_killed_run_resumes_bit_for_bit(uninterrupted, micro_run, mode, when):
    config = micro_run()
    killed = run_process(config, mode, when)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = [p.name for p in (Path(config.run_dir) / "checkpoints").iterdir()]
    if mode == "save":
        assert any("tmp" in name for name in left), "the save was over before the kill"
        assert read_only(config).steps == [2]
    else:  # the save of step 2 may still have been under way
        assert read_only(config).steps in ([], [2])
    train(config)
    assert_same_end(config, uninterrupted)


def test_a_crash_ends_the_process_within_seconds_and_the_run_resumes(uninterrupted, micro_run):
    config = micro_run()
    crashed = run_process(config, "crash", 4)
    ended = time.time()
    assert crashed.returncode == 1
    assert "RuntimeError: crash" in crashed.stderr
    assert ended - float(crashed.stdout.split("crash at ")[1].split()[0]) < 20
    assert read_only(config).steps == [2]  # the save in flight was finished
    train(config)
    assert_same_end(config, uninterrupted)


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(text_folder, tmp_path):
    rng = random.Random(os.getpid())
    long = {"steps": 24, "checkpoint_interval": 3}
    reference = micro_config(text_folder, tmp_path / "reference", train=long)
    config = micro_config(text_folder, tmp_path / "killed", train=long)
    train(reference)
    kills = 0
    while kills < 10:
        mode = ("step", "save")[kills % 2]
        done = read_only(config).latest or 0 if kills else 0
        # before the next save, so that progress is slow enough for ten kills; in a save, after it
        when = rng.randint(1, 3) if mode == "step" else done + 1
        killed = run_process(config, mode, when)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        kills += 1
    finished = run_process(config)
    assert finished.returncode == 0, finished.stderr
    assert_same_end(config, reference)


def test_a_finished_run_is_left_alone(uninterrupted, capsys):
    before = saved_arrays(uninterrupted)[1]
    train(uninterrupted)
    assert "6 (0 now" in capsys.readouterr().out
    assert all((before[name] == value).all() for name, value in saved_arrays(uninterrupted)[1].items())
    assert [r["step"] for r in records(uninterrupted)] == [1, 2, 3, 4, 5, 6]


def test_a_run_may_go_on_with_longer_sequences_when_told(micro_run, monkeypatch, capsys):
    config = micro_run()
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        train(config)
    longer = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=48, batch_size=2))
    with pytest.raises(ConfigError, match=r"data\.sequence_length +32 → 48"):
        train(longer)
    assert read_only(config).steps == [2]
    train(longer, allow_config_change=True)
    assert "changed   data.sequence_length" in capsys.readouterr().out
    saved = read_only(config).read_record()
    assert saved.data["next_row"] == 2 * 4 + 4 * 2
    assert saved.config["data"]["sequence_length"] == 48
    assert [r["step"] for r in records(config)] == [1, 2, 3, 4, 5, 6]


def test_another_models_checkpoint_is_refused_even_when_told(uninterrupted):
    other = dataclasses.replace(uninterrupted, model=micro_model(hidden_size=48))
    with pytest.raises(CheckpointError, match=r"another model.*\n.*model\.hidden_size +32 → 48"):
        train(other, allow_config_change=True)


def spoil(monkeypatch, config: RunConfig, folder: Path, steps: tuple[int, ...]) -> tuple[RunConfig, list[int]]:
    """A run whose loss is NaN in these steps only, each through one document; also returns those documents.

    A character of a document becomes \\x01 where that step reads it, and the loss is NaN where \\x01 is a target.
    """
    copy = Path(shutil.copytree(config.data.source, folder))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, source=str(copy)))
    data, documents = open_data(config.data), []
    with data.train_loader() as loader:
        for step, batch in zip(range(1, max(steps) + 1), loader):
            if step in steps:
                ids, targets, mask = (batch[name][0] for name in ("document_ids", "targets", "loss_mask"))
                text = bytes(targets[mask & (ids == ids[0])].astype(np.uint8)).decode()
                path = copy / data.documents.name(int(ids[0]))
                assert path.read_text().count(text) == 1
                path.write_text(path.read_text().replace(text, text[:-1] + "\x01"))
                documents.append(int(ids[0]))
    real = step_module.linear_cross_entropy

    def nan_at_the_mark(x, w, targets, mask, **options):
        loss, aux = real(x, w, targets, mask, **options)
        return jnp.where(jnp.any(targets == 1), jnp.nan, loss), aux

    monkeypatch.setattr(step_module, "linear_cross_entropy", nan_at_the_mark)
    return config, documents


def test_a_nan_stops_the_run_names_the_documents_and_may_be_skipped(micro_run, monkeypatch, tmp_path):
    config, (document,) = spoil(monkeypatch, micro_run(), tmp_path / "spoiled", (5,))
    with pytest.raises(NonFiniteError, match=r"step 5 is not finite: cross_entropy|step 5 is not finite"):
        train(config)
    facts = json.loads((Path(config.run_dir) / "nonfinite_step_5.json").read_text())
    assert facts["step"] == 5
    assert facts["metrics"]["loss"] == "nan"
    assert facts["documents"][str(document)].endswith(".txt")
    step, arrays = saved_arrays(config)
    assert step == 4
    assert all(np.isfinite(value).all() for value in arrays.values())

    patient = dataclasses.replace(config, train=dataclasses.replace(config.train, skip_nonfinite=1))
    train(patient)
    step, arrays = saved_arrays(patient)
    assert step == 6
    assert arrays["training['step']"] == 5  # one update fewer than batches
    assert all(np.isfinite(value).all() for value in arrays.values())


def test_a_nonfinite_step_names_documents_with_images(tmp_path):
    texts, pictures = MagicMock(), MagicMock()
    texts.__len__.return_value, texts.name, pictures.documents.name = 3, "text {}".format, "image {}".format
    data = TextData(*[MagicMock()] * 6, pictures)
    data = dataclasses.replace(data, documents=texts)
    run = object.__new__(loop._Run)
    run.config, run.run_dir, run.data = micro_config("", tmp_path), tmp_path, data
    run.store, run.skipped = MagicMock(latest=4), 0
    metrics = {"cross_entropy": math.nan, "z_loss": 0.0, "grad_norm": 1.0, "loss": math.nan}
    with pytest.raises(NonFiniteError):
        run._nonfinite(loop._Pending(5, {}, np.array([[-1, 2, 3, 8]]), 0, None), metrics, True)
    facts = json.loads((tmp_path / "nonfinite_step_5.json").read_text())
    assert facts["documents"] == {"2": "text 2", "3": "image 0", "8": "image 5"}


def test_a_spent_skip_budget_is_remembered_across_a_resume(micro_run, monkeypatch, tmp_path):
    config, _ = spoil(monkeypatch, micro_run(train={"skip_nonfinite": 1}), tmp_path / "spoiled", (1, 4))
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        train(config)
    with pytest.raises(NonFiniteError, match=r"step 4 .*allows no more"):
        train(config)


def test_held_out_text_without_anything_to_predict_is_refused(micro_run, tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n' * 100 + '{"text": "a"}\n')
    config = micro_run(train={"eval_interval": 2}, data={"source": str(tmp_path / "empty.jsonl")})
    with pytest.raises(DataError, match="hold nothing to predict"):
        train(config)


def test_two_runs_in_one_directory_at_once_are_refused(micro_run):
    config = micro_run()
    with claimed(Path(config.run_dir)), pytest.raises(ConfigError, match="another process trains in"):
        train(config)


def test_an_optimizer_that_makes_nan_of_finite_gradients_stops_before_anything_is_saved(micro_run, monkeypatch):
    config = micro_run(train={"skip_nonfinite": 9, "checkpoint_interval": 1})
    monkeypatch.setattr(step_module, "update_rms", lambda updates, groups: {"adamw": jnp.float32(jnp.nan)})
    with pytest.raises(NonFiniteError, match=r"update_rms/adamw .*the state is lost"):
        train(config)
    assert read_only(config).steps == []


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_losses_on_another_mesh(micro_run, tmp_path, capsys):
    """FSDP over four devices; from step 4 on ZeRO-1 over two by two, and on one device. Both evaluate and sample."""
    options = {"eval_interval": 3, "sample_interval": 6, "sample_tokens": 4}
    first = micro_run(mesh=MeshConfig(data=4, fsdp=True), train=options)
    train(first)
    printed = capsys.readouterr().out
    assert "mesh: data 4; parameters cut, optimizer state cut" in printed
    assert "segments/0/runs/1/ffn/w1 " in printed
    assert "sample" in printed
    expected = records(first)
    for name, mesh in (("zero", MeshConfig(data=2, expert=2)), ("one", MeshConfig())):
        run_dir = tmp_path / name
        shutil.copytree(first.run_dir, run_dir)
        shutil.rmtree(run_dir / "checkpoints" / "6")
        other = dataclasses.replace(first, mesh=mesh, run_dir=str(run_dir))
        with pytest.raises(ConfigError, match=r"mesh\.data"):
            train(other)
        train(other, allow_config_change=True)
        found = records(other)
        assert [record["step"] for record in found] == [record["step"] for record in expected]
        for a, b in zip(found, expected):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4), (name, a["step"])
