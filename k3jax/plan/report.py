"""The plan of a configuration on a mesh, as numbers, rows and text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from k3jax.config import ConfigError, MeshConfig, RunConfig
from k3jax.plan import memory, roofline, traffic
from k3jax.plan.chips import Chip
from k3jax.plan.chips import chip as chip_named
from k3jax.plan.geometry import sizes
from k3jax.plan.layout import Leaf, Stage, Work, leaves, refusals, stages
from k3jax.plan.memory import KINDS, PHASES, Memory
from k3jax.plan.roofline import Time
from k3jax.plan.traffic import Collective
from k3jax.train import flops

Known = Literal["exact", "estimate", "fitted", "data sheet"]
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One number of a plan. For a table in a notebook: `pandas.DataFrame(plan.table())`."""

    section: str
    name: str
    value: float
    unit: str
    known: Known
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """What a step of a configuration costs on a mesh of one kind of chip."""

    config: RunConfig
    chip: Chip
    virtual: int
    stages: list[Stage]
    memories: list[Memory]
    """Of each pipeline stage."""
    traffic: list[list[Collective]]
    """Likewise."""
    time: Time
    newton_schulz_flops: float
    """Of the device that has most, as its chip computes them."""

    @property
    def devices(self) -> int:
        return _devices(self.config.mesh)

    @property
    def memory(self) -> Memory:
        """Of the fullest stage."""
        return max(self.memories, key=lambda m: m.peak)

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.chip.memory_bytes

    @property
    def flops_per_token(self) -> int:
        return flops.flops_per_token(self.config.model, self.config.data.sequence_length)

    @property
    def flops_per_device(self) -> float:
        """Model FLOPs of a step on one device, on average over stages."""
        return self.flops_per_token * self._tokens / self.devices

    @property
    def mfu(self) -> float:
        return self.flops_per_device / self.time.predicted / self.chip.flops

    @property
    def mfu_bound(self) -> float:
        return self.flops_per_device / self.time.bound / self.chip.flops

    @property
    def _tokens(self) -> int:
        return self.config.data.batch_size * self.config.data.sequence_length

    def rows(self) -> list[Row]:
        """Every number, in the order of the text."""
        return [*self._memory_rows(), *self._traffic_rows(), *self._flops_rows(), *self._time_rows()]

    def table(self) -> list[dict]:
        """The rows as dictionaries."""
        return [dataclasses.asdict(row) for row in self.rows()]

    def _memory_rows(self) -> Iterable[Row]:
        fullest = self.memory
        where = f"peak in the {fullest.peak_phase} phase" + f" of stage {fullest.stage}" * (len(self.stages) > 1)
        for kind, how in KINDS.items():
            if kind in fullest.kinds:
                yield Row("memory of a device", kind, fullest.kinds[kind], "bytes", how)  # type: ignore[arg-type]
        yield Row("memory of a device", "total", fullest.peak, "bytes", "estimate", where)
        note = f"{self.chip.name}, {self.chip.efficiency.usable_memory:.0%} of {self.chip.memory_gib} GiB"
        yield Row("memory of a device", "available", self.chip.memory_bytes, "bytes", "data sheet", note)
        for phase in PHASES:
            if phase in fullest.phases:
                total = sum(fullest.phases[phase].values())
                yield Row("memory by phase", phase, total, "bytes", "estimate")
        for preset, size in fullest.activations.items():
            note = "chosen" if preset == self.config.train.remat else ""
            yield Row("activations by remat preset", preset, size, "bytes", "estimate", note)
        for name, size in fullest.details["MoonEP buffers"].items():
            yield Row("MoonEP buffers", name, size, "bytes", "estimate")
        if len(self.stages) > 1:
            for stage, found in zip(self.stages, self.memories):
                note = "layers " + ", ".join(f"{chunk[0]}-{chunk[-1]}" for chunk in stage.chunks)
                yield Row("memory by stage", f"stage {stage.index}", found.peak, "bytes", "estimate", note)

    def _traffic_rows(self) -> Iterable[Row]:
        found = self.traffic[self.memory.stage]
        section = "sent by a device in a step" + (f" (stage {self.memory.stage})" if len(self.stages) > 1 else "")
        for c in sorted(found, key=lambda c: -c.sent):
            name, note = f"{' × '.join(c.axes)}: {c.what}", f"{c.op} over {c.ranks}, {c.count:,} of {_bytes(c.bytes)}"
            yield Row(section, name, c.sent, "bytes", "estimate", note)

    def _flops_rows(self) -> Iterable[Row]:
        model = self.config.model
        for name, count in flops.flops_by_mechanism(model, self.config.data.sequence_length).items():
            yield Row("operations of a token", name, count, "FLOP", "exact")
        yield Row("operations of a token", "total", self.flops_per_token, "FLOP", "exact")
        section, muon = "operations of a step", self.newton_schulz_flops
        yield Row(section, "model, a device", self.flops_per_device, "FLOP", "exact", "mean over stages")
        yield Row(section, "Newton-Schulz, a device", muon, "FLOP", "exact", "at most")

    def _time_rows(self) -> Iterable[Row]:
        time, peak, section = self.time, f"{self.chip.bf16_tflops:,.0f} TFLOP/s", "time of a step"
        yield Row(section, "roofline bound", time.bound, "s", "estimate", "all peaks reached, communication hidden")
        yield Row(section, "MFU at the bound", self.mfu_bound, "share", "estimate", f"of {peak}")
        yield Row(
            section, "predicted", time.predicted, "s", "estimate", "shares of peaks as in chips.toml, nothing hidden"
        )
        yield Row(section, "MFU predicted", self.mfu, "share", "estimate", f"of {peak}")
        yield Row(section, "computation", time.compute, "s", "estimate", "slowest stage, without bubble")
        yield Row(section, "communication", time.communication, "s", "estimate", "slowest stage, without bubble")
        yield Row(section, "optimizer", time.optimizer, "s", "estimate")
        yield Row(section, "pipeline bubble", time.bubble, "share", "exact", "(P − 1)/(V·M + P − 1)")
        yield Row(section, "tokens a second", self._tokens / time.predicted, "tokens/s", "estimate", "predicted")

    def __str__(self) -> str:
        return "\n".join([*self._heading(), *_text(self.rows())])

    def _heading(self) -> list[str]:
        config, mesh = self.config, self.config.mesh
        axes = ", ".join(f"{a} {n}" for a, n in zip(roofline.AXES, mesh.sizes) if n > 1) or "one device"
        shape = memory.shape_of(config)
        fit = "fits" if self.fits else "DOES NOT FIT"
        return [
            f"{self.devices} × {self.chip.name}: {axes}{', fsdp' * mesh.fsdp}; remat {config.train.remat}"
            + (f", {self.virtual} virtual stages" if self.virtual > 1 else ""),
            f"{config.data.batch_size} × {config.data.sequence_length} = {self._tokens:,} tokens a step in "
            f"{config.train.accumulation} micro-batch(es) of {shape.rows} × {shape.tokens} on a device",
            f"{fit}: {_bytes(self.memory.peak)} of {_bytes(self.chip.memory_bytes)} a device; "
            f"{self.time.predicted:.3g} s a step, {self.mfu:.1%} MFU, "
            f"{self._tokens / self.time.predicted:,.0f} tokens/s (estimates)",
            *self._tower(),
        ]

    def _tower(self) -> list[str]:
        if self.config.data.images.source is None:
            return []
        copies = ", nor its copies outside stage 0" if self.config.mesh.pipe > 1 else ""
        return [f"the vision tower's work on images is not counted{copies}"]


def plan(
    config: RunConfig,
    mesh: MeshConfig | None = None,
    *,
    chip: str | Chip = "H200",
    virtual: int = 1,
    chips_file: str | Path | None = None,
) -> Plan:
    """What a step of `config` costs on `mesh` (None: the configuration's own).

    Args:
        chip: a name in `chips.toml` or in `chips_file`, or a `Chip`.
        virtual: pipeline stages that each device has.

    Raises:
        ConfigError: the mesh cannot be honoured, with every reason and what would be legal; or an unknown chip.
    """
    config = on_mesh(config, mesh or config.mesh, virtual)
    found = chip if isinstance(chip, Chip) else chip_named(chip, chips_file)
    return plan_checked(config, found, virtual, leaves(config))


def on_mesh(config: RunConfig, mesh: MeshConfig, virtual: int = 1) -> RunConfig:
    """The configuration on a mesh.

    Raises:
        ConfigError: the mesh cannot be honoured.
    """
    work = Work(config.data.batch_size, config.data.sequence_length, config.train.accumulation)
    reasons = refusals(config.model, mesh, work, virtual)
    if reasons:
        raise ConfigError("this mesh cannot be honoured:\n" + "\n".join(f"  {reason}" for reason in reasons))
    return dataclasses.replace(config, mesh=mesh)


def plan_checked(config: RunConfig, chip: Chip, virtual: int, parameters: list[Leaf]) -> Plan:
    """`plan` of a configuration whose mesh is legal, with the parameters of its model."""
    parts = stages(config.model, config.mesh.pipe, virtual)
    memories = [memory.predict_stage(parameters, config, stage) for stage in parts]
    sent = [traffic.collectives(parameters, config, stage, virtual) for stage in parts]
    time = roofline.step_time(parameters, config, parts, sent, chip, virtual)
    muon = max(roofline.newton_schulz_flops(parameters, config, stage, chip) for stage in parts)
    return Plan(config, chip, virtual, parts, memories, sent, time, muon)


def predict(config: RunConfig, mesh: MeshConfig | None = None, *, virtual: int = 1) -> list[dict]:
    """Bytes a device by kind, for comparison with what XLA reports and a device measures.

    `arguments` are what XLA's memory analysis calls so, `temporaries` the rest; `peak` is both.
    """
    result = plan(config, mesh, virtual=virtual)
    fullest = result.memory
    found = {**fullest.kinds, "arguments": fullest.arguments, "temporaries": fullest.temporaries, "peak": fullest.peak}
    return [{"kind": kind, "bytes": size, "gib": size / GIB} for kind, size in found.items()]


def size_rows(config: RunConfig) -> list[Row]:
    """Sizes of the geometry, whatever the mesh."""
    found = sizes(config.model, config.data.sequence_length)
    return [Row("sizes of the geometry", name, value, _unit(name), "exact") for name, value in found.items()]


def _unit(name: str) -> str:
    return {"bytes": "bytes", "FLOPs": "FLOP"}.get(name.split(",")[0], "")


def _devices(mesh: MeshConfig) -> int:
    count = 1
    for size in mesh.sizes:
        count *= size
    return count


def _bytes(size: float) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size:,.0f} B"


def _number(row: Row) -> str:
    if row.unit == "bytes":
        return _bytes(row.value)
    if row.unit == "FLOP":
        return f"{row.value / 1e9:,.4g} GFLOP" if row.value < 1e12 else f"{row.value / 1e12:,.4g} TFLOP"
    if row.unit == "share":
        return f"{row.value:.1%}"
    return f"{row.value:.3g} s" if row.unit == "s" else f"{row.value:,.0f}"


def text(rows: Iterable[Row]) -> str:
    """Rows as a table for people."""
    return "\n".join(_text(list(rows)))


def _text(rows: list[Row]) -> list[str]:
    width = max(len(row.name) for row in rows)
    lines: list[str] = []
    section = ""
    for row in rows:
        if row.section != section:
            section = row.section
            lines += ["", section]
        lines.append(f"  {row.name:{width}}  {_number(row):>14}  {row.known:10}  {row.note}".rstrip())
    return lines
