"""`python train.py CONFIG --field value`: bad input gives one clear message and exit code 2."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from k3jax.config import RunConfig

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
        (["--mesh.tensor", "2"], "ConfigError: "),
        (["--model.vocab-size", "300"], "DataError: tokenizer bytes"),
    ],
)
def test_what_cannot_be_honoured_is_one_message_and_exit_code_2(main, capsys, tmp_path, arguments, message):
    assert main([str(ROOT / "configs/nano.py"), "--run-dir", str(tmp_path / "run"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
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


def test_the_script_fails_within_seconds_and_without_a_traceback(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs/nano.py"), "--data.source", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.strip().startswith("DataError")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["nano", "proxy", "k3"])
def test_the_shipped_configurations_are_valid(name):
    assert isinstance(runpy.run_path(str(ROOT / f"configs/{name}.py"))["config"], RunConfig)
