"""The command line of the planner: `python -m k3jax.plan configs/k3.py --mesh pipe=8,data=16,expert=32 --help`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass

import tyro

from k3jax.config import ConfigError, MeshConfig, Remat, RunConfig

AXES = tuple(f.name for f in dataclasses.fields(MeshConfig) if f.name != "fsdp")


@dataclass(frozen=True)
class Arguments:
    """What a mesh would cost. Nothing is allocated, and no GPU is needed."""

    mesh: str | None = None
    """Sizes of mesh axes, "pipe=8,data=16,expert=32"; "fsdp" among them cuts parameters too. None: the
    configuration's."""
    chip: str = "H200"
    """A chip of k3jax/plan/chips.toml, or of --chips."""
    chips: str | None = None
    """A TOML file like k3jax/plan/chips.toml, whose tables go over those."""
    remat: Remat | None = None
    batch: int | None = None
    """Sequences of a step over the whole mesh."""
    sequence: int | None = None
    """Tokens of a sequence."""
    micro_batches: int | None = None
    virtual: int = 1
    """Pipeline stages of each device."""
    search: int | None = None
    """Rank the legal meshes of so many devices instead."""
    compile: bool = False
    """Also compile the real step on up to 64 fake devices, and show XLA's numbers."""
    compile_layers: int | None = None
    """Compile the first so many layers only."""
    sizes: bool = False
    """Also show sizes that no mesh changes."""
    json: bool = False
    """Print rows as JSON."""


def parse_mesh(text: str) -> MeshConfig:
    """ "pipe=8,data=16,fsdp" as a `MeshConfig`.

    Raises:
        ConfigError: not of this form, with what would be.
    """
    sizes: dict[str, int | bool] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, size = part.partition("=")
        if name == "fsdp" and size in ("", "true", "false"):
            sizes[name] = size != "false"
        elif name in AXES and size.isdigit():
            sizes[name] = int(size)
        else:
            raise ConfigError(f"--mesh: {part!r} is not one of {', '.join(f'{a}=N' for a in AXES)} or fsdp")
    return MeshConfig(**sizes)  # type: ignore[arg-type]


def overridden(config: RunConfig, arguments: Arguments) -> RunConfig:
    """The configuration with what the command line says of the work, on one device for now."""
    data, train = config.data, config.train
    if arguments.batch is not None:
        data = dataclasses.replace(data, batch_size=arguments.batch)
    if arguments.sequence is not None:
        data = dataclasses.replace(data, sequence_length=arguments.sequence)
    if arguments.micro_batches is not None:
        train = dataclasses.replace(train, accumulation=arguments.micro_batches)
    if arguments.remat is not None:
        train = dataclasses.replace(train, remat=arguments.remat)
    return dataclasses.replace(config, data=data, train=train, mesh=MeshConfig())


def fake_devices(config: RunConfig, arguments: Arguments) -> int:
    """How many devices `--compile` needs.

    Raises:
        ConfigError: the mesh cannot be honoured, or cannot shrink to `MAX_DEVICES`.
    """
    from k3jax.plan.compile import MAX_DEVICES, fitted_to
    from k3jax.plan.report import on_mesh

    mesh = parse_mesh(arguments.mesh) if arguments.mesh is not None else config.mesh
    small, _ = fitted_to(on_mesh(overridden(config, arguments), mesh), MAX_DEVICES)
    return math.prod(small.mesh.sizes)


def run(config: RunConfig, arguments: Arguments) -> None:
    """Prints what was asked for."""
    from k3jax.plan.compile import compile_step
    from k3jax.plan.ranking import search, search_text
    from k3jax.plan.report import plan, size_rows, text

    mesh = parse_mesh(arguments.mesh) if arguments.mesh is not None else config.mesh
    config = overridden(config, arguments)
    options = {"chip": arguments.chip, "chips_file": arguments.chips}
    if arguments.search is not None:
        print(search_text(search(config, arguments.search, **options)))
        return
    result = plan(config, mesh, virtual=arguments.virtual, **options)
    rows = result.table() + [dataclasses.asdict(row) for row in size_rows(config) if arguments.sizes]
    if arguments.json:
        print(json.dumps(rows, indent=1))
    else:
        print(result)
        if arguments.sizes:
            print(text(size_rows(config)))
    if arguments.compile:
        for line in ["", *compile_step(config, mesh, layers=arguments.compile_layers, **options).lines()]:
            print(line)


def main(argv: list[str]) -> int:
    """Runs the command line; 2 for something that cannot be honoured."""
    try:
        if not argv or argv[0].startswith("-"):
            if "--help" in argv or "-h" in argv:
                tyro.cli(Arguments, prog="python -m k3jax.plan CONFIG", args=["--help"])
            raise ConfigError("the first argument is a configuration file, such as configs/k3.py")
        arguments = tyro.cli(Arguments, prog=f"python -m k3jax.plan {argv[0]}", args=argv[1:])
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a plan needs no accelerator, and must not hold one
        from k3jax.train.config_file import load_config

        config = load_config(argv[0])
        if arguments.compile:  # read when the first device is asked for
            count = fake_devices(config, arguments)
            flags = f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
        run(config, arguments)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
