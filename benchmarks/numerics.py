"""Do the kernels train as plain JAX does? Loss curves of one run with kernels and two without, same seed and data.

    python -m benchmarks.numerics configs/proxy.py --data.source stdlib --steps 300

The two plain runs differ in the order of their sums alone (KDA chunks of 64 and of 32): how far they drift apart is
what the curve with kernels is held against. The model is cut to its first layers, so that a run takes a minute or two.

Prints the three curves, and the distance of each of the first and third from the second: root mean square over steps,
and of their last tenth. Writes results/numerics.json. Exit status 1 if the kernels drift more than twice as far as the
plain run does.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from benchmarks.common import write_results
from benchmarks.train_step import set_up
from k3jax.config import RunConfig
from k3jax.sharding import make_mesh
from k3jax.train.batch import place_batch
from k3jax.train.config_file import load_config
from k3jax.train.report import implementations


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to train."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    steps: int = 300
    layers: int = 5
    """Of the model; the last one kept is MLA."""


def variants(config: RunConfig) -> dict[str, RunConfig]:
    """By name; what runs by default is what has kernels."""

    def plain(chunk_size: int) -> RunConfig:
        model = dataclasses.replace(
            config.model,
            kda=dataclasses.replace(config.model.kda, implementation="xla", chunk_size=chunk_size),
            mla=dataclasses.replace(config.model.mla, implementation="xla"),
            moe=dataclasses.replace(config.model.moe, implementation="blocked"),
        )
        return dataclasses.replace(config, model=model)

    return {"kernels": config, "plain": plain(64), "plain, chunks of 32": plain(32)}


def cut(config: RunConfig, layers: int, steps: int) -> RunConfig:
    """The configuration with its first layers, for this many steps."""
    mla = tuple(layer for layer in config.model.mla_layers if layer < layers - 1) + (layers - 1,)
    model = dataclasses.replace(config.model, num_layers=layers, mla_layers=mla)
    return dataclasses.replace(config, model=model, train=dataclasses.replace(config.train, steps=steps))


def losses(config: RunConfig) -> np.ndarray:
    """Of every step, from the seed of the configuration."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        data, state, step = set_up(config, mesh)
        curve = []
        with data.train_loader() as loader:
            for _ in range(config.train.steps):
                state, metrics = step(state, place_batch(next(loader), config.train.accumulation, mesh))
                curve.append(metrics["loss"])
        return np.asarray(jax.device_get(curve), np.float64)


def distance(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Root mean square over all steps, and over the last tenth."""
    apart = (a - b) ** 2
    return {"all": float(np.sqrt(apart.mean())), "last tenth": float(np.sqrt(apart[-max(1, len(a) // 10) :].mean()))}


def run(arguments: Arguments) -> bool:
    config = cut(arguments.config, arguments.layers, arguments.steps)
    curves: dict[str, np.ndarray] = {}
    rows: list[dict[str, Any]] = []
    for name, variant in variants(config).items():
        begin = time.perf_counter()
        curves[name] = losses(variant)
        gc.collect()
        seconds = time.perf_counter() - begin
        shown = " ".join(f"{loss:.3f}" for loss in curves[name][:: max(1, arguments.steps // 10)])
        print(f"{name} ({seconds:.0f} s): {shown} … {curves[name][-1]:.3f}", flush=True)
        rows.append({"who": name, "implementations": implementations(variant), "losses": curves[name].tolist()})
    apart = {name: distance(curve, curves["plain"]) for name, curve in curves.items() if name != "plain"}
    for name, found in apart.items():
        print(f"{name} from plain: " + ", ".join(f"{what} {value:.2e}" for what, value in found.items()))
    print(f"written to {write_results('numerics', [*rows, {'distance_from_plain': apart}])}")
    kernels, reordered = apart.values()
    return all(kernels[what] <= 2 * reordered[what] for what in kernels)


if __name__ == "__main__":
    arguments = tyro.cli(Arguments, args=sys.argv[2:], default=Arguments(load_config(sys.argv[1])))
    sys.exit(0 if run(arguments) else 1)
