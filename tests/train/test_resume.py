"""What may change between a checkpoint and the run that goes on from it."""

import dataclasses

import pytest
from micro import micro_config

from k3jax.checkpoint.store import CheckpointError, RunRecord
from k3jax.config import ConfigError, to_dict
from k3jax.train.resume import ALWAYS_FREE, check_resume, claimed

CONFIG = to_dict(micro_config("text", "runs/a"))


def record(changes: dict | None = None, tokenizer: str = "bytes", files: str = "abc") -> RunRecord:
    config = {name: dict(value) if isinstance(value, dict) else value for name, value in CONFIG.items()}
    for name, value in (changes or {}).items():
        node, names = config, name.split(".")
        for part in names[:-1]:
            node[part] = dict(node[part])
            node = node[part]
        node[names[-1]] = value
    return RunRecord(config, {"fingerprint": tokenizer, "vocab_size": 512}, {"files_hash": files, "bytes": 9}, {})


def test_nothing_changed_needs_no_permission_and_says_nothing():
    assert check_resume(record(), record(), "here", allow_config_change=False) == []


@pytest.mark.parametrize("name", sorted(ALWAYS_FREE))
def test_what_is_only_shown_and_kept_may_change_freely(name):
    (line,) = check_resume(record(), record({name: "other"}), "here", allow_config_change=False)
    assert name in line


@pytest.mark.parametrize(
    "name",
    ["train.steps", "train.seed", "train.remat", "optimizer.learning_rate", "data.sequence_length", "data.seed"]
    + ["mesh.data", "model.dtype", "model.kda.chunk_size"],
)
def test_what_changes_the_result_is_refused_with_the_difference_unless_told(name):
    with pytest.raises(ConfigError, match=rf"{name} .* → 'other'") as error:
        check_resume(record(), record({name: "other"}), "here", allow_config_change=False)
    assert "--allow-config-change" in str(error.value)
    (line,) = check_resume(record(), record({name: "other"}), "here", allow_config_change=True)
    assert name in line


@pytest.mark.parametrize("name", ["model.hidden_size", "model.situ_beta", "model.moe.experts_per_token"])
def test_another_model_is_refused_always(name):
    with pytest.raises(CheckpointError, match=rf"another model.*\n +{name}"):
        check_resume(record(), record({name: 7}), "here", allow_config_change=True)


def test_another_tokenizer_is_another_model_and_another_text_another_run():
    with pytest.raises(CheckpointError, match="tokenizer fingerprint"):
        check_resume(record(), record(tokenizer="tiktoken:1"), "here", allow_config_change=True)
    with pytest.raises(ConfigError, match="training text files_hash"):
        check_resume(record(), record(files="def"), "here", allow_config_change=False)


def test_a_field_that_the_checkpoint_does_not_know_counts_as_changed():
    old = record()
    del old.config["optimizer"]["clip_norm"]
    with pytest.raises(ConfigError, match=r"optimizer\.clip_norm +None → 1\.0"):
        check_resume(old, record(), "here", allow_config_change=False)
    assert dataclasses.asdict(old)["config"]["train"] == CONFIG["train"]


def test_a_run_directory_is_held_by_one_process_and_named_when_it_cannot_be_written(tmp_path):
    with claimed(tmp_path / "a/run"), pytest.raises(ConfigError, match="another process trains in .*a/run"):
        claimed(tmp_path / "a/run").__enter__()
    with claimed(tmp_path / "a/run"):
        pass
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(ConfigError, match="file.* cannot be written"):
            claimed(path).__enter__()
