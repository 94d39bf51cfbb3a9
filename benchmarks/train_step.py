"""Time, memory and kernels of the training step of a configuration, on real text.

    python -m benchmarks.train_step configs/proxy.py --data.source stdlib --steps 20 --profile
    python -m benchmarks.train_step configs/proxy.py --without muon

Prints what it measured on, the median and spread of the step time, tokens/s, MFU with its denominator, peak memory, and
with --profile where device time goes: by component and pass, by path for what belongs to none, and by kernel. With
--without one mechanism is left out, and its cost is the difference to the run with it. Each run writes
results/train_step*.json.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from benchmarks.common import write_results
from k3jax.config import OptimizerConfig, RunConfig
from k3jax.data.loader import TextData, open_data
from k3jax.model import moe
from k3jax.sharding import make_mesh
from k3jax.train import flops
from k3jax.train import step as step_module
from k3jax.train.batch import place_batch
from k3jax.train.config_file import load_config
from k3jax.train.optimizer import Optimizer, make_optimizer, make_schedule
from k3jax.train.report import implementations
from k3jax.train.state import TrainState, abstract_params, create_state
from k3jax.train.step import compiler_options, make_train_step

Mechanism = Literal["attn_res", "muon", "balancing"]
TRACED = 3  # steps in a trace


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to time."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    steps: int = 20
    """Timed steps, after three of warm-up; from one loss known to the next."""
    profile: bool = False
    """Also trace three steps. Kernels are then launched one by one: XLA's command buffers hide what they belong to."""
    triton: bool = False
    """Let XLA use Triton for matrix products, unlike training."""
    without: Mechanism | None = None
    """Leave out: attn_res (plain residuals), muon (AdamW for every parameter), balancing (no histogram and no update of
    the router biases)."""


# Component → its named scopes; the innermost one of an operation counts.
COMPONENTS = {
    "KDA": "kda",
    "MLA": "mla",
    "MoE": "moe",
    "dense": "dense",
    "AttnRes": "attn_res",
    "loss": "head",
    "balancing": "balancing",
    "optimizer": "optimizer",
}
PASSES = ("forward", "again", "backward")


def device_events(directory: Path) -> list[dict[str, Any]]:
    """Complete events on device tracks of a trace."""
    path = max(directory.rglob("*.trace.json.gz"))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    tracks = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    return [
        e
        for e in events
        if e.get("ph") == "X"
        and "device" in tracks.get(e["pid"], "").lower()
        and "stream" in threads.get((e["pid"], e["tid"]), "").lower()
    ]


def op_paths(hlo: str) -> dict[str, str]:
    """Path of every HLO instruction; of a fusion without one, the commonest in it."""
    paths: dict[str, str] = {}
    inside: dict[str, Counter[str]] = {}
    bare: dict[str, str] = {}
    computation = ""
    for line in hlo.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = begins[1]
        elif names := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line):
            path = re.search(r'op_name="([^"]*)"', line)
            if path:
                paths[names[1]] = path[1]
                inside.setdefault(computation, Counter())[path[1]] += 1
            elif called := re.search(r"calls=%?([\w.\-]+)", line):
                bare[names[1]] = called[1]
    return paths | {name: inside[called].most_common(1)[0][0] for name, called in bare.items() if called in inside}


def component_and_pass(path: str) -> tuple[str, str]:
    scopes = {scope: name for name, scope in COMPONENTS.items()}
    known = [part for part in re.split(r"[/()]", path) if part in scopes]
    part = "again" if "rematted_computation" in path else "backward" if "transpose" in path else "forward"
    return (scopes[known[-1]] if known else "rest"), part


def profile(directory: Path, hlo: str, top: int = 30) -> dict[str, dict[str, float]]:
    """Prints milliseconds a step on the device; returns them by component and pass."""
    paths = op_paths(hlo)
    table: dict[str, Counter[str]] = {name: Counter() for name in (*COMPONENTS, "rest")}
    rest: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in device_events(directory):
        ms = event["dur"] / 1e3 / TRACED
        op = event.get("args", {}).get("hlo_op", "")
        component, part = component_and_pass(paths.get(op, ""))
        table[component][part] += ms
        kernels[event["name"][:90]] += ms
        if component == "rest":
            rest[f"{event['name'][:45]:45}  {paths.get(op, op)[-90:]}"] += ms
    total = sum(kernels.values()) or 1.0
    print(f"\nmilliseconds a step on the device ({total:.1f} in all)")
    print(f"  {'':10}" + "".join(f"{part:>10}" for part in (*PASSES, "all", "share")))
    for name, parts in table.items():
        row = [parts[part] for part in PASSES]
        print(f"  {name:10}" + "".join(f"{ms:10.2f}" for ms in (*row, sum(row))) + f"{sum(row) / total:10.1%}")
    for title, counter in (("rest, by kernel and path", rest), ("by kernel", kernels)):
        print(title)
        for name, ms in counter.most_common(top):
            print(f"  {ms:9.2f}  {name}")
    return {name: dict(parts) for name, parts in table.items()}


def adamw(config: OptimizerConfig, total_steps: int, groups: Any) -> Optimizer:
    """Every parameter under AdamW, for what Muon costs."""
    schedule = make_schedule(config, total_steps)
    transform = optax.chain(
        optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
    return Optimizer(transform, schedule, groups)


def leave_out(config: RunConfig, mechanism: Mechanism | None) -> RunConfig:
    """The configuration without it; balancing is replaced by functions that do nothing."""
    if mechanism == "attn_res":
        return dataclasses.replace(config, model=dataclasses.replace(config.model, attn_res_block_size=None))
    if mechanism == "balancing":
        nothing: Any = lambda scores, *_, bins, **__: jnp.zeros((scores.shape[-1], bins), jnp.int32)  # noqa: E731
        unchanged: Any = lambda _, bias, **__: bias  # noqa: E731
        moe.qb_histogram, step_module.qb_update = nothing, unchanged
    return config


def set_up(
    config: RunConfig, mesh: jax.sharding.Mesh, *, muon: bool = True, triton: bool = False
) -> tuple[TextData, TrainState, Any]:
    """Data, a fresh state, and the jitted step as training runs it; called with the mesh set."""
    data = open_data(config.data, config.model.vocab_size)
    optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
    if not muon:
        optimizer = adamw(config.optimizer, config.train.steps, optimizer.groups)
    state = create_state(config.model, optimizer.transform, mesh, config.train.seed, fsdp=config.mesh.fsdp)
    train_step = make_train_step(config, optimizer, data.tokenizer.token_bytes)
    options = None if triton else compiler_options(mesh)
    return data, state, jax.jit(train_step, donate_argnums=0, compiler_options=options)


def run(arguments: Arguments) -> None:
    config, device = leave_out(arguments.config, arguments.without), jax.devices()[0]
    print(f"device {device.device_kind} × {jax.device_count()}, jax {jax.__version__}")
    if arguments.without:
        print(f"without {arguments.without}")
    print("; ".join(f"{op}: {name}" for op, name in implementations(config).items()))
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        data, state, step = set_up(config, mesh, muon=arguments.without != "muon", triton=arguments.triton)
        with data.train_loader() as loader:
            batches = [place_batch(next(loader), config.train.accumulation, mesh) for _ in range(8)]
        begin = time.perf_counter()
        lowered = step.lower(state, batches[0])
        traced = time.perf_counter() - begin
        compiled = lowered.compile()
        print(f"traced and lowered in {traced:.1f} s, compiled in {time.perf_counter() - begin - traced:.1f} s")
        analysis = compiled.memory_analysis()
        memory = {}
        if analysis is not None:
            memory = {"arguments": analysis.argument_size_in_bytes, "temporaries": analysis.temp_size_in_bytes}
            print("memory: " + ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory.items()))
        times, losses, running = [], [], None
        begin = time.perf_counter()
        for i in range(arguments.steps + 4):
            state, metrics = compiled(state, batches[i % len(batches)])
            if running is not None:  # as in training, the host is one step ahead of what it has read
                losses.append(float(running))
                times.append(-begin + (begin := time.perf_counter()))
            running = metrics["loss"]
        jax.block_until_ready(state)
        row = report(config, mesh, np.array(times[3:]), losses, device)
        row |= {
            "without": arguments.without,
            "triton": arguments.triton,
            "one_by_one": arguments.profile,
            "memory_bytes": memory,
        }
        if arguments.profile:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for i in range(TRACED):
                        state, metrics = compiled(state, batches[i])
                    jax.block_until_ready(state)
                row["milliseconds"] = profile(Path(folder), compiled.as_text() or "")
    row["implementations"] = implementations(config)
    path = write_results(f"train_step_without_{arguments.without}" if arguments.without else "train_step", [row])
    print(f"written to {path}")


def report(
    config: RunConfig, mesh: jax.sharding.Mesh, times: np.ndarray, losses: list[float], device: Any
) -> dict[str, Any]:
    """Prints speed and memory; returns them."""
    median = float(np.median(times))
    tokens = config.data.batch_size * config.data.sequence_length
    peak = flops.peak_flops(mesh, config.model.dtype)
    per_token = flops.flops_per_token(config.model, config.data.sequence_length)
    row = {"step_ms": median * 1e3, "step_ms_min": times.min() * 1e3, "step_ms_max": times.max() * 1e3}
    row |= {"steps": len(times), "tokens_a_step": tokens, "tokens_per_second": tokens / median}
    row |= {"flops_a_token": per_token, "remat": config.train.remat, "unroll": config.train.unroll}
    print(f"step {median * 1e3:.1f} ms (min {times.min() * 1e3:.1f}, max {times.max() * 1e3:.1f}, n = {len(times)})")
    print(f"tokens/s {tokens / median:,.0f} ({tokens:,} a step); {per_token / 1e9:.3f} GFLOP a token")
    if peak.flops:
        row["mfu"] = per_token * tokens / median / peak.flops
        print(f"MFU {row['mfu']:.2%} of {peak.describe()}")
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        row["peak_bytes"] = stats["peak_bytes_in_use"]
        print(f"peak memory {stats['peak_bytes_in_use'] / 2**30:.1f} GiB")
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} over {len(losses)} steps on 8 batches")
    return row | {"losses": losses}


if __name__ == "__main__":
    arguments = tyro.cli(Arguments, args=sys.argv[2:], default=Arguments(load_config(sys.argv[1])))
    if arguments.profile:  # read when the first device is asked for
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    run(arguments)
