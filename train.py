"""Trains a model: `python train.py configs/nano.py --train.steps 300 --data.source DIR --run-dir runs/x`.

The first argument is a Python file that defines `config = RunConfig(...)`; any field can be overridden by its dotted
name (`--help` lists them). The same command resumes a run that was stopped, from its last complete checkpoint.
"""

import dataclasses
import difflib
import re
import runpy
import sys
import traceback
from pathlib import Path
from typing import Annotated

import jax
import tyro

import k3jax.config
from k3jax.checkpoint.store import CheckpointError
from k3jax.config import ConfigError, RunConfig, from_dict, to_dict
from k3jax.data.sources import DataError
from k3jax.sharding import make_mesh
from k3jax.train.loop import NonFiniteError, train, use_compile_cache


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Fields of the configuration, and what is said about this call only."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    allow_config_change: bool = False
    """Resume although fields differ from the checkpoint's that change the result."""


def load_config(path: str) -> RunConfig:
    """The `config` of a Python file, with every value of the type that its field declares.

    Raises:
        ConfigError: no such file, an error in it (which line), no `RunConfig` of that name, or a value of another type.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no configuration file {path}; the first argument is a Python file such as configs/nano.py")
    try:
        config = runpy.run_path(path).get("config")
    except ConfigError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"{path}{where}: {type(error).__name__}: {error}{_nearest_field(error)}") from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{path} must define `config = RunConfig(...)`")
    return from_dict(RunConfig, to_dict(config))


def _nearest_field(error: Exception) -> str:
    """What a misspelt field of a configuration class was probably meant to be."""
    call = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    owner = getattr(k3jax.config, call[1], None) if call else None
    if call is None or not dataclasses.is_dataclass(owner):
        return ""
    near = difflib.get_close_matches(call[2], [f.name for f in dataclasses.fields(owner)], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def main(argv: list[str]) -> int:
    try:
        if not argv or argv[0].startswith("-"):
            raise ConfigError("the first argument is a configuration file, such as configs/nano.py")
        arguments = tyro.cli(
            Arguments, prog=f"train.py {argv[0]}", args=argv[1:], default=Arguments(load_config(argv[0]))
        )
        use_compile_cache()
        mesh = make_mesh(arguments.config.mesh)
        with jax.set_mesh(mesh):
            train(arguments.config, mesh, allow_config_change=arguments.allow_config_change)
    except (ConfigError, DataError, CheckpointError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except NonFiniteError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
