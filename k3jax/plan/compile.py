"""The real training step, compiled for fake devices, and XLA's own numbers beside the estimate.

Arrays are shapes only: nothing is allocated and nothing runs. The step is compiled for CPUs, where KDA, attention and
the experts are plain JAX: its temporaries are not those of a GPU's kernels; arguments, collectives and products of
matrices are. A mesh larger than the devices there are keeps each device's shapes: `data` shrinks with the batch, then
`expert` with the experts; what lies over more devices at rest is then larger, and is named.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from k3jax.config import ConfigError, MeshConfig, RunConfig
from k3jax.plan.chips import Chip
from k3jax.plan.hlo import Program, read_program
from k3jax.plan.layout import leaves
from k3jax.plan.report import GIB, Plan, on_mesh, plan
from k3jax.plan.roofline import newton_schulz_flops
from k3jax.sharding import make_mesh
from k3jax.train.batch import abstract_batch
from k3jax.train.optimizer import make_optimizer
from k3jax.train.state import abstract_params, abstract_state
from k3jax.train.step import make_train_step

MAX_DEVICES = 64


@dataclass(frozen=True)
class Compiled:
    """What XLA says of the step on one device, beside the plan of what was compiled."""

    plan: Plan
    changes: list[str]
    """What differs from the target, in words."""
    arguments: int
    """Bytes, of state and batch."""
    temporaries: int
    program: Program
    xla_flops: float
    """Of XLA's cost analysis, which counts each loop once."""
    seconds: float

    def lines(self) -> list[str]:
        """A table for people."""
        estimate, program = self.plan.memory, self.program
        rows = [
            ("arguments", estimate.arguments / GIB, self.arguments / GIB, "GiB"),
            ("temporaries", estimate.temporaries / GIB, self.temporaries / GIB, "GiB, of plain JAX on a CPU"),
        ]
        sent: dict[str, float] = {}
        for c in self.plan.traffic[0]:
            op = "collective-permute" if c.op == "permute" else c.op
            sent[op] = sent.get(op, 0.0) + c.total
        for op in sorted(set(sent) | set(program.bytes)):
            note = f"MiB, {program.counts.get(op, 0):,} of them in the program"
            rows.append((op, sent.get(op, 0.0) / 2**20, program.bytes.get(op, 0) / 2**20, note))
        config = self.plan.config
        model = self.plan.flops_per_device + newton_schulz_flops(leaves(config), config, self.plan.stages[0])
        rows.append(("products", model / 1e12, program.flops / 1e12, "TFLOP; the estimate counts no recomputation"))
        rows.append(("XLA's cost analysis", model / 1e12, self.xla_flops / 1e12, "TFLOP, each loop counted once"))
        head = [f"compiled in {self.seconds:.0f} s on {self.plan.devices} fake devices; numbers are of one device"]
        head += [f"changed: {change}" for change in self.changes]
        head.append(f"  {'':20}  {'estimate':>12}  {'XLA':>12}")
        return head + [f"  {name:20}  {a:12,.3f}  {b:12,.3f}  {note}" for name, a, b, note in rows]


def fitted_to(config: RunConfig, devices: int, layers: int | None = None) -> tuple[RunConfig, list[str]]:
    """The configuration on at most so many devices, with the shapes that a device of the target has.

    Args:
        layers: only the first so many.

    Returns:
        the configuration, and what was changed.

    Raises:
        ConfigError: data and expert cannot shrink so far, or too few layers for the model.
    """
    model, mesh, data, changes = config.model, config.mesh, config.data, []
    rest = mesh.pipe * mesh.context * mesh.tensor
    size = rest * mesh.data * mesh.expert
    if size > devices:
        fewer = [(e, d) for e in _divisors(mesh.expert) for d in _divisors(mesh.data) if rest * e * d <= devices]
        fewer = [(e, d) for e, d in fewer if e == 1 or model.moe.num_experts * e // mesh.expert > 0]
        if not fewer:
            raise ConfigError(f"pipe × context × tensor = {rest} alone is more than {devices} devices")
        expert, by = max(fewer)
        rows = data.batch_size // (mesh.data * mesh.expert)
        changes.append(
            f"data {mesh.data} → {by}, expert {mesh.expert} → {expert}, batch {data.batch_size} → "
            f"{rows * by * expert}; what is cut at rest lies over {by * expert} devices, not {mesh.data * mesh.expert}"
        )
        if expert < mesh.expert:
            experts = model.moe.num_experts * expert // mesh.expert
            k = min(model.moe.experts_per_token, experts - 1)
            changes.append(f"experts {model.moe.num_experts} → {experts}, as many on a device; {k} for a token")
            model = dataclasses.replace(
                model, moe=dataclasses.replace(model.moe, num_experts=experts, experts_per_token=k)
            )
        mesh = dataclasses.replace(mesh, data=by, expert=expert)
        data = dataclasses.replace(data, batch_size=rows * by * expert)
    if layers is not None and layers < model.num_layers:
        if layers < 1:
            raise ConfigError(f"--compile-layers must be positive, got {layers}")
        changes.append(f"layers {model.num_layers} → the first {layers}")
        kept = tuple(layer for layer in model.mla_layers if layer < layers)
        dense = min(model.num_dense_layers, layers)
        model = dataclasses.replace(model, num_layers=layers, mla_layers=kept, num_dense_layers=dense)
    return dataclasses.replace(config, model=model, mesh=mesh, data=data), changes


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def compile_step(
    config: RunConfig,
    mesh: MeshConfig | None = None,
    *,
    layers: int | None = None,
    chip: str | Chip = "H200",
    chips_file: str | Path | None = None,
) -> Compiled:
    """Compiles the training step on the fake devices of this process.

    Args:
        layers: compile only the first so many.
        chip, chips_file: of `plan`.

    Raises:
        ConfigError: a mesh that cannot be honoured, that the trainer does not support yet, or that is too large for
            the devices there are.
    """
    target = on_mesh(config, mesh or config.mesh)
    small, changes = fitted_to(target, min(jax.device_count(), MAX_DEVICES), layers)
    device_mesh = make_mesh(small.mesh)
    estimate = plan(small, chip=chip, chips_file=chips_file)
    begin = time.perf_counter()
    with jax.set_mesh(device_mesh):
        optimizer = make_optimizer(small.optimizer, abstract_params(small.model), small.train.steps)
        state = abstract_state(small.model, optimizer.transform, device_mesh, fsdp=small.mesh.fsdp)
        step = make_train_step(small, optimizer, np.ones(small.model.vocab_size, np.int32))
        compiled = jax.jit(step, donate_argnums=0).lower(state, abstract_batch(small, device_mesh)).compile()
    memory, cost, text = compiled.memory_analysis(), compiled.cost_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    return Compiled(
        estimate,
        changes,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        read_program(text),
        float((cost or {}).get("flops", 0.0)),
        time.perf_counter() - begin,
    )
