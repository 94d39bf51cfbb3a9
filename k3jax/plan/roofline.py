"""Step time from operations, memory traffic and collectives, and what the pipeline adds.

Two numbers: the `bound`, with every peak reached and all communication hidden behind computation, and the `predicted`
time, with the shares of the peaks that `chips.toml` counts on and nothing hidden. A pipeline of P stages, V virtual
stages and M micro-batches takes M + (P − 1)/V times its slowest stage: bubble (P − 1)/(V·M + P − 1).

Model FLOPs are those of `k3jax.train.flops`; what is computed again comes on top and counts in the time, not in MFU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from k3jax.config import MeshConfig, ModelConfig, RunConfig
from k3jax.ops import symmetric_product_gpu
from k3jax.plan.chips import Chip
from k3jax.plan.layout import Blocks, Leaf, Stage, cut, kinds_of_layers, muon_blocks
from k3jax.plan.memory import bank_rows, expert_rows, forwards_again, moe_layers_of, saved_tensors, shape_of
from k3jax.plan.traffic import Collective
from k3jax.sharding import AXES
from k3jax.train import flops

# Mechanism of `flops_by_mechanism` → which share of the peak it reaches
_CLASS = dict.fromkeys(("kda", "mla", "dense_mlp", "router", "latent", "shared_experts", "head"), "matmul")
_CLASS |= {"routed_experts": "experts", "mla_attention": "attention", "kda_recurrence": "recurrence"}

ONCE = ("new weights", "new experts", "Muon's blocks, to owners and back", "Muon's blocks, from their owners")
"""Collectives that a step has once and not for every micro-batch."""


@dataclass(frozen=True)
class Work:
    """What a device does: operations, by the share of the peak that they reach, and bytes of memory traffic."""

    flops: dict[str, float]
    bytes: float

    def seconds(self, chip: Chip, *, ideal: bool) -> float:
        """Products and their operands overlap; elementwise passes are counted in `bytes` beside them."""
        share = {name: 1.0 if ideal else getattr(chip.efficiency, name) for name in (*self.flops, "memory")}
        compute = sum(count / (chip.flops * share[name]) for name, count in self.flops.items())
        memory = self.bytes / (chip.memory_bandwidth * share["memory"])
        return max(compute, memory) if ideal else compute + memory


def model_flops(model: ModelConfig, layers: Iterable[int], sequence: int, *, head: bool) -> dict[str, float]:
    """Forward and backward operations a token by mechanism, of some layers."""
    per_token, kinds = flops.flops_by_mechanism(model, sequence), kinds_of_layers(model)
    chosen = [kinds[layer] for layer in layers]
    mixers, ffns = [spec.mixer for spec in chosen], [spec.ffn for spec in chosen]
    num_mla = len(model.mla_layers)
    shares = {
        "kda": (mixers.count("kda"), model.num_layers - num_mla),
        "mla": (mixers.count("mla"), num_mla),
        "dense": (ffns.count("dense"), model.num_dense_layers),
        "moe": (ffns.count("moe"), model.num_moe_layers),
    }
    part_of = {"kda": "kda", "kda_recurrence": "kda", "mla": "mla", "mla_attention": "mla", "dense_mlp": "dense"}
    part_of |= dict.fromkeys(("router", "latent", "shared_experts", "routed_experts"), "moe")
    found = {}
    for name, count in per_token.items():
        part, whole = (int(head), 1) if name == "head" else shares[part_of[name]]
        found[name] = count * part / whole if whole else 0.0
    return found


def again(config: RunConfig, stage: Stage, mechanism: str) -> float:
    """Operations computed a second time, over those of a forward and a backward pass."""
    if mechanism == "head":
        return 0.0
    more = forwards_again(config, stage) / 3
    more += 2 / 9 if mechanism == "routed_experts" else 0.0  # their backward pass forms gate and up anew
    if config.train.remat == "block":
        return more + 1 / 3
    formed = config.train.remat in ("sublayer", "layer") and _CLASS[mechanism] == "matmul"
    return more + formed / 3


def micro_batch_work(leaves: list[Leaf], config: RunConfig, stage: Stage) -> Work:
    """Of one micro-batch through all chunks of a stage, forward and backward."""
    model, mesh, n = config.model, config.mesh, shape_of(config).n
    a, C = jnp.dtype(model.dtype).itemsize, mesh.context
    counts: dict[str, float] = {}
    for name, per_token in model_flops(model, stage.layers, config.data.sequence_length, head=stage.last).items():
        operations = per_token * n / mesh.tensor * (1 + again(config, stage, name))
        if name == "mla_attention":
            operations *= 2 - 1 / C  # the last shard of time sees the most keys
        counts[_CLASS[name]] = counts.get(_CLASS[name], 0.0) + operations

    passes = 2 + (config.train.remat in ("sublayer", "layer", "block")) + forwards_again(config, stage)
    weights = sum(stage.holds(leaf) * cut(leaf, mesh).used for leaf in leaves) * (a * passes + 4)
    kinds = kinds_of_layers(model)
    saved = {spec: sum(t.bytes for t in saved_tensors(model, spec, mesh)) for spec in set(kinds)}
    # each is written and read forward, read backward, and its gradient written and read; forming it anew is once more
    activations = sum(n * saved[kinds[layer]] for layer in stage.layers) * (3 + passes)
    moe = model.moe
    rows = expert_rows(config) * moe_layers_of(model, stage)
    activations += 2 * a * rows * (6 * moe.expert_size + 4 * (moe.latent_size or model.hidden_size))
    # every mix reads its sources, forward, again, and twice for the gradients
    sources = sum(2 * (bank_rows(model, (layer,)) + 2) for layer in stage.layers)
    mixes = a * n * model.hidden_size / mesh.tensor * sources * (passes + 1)
    return Work(counts, weights + activations + mixes)


def newton_schulz_flops(leaves: list[Leaf], config: RunConfig, stage: Stage, chip: Chip | None = None) -> float:
    """Of Muon on the blocks that a device owns; without a chip as XLA computes them, in full products."""
    groups = muon_blocks(leaves, config.mesh, stage)
    once = sum(g.share * _iteration_flops(g, config, chip) for g in groups)
    return once * config.optimizer.muon_ns_steps


def _iteration_flops(blocks: Blocks, config: RunConfig, chip: Chip | None) -> float:
    """Of one iteration on one block, rows ≤ columns: three products of rows² × columns. Where the kernel runs, tiles on
    and above the diagonal of the Gram matrix and of its polynomial, and one product."""
    rows, columns = sorted((blocks.rows, blocks.columns))
    muon = config.optimizer
    hopper = chip is not None and chip.compute_capability == "9.0"
    if not hopper or muon.muon_ns_implementation == "xla":
        return 6.0 * rows**2 * columns
    if symmetric_product_gpu.why_not(rows, columns, muon.muon_ns_dtype):
        return 6.0 * rows**2 * columns
    tile = symmetric_product_gpu.TILE
    symmetric = rows * (rows + tile) // 2
    return 2.0 * (symmetric * columns + symmetric * rows + rows**2 * columns)


def optimizer_work(leaves: list[Leaf], config: RunConfig, stage: Stage, chip: Chip) -> Work:
    """Newton-Schulz, and passes over gradients, states and parameters at rest."""
    held = sum(stage.holds(leaf) * cut(leaf, config.mesh).rest * leaf.itemsize for leaf in leaves)
    return Work({"matmul": newton_schulz_flops(leaves, config, stage, chip)}, 6.0 * held)


@functools.cache
def group_ranks(mesh: MeshConfig, axes: tuple[str, ...], domain: int) -> tuple[int, int]:
    """Ranks of a collective over some axes: (in one domain of fast links, domains); devices are in mesh order."""
    ids = np.arange(math.prod(mesh.sizes)).reshape(mesh.sizes)
    chosen = tuple(slice(None) if axis in axes else 0 for axis in AXES)
    found = np.unique(ids[chosen].ravel() // domain, return_counts=True)[1]
    return int(found.max()), len(found)


def seconds(collective: Collective, mesh: MeshConfig, chip: Chip, *, ideal: bool) -> float:
    """Time of all collectives of one kind in a step; those over several domains use the links inside first."""
    inside, domains = group_ranks(mesh, collective.axes, chip.domain)
    R, total, op = collective.ranks, collective.total, collective.op
    if op == "permute":
        network, link = (total, 0.0) if domains > 1 else (0.0, total)
    elif op in ("all-to-all", "ragged-all-to-all"):
        network, link = total * (R - inside) / R, total * (inside - 1) / R
    else:
        twice = 2 if op == "all-reduce" else 1
        network = twice * total * (domains - 1) / domains / inside
        link = twice * total * (inside - 1) / inside
    share = chip.efficiency
    fast = 1.0 if ideal else share.ragged if op == "ragged-all-to-all" else share.link
    slow = 1.0 if ideal else share.network
    return max(network / (chip.network_gb_s * 1e9 * slow), link / (chip.link_gb_s * 1e9 * fast))


@dataclass(frozen=True)
class Time:
    """Seconds of a step."""

    compute: float
    """Of the slowest stage, without the bubble."""
    communication: float
    """Likewise, if none of it is hidden."""
    optimizer: float
    bubble: float
    """Share of the pipeline's time in which a stage waits."""
    predicted: float
    bound: float


def step_time(
    leaves: list[Leaf],
    config: RunConfig,
    stages: list[Stage],
    traffic: list[list[Collective]],
    chip: Chip,
    virtual: int = 1,
) -> Time:
    """Time of a step, from the slowest stage."""
    mesh, M, P = config.mesh, config.train.accumulation, config.mesh.pipe
    rounds = M + (P - 1) / virtual
    best: dict[bool, tuple[float, float, float, float]] = {}
    for ideal in (False, True):
        for stage, found in zip(stages, traffic):
            compute = micro_batch_work(leaves, config, stage).seconds(chip, ideal=ideal)
            times = [(c, seconds(c, mesh, chip, ideal=ideal)) for c in found]
            once = sum(t for c, t in times if c.what in ONCE)
            often = sum(t for c, t in times if c.what not in ONCE) / M
            update = optimizer_work(leaves, config, stage, chip).seconds(chip, ideal=ideal)
            if ideal:
                total = rounds * max(compute, often) + max(update, once)
            else:
                total = rounds * (compute + often) + update + once
            best[ideal] = max(best.get(ideal, (0.0,) * 4), (total, M * compute, M * often + once, update))
    total, compute, communication, update = best[False]
    return Time(compute, communication, update, (P - 1) / (virtual * M + P - 1), total, best[True][0])
