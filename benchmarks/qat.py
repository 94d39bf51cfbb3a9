"""What training with quantised experts costs in loss: curves with and without, same seed and data.

    python -m benchmarks.qat configs/nano.py --steps 200 --config.data.batch-size 4 --config.data.sequence-length 128

`model.moe.qat` None, "w4" and "w4a8", and for a scale of what a difference means None once more with KDA in chunks of
twice the length: other sums in the same arithmetic. Prints every fiftieth loss, the mean of the last 50 steps and the
largest distance of each curve from the first, of single steps and of means over 50.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Annotated, Literal

import jax
import numpy as np
import tyro

from benchmarks.common import device_line
from benchmarks.numerics import losses
from k3jax.config import RunConfig
from k3jax.train.config_file import load_config

EVERY = 50


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to train."""

    config: RunConfig
    steps: Annotated[int, tyro.conf.arg(help=f"a multiple of {EVERY}")] = 200


def variants(config: RunConfig) -> dict[str, RunConfig]:
    """By name."""

    def changed(qat: Literal["w4", "w4a8"] | None, chunk_size: int) -> RunConfig:
        model = config.model
        kda = dataclasses.replace(model.kda, chunk_size=chunk_size)
        model = dataclasses.replace(model, kda=kda, moe=dataclasses.replace(model.moe, qat=qat))
        return dataclasses.replace(config, model=model)

    chunk = config.model.kda.chunk_size
    return {
        "none": changed(None, chunk),
        "w4": changed("w4", chunk),
        "w4a8": changed("w4a8", chunk),
        "none, other sums": changed(None, 2 * chunk),
    }


def means(curve: np.ndarray) -> np.ndarray:
    """Of every `EVERY` steps."""
    return curve.reshape(-1, EVERY).mean(1)


def run(arguments: Arguments) -> None:
    train = dataclasses.replace(arguments.config.train, steps=arguments.steps)
    config = dataclasses.replace(arguments.config, train=train)
    data = config.data
    print(f"{device_line()}; {jax.device_count()} device(s)")
    print(f"{data.batch_size} × {data.sequence_length} tokens a step, {config.model.dtype}")
    curves: dict[str, np.ndarray] = {}
    for name, variant in variants(config).items():
        begin = time.perf_counter()
        curve = curves[name] = losses(variant)
        row = " ".join(f"{loss:.4f}" for loss in (curve[0], *curve[EVERY - 1 :: EVERY]))
        apart = np.abs(curve - curves["none"]), np.abs(means(curve) - means(curves["none"]))
        print(
            f"{name:<17} {row} | last {EVERY} {curve[-EVERY:].mean():.4f} | largest distance {apart[0].max():.4f} "
            f"(step {apart[0].argmax() + 1}), of means {apart[1].max():.4f} | {time.perf_counter() - begin:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    run(tyro.cli(Arguments, args=sys.argv[2:], default=Arguments(load_config(sys.argv[1]))))
