"""What there is to place: every parameter by layer, how a mesh cuts it, and which layers a pipeline stage holds.

Axes mean here: `expert` keeps banks of experts at home (E/R a rank), `tensor` cuts heads, columns of the dense and
shared feed-forwards and the vocabulary, `pipe` cuts layers at borders of the period of mixers. At rest a parameter is
cut over all axes but `pipe` that it does not use, over which it would else lie in copies.

Legend: R ranks of `expert`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from k3jax.config import ConfigError, LayerSpec, MeshConfig, ModelConfig, OptimizerConfig, RunConfig
from k3jax.model.plan import plan_layers
from k3jax.sharding import COPIES, logical_axes, names, rest_spec, used_spec
from k3jax.train.optimizer import LEAVES, Group, make_optimizer, path_names
from k3jax.train.state import abstract_params


@dataclass(frozen=True, eq=False)
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
    """Outside the layers: behind them (head, output mix, final norm) and not before (embedding, tower)."""

    @property
    def is_bank(self) -> bool:
        return self.axes[0] == "expert"

    @property
    def layout(self) -> str:
        """Muon's letter of each axis; the tower's blocks stand in a stack."""
        layout = LEAVES[self.tensor.split("/")[-1]].layout
        return "b" * (len(self.shape) - len(layout)) + layout

    @functools.cached_property
    def blocks(self) -> tuple[int, int, int]:
        """Muon's blocks: how many, rows, columns."""
        b, r, c = (math.prod(n for n, axis in zip(self.shape, self.layout) if axis == letter) for letter in "brc")
        return b, r, c


@dataclass(frozen=True)
class Cut:
    """Elements of a parameter on one device."""

    used: int
    """In the layout that it is computed with."""
    rest: int
    """At rest: optimizer state always, parameters with `mesh.fsdp`."""
    copies: tuple[str, ...]
    """Mesh axes over which it lies in copies while it is used."""
    by_axis: tuple[tuple[int, tuple[str, ...]], ...]
    """At rest: which of its axes are cut over which mesh axes."""


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
    found: dict[tuple, Leaf] = {}  # those of layers of one kind are one
    is_variable = lambda x: hasattr(x, "get_metadata")  # noqa: E731
    for (path, node), group in zip(jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable), groups):
        names, shape, axes = path_names(path), tuple(node.shape), logical_axes(node)
        layers: frozenset[int] = frozenset()
        if names[0] == "segments":
            layers, names = frozenset(runs[int(names[1])][int(names[3])]), names[4:]
            shape, axes = shape[1:], axes[1:]
        kind = kinds[min(layers)] if layers else None
        tensor = "/".join(names)
        if (tensor, kind) in found:
            layers |= found[tensor, kind].layers
        leaf = Leaf(tensor, shape, axes, kind, layers, node.dtype.itemsize, group, names[0] not in ("embed", "vision"))
        found[tensor, kind] = leaf
    return list(found.values())


@functools.cache
def kinds_of_layers(model: ModelConfig) -> tuple[LayerSpec, ...]:
    """`model.layers`, kept."""
    return model.layers


@functools.cache
def cut(leaf: Leaf, mesh: MeshConfig) -> Cut:
    """How a mesh cuts a parameter that it can cut (`refusals`)."""
    sizes = {axis: getattr(mesh, axis) for axis in COPIES}
    described = (leaf.tensor, leaf.shape, leaf.axes, sizes)
    used, rest = ([names(entry) for entry in spec] for spec in (used_spec(*described), rest_spec(*described)))
    taken = {axis for axes in used for axis in axes}
    return Cut(
        *(math.prod(n // ways(mesh, axes) for n, axes in zip(leaf.shape, over)) for over in (used, rest)),
        copies=tuple(axis for axis in COPIES if axis not in taken and sizes[axis] > 1),
        by_axis=tuple((i, axes) for i, axes in enumerate(rest) if axes),
    )


def ways(mesh: MeshConfig, axes: Sequence[str]) -> int:
    """Devices along some mesh axes."""
    return math.prod(getattr(mesh, axis) for axis in axes)


@dataclass(frozen=True)
class Blocks:
    """Muon's blocks of one shape that lie alike; Newton-Schulz runs on all of them at once."""

    rows: int
    columns: int
    cuts: tuple[tuple[str, tuple[str, ...], int], ...]
    """How blocks are cut, as `k3jax.train.optimizer`: "r" or "c" with the mesh axes that cut rows or columns and their
    number, "" with those that hold copies."""
    count: int
    """On a device, or parts of so many."""

    @property
    def share(self) -> int:
        """Whole blocks that a device works on."""
        count = self.count
        for _, _, number in self.cuts:
            count = -(-count // number)
        return count

    def exchanges(self) -> Iterator[tuple[str, tuple[str, ...], int, int]]:
        """(letter, mesh axes, their number, elements of the whole array on a device) on the way to owners."""
        count = self.count
        piece = self.rows * self.columns // math.prod(number for letter, _, number in self.cuts if letter)
        for letter, axes, number in self.cuts:
            count = -(-count // number)
            yield letter, axes, number, count * number * piece
            piece *= number if letter else 1


def muon_blocks(leaves: list[Leaf], mesh: MeshConfig, stage: Stage) -> list[Blocks]:
    """Muon's blocks on the devices of a stage, grouped as `k3jax.train.optimizer` does."""
    found: dict[tuple[int, int, tuple[tuple[str, tuple[str, ...], int], ...]], int] = {}
    for leaf in leaves:
        if leaf.group == "adamw" or not stage.holds(leaf):
            continue
        layout, place = leaf.layout, cut(leaf, mesh)
        count, rows, columns = leaf.blocks
        cuts: list[tuple[str, tuple[str, ...], int]] = []
        for i, axes in place.by_axis:
            if layout[i] == "b":
                count //= ways(mesh, axes)
            else:
                cuts.append((layout[i], axes, ways(mesh, axes)))
        if place.rest == place.used and place.copies:
            cuts.append(("", place.copies, ways(mesh, place.copies)))
        key = (rows, columns, tuple(cuts))
        found[key] = found.get(key, 0) + count * stage.holds(leaf)
    return [Blocks(rows, columns, cuts, count) for (rows, columns, cuts), count in found.items()]


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
        "shared experts": model.moe.num_shared_experts * model.moe.expert_size,
    }
    for name, size in sizes.items():
        if size % mesh.tensor:
            found.append(f"tensor {mesh.tensor} does not divide the {name}: {size}; legal are {_legal(sizes.values())}")
    experts = model.moe.num_experts
    if experts % mesh.expert:
        found.append(f"expert {mesh.expert} does not divide the {experts} experts; legal are {_legal([experts])}")
    elif mesh.fsdp and experts % ways(mesh, COPIES):
        product = " × ".join(f"{axis} {getattr(mesh, axis)}" for axis in COPIES)
        found.append(
            f"mesh.fsdp cuts the {experts} experts over {product} = {ways(mesh, COPIES)} devices; legal are products "
            f"in {_legal([experts])}, or no fsdp"
        )
    shards, parts = mesh.context * mesh.tensor, mesh.data * mesh.expert
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
    if work.batch % (work.micro_batches * parts):
        legal = _legal([work.batch // parts]) if work.batch % parts == 0 else ""
        found.append(
            f"{work.batch} sequences in {work.micro_batches} micro-batches do not divide over data {mesh.data} × "
            f"expert {mesh.expert} = {parts} devices; legal are "
            + (f"micro-batches in {legal}" if legal else f"batches that are multiples of {parts}")
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
