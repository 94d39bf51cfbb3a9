"""One training step on meshes of several GPUs against one GPU: the same losses, and what it costs.

    python -m benchmarks.meshes configs/proxy.py --meshes data=2 expert=2 pipe=2 --data.source stdlib

The batch is the same on every mesh, so ideal is half the time on two; a pipeline takes it one sequence at a time. Every
mesh has a process of its own; they compile at once and take turns on the GPUs. Prints a table: step time, tokens/s,
speed-up over one GPU, memory of the fullest device, and how far the losses of the first steps lie from those of one
GPU. Writes results/meshes.json.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Annotated, Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # processes take turns

import jax
import numpy as np
import tyro

from benchmarks.common import write_results
from k3jax.config import MeshConfig, RunConfig
from k3jax.data.loader import open_data
from k3jax.sharding import make_mesh
from k3jax.train.batch import abstract_batch, place_batch
from k3jax.train.config_file import load_config
from k3jax.train.optimizer import make_optimizer
from k3jax.train.pipeline import PipelineTrainer
from k3jax.train.state import abstract_params, abstract_state, creator
from k3jax.train.step import compiler_options, make_train_step

MARK = "RESULT "
WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to time."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    meshes: tuple[str, ...] = ("data=2", "expert=2", "context=2", "tensor=2", "pipe=2")
    """Each "axis=size" or several with commas; one GPU is always first."""
    steps: int = 10
    """Timed steps, after three of warm-up."""
    lock: str = "/tmp/k3jax-meshes.lock"
    only: str | None = None
    """Of the processes that this program starts: the one mesh to run."""


def parse(mesh: str) -> MeshConfig:
    """ "expert=2,context=2" → its `MeshConfig`; "one" is a single device."""
    sizes = {} if mesh == "one" else {axis: int(n) for axis, n in (part.split("=") for part in mesh.split(","))}
    return MeshConfig(**sizes)


def prepared(config: RunConfig, mesh: jax.sharding.Mesh) -> tuple[Any, Callable[[], Any], Callable[[Any], Any]]:
    """The compiled step, what makes a fresh state, and what places a batch; the devices hold nothing yet."""
    data = open_data(config.data, config.model.vocab_size)
    if config.mesh.pipe > 1:
        pipeline = PipelineTrainer(config, mesh, data.tokenizer.token_bytes)
        pipeline.compile(fresh=True)
        return pipeline.step, pipeline.create, pipeline.place
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    fsdp, transform = config.mesh.fsdp, optimizer.transform
    step = jax.jit(
        make_train_step(config, optimizer, data.tokenizer.token_bytes),
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )
    state = abstract_state(config.model, transform, mesh, fsdp=fsdp)
    return (
        step.lower(state, abstract_batch(config, mesh)).compile(),
        creator(config.model, transform, mesh, config.train.seed, fsdp=fsdp).lower().compile(),
        lambda batch: place_batch(batch, config.train.accumulation, mesh),
    )


def measure(arguments: Arguments, name: str) -> dict[str, Any]:
    """Losses and times of one mesh."""
    config = dataclasses.replace(arguments.config, mesh=parse(name))
    if config.mesh.pipe > 1:  # one sequence a micro-batch
        train = dataclasses.replace(config.train, accumulation=config.data.batch_size)
        config = dataclasses.replace(config, train=train)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh), open(arguments.lock, "w") as lock:
        begin = time.perf_counter()
        step, create, place = prepared(config, mesh)
        compile_s = time.perf_counter() - begin
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = create()
        with open_data(config.data, config.model.vocab_size).train_loader() as loader:
            batches = [place(next(loader)) for _ in range(8)]
        losses, norms, times = [], [], []
        for i in range(WARM_UP + arguments.steps):
            begin = time.perf_counter()
            state, metrics = step(state, batches[i % len(batches)])
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
            times.append(time.perf_counter() - begin)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in mesh.devices.flat]
    tokens = config.data.batch_size * config.data.sequence_length
    median = float(np.median(times[WARM_UP:]))
    return {"mesh": name, "devices": mesh.size, "step_ms": median * 1e3, "tokens_per_second": tokens / median} | {
        "spread_ms": [min(times[WARM_UP:]) * 1e3, max(times[WARM_UP:]) * 1e3],
        "peak_bytes": max(peaks),
        "compile_s": compile_s,
        "losses": losses,
        "grad_norms": norms,
    }


def run(arguments: Arguments) -> None:
    names = ("one", *arguments.meshes)
    command = [sys.executable, "-m", "benchmarks.meshes", *sys.argv[1:], "--only"]
    processes = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in names]
    titles = ("step ms", 10), ("tokens/s", 10), ("speed-up", 10), ("GiB", 7), ("compile s", 11)
    print(f"{'mesh':20}" + "".join(f"{title:>{width}}" for title, width in titles) + "  losses from one GPU's")
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor() as pool:
        outputs = {pool.submit(process.communicate): name for name, process in zip(names, processes)}
        for done in as_completed(outputs):
            name, lines = outputs[done], done.result()[0].splitlines()
            found = [line for line in lines if line.startswith(MARK)]
            if not found:
                print(f"{name:20} failed", flush=True)
                continue
            rows.append(json.loads(found[-1].removeprefix(MARK)))
            one = next((row for row in rows if row["mesh"] == "one"), None)
            for row in rows if name == "one" else rows[-1:] if one else ():  # the others are held against it
                print(line_of(row, one or row), flush=True)
    print(f"written to {write_results('meshes', rows)}")


def line_of(row: dict[str, Any], one: dict[str, Any]) -> str:
    """A line of the table; `one` is the first that ran."""
    apart = np.abs(np.subtract(row["losses"], one["losses"]))
    row["speed_up"] = one["step_ms"] / row["step_ms"]
    return (
        f"{row['mesh']:20}{row['step_ms']:10.1f}{row['tokens_per_second']:10,.0f}{row['speed_up']:10.2f}"
        f"{row['peak_bytes'] / 2**30:7.1f}{row['compile_s']:11.0f}  first {apart[0]:.1e}, worst {apart.max():.1e}"
    )


if __name__ == "__main__":
    arguments = tyro.cli(Arguments, args=sys.argv[2:], default=Arguments(load_config(sys.argv[1])))
    if arguments.only:
        print(MARK + json.dumps(measure(arguments, arguments.only)), flush=True)
    else:
        run(arguments)
