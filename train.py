"""Trains a model: `python train.py configs/nano.py --train.steps 300 --data.source DIR --run-dir runs/x`.

The first argument is a Python file that defines `config = RunConfig(...)`; any field can be overridden by its dotted
name (`--help` lists them). The same command resumes a run that was stopped, from its last complete checkpoint. What
torchrun or `srun` starts is one of several processes of a run: docs/cluster.md.

Exit status: 0 when the run is done, and when SIGTERM or Ctrl-C stopped it with a checkpoint; 1 after a step that was
not finite; 2 when something was refused.
"""

import dataclasses
import math
import sys
from typing import Annotated

import jax
import tyro

from k3jax.checkpoint.store import CheckpointError
from k3jax.config import ConfigError, LaunchConfig, RunConfig
from k3jax.data.sources import DataError
from k3jax.parallel.launch import LaunchError, initialize
from k3jax.sharding import make_mesh
from k3jax.train.config_file import load_config
from k3jax.train.loop import NonFiniteError, train, use_compile_cache


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Fields of the configuration, and what is said about this call only."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    allow_config_change: bool = False
    """Resume although fields differ from the checkpoint's that change the result."""
    launch: LaunchConfig = dataclasses.field(default_factory=LaunchConfig)


def main(argv: list[str]) -> int:
    try:
        if not argv or argv[0].startswith("-"):
            raise ConfigError("the first argument is a configuration file, such as configs/nano.py")
        arguments = tyro.cli(
            Arguments,
            prog=f"train.py {argv[0]}",
            args=argv[1:],
            default=Arguments(load_config(argv[0])),
            config=(tyro.conf.AvoidSubcommands,),  # whether the model has a tower is the file's to say
        )
        use_compile_cache()
        initialize(arguments.launch, math.prod(arguments.config.mesh.sizes))
        mesh = make_mesh(arguments.config.mesh)
        with jax.set_mesh(mesh):
            train(arguments.config, mesh, allow_config_change=arguments.allow_config_change)
    except (ConfigError, DataError, CheckpointError, LaunchError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except NonFiniteError as error:
        print(f"stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
