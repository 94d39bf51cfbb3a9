"""`python train.py CONFIG --field value`: bad input gives one clear message and exit code 2."""

import importlib.util
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax.config import ConfigError, MoEConfig, RunConfig
from k3jax.train.loop import NonFiniteError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def main(monkeypatch):
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_script", module)  # tyro looks up the source of the class
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [(["--train.stepz", "3"], "--train.steps"), (["--optimizer.learnin-rate", "1"], "--optimizer.learning-rate")],
)
def test_an_unknown_field_is_refused_with_the_nearest_one(main, capsys, arguments, nearest):
    with pytest.raises(SystemExit) as exit:
        main([str(ROOT / "configs/nano.py"), *arguments])
    assert exit.value.code == 2
    assert nearest in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.accumulation", "3"], "ConfigError: train.accumulation 3 must divide"),
        (["--data.source", "/nowhere"], "DataError: data.source '/nowhere'"),
        (["--data.tokenizer", "/nowhere"], "DataError: data.tokenizer"),
        (["--mesh.data", "3"], "ConfigError: data.batch_size 8 must be a multiple of .* = 3 × 1 × 1, such as 6 or 9;"),
        (["--mesh.tensor", "3"], "ConfigError: data.sequence_length 256 must be a multiple of"),
        (["--model.vocab-size", "300"], "DataError: tokenizer bytes"),
        (["--model.dtype", "float64"], "ConfigError: float64 needs JAX_ENABLE_X64=1"),
    ],
)
def test_what_cannot_be_honoured_is_one_message_and_exit_code_2(main, capsys, tmp_path, arguments, message):
    assert main([str(ROOT / "configs/nano.py"), "--run-dir", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err
    assert re.match(message, error)
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_missing_or_wrong_configuration_file_is_named(main, capsys, tmp_path):
    assert main(["configs/nanoo.py"]) == 2
    assert "configs/nanoo.py" in capsys.readouterr().err
    (tmp_path / "empty.py").write_text("x = 1")
    assert main([str(tmp_path / "empty.py")]) == 2
    assert "must define `config = RunConfig(...)`" in capsys.readouterr().err
    assert main([]) == 2
    assert "first argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("TrainConfig(stepz=3)", "line 2: TypeError: .*'stepz'; did you mean steps[?]"),
        ("nano(hidden_sise=3)", "line 2: TypeError: .*'hidden_sise'; did you mean hidden_size[?]"),
        ("TrainConfig(steps='10')", "TrainConfig.steps must be positive, got '10'"),
        ("RunConfig(model=nano(), data=DataConfig(batch_size=8.0))", "data.batch_size must be int, got 8.0"),
        ("RunConfig(model=nano(), train=TrainConfig(remat='all'))", "train.remat must be one of 'none', .* got 'all'"),
        ("RunConfig(model=nano(dtype='float16'))", "model.dtype must be one of 'float32', .* got 'float16'"),
        ("RunConfig(model=nano(), optimizer=OptimizerConfig(adam_b1=1.0))", "OptimizerConfig.adam_b1 must be in"),
        ("RunConfig(model=nano(), optimizer=OptimizerConfig(clip_norm=0.0))", "OptimizerConfig.clip_norm must be"),
        ("RunConfig(", "SyntaxError"),
    ],
)
def test_a_wrong_value_or_name_in_a_configuration_file_is_one_message(main, capsys, tmp_path, body, message):
    path = tmp_path / "run.py"
    path.write_text(f"from k3jax.config import *\nconfig = {body}\n")
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ")
    assert re.search(message, error)


def test_groups_that_leave_no_choice_of_experts_are_refused():
    moe = {"num_experts": 8, "expert_size": 16, "latent_size": 16, "num_groups": 4, "topk_groups": 1}
    with pytest.raises(ConfigError, match="below the 2 experts"):
        MoEConfig(**moe, experts_per_token=2)
    MoEConfig(**moe, experts_per_token=1)


def test_the_script_fails_within_seconds_and_without_a_traceback(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs/nano.py"), "--data.source", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.strip().startswith("DataError")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("error", "status"), [(None, 0), (NonFiniteError("step 3 is not finite"), 1)])
def test_the_exit_status_tells_a_run_that_ended_or_was_stopped_from_one_that_failed(main, monkeypatch, error, status):
    def train(*args, **kwargs):  # it returns when done and after SIGTERM: see test_loop
        if error is not None:
            raise error

    monkeypatch.setattr(sys.modules["train_script"], "train", train)
    assert main([str(ROOT / "configs/nano.py")]) == status


@pytest.mark.parametrize("name", ["nano", "proxy", "k3"])
def test_the_shipped_configurations_are_valid(name):
    assert isinstance(runpy.run_path(str(ROOT / f"configs/{name}.py"))["config"], RunConfig)
