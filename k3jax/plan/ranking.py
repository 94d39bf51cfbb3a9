"""Legal meshes for a number of devices, ranked by predicted step time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k3jax.config import ConfigError, MeshConfig, RunConfig
from k3jax.plan.chips import Chip
from k3jax.plan.chips import chip as chip_named
from k3jax.plan.layout import Work, leaves, refusals, stages, units
from k3jax.plan.memory import predict_stage
from k3jax.plan.report import Plan, plan_checked

MAX_VIRTUAL = 4


@dataclass(frozen=True)
class Candidate:
    """A mesh and what it would cost."""

    mesh: MeshConfig
    virtual: int
    micro_batches: int
    plan: Plan


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def legal_meshes(config: RunConfig, devices: int) -> Iterator[tuple[MeshConfig, int, int]]:
    """(mesh, virtual stages, micro-batches) that divide everything.

    Micro-batches are of one sequence on a device; without a pipeline, also one of all, or as many as the configuration
    has.
    """
    model, batch = config.model, config.data.batch_size
    for pipe, data, expert, context, tensor in _factors(devices, 5):
        if pipe > len(units(model)) or batch % (data * expert):
            continue
        rows = batch // (data * expert)
        counts = {rows} if pipe > 1 else {config.train.accumulation, 1, rows}
        virtuals = range(1, MAX_VIRTUAL + 1) if pipe > 1 else (1,)
        cuts = (False, True) if devices > pipe else (False,)
        for fsdp, virtual, micro in itertools.product(cuts, virtuals, sorted(counts)):
            mesh = MeshConfig(pipe, data, expert, context, tensor, fsdp)
            if not refusals(model, mesh, Work(batch, config.data.sequence_length, micro), virtual):
                yield mesh, virtual, micro


def _factors(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write n as a product of so many factors."""
    if parts == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for rest in _factors(n // first, parts - 1):
            yield first, *rest


def search(
    config: RunConfig,
    devices: int,
    *,
    chip: str | Chip = "H200",
    chips_file: str | Path | None = None,
    lacking: int = 20,
) -> list[Candidate]:
    """Legal meshes: all that fit, by predicted time, then those that do not fit and lack least.

    The batch, the sequence and the remat preset are the configuration's; micro-batches are chosen.

    Args:
        lacking: how many of those that do not fit.

    Raises:
        ConfigError: no mesh of that many devices is legal.
    """
    found = chip if isinstance(chip, Chip) else chip_named(chip, chips_file)
    parameters = leaves(config)

    def candidate(mesh: MeshConfig, virtual: int, micro: int) -> Candidate:
        return Candidate(mesh, virtual, micro, plan_checked(on(mesh, micro), found, virtual, parameters))

    def on(mesh: MeshConfig, micro: int) -> RunConfig:
        return dataclasses.replace(config, mesh=mesh, train=dataclasses.replace(config.train, accumulation=micro))

    fitting, short = [], []
    for mesh, virtual, micro in legal_meshes(config, devices):
        parts = stages(config.model, mesh.pipe, virtual)
        # the first stage keeps most micro-batches, the last has the logits
        ends = (predict_stage(parameters, on(mesh, micro), stage) for stage in {parts[0], parts[-1]})
        least = max(memory.peak for memory in ends)
        if least > found.memory_bytes:
            short.append((least, mesh, virtual, micro))
        else:
            fitting.append(candidate(mesh, virtual, micro))
    if not fitting and not short:
        raise ConfigError(
            f"no mesh of {devices} devices is legal for {config.data.batch_size} sequences of "
            f"{config.data.sequence_length} tokens: data × expert must divide the batch, expert the "
            f"{config.model.moe.num_experts} experts, tensor the heads ({config.model.kda.num_heads} and "
            f"{config.model.mla.num_heads}), and pipe × virtual may be at most {len(units(config.model))}"
        )
    short.sort(key=lambda entry: entry[0])
    fitting += [candidate(*entry[1:]) for entry in short[:lacking]]

    def order(c: Candidate) -> tuple[bool, float]:
        return not c.plan.fits, c.plan.time.predicted if c.plan.fits else c.plan.memory.peak

    return sorted(fitting, key=order)


def search_text(candidates: list[Candidate], top: int = 20) -> str:
    """The best of them as a table for people."""
    fitting, chip = [c for c in candidates if c.plan.fits], candidates[0].plan.chip
    available = chip.memory_bytes / 2**30
    lines = [f"{len(fitting)} legal meshes fit in {available:.1f} GiB of a device; all numbers are estimates"]
    if not fitting:
        lines.append("none fits; these lack least")
    head = f"{'pipe':>4} {'data':>5} {'expert':>6} {'context':>7} {'tensor':>6} {'fsdp':>5} {'virtual':>7} {'micro':>6}"
    lines.append(head + f" {'GiB':>8} {'step s':>9} {'MFU':>6} {'bubble':>7}")
    for c in (fitting or candidates)[:top]:
        m, p = c.mesh, c.plan
        lines.append(
            f"{m.pipe:4} {m.data:5} {m.expert:6} {m.context:7} {m.tensor:6} {'yes' if m.fsdp else 'no':>5} "
            f"{c.virtual:7} {c.micro_batches:6} {p.memory.peak / 2**30:8.1f} {p.time.predicted:9.3g} {p.mfu:6.1%} "
            f"{p.time.bubble:7.1%}"
        )
    return "\n".join(lines)
