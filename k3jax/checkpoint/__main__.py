"""Weights in and out on the command line.

python -m k3jax.checkpoint inspect DIR
python -m k3jax.checkpoint import DIR RUN_DIR --mesh.expert 8
python -m k3jax.checkpoint export RUN_DIR DIR --like SOURCE
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from k3jax.checkpoint.export import export_pretrained
from k3jax.checkpoint.layout import CheckpointFormatError
from k3jax.checkpoint.load import load_pretrained
from k3jax.checkpoint.preflight import preflight
from k3jax.checkpoint.store import CheckpointError, CheckpointStore, RunRecord
from k3jax.config import ConfigError, DataConfig, DType, MeshConfig, RunConfig, to_dict
from k3jax.data.sources import DataError
from k3jax.data.tokenizers import load_tokenizer
from k3jax.sharding import make_mesh

RANKS = "tiktoken.model"
"""Name of the rank file in a released directory."""

_app = tyro.extras.SubcommandApp()


@_app.command(name="inspect")
def inspect_directory(directory: Annotated[str, tyro.conf.Positional], /, any_float: bool = False) -> None:
    """Check a directory in the released layout: names, shapes and dtypes, from headers only.

    Args:
        directory: with config.json, index and shards.
        any_float: accept other floating-point dtypes than the release's.
    """
    print("\n".join(preflight(directory, any_float=any_float).lines()))


@_app.command(name="import")
def import_directory(
    directory: Annotated[str, tyro.conf.Positional],
    run_dir: Annotated[str, tyro.conf.Positional],
    /,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
    param_dtype: DType | None = None,
    tokenizer: str | None = None,
    any_float: bool = False,
) -> None:
    """Turn a directory in the released layout into a run directory that `k3jax.load` and `k3jax.generate` read.

    Args:
        directory: with config.json, index and shards.
        run_dir: must hold no checkpoint yet.
        mesh: over the devices of this machine.
        param_dtype: of parameters; the checkpoint's if left out.
        tokenizer: as `data.tokenizer`; the rank file of the directory if left out.
        any_float: accept other floating-point dtypes than the release's.
    """
    store = CheckpointStore(Path(run_dir) / "checkpoints")
    if store.latest is not None:
        raise CheckpointError(f"{run_dir} already holds checkpoint {store.latest}; import into a new directory")
    if tokenizer is None:
        ranks = Path(directory).absolute() / RANKS
        tokenizer = str(ranks) if ranks.exists() else "bytes"
    overrides: dict[str, Any] = {} if param_dtype is None else {"param_dtype": param_dtype}
    checked = preflight(directory, any_float=any_float)
    print("\n".join(checked.lines()))
    with jax.set_mesh(make_mesh(mesh)), _bar() as bar:
        task, lock = bar.add_task("reading", total=checked.total_bytes), threading.Lock()

        def advance(number: int) -> None:
            with lock:
                bar.advance(task, number)

        loaded = load_pretrained(directory, fsdp=mesh.fsdp, any_float=any_float, progress=advance, **overrides)
        words = load_tokenizer(tokenizer)
        config = RunConfig(model=loaded.model.config, mesh=mesh, data=DataConfig(tokenizer=tokenizer), run_dir=run_dir)
        record = RunRecord(
            config=to_dict(config),
            tokenizer={"fingerprint": words.fingerprint, "vocab_size": words.vocab_size},
            source={"imported_from": directory},
            data={},
        )
        arrays = {"params": loaded.model, "router_bias": loaded.router_bias}
        store.save(0, model=arrays, training={"step": jnp.zeros((), jnp.int32)}, record=record)
        store.close()
    print(f"wrote {run_dir}; continue with: python -m k3jax.generate {run_dir}")


@_app.command(name="export")
def export_run(
    run_dir: Annotated[str, tyro.conf.Positional],
    directory: Annotated[str, tyro.conf.Positional],
    /,
    like: str | None = None,
    experts: Literal["plain", "mxfp4"] | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    step: int | None = None,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
    max_shard_gb: float = 5,
) -> None:
    """Write the model of a run as a directory in the released layout.

    Args:
        run_dir: directory of a training run or an import.
        directory: must not exist.
        like: released directory that the weights came from; see `k3jax.checkpoint.export`.
        experts: as in `like` if left out, plain without it.
        dtype: of what the release stores as bfloat16, without `like`.
        step: checkpoint to use; the latest if left out.
        mesh: over the devices of this machine.
        max_shard_gb: files are no larger.
    """
    from k3jax.generate import load

    with jax.set_mesh(make_mesh(mesh)):
        run = load(run_dir, step)
        limit = int(max_shard_gb * 1e9)
        options = {"like": like, "experts": experts, "dtype": dtype, "max_shard_bytes": limit}
        export_pretrained(run.model, run.router_bias, directory, **options)
    print("\n".join(preflight(directory, any_float=True).lines()))


def _bar() -> Progress:
    return Progress(
        "{task.description}",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        transient=True,
    )


if __name__ == "__main__":
    try:
        _app.cli()
    except (CheckpointError, CheckpointFormatError, ConfigError, DataError, OSError) as error:
        sys.exit(f"error: {error}")
