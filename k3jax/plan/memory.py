"""Bytes a device, by kind and by phase of a step.

State (parameters, optimizer) is exact. Everything else is counted from shapes: which tensors a layer keeps under each
remat preset, what its backward pass needs at once, what Newton-Schulz and the loss hold. A step has three phases that
may be its peak:

    backward   gradients, what all layers in flight keep, the working set of one unit that is recomputed
    loss       what all layers keep, logits and their gradient
    optimizer  gradients, and four arrays of the size of the largest group of Muon's blocks

XLA then packs temporaries that are not alive together into one allocation, with gaps: `PACKING`, which is fitted.

Legend: n tokens of a micro-batch on a device (its sequences × its shard of time), D hidden, H heads, K head dim.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

import jax.numpy as jnp

from k3jax.config import LayerSpec, MeshConfig, ModelConfig, Remat, RunConfig
from k3jax.model.plan import plan_layers
from k3jax.parallel.expert_plan import copy_slots
from k3jax.plan.layout import Leaf, Stage, cut, kinds_of_layers, muon_blocks, ways
from k3jax.sharding import COPIES

Phase = Literal["backward", "loss", "optimizer"]
PHASES: tuple[Phase, ...] = get_args(Phase)

KINDS = {
    "parameters": "exact",
    "optimizer": "exact",
    "balancing": "exact",
    "gradients": "estimate",
    "activations": "estimate",
    "bank": "estimate",
    "experts": "estimate",
    "quantised": "estimate",
    "working": "estimate",
    "packing": "fitted",
}
"""Kinds of bytes and how they are known. `balancing` are router biases; `bank` AttnRes blocks and their
gradients; `experts` MoonEP's buffers; `quantised` the routed experts that quantisation-aware training computes with,
which live until the gradients are there."""

PACKING = {"loops": 1.46, "unrolled": 1.15}
"""Bytes that XLA allocates for temporaries other than gradients over those alive at its peak, by `train.unroll`, in the
phases with activations. Fitted to configs/proxy.py compiled for an H200: in loops with remat "layer" 18.8 GiB for 10.9,
at twice the batch 30.9 for 17.7; unrolled with "none" 26.4 for 22.9."""

ROW_ALIGN = 8
"""Rows that groups of an expert's rows are padded to, by the Hopper kernels."""


@dataclass(frozen=True)
class Shape:
    """What a micro-batch is on one device."""

    rows: int
    """Sequences."""
    tokens: int
    """Of a sequence, in this device's shard of time."""

    @property
    def n(self) -> int:
        return self.rows * self.tokens


def shape_of(config: RunConfig) -> Shape:
    mesh = config.mesh
    rows = config.data.batch_size // (config.train.accumulation * mesh.data * mesh.expert)
    return Shape(rows, config.data.sequence_length // mesh.context)


@dataclass(frozen=True)
class Saved:
    """A tensor that the backward pass of a layer reads, in bytes a token of `Shape.n`."""

    name: str
    bytes: float
    presets: frozenset[str]
    """Remat presets that keep it; others compute it again."""


_NONE: frozenset[str] = frozenset({"none"})
_PRODUCTS = _NONE | {"products"}
_KERNELS = _PRODUCTS | {"sublayer", "layer"}
_SUBLAYER = _PRODUCTS | {"sublayer"}


@functools.cache
def saved_tensors(model: ModelConfig, spec: LayerSpec, mesh: MeshConfig) -> list[Saved]:
    """What a layer's two halves need for their backward passes, and which presets keep it.

    Over `tensor`, the stream between sublayers and the tokens of experts are sharded, heads and MLP columns inside
    sublayers too; `context` makes MLA hold keys and values of all shards.
    """
    a, D, T = jnp.dtype(model.dtype).itemsize, model.hidden_size, mesh.tensor
    whole = a * D * (1 + 1 / T if T > 1 else 1)  # with what is gathered over `tensor`
    mixer = _kda_tensors(model, T, a) if spec.mixer == "kda" else _mla_tensors(model, mesh, a)
    ffn = _mlp_tensors("mlp", model.dense_size / T, a) if spec.ffn == "dense" else _moe_tensors(model, mesh, a)
    return [
        Saved("layer input", a * D / T, _KERNELS),
        Saved("normed input of the mixer", whole, _PRODUCTS),
        *mixer,
        Saved("stream between the halves", a * D / T, _SUBLAYER),
        Saved("normed input of the feed-forward", whole, _PRODUCTS),
        *ffn,
    ]


def _kda_tensors(model: ModelConfig, T: int, a: int) -> list[Saved]:
    H, K = model.kda.num_heads / T, model.kda.head_dim
    return [
        Saved("q, k, v before the convolution", 3 * a * H * K, _PRODUCTS),
        Saved("q, k, v", 3 * a * H * K, _PRODUCTS),
        Saved("gate and its low-rank factor", a * (H * K + K), _PRODUCTS),
        Saved("beta", a * H, _PRODUCTS),
        # the kernels' first stage, which XLA shares between the passes where nothing forbids it
        Saved("W, Q, K, U and two [64, 64] blocks of each chunk", a * H * (4 * K + 2 * 64), _NONE),
        Saved("KDA output", a * H * K, _KERNELS),
        Saved("output gate", a * H * K, _PRODUCTS),
        Saved("gated output", a * H * K, _PRODUCTS),
    ]


def _mla_tensors(model: ModelConfig, mesh: MeshConfig, a: int) -> list[Saved]:
    mla = model.mla
    H, latent, shards = mla.num_heads / mesh.tensor, mla.kv_lora_rank + mla.qk_rope_head_dim, mesh.context
    return [
        Saved("query latent and its norm", 2 * a * (mla.q_lora_rank or 0), _PRODUCTS),
        Saved("queries", a * H * mla.qk_head_dim, _PRODUCTS),
        Saved("key-value latent and its norm", a * (latent + mla.kv_lora_rank), _PRODUCTS),
        Saved("gathered latent", a * latent * (shards - 1), _PRODUCTS),
        Saved("keys and values", a * H * (mla.qk_head_dim + mla.v_head_dim) * shards, _PRODUCTS),
        Saved("attention output and logsumexp", H * (a * mla.v_head_dim + 4), _KERNELS),
        Saved("output gate", a * H * mla.v_head_dim * mla.output_gate, _PRODUCTS),
        Saved("gated output", a * H * mla.v_head_dim, _PRODUCTS),
    ]


def _mlp_tensors(name: str, columns: float, a: int) -> list[Saved]:
    return [
        Saved(f"gate and up of the {name}", 2 * a * columns, _PRODUCTS),
        Saved(f"two tanh of the {name}, float32", 2 * 4 * columns, _NONE),
        Saved(f"hidden of the {name}", a * columns, _PRODUCTS),
    ]


def _moe_tensors(model: ModelConfig, mesh: MeshConfig, a: int) -> list[Saved]:
    moe, T = model.moe, mesh.tensor
    latent, k = moe.latent_size or model.hidden_size, moe.experts_per_token
    return [
        Saved("router scores and logits, float32", 2 * 4 * moe.num_experts / T, _NONE),
        Saved("routing: weights, slots, rows", 3 * 4 * k / T, _NONE),
        Saved("latent", a * latent * (moe.latent_size is not None) / T, _PRODUCTS),
        # XLA shares them between the passes; what arrives by MoonEP is behind a barrier
        Saved("dispatched rows", a * k * latent * (mesh.expert == 1) / T, _NONE),
        Saved("routed output", a * latent / T, _KERNELS),
        Saved("its norm", a * latent * moe.latent_norm / T, _PRODUCTS),
        *_mlp_tensors("shared experts", moe.num_shared_experts * moe.expert_size / T, a),
    ]


def moe_layers_of(model: ModelConfig, stage: Stage) -> int:
    """MoE layers of a stage."""
    kinds = kinds_of_layers(model)
    return sum(kinds[layer].ffn == "moe" for layer in stage.layers)


def rows_routed(config: RunConfig) -> int:
    """Tokens of a micro-batch × k that a device routes, and with MoonEP computes."""
    return shape_of(config).n // config.mesh.tensor * config.model.moe.experts_per_token


def expert_rows(config: RunConfig) -> int:
    """Rows that a rank's experts compute in a micro-batch: tokens × k, padded by segment."""
    moe, mesh = config.model.moe, config.mesh
    segments = moe.num_experts // mesh.expert + (copy_slots(moe.num_experts, mesh.expert) if mesh.expert > 1 else 0)
    return rows_routed(config) + segments * (ROW_ALIGN - 1)


def expert_buffers(config: RunConfig) -> dict[str, float]:
    """MoonEP's buffers on a device: of one layer at a time, forward and backward. Empty without `expert`."""
    model, mesh = config.model, config.mesh
    if mesh.expert == 1 or not model.num_moe_layers:
        return {}
    a, moe = jnp.dtype(model.dtype).itemsize, model.moe
    latent, slots = moe.latent_size or model.hidden_size, copy_slots(moe.num_experts, mesh.expert)
    matrices = 3 * latent * moe.expert_size
    row = a * latent
    return {
        "rows to send": 2.0 * rows_routed(config) * row,  # tokens, and gradients on their way
        "rows that arrive": 2.0 * expert_rows(config) * row,
        "copied experts": slots * matrices * a,
        "their gradients, to send": slots * matrices * a,
        "gradients of copies that arrive": (moe.num_experts // mesh.expert + mesh.expert - 1) * matrices * a,
    }


def _backward_transients(config: RunConfig, spec: LayerSpec) -> float:
    """Bytes that only exist while the backward pass is in one half of a layer: the larger of the two."""
    model, mesh, n = config.model, config.mesh, shape_of(config).n
    a, T = jnp.dtype(model.dtype).itemsize, mesh.tensor
    if spec.mixer == "kda":
        H, K = model.kda.num_heads / T, model.kda.head_dim
        states = 2 * K * K / 64  # entering each chunk of 64, and their gradients
        mixer = a * n * H * (4 * K + 2 * 64 + states + 2 * K + 4 * K)  # prepared, V' and its gradient, dq dk dv dg
    else:
        mla = model.mla
        H = mla.num_heads / T
        keys = (mla.qk_head_dim + mla.v_head_dim) * mesh.context
        mixer = a * n * H * (mla.qk_head_dim + keys + 2 * mla.v_head_dim)
    if spec.ffn == "dense":
        return max(mixer, 3 * a * n * model.dense_size / T)
    moe = model.moe
    latent, inner, rows = moe.latent_size or model.hidden_size, moe.expert_size, expert_rows(config)
    # gate, up, d_hidden, hidden, d_gate, d_up; rows in, gradients in and out unless MoonEP's buffers have them
    experts = a * rows * (6 * inner + latent * (3 if mesh.expert == 1 else 1))
    bank = 3 * latent * inner * moe.num_experts / mesh.expert
    return max(mixer, experts + bank * a)  # with the gradients of the bank in the dtype of products


@dataclass
class Memory:
    """Bytes on the devices of one pipeline stage."""

    stage: int
    phases: dict[Phase, dict[str, float]] = field(default_factory=dict)
    activations: dict[Remat, float] = field(default_factory=dict)
    """What one micro-batch keeps, and in a pipeline what waits of all in flight, by preset."""
    details: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def kinds(self) -> dict[str, float]:
        """Bytes by kind in the phase of the peak."""
        return self.phases[self.peak_phase]

    @property
    def peak(self) -> float:
        return sum(self.kinds.values())

    @property
    def arguments(self) -> float:
        return sum(self.kinds[kind] for kind in ("parameters", "optimizer", "balancing"))

    @property
    def temporaries(self) -> float:
        return self.peak - self.arguments


def in_flight(stage: Stage, pipe: int, micro_batches: int) -> int:
    """Inputs of chunks that wait on a stage for their backward pass at once, under (interleaved) 1F1B."""
    virtual = len(stage.chunks)
    if pipe == 1:
        return 0
    if virtual == 1:
        return min(micro_batches, pipe - stage.index)
    return min(micro_batches * virtual, 2 * (pipe - stage.index - 1) + (virtual - 1) * pipe + 1)


def forwards_again(config: RunConfig, stage: Stage) -> float:
    """Forward passes that a pipeline adds: of a chunk it keeps only the input, so the backward pass begins with one
    (the last chunk has no other)."""
    if config.mesh.pipe == 1:
        return 0.0
    return 1.0 - stage.last / len(stage.chunks)


def bank_rows(model: ModelConfig, layers: Iterable[int]) -> int:
    """AttnRes blocks that the last of some layers reads, the embedding among them."""
    return 0 if model.attn_res_block_size is None else max(layers) // model.attn_res_block_size + 1


_segments = functools.cache(plan_layers)


@functools.cache
def outside_loops(config: RunConfig) -> frozenset[int]:
    """Layers that no loop runs over, although layers are not unrolled.

    There XLA sees that the backward pass computes again what the forward pass did, and keeps it instead: the remat
    presets do nothing.
    """
    if config.train.unroll or config.mesh.pipe > 1:
        return frozenset()
    alone: set[int] = set()
    for plan in _segments(config.model):
        layer = plan.first_layer
        for repeat in plan.repeats:
            for run in repeat.runs:
                if plan.num_blocks == repeat.count == run.count == 1:
                    alone.add(layer)
                layer += run.count
            layer += (repeat.count - 1) * repeat.unit
    return frozenset(alone)


def _kept(config: RunConfig, layers: Iterable[int], preset: Remat) -> float:
    """Bytes that layers keep of one micro-batch."""
    model, alone, total = config.model, outside_loops(config), 0.0
    chosen = set(layers)
    for part, kept in ((chosen & alone, "none"), (chosen - alone, preset)):
        for spec, count in _counts(model, part).items():
            tensors = saved_tensors(model, spec, config.mesh)
            total += count * sum(tensor.bytes for tensor in tensors if kept in tensor.presets)
    return shape_of(config).n * total


def _counts(model: ModelConfig, layers: Iterable[int]) -> Counter[LayerSpec]:
    kinds = kinds_of_layers(model)
    return Counter(kinds[layer] for layer in layers)


def _rounded(leaves: list[Leaf], config: RunConfig, spec: LayerSpec, *, rest: bool = False) -> float:
    """Bytes of the weights of a layer in the dtype of products, in the layout of use (or at rest)."""
    a = jnp.dtype(config.model.dtype).itemsize
    chosen = [leaf for leaf in leaves if leaf.kind == spec]
    if config.model.moe.qat and (rest or not config.mesh.fsdp):
        # banks are there (`_quantised`), but w1 and w3 are put side by side where they are used
        chosen = [leaf for leaf in chosen if not (leaf.is_bank and (rest or leaf.tensor.endswith("w2")))]
    cuts = (cut(leaf, config.mesh) for leaf in chosen)
    return a * sum(c.rest if rest else c.used for c in cuts)


def _weights_kept(leaves: list[Leaf], config: RunConfig, layers: Iterable[int], preset: Remat) -> float:
    """Rounded or gathered weights that the backward pass finds where the forward pass left them."""
    model, fsdp, rest = config.model, config.mesh.fsdp, False
    if model.dtype == model.param_dtype and not fsdp:
        return 0.0
    if preset != "none" and not (fsdp and preset == "products"):
        if config.train.unroll:
            rest = fsdp
        elif preset == "products":  # w1 and w3 side by side
            leaves = [leaf for leaf in leaves if leaf.is_bank and leaf.tensor.split("/")[-1] in ("w1", "w3")]
        else:
            return 0.0
    counts = _counts(model, layers)
    return sum(count * _rounded(leaves, config, spec, rest=rest) for spec, count in counts.items())


def _quantised(leaves: list[Leaf], config: RunConfig, stage: Stage) -> float:
    """Routed experts on the MXFP4 grid, rounded once a step where they lie between steps."""
    if config.model.moe.qat is None:
        return 0.0
    a = jnp.dtype(config.model.dtype).itemsize
    return float(sum(a * stage.holds(leaf) * _stored(leaf, config.mesh) for leaf in leaves if leaf.is_bank))


def _optimizer_transients(leaves: list[Leaf], config: RunConfig, stage: Stage) -> float:
    """Y, its Gram matrix, V and the next Y of all blocks of one shape at once; of the largest group."""
    a = jnp.dtype(config.optimizer.muon_ns_dtype).itemsize
    groups = muon_blocks(leaves, config.mesh, stage)
    return max((a * g.share * (3 * g.rows * g.columns + min(g.rows, g.columns) ** 2) for g in groups), default=0.0)


def _gradients(leaves: list[Leaf], config: RunConfig, stage: Stage, layers: Iterable[int], *, end: bool) -> float:
    """Gradients of some layers of a stage (`end`: and of what stands outside them), before they are added up."""
    chosen, total = set(layers), 0.0
    for leaf in leaves:
        held = len(leaf.layers & chosen) if leaf.layers else stage.holds(leaf) * (leaf.last or end)
        total += held * leaf.itemsize * _stored(leaf, config.mesh)
    return total


def _sums(leaves: list[Leaf], config: RunConfig, stage: Stage) -> float:
    """Slices of the gradients at rest, where micro-batches and devices are added up."""
    alone = ways(config.mesh, COPIES) == 1
    if config.train.accumulation == 1 and (alone or config.mesh.fsdp):
        return 0.0
    return sum(float(stage.holds(leaf) * leaf.itemsize * cut(leaf, config.mesh).rest) for leaf in leaves)


def _loop_copies(leaves: list[Leaf], config: RunConfig, layers: tuple[int, ...]) -> float:
    """A loop over equal blocks slices a block's weights out of their stacks, and adds its gradients into theirs."""
    for plan in _segments(config.model):
        blocks = len(set(layers) & set(range(plan.first_layer, plan.first_layer + plan.num_blocks * plan.block_layers)))
        if config.train.unroll or blocks < 2 * plan.block_layers:
            continue
        block = set(range(plan.first_layer, plan.first_layer + plan.block_layers))
        held = ((leaf, len(leaf.layers & block)) for leaf in leaves)
        return 2 * sum(count * leaf.itemsize * _stored(leaf, config.mesh) for leaf, count in held)
    return 0.0


def _stored(leaf: Leaf, mesh: MeshConfig) -> int:
    """Elements of a parameter on a device between steps."""
    c = cut(leaf, mesh)
    return c.rest if mesh.fsdp else c.used


def _units(config: RunConfig, layers: Iterable[int], *, loops: bool) -> list[tuple[int, ...]]:
    """Layers whose gradients are born together, in order: the segments that loops run over, else what is recomputed."""
    model = config.model
    if loops:
        ends = [plan.first_layer for plan in _segments(model)][1:]
        of = lambda layer: sum(layer >= end for end in ends)  # noqa: E731
    elif config.train.remat == "block":
        of = lambda layer: layer // (model.attn_res_block_size or model.num_layers)  # noqa: E731
    else:
        of = lambda layer: layer  # noqa: E731
    found: dict[int, list[int]] = {}
    for layer in layers:
        found.setdefault(of(layer), []).append(layer)
    return [tuple(unit) for unit in found.values()]


def _recomputed(leaves: list[Leaf], config: RunConfig, layers: Iterable[int]) -> float:
    """Working set of the backward pass in some layers: what one unit forms anew, its weights, and its largest half."""
    model, preset, worst = config.model, config.train.remat, 0.0
    seen: set[frozenset] = set()  # units of the same layers need the same
    for unit in _units(config, layers, loops=False):
        counts = _counts(model, unit)
        alone = len(outside_loops(config).intersection(unit))
        key = frozenset([*counts.items(), alone])
        if key in seen:
            continue
        seen.add(key)
        formed = _kept(config, unit, "none") - _kept(config, unit, preset)
        rounded = {spec: _rounded(leaves, config, spec) for spec in counts}
        weights = max(rounded.values())
        if preset == "block" and not config.mesh.fsdp:
            weights = sum(count * rounded[spec] for spec, count in counts.items())
        if preset == "sublayer":
            formed /= 2  # one half at a time
        if preset == "none":
            weights = 0.0
        worst = max(worst, formed + weights + max(_backward_transients(config, spec) for spec in counts))
    return worst


def _backward(leaves: list[Leaf], config: RunConfig, stage: Stage) -> dict[str, float]:
    """Gradients, activations and working set where their sum is largest while a chunk goes backwards.

    Loops allocate stacks for all their layers at once; unrolled layers free what they kept as gradients are born.
    """
    preset, worst = config.train.remat, dict[str, float]()
    sums = _sums(leaves, config, stage) if config.train.accumulation > 1 else 0.0  # else formed once all are there
    for chunk in stage.chunks:
        total, weights = _kept(config, chunk, preset), _weights_kept(leaves, config, chunk, preset)
        units = _units(config, chunk, loops=not config.train.unroll)
        for i, unit in enumerate(units):
            freed = [layer for u in units[i + 1 :] for layer in u]
            # loops start from zeros for the gradients of all layers, which XLA makes early
            done = [*unit, *freed] if config.train.unroll else chunk
            end = not config.train.unroll or i == 0
            point = {
                "gradients": sums + _gradients(leaves, config, stage, done, end=end),
                "activations": total + weights - _kept(config, freed, preset),
                "working": _recomputed(leaves, config, unit) + _loop_copies(leaves, config, unit),
            }
            if config.train.unroll:
                point["activations"] -= _weights_kept(leaves, config, freed, preset)
            worst = max(worst, point, key=lambda p: sum(p.values()))
    return worst


def _loss(config: RunConfig) -> float:
    """Logits of one chunk in float32, their gradient in the dtype of products, and that of the head in float32."""
    model, mesh, shape = config.model, config.mesh, shape_of(config)
    a, vocabulary = jnp.dtype(model.dtype).itemsize, model.vocab_size / mesh.tensor
    chunks = math.ceil(shape.tokens / config.train.loss_chunk)
    tokens = shape.rows * math.ceil(shape.tokens / chunks)
    return tokens * vocabulary * (4 + a) + vocabulary * model.hidden_size * (4 + a)


def predict_stage(leaves: list[Leaf], config: RunConfig, stage: Stage) -> Memory:
    """Memory of the devices of one stage."""
    model, mesh, n = config.model, config.mesh, shape_of(config).n
    a, D, preset = jnp.dtype(model.dtype).itemsize, model.hidden_size, config.train.remat
    cuts = [(leaf, cut(leaf, mesh), stage.holds(leaf)) for leaf in leaves]
    parameters = sum(held * leaf.itemsize * (c.rest if mesh.fsdp else c.used) for leaf, c, held in cuts)
    slots = sum(held * leaf.itemsize * c.rest * (2 if leaf.group == "adamw" else 1) for leaf, c, held in cuts)
    moe_layers = moe_layers_of(model, stage)
    balancing = moe_layers * 4 * model.moe.num_experts  # router biases
    bins = float(balancing * model.moe.qb_bins)

    # inputs of chunks and AttnRes rows of all micro-batches in flight; of the one in its backward pass also the
    # gradients of rows, and those of a block's mixes
    row = a * n * D / mesh.tensor
    rows, flying = bank_rows(model, stage.layers), in_flight(stage, mesh.pipe, config.train.accumulation)
    micro_batches = max(1, math.ceil(flying / len(stage.chunks)))
    size = model.attn_res_block_size or 0
    of_block = max(sum(layer // size == block for layer in stage.layers) for block in range(rows)) if rows else 0
    waiting, bank = row * flying, row * (rows * micro_batches + rows + 2 * of_block)

    memory = Memory(stage.index)
    for each in get_args(Remat):
        memory.activations[each] = waiting + max(_kept(config, chunk, each) for chunk in stage.chunks)
    last = stage.chunks[-1]
    kept = waiting + _kept(config, last, preset) + _weights_kept(leaves, config, last, preset)
    gradients = _sums(leaves, config, stage) or _gradients(leaves, config, stage, stage.layers, end=True)
    buffers = expert_buffers(config) if moe_layers else {}
    backward, muon = _backward(leaves, config, stage), _optimizer_transients(leaves, config, stage)
    backward = {k: v + {"activations": waiting, "working": bins}.get(k, 0.0) for k, v in backward.items()}
    fixed = {"parameters": float(parameters), "optimizer": float(slots), "balancing": float(balancing)}
    phases: dict[Phase, dict[str, float]] = {
        "backward": backward | {"bank": bank, "experts": sum(buffers.values())},
        "optimizer": {"gradients": gradients, "activations": 0.0, "bank": 0.0, "experts": 0.0, "working": muon},
    }
    if stage.last:
        at_loss = {"gradients": 0.0, "activations": kept, "bank": row * (rows * micro_batches + 4)}
        phases["loss"] = at_loss | {"experts": 0.0, "working": _loss(config) + bins}
    quantised = _quantised(leaves, config, stage)
    gaps = PACKING["unrolled" if config.train.unroll else "loops"] - 1
    for phase, kinds in phases.items():
        # what waits between programs of a pipeline is packed by none
        packed = sum(kinds.values()) - kinds["gradients"] - (waiting + row * rows * micro_batches if flying else 0.0)
        rounded = 0.0 if phase == "optimizer" else quantised
        late = {"quantised": rounded, "packing": 0.0 if phase == "optimizer" else gaps * packed}
        memory.phases[phase] = fixed | kinds | late
    memory.details = {"MoonEP buffers": buffers, "live": {p: sum(k.values()) for p, k in phases.items()}}
    return memory
