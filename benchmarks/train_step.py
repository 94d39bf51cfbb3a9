"""Time, memory and kernels of the training step of a configuration, on real text.

    python benchmarks/train_step.py configs/proxy.py --data.source stdlib --steps 20 --profile

Prints what it measured on, the median and spread of the step time, tokens/s, MFU with its denominator, peak memory,
and (with --profile) where device time goes by named scope and by kernel.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro

from k3jax.config import RunConfig
from k3jax.data.loader import open_data
from k3jax.sharding import make_mesh
from k3jax.train import flops
from k3jax.train.config_file import load_config
from k3jax.train.optimizer import make_optimizer
from k3jax.train.state import abstract_params, create_state
from k3jax.train.step import make_train_step, place_batch


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What to time."""

    config: Annotated[RunConfig, tyro.conf.arg(name="")]
    steps: int = 20
    """Timed steps, after three of warm-up."""
    profile: bool = False
    """Also trace three steps and list kernels."""


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


def print_profile(directory: Path, steps: int, hlo: str, top: int = 25) -> None:
    """Milliseconds a step by the innermost known named scope of each kernel's HLO operation, and by kernel."""
    paths = dict(re.findall(r'([\w.\-]+) = [^\n]*?op_name="([^"]*)"', hlo))
    scopes: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in device_events(directory):
        ms = event["dur"] / 1e3 / steps
        kernels[event["name"][:90]] += ms
        path = paths.get(event.get("args", {}).get("hlo_op", ""), "")
        known = [part for part in re.split(r"[/()]", path) if part in SCOPES]
        backward = "backward " if "transpose" in path else "forward  "
        scopes[backward + known[-1] if known else "other"] += ms
    print(f"\nmilliseconds a step on the device ({sum(kernels.values()):.1f} in all), by scope")
    for name, ms in scopes.most_common(top):
        print(f"  {ms:9.2f}  {name}")
    print("by kernel")
    for name, ms in kernels.most_common(top):
        print(f"  {ms:9.2f}  {name}")


SCOPES = {"kda", "mla", "moe", "dense", "attn_res", "head", "optimizer"}


def run(arguments: Arguments) -> None:
    config, device = arguments.config, jax.devices()[0]
    print(f"device {device.device_kind} × {jax.device_count()}, jax {jax.__version__}")
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        data = open_data(config.data, config.model.vocab_size)
        optimizer = make_optimizer(config.optimizer, abstract_params(config.model), config.train.steps)
        state = create_state(config.model, optimizer.transform, mesh, config.train.seed)
        step = jax.jit(make_train_step(config, optimizer, data.tokenizer.token_bytes), donate_argnums=0)
        with data.train_loader() as loader:
            batches = [place_batch(next(loader), config.train.accumulation, mesh) for _ in range(8)]
        begin = time.perf_counter()
        compiled = step.lower(state, batches[0]).compile()
        print(f"compiled in {time.perf_counter() - begin:.1f} s")
        analysis = compiled.memory_analysis()
        if analysis is not None:
            print(
                f"memory: arguments {analysis.argument_size_in_bytes / 2**30:.2f} GiB, "
                f"temporaries {analysis.temp_size_in_bytes / 2**30:.2f} GiB"
            )
        times, losses = [], []
        for i in range(arguments.steps + 3):
            begin = time.perf_counter()
            state, metrics = compiled(state, batches[i % len(batches)])
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - begin)
        report(config, mesh, np.array(times[3:]), losses, device)
        if arguments.profile:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for i in range(3):
                        state, metrics = compiled(state, batches[i])
                    jax.block_until_ready(state)
                print_profile(Path(folder), 3, compiled.as_text())


def report(config: RunConfig, mesh: jax.sharding.Mesh, times: np.ndarray, losses: list[float], device: Any) -> None:
    median = float(np.median(times))
    tokens = config.data.batch_size * config.data.sequence_length
    peak = flops.peak_flops(mesh, config.model.dtype)
    per_token = flops.flops_per_token(config.model, config.data.sequence_length)
    print(f"step {median * 1e3:.1f} ms (min {times.min() * 1e3:.1f}, max {times.max() * 1e3:.1f}, n = {len(times)})")
    print(f"tokens/s {tokens / median:,.0f} ({tokens:,} a step); {per_token / 1e9:.3f} GFLOP a token")
    if peak.flops:
        print(f"MFU {per_token * tokens / median / peak.flops:.2%} of {peak.describe()}")
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        print(f"peak memory {stats['peak_bytes_in_use'] / 2**30:.1f} GiB")
    print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} over {len(losses)} steps on 8 batches")


if __name__ == "__main__":
    arguments = tyro.cli(Arguments, args=sys.argv[2:], default=Arguments(load_config(sys.argv[1])))
    run(arguments)
