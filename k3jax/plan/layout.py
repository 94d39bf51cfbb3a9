"""What there is to place: every parameter by layer, how a mesh cuts it, and which layers a pipeline stage holds.

Axes mean here: `expert` keeps banks of experts at home (E/R a rank), `tensor` cuts heads, MLP columns and the
vocabulary, `pipe` cuts layers at borders of the period of mixers; `context` cuts no parameter. At rest, a device of
data × expert keeps a slice (`k3jax.sharding`), of a bank one over data.

Legend: R ranks of `expert`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from k3jax.config import ConfigError, LayerSpec, MeshConfig, ModelConfig, OptimizerConfig, RunConfig
from k3jax.model.plan import plan_layers
from k3jax.sharding import RULES, logical_axes
from k3jax.train.optimizer import LEAVES, Group, make_optimizer, path_names
from k3jax.train.state import abstract_params

TENSOR = ("heads", "mlp", "vocab")
"""Logical axes that `tensor` cuts."""


@dataclass(frozen=True)
class Leaf:
    """One parameter of one layer, or outside the layers."""

    tensor: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: LayerSpec | None
    """Of its layers."""
    layers: frozenset[int]
    """Layers that have one like it; empty for what stands outside."""
    itemsize: int
    group: Group
    """Of the optimizer; see `k3jax.train.optimizer`."""
    last: bool
    """Outside the layers: behind them (head, output mix, final norm) and not before (embedding)."""

    @property
    def is_bank(self) -> bool:
        return self.axes[0] == "expert"

    @functools.cached_property
    def blocks(self) -> tuple[int, int, int]:
        """Muon's blocks: how many, rows, columns."""
        layout = LEAVES[self.tensor.split("/")[-1]].layout
        b, r, c = (math.prod(n for n, axis in zip(self.shape, layout) if axis == letter) for letter in "brc")
        return b, r, c


@dataclass(frozen=True)
class Cut:
    """Elements of a parameter on one device."""

    used: int
    """In the layout that it is computed with."""
    rest: int
    """At rest: optimizer state always, parameters with `mesh.fsdp`."""
    letter: str
    """Of the axis that is cut at rest in the layout of Muon's blocks; empty: none is."""


@dataclass(frozen=True)
class Stage:
    """What the devices at one place of `pipe` hold."""

    index: int
    chunks: tuple[tuple[int, ...], ...]
    """Layers of each of its virtual stages."""
    first: bool
    last: bool

    @functools.cached_property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)

    def holds(self, leaf: Leaf) -> int:
        """How many of a parameter."""
        if leaf.layers:
            return len(leaf.layers.intersection(self.layers))
        return int(self.last if leaf.last else self.first)


def leaves(config: RunConfig) -> list[Leaf]:
    """Every parameter of a model, from its tree of shapes."""
    return _leaves(config.model, config.optimizer)


@functools.cache  # a search plans hundreds of meshes
def _leaves(model: ModelConfig, optimizer: OptimizerConfig) -> list[Leaf]:
    params = abstract_params(model)
    groups = jax.tree.leaves(make_optimizer(optimizer, params, 1).groups)
    runs = [[numbers for _, numbers in plan.run_layers()] for plan in plan_layers(model)]
    kinds = kinds_of_layers(model)
    found: dict[Leaf, frozenset[int]] = {}  # those of layers of one kind are one
    is_variable = lambda x: hasattr(x, "get_metadata")  # noqa: E731
    for (path, node), group in zip(jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable), groups):
        names, shape, axes = path_names(path), tuple(node.shape), logical_axes(node)
        layers: frozenset[int] = frozenset()
        if names[0] == "segments":
            layers, names = frozenset(runs[int(names[1])][int(names[3])]), names[4:]
            shape, axes = shape[1:], axes[1:]
        kind = kinds[min(layers)] if layers else None
        tensor = "/".join(names)
        leaf = Leaf(tensor, shape, axes, kind, frozenset(), node.dtype.itemsize, group, tensor != "embed")
        found[leaf] = found.get(leaf, frozenset()) | layers
    return [dataclasses.replace(leaf, layers=layers) for leaf, layers in found.items()]


@functools.cache
def kinds_of_layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """`model.layers`, kept."""
    return model.layers


@functools.cache
def cut(leaf: Leaf, mesh: MeshConfig) -> Cut:
    """How a mesh cuts a parameter that it can cut (`refusals`)."""
    local = list(leaf.shape)
    for i, axis in enumerate(leaf.axes):
        if axis in TENSOR:
            local[i] //= mesh.tensor
    if leaf.is_bank:
        local[0] //= mesh.expert
    used = math.prod(local)
    ways = mesh.data if leaf.is_bank else mesh.data * mesh.expert
    place = _cut_at_rest(leaf.axes, local, ways) if ways > 1 else None
    if place is None:
        return Cut(used, used, "")
    layout = LEAVES[leaf.tensor.split("/")[-1]].layout
    return Cut(used, used // ways, layout[place] if layout else "")


@dataclass(frozen=True)
class Blocks:
    """Muon's blocks of one shape that lie alike; Newton-Schulz runs on all of them at once."""

    rows: int
    columns: int
    letter: str
    """Of the axis that is cut at rest; with "b" every device has whole blocks, else they are dealt to owners."""
    axes: tuple[str, ...]
    """Mesh axes over which they are cut or dealt."""
    ways: int
    count: int
    """Over all devices of `axes`."""

    @property
    def share(self) -> int:
        """Blocks that a device works on."""
        return -(-self.count // self.ways)

    @property
    def moves(self) -> bool:
        return self.ways > 1 and self.letter != "b"


def muon_blocks(leaves: list[Leaf], mesh: MeshConfig, stage: Stage) -> list[Blocks]:
    """Muon's blocks on the devices of a stage, grouped as `k3jax.train.optimizer` does.

    Whole matrices that `tensor` cuts are dealt over it too; blocks of heads stay on its devices.
    """
    found: dict[tuple[int, int, str, tuple[str, ...]], int] = {}
    for leaf in leaves:
        if leaf.group == "adamw" or not stage.holds(leaf):
            continue
        count, rows, columns = leaf.blocks
        layout = LEAVES[leaf.tensor.split("/")[-1]].layout
        letters = {letter for letter, axis in zip(layout, leaf.axes) if axis in TENSOR}
        axes = ("data",) if leaf.is_bank else ("data", "expert")
        letter = cut(leaf, mesh).letter
        if leaf.is_bank:
            count //= mesh.expert
        if mesh.tensor > 1 and letters == {"b"}:
            count //= mesh.tensor
        elif mesh.tensor > 1 and letters:
            axes, letter = (*axes, "tensor"), min(letters)
        axes = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
        key = (rows, columns, letter, axes)
        found[key] = found.get(key, 0) + count * stage.holds(leaf)
    return [
        Blocks(rows, columns, letter, axes, math.prod(getattr(mesh, axis) for axis in axes), count)
        for (rows, columns, letter, axes), count in found.items()
    ]


def _cut_at_rest(axes: Sequence[str], local: Sequence[int], ways: int) -> int | None:
    """The axis that `k3jax.sharding.rest_spec` would cut."""
    for name, rule in RULES.items():
        if rule.rest and name in axes and local[axes.index(name)] % ways == 0:
            return axes.index(name)
    return None


def period(model: ModelConfig) -> int:
    """Layers from one MLA layer to the next: stages are cut between periods."""
    first = model.mla_layers[0] + 1 if model.mla_layers else 1
    return min(first, model.num_layers)


def units(model: ModelConfig) -> list[tuple[int, ...]]:
    """Layers between two borders where stages can be cut, in order."""
    size = period(model)
    return [tuple(range(i, min(i + size, model.num_layers))) for i in range(0, model.num_layers, size)]


@functools.cache
def stages(model: ModelConfig, pipe: int, virtual: int = 1) -> list[Stage]:
    """Layers of each pipeline stage: pipe × virtual runs of periods, as equal as can be, dealt in turn.

    Raises:
        ConfigError: more stages than periods.
    """
    pieces, count = units(model), pipe * virtual
    if count > len(pieces):
        raise ConfigError(
            f"pipe {pipe} × virtual {virtual} = {count} stages: the {model.num_layers} layers have {len(pieces)} "
            f"periods of {period(model)} to cut between; legal are pipe × virtual in 1..{len(pieces)}"
        )
    ends = [-(-len(pieces) * (c + 1) // count) for c in range(count)]
    runs = [pieces[a:b] for a, b in zip([0, *ends], ends)]
    chunks = [tuple(layer for piece in run for layer in piece) for run in runs]
    return [Stage(p, tuple(chunks[p::pipe]), p == 0, p == pipe - 1) for p in range(pipe)]


@dataclass(frozen=True)
class Work:
    """Tokens of a step and how they are divided, besides the mesh."""

    batch: int
    sequence: int
    micro_batches: int


def refusals(model: ModelConfig, mesh: MeshConfig, work: Work, virtual: int = 1) -> list[str]:
    """Why a mesh cannot be honoured; empty if it can."""
    tail, found = model.kda.conv_size - 1, []
    sizes = {
        "KDA heads": model.kda.num_heads,
        "MLA heads": model.mla.num_heads,
        "vocabulary": model.vocab_size,
        "dense MLP": model.dense_size,
        "expert MLP": model.moe.expert_size,
    }
    for name, size in sizes.items():
        if size % mesh.tensor:
            found.append(f"tensor {mesh.tensor} does not divide the {name}: {size}; legal are {_legal(sizes.values())}")
    experts = model.moe.num_experts
    if experts % mesh.expert:
        found.append(f"expert {mesh.expert} does not divide the {experts} experts; legal are {_legal([experts])}")
    elif mesh.fsdp and experts % (mesh.expert * mesh.data):
        found.append(
            f"mesh.fsdp cuts the {experts} experts over data {mesh.data} × expert {mesh.expert} = "
            f"{mesh.data * mesh.expert} devices; legal are data × expert in {_legal([experts])}, or no fsdp"
        )
    shards, ways = mesh.context * mesh.tensor, mesh.data * mesh.expert
    if work.sequence % shards:
        found.append(
            f"context {mesh.context} × tensor {mesh.tensor} = {shards} does not divide {work.sequence} tokens a "
            f"sequence; legal are context × tensor in {_legal([work.sequence])}"
        )
    elif mesh.context > 1 and work.sequence // mesh.context < tail:
        found.append(
            f"context {mesh.context}: {work.sequence // mesh.context} tokens a shard, and a convolution looks {tail} "
            f"back; legal are context in 1..{work.sequence // tail} that divide {work.sequence}"
        )
    if work.batch % (work.micro_batches * ways):
        legal = _legal([work.batch // ways]) if work.batch % ways == 0 else ""
        found.append(
            f"{work.batch} sequences in {work.micro_batches} micro-batches do not divide over data {mesh.data} × "
            f"expert {mesh.expert} = {ways} devices; legal are "
            + (f"micro-batches in {legal}" if legal else f"batches that are multiples of {ways}")
        )
    if mesh.pipe == 1 and virtual > 1:
        found.append(f"virtual {virtual} stages need pipe > 1; legal is virtual 1")
    elif virtual > 1 and work.micro_batches % mesh.pipe:
        found.append(
            f"virtual {virtual}: interleaved 1F1B runs micro-batches in groups of pipe {mesh.pipe}, and there are "
            f"{work.micro_batches}; legal are multiples of {mesh.pipe}"
        )
    try:
        stages(model, mesh.pipe, virtual)
    except ConfigError as error:
        found.append(str(error))
    return found


def _legal(sizes) -> str:
    """Divisors that all sizes share."""
    common = math.gcd(*sizes)
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
