"""Whether a run may go on: in its directory, and from a checkpoint by the saved configuration and the one at hand."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Generator
from pathlib import Path
from typing import Any

from k3jax.checkpoint.store import CheckpointError, RunRecord
from k3jax.config import ConfigError, diff_dicts

# May change on any resume: they decide what is shown, written and kept, not what is computed.
ALWAYS_FREE = frozenset(
    {
        "run_dir",
        "data.prefetch",
        "optimizer.offload",
        "train.log_interval",
        "train.eval_interval",
        "train.eval_batches",
        "train.sample_interval",
        "train.sample_prompt",
        "train.sample_tokens",
        "train.checkpoint_interval",
        "train.keep_last",
        "train.keep_every",
        "train.checkpoint_copy",
        "train.publish.interval",
        "train.publish.directory",
        "train.publish.keep",
        "train.publish.address",
        "train.publish.experts",
        "train.skip_nonfinite",
        "train.profile_steps",
    }
)

# May change when told: the same function, computed otherwise. Any other field of the model makes it another model.
SAME_MODEL = frozenset(
    {
        "model.dtype",
        "model.kda.chunk_size",
        "model.kda.implementation",
        "model.mla.implementation",
        "model.moe.implementation",
        "model.moe.dispatch",
        "model.moe.qb_bins",
    }
)


@contextlib.contextmanager
def claimed(run_dir: Path) -> Generator[None]:
    """Makes the directory of a run and holds it; however this process ends, the system lets go of it.

    Raises:
        ConfigError: it cannot be written, or another process trains in it (each would remove what the other saves).
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"run_dir {run_dir} cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process trains in run_dir {run_dir}; use another directory") from None
        except OSError:
            pass  # a file system without locks
        yield


def check_resume(saved: RunRecord, current: RunRecord, where: str, allow_config_change: bool) -> list[str]:
    """Compares the record of a checkpoint with the one that this run would write.

    Args:
        where: the checkpoint's path, for messages.
        allow_config_change: the user asked to go on although fields differ that change the result.

    Returns:
        Lines that say which fields changed, for the log.

    Raises:
        CheckpointError: the checkpoint belongs to another model or tokenizer.
        ConfigError: other fields differ and the change was not allowed.
    """
    changes = diff_dicts(saved.config, current.config)
    other_model = {n: c for n, c in changes.items() if n.startswith("model.") and n not in SAME_MODEL}
    other_model |= _prefixed("tokenizer", saved.tokenizer, current.tokenizer)
    if other_model:
        raise CheckpointError(
            f"{where} is a checkpoint of another model:\n{_table(other_model)}\n"
            "Use another run directory, or the configuration it was made with."
        )
    asked = {n: c for n, c in changes.items() if n not in ALWAYS_FREE}
    asked |= _prefixed("training text", saved.source, current.source)
    if asked and not allow_config_change:
        raise ConfigError(
            f"{where} was made with another configuration:\n{_table(asked)}\n"
            "Going on would not continue that run. Restore these values, use another run directory, or pass "
            "--allow-config-change to go on with the new ones."
        )
    return _table(changes | asked).splitlines()


def _prefixed(prefix: str, old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {f"{prefix} {name}": change for name, change in diff_dicts(old, new).items()}


def _table(changes: dict[str, tuple[Any, Any]]) -> str:
    width = max((len(name) for name in changes), default=0)
    return "\n".join(f"  {name:<{width}}  {old!r} → {new!r}" for name, (old, new) in sorted(changes.items()))
