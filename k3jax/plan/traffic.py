"""Collectives of a step on one device: what travels, over which axis, how often, how many bytes.

Parameters, gradients and Muon are as the trainer's program has them. `expert` is MoonEP (`k3jax.parallel.expert`),
`context` is `k3jax.parallel.context`; `tensor` gathers the stream before a mixer or MLP and reduce-scatters what comes
out (tokens of experts stay where the stream has them); `pipe` sends the partial sum and the AttnRes blocks that the
receiver has not seen. Scalars (norms, losses, counts) are left out. XLA may join collectives of one kind: then counts
differ and bytes do not.

Legend: R ranks of an axis, n tokens of a micro-batch on a device, D hidden, L latent, k experts of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp

from k3jax.config import ModelConfig, RunConfig
from k3jax.parallel.expert_plan import copy_slots
from k3jax.plan.layout import Leaf, Stage, cut, kinds_of_layers, muon_blocks, stages, ways
from k3jax.plan.memory import forwards_again, moe_layers_of, outside_loops, rows_routed, shape_of
from k3jax.sharding import COPIES

Op = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "permute"]

# Weights that layers round to the compute dtype where they use them (and, at rest, before they travel).
_WIDE = ("norm", "input_norm", "post_norm", "final_norm", "o_norm", "q_a_norm", "kv_a_norm", "latent_norm", "proj")
_WIDE += ("A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "router", "embed", "lm_head")


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in a step, on one device."""

    axes: tuple[str, ...]
    op: Op
    what: str
    ranks: int
    count: int
    bytes: float
    """Of the whole array of one of them: what is gathered, reduced or exchanged."""

    @property
    def total(self) -> float:
        return self.count * self.bytes

    @property
    def sent(self) -> float:
        """Bytes that leave the device in a step, in the usual ring or direct algorithms."""
        share = 1.0 if self.op == "permute" else (self.ranks - 1) / self.ranks
        return self.total * share * (2 if self.op == "all-reduce" else 1)


def _axes(config: RunConfig, *names: str) -> tuple[tuple[str, ...], int]:
    """Those of some mesh axes that are larger than 1, and their size together."""
    axes, ranks = tuple(name for name in names if getattr(config.mesh, name) > 1), 1
    for name in axes:
        ranks *= getattr(config.mesh, name)
    return axes, ranks


def collectives(leaves: list[Leaf], config: RunConfig, stage: Stage, virtual: int = 1) -> list[Collective]:
    """Every collective of a step on the devices of one stage."""
    found = [
        *_of_parameters(leaves, config, stage),
        *_of_muon(leaves, config, stage),
        *_of_experts(config, stage),
        *_of_tensor(config, stage),
        *_of_context(config, stage),
        *_of_pipe(config, stage, virtual),
        *_of_balancing(config, stage),
    ]
    return _joined(c for c in found if c.ranks > 1 and c.count and c.bytes)


def _joined(found: Iterable[Collective]) -> list[Collective]:
    """Those that differ in bytes only as one."""
    joined: dict[Collective, Collective] = {}
    for c in found:
        key = dataclasses.replace(c, bytes=0.0)
        before = joined.get(key, key)
        joined[key] = dataclasses.replace(c, bytes=before.bytes + c.bytes)
    return list(joined.values())


def _gathers(config: RunConfig, leaf: Leaf, stage: Stage) -> dict[int, int]:
    """Times that a parameter at rest is gathered for a micro-batch → how many of it are."""
    held = stage.holds(leaf)
    if not leaf.layers or config.train.remat in ("none", "products"):
        return {1: held}
    once = len(leaf.layers.intersection(stage.layers) & outside_loops(config))
    return {1: once, 2: held - once}


def _of_parameters(leaves: list[Leaf], config: RunConfig, stage: Stage) -> Iterator[Collective]:
    """Gradients of every micro-batch, and weights: gathered where they are used, or once they are new."""
    mesh, micro = config.mesh, config.train.accumulation
    dtype = jnp.dtype(config.model.dtype).itemsize
    for leaf in leaves:
        c, held = cut(leaf, mesh), stage.holds(leaf)
        name = "experts" if leaf.is_bank else "weights"
        used = leaf.itemsize if leaf.tensor.split("/")[-1] in _WIDE else dtype
        summed = dtype if leaf.tensor == "embed" else used  # looked up in the compute dtype, wherever it lies
        size, at_rest = float(held * c.used), c.rest < c.used
        wanted: list[tuple[Op, str, int, float]] = []
        if mesh.fsdp and at_rest:
            for passes, count in _gathers(config, leaf, stage).items():
                times = round(micro * (passes + forwards_again(config, stage)))
                wanted.append(("all-gather", f"{name}, gathered where used", times, count * c.used * used))
            wanted.append(("reduce-scatter", f"gradients of {name}", micro, size * summed))
        else:
            wanted.append(("all-reduce", f"gradients of {name}", micro, size * summed))
            if at_rest:
                wanted.append(("all-gather", f"new {name}", 1, size * leaf.itemsize))
        for op, what, count, total in wanted:
            yield Collective(c.copies, op, what, ways(mesh, c.copies), count, float(total))


def _of_muon(leaves: list[Leaf], config: RunConfig, stage: Stage) -> Iterator[Collective]:
    """Pieces of blocks that are cut travel to their owners, and pieces of the update back; a share of blocks is filled
    up to as many for every device."""
    itemsize = jnp.dtype(config.optimizer.muon_ns_dtype).itemsize
    for blocks in muon_blocks(leaves, config.mesh, stage):
        for letter, axes, ranks, elements in blocks.exchanges():
            size = float(itemsize * elements)
            if letter:
                yield Collective(axes, "all-to-all", "Muon's blocks, to owners and back", ranks, 2, size)
            else:
                yield Collective(axes, "all-gather", "Muon's blocks, from their owners", ranks, 1, size)


def _forwards(config: RunConfig, stage: Stage) -> float:
    """How often the large kernels run forward, and receive what they need from other devices."""
    return 1 + (config.train.remat == "block") + forwards_again(config, stage)


def _of_experts(config: RunConfig, stage: Stage) -> Iterator[Collective]:
    """MoonEP: rows out and back, copies of experts, their gradients. Copies are counted as if all slots were filled."""
    model, moe, axes_ranks = config.model, config.model.moe, _axes(config, "expert")
    axes, R = axes_ranks
    if R == 1:
        return
    a, times = jnp.dtype(model.dtype).itemsize, config.train.accumulation
    times *= moe_layers_of(config.model, stage)
    latent, forwards = moe.latent_size or model.hidden_size, _forwards(config, stage)
    rows, copies = float(rows_routed(config)), copy_slots(moe.num_experts, R)
    matrices = 3 * latent * moe.expert_size * a
    yield Collective(axes, "all-gather", "counts of rows", R, round(times * forwards), float(4 * R * moe.num_experts))
    exchanges = round(times * (2 * forwards + 3))  # out and back; out again, gradients out, gradients back
    yield Collective(axes, "ragged-all-to-all", "rows of experts", R, exchanges, rows * latent * a)
    weights = round(times * (forwards + 2))
    yield Collective(axes, "ragged-all-to-all", "routing weights of rows", R, weights, rows * 4)
    # a copy comes from another rank whole: written as one of R parts staying would be, so that `sent` is all of it
    whole = copies * matrices * R / (R - 1)
    fetches = round(times * (forwards + 1))
    yield Collective(axes, "ragged-all-to-all", "copied experts (at most)", R, fetches, whole)
    yield Collective(axes, "ragged-all-to-all", "gradients of copies (at most)", R, times, whole)


def _of_tensor(config: RunConfig, stage: Stage) -> Iterator[Collective]:
    axes, T = _axes(config, "tensor")
    model, micro = config.model, config.train.accumulation
    a, n, D = jnp.dtype(model.dtype).itemsize, shape_of(config).n, model.hidden_size
    sublayers, remat = 2 * len(stage.layers) * micro, config.train.remat
    stream = float(a * n * D)
    again = {"none": (0.0, 0.0), "products": (0.0, 0.0), "sublayer": (1.0, 0.0), "layer": (1.0, 0.5), "block": (1, 1)}
    gathers, scatters = (times + forwards_again(config, stage) for times in again[remat])
    yield Collective(axes, "all-gather", "stream into sublayers", T, round(sublayers * (2 + gathers)), stream)
    yield Collective(axes, "reduce-scatter", "stream out of sublayers", T, round(sublayers * (2 + scatters)), stream)
    if stage.first:
        yield Collective(axes, "reduce-scatter", "embeddings", T, micro, stream)
        yield Collective(axes, "all-gather", "gradient of embeddings", T, micro, stream)
    if stage.last:
        yield Collective(axes, "all-gather", "stream into the head", T, micro, stream)
        yield Collective(axes, "reduce-scatter", "gradient out of the head", T, micro, stream)
        yield Collective(axes, "all-reduce", "maximum, sum and target of logits", T, micro, float(3 * 4 * n))


def _of_context(config: RunConfig, stage: Stage) -> Iterator[Collective]:
    """State maps and convolution halos of KDA, latents of MLA."""
    axes, C = _axes(config, "context")
    model, mesh, shape = config.model, config.mesh, shape_of(config)
    a, kda, mla = jnp.dtype(model.dtype).itemsize, model.kda, model.mla
    kinds = [kinds_of_layers(model)[layer].mixer for layer in stage.layers]
    of_kda, of_mla = (kinds.count(kind) * config.train.accumulation for kind in ("kda", "mla"))
    H, K, again = kda.num_heads / mesh.tensor, kda.head_dim, config.train.remat in ("sublayer", "layer", "block")
    maps = shape.rows * C * H * K * 2 * K * 4
    halo = shape.rows * (kda.conv_size - 1) * 3 * H * K * a
    latents = shape.n * C * (mla.kv_lora_rank + mla.qk_rope_head_dim) * a
    more = forwards_again(config, stage)
    gathers = round(of_kda * (1 + _forwards(config, stage)))
    yield Collective(axes, "all-gather", "KDA state maps", C, gathers, maps)
    yield Collective(axes, "permute", "convolution halos", C, round(of_kda * (2 + again + more)), halo)
    yield Collective(axes, "all-gather", "MLA latents", C, round(of_mla * (1 + again + more)), latents)
    yield Collective(axes, "reduce-scatter", "gradients of MLA latents", C, of_mla, latents)


def rows_between(model: ModelConfig, chunks: list[tuple[int, ...]], pipe: int) -> list[int]:
    """AttnRes blocks that go from each chunk to the next: those that the receiver did not cache in its chunk before."""
    size = model.attn_res_block_size
    if size is None:
        return [0] * (len(chunks) - 1)
    born = [sum(layer % size == 0 for layer in chunk) for chunk in chunks]
    return [sum(born[max(0, c + 2 - pipe) : c + 1]) for c in range(len(chunks) - 1)]


def _of_pipe(config: RunConfig, stage: Stage, virtual: int) -> Iterator[Collective]:
    pipe, model = config.mesh.pipe, config.model
    if pipe == 1:
        return
    # chunks of all stages in order of depth: stage p has every pipe-th
    every = stages(model, pipe, virtual)
    chunks = [every[c % pipe].chunks[c // pipe] for c in range(pipe * virtual)]
    row = jnp.dtype(model.dtype).itemsize * shape_of(config).n * model.hidden_size / config.mesh.tensor
    between = rows_between(model, chunks, pipe)
    mine = [c for c in range(pipe * virtual) if c % pipe == stage.index]
    forward = sum(1 + between[c] for c in mine if c < len(between))
    backward = sum(1 + between[c - 1] for c in mine if c > 0)
    micro = config.train.accumulation
    yield Collective(("pipe",), "permute", "partial sums and blocks, to the next stage", pipe, micro, forward * row)
    yield Collective(("pipe",), "permute", "their gradients, to the stage before", pipe, micro, backward * row)


def _of_balancing(config: RunConfig, stage: Stage) -> Iterator[Collective]:
    axes, ranks = _axes(config, *COPIES)
    moe, times = config.model.moe, moe_layers_of(config.model, stage) * config.train.accumulation
    size = float(4 * moe.num_experts * (moe.qb_bins + 1))
    yield Collective(axes, "all-reduce", "histograms and loads of experts", ranks, times, size)
