"""The mesh, the one table of rules from logical axes to mesh axes, and the `param()` helper.

Modules name what their axes mean ("embed", "heads", …); which mesh axis, if any, holds a slice of them is decided
here alone. Everything also runs with no mesh set: specs are then empty and islands are plain calls.

    mesh = make_mesh(MeshConfig(data=8, fsdp=True))
    with jax.set_mesh(mesh): ...

Every parameter has two layouts: the one that it is *used* in, and the one *at rest*, where each device of the batch
keeps a slice. Optimizer state is always at rest (ZeRO-1), parameters with `MeshConfig.fsdp`; layers gather theirs just
before they use them (`gathered`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError, MeshConfig

AXES = ("pipe", "data", "expert", "context", "tensor")
_BATCH = ("data", "expert")
COPIES = ("data", "expert", "context", "tensor")
"""Mesh axes over which a parameter that does not use them lies in equal copies, unless it rests cut."""


class Rule(NamedTuple):
    """Mesh axes that hold slices of a logical axis. A mesh axis of size 1 never appears in a spec."""

    used: tuple[str, ...] = ()
    """While it is computed with."""
    rests: bool = True
    """Whether it may be cut at rest, over the mesh axes that the tensor does not use: of one tensor the first in the
    order of the table whose size is a multiple of their number is. A tensor that has none stays in copies."""


# Experts and heads come first: Muon's blocks then rest whole, each on one device, and its update moves nothing.
# "layers" is never cut at rest: every step of a scan would fetch from another device what all of them need at once.
RULES: Mapping[str, Rule] = {
    "batch": Rule(_BATCH, rests=False),
    "time": Rule(("context",), rests=False),  # where heads, columns or the vocabulary are cut over "tensor"
    "sequence": Rule(("context", "tensor"), rests=False),  # of the residual stream
    "layers": Rule(rests=False),
    "expert": Rule(("expert",)),
    "heads": Rule(("tensor",)),
    "vocab": Rule(("tensor",)),
    "mlp": Rule(("tensor",)),
    "expert_mlp": Rule(),
    "route": Rule(),  # the router's column of an expert
    "embed": Rule(),
    "latent": Rule(),
    "lora": Rule(),
    "kda_key": Rule(),
    "kda_value": Rule(),
    "qk": Rule(),
    "v": Rule(),
    "conv": Rule(rests=False),
    # The tower is a copy everywhere; what it reads is cut instead.
    "patch_row": Rule(("data", "expert", "tensor"), rests=False),
    "patch": Rule(("context",), rests=False),
    "vision_heads": Rule(),
    "vision_mlp": Rule(),
    "pixels": Rule(),
}


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """The device mesh in Explicit mode, axes `pipe, data, expert, context, tensor`.

    Raises:
        ConfigError: a product of sizes that is not the number of devices.
    """
    count, available = math.prod(config.sizes), jax.device_count()
    if count > available or available % count:
        raise ConfigError(f"mesh {dict(zip(AXES, config.sizes))} needs {count} devices, this machine has {available}")
    return jax.make_mesh(config.sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=jax.devices()[:count])


def rank_meshes(mesh: jax.sharding.Mesh) -> list[jax.sharding.Mesh]:
    """The submesh of every rank of the pipeline: the same axes, `pipe` of size 1."""
    return [jax.sharding.Mesh(devices[None], mesh.axis_names, axis_types=mesh.axis_types) for devices in mesh.devices]


def spec(*logical: str | None) -> P:
    """The `PartitionSpec` of an array with these logical axes on the current mesh (None: not sharded).

    Raises:
        KeyError: a logical axis that is not in the table.
        ConfigError: two axes of one array on the same mesh axis.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    entries: list[tuple[str, ...] | None] = []
    used: list[str] = []
    for name in logical:
        axes = tuple(a for a in (RULES[name].used if name else ()) if sizes.get(a, 1) > 1)
        used += axes
        entries.append(axes or None)
    if len(set(used)) != len(used):
        raise ConfigError(f"logical axes {logical} map to one mesh axis twice: {entries}")
    return P(*entries)


def param(
    key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], init: Callable[..., jax.Array], dtype: Any
) -> nnx.Param:
    """The one place where a parameter is born: `init(key, shape, dtype)` with logical axis names attached.

    Stacked layers add a leading axis by `vmap`, which the names do not show: read them with `logical_axes`.
    """
    if len(shape) != len(axes):
        raise ValueError(f"a parameter of shape {shape} needs {len(shape)} axis names, got {axes}")
    unknown = [a for a in axes if a not in RULES]
    if unknown:
        raise ValueError(f"unknown logical axes {unknown}; known are {', '.join(RULES)}")
    return nnx.Param(init(key, shape, dtype), axes=axes)


def logical_axes(variable: nnx.Variable) -> tuple[str, ...]:
    """Logical axis names of a parameter, with the leading "layers" of a stack."""
    axes = variable.get_metadata()["axes"]
    return ("layers",) * (len(variable.shape) - len(axes)) + axes


def names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def used_spec(tensor: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Mapping[str, int]) -> P:
    """The `PartitionSpec` of a parameter while it is computed with; arguments of `rest_spec`.

    Raises:
        ConfigError: an axis whose size is not a multiple of the devices that it is cut over.
    """
    entries: list[tuple[str, ...] | None] = []
    for size, name in zip(shape, axes):
        over = tuple(a for a in RULES[name].used if sizes.get(a, 1) > 1)
        ways = math.prod(sizes[a] for a in over)
        if size % ways:
            legal = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ConfigError(
                f"{tensor} {list(shape)}: its axis {name!r} of {size} cannot be cut over mesh axis "
                f"{' × '.join(over)} = {ways}; legal are {legal}"
            )
        entries.append(over or None)
    return P(*entries)


def rest_spec(
    tensor: str, shape: tuple[int, ...], axes: tuple[str, ...], sizes: Mapping[str, int], *, strict: bool = False
) -> P:
    """The `PartitionSpec` at rest of a parameter, or of optimizer state of its shape.

    Args:
        tensor: its name, for the message.
        axes: its logical axes.
        sizes: of the axes of the mesh.
        strict: refuse a bank of experts that would have to be cut elsewhere than between experts.

    Raises:
        ConfigError: see `strict`, and `used_spec`.
    """
    entries = [names(entry) for entry in used_spec(tensor, shape, axes, sizes)]
    used = {a for entry in entries for a in entry}
    cut = tuple(a for a in COPIES if sizes.get(a, 1) > 1 and a not in used)
    for name, rule in RULES.items():
        if not cut or not rule.rests or name not in axes:
            continue
        place = axes.index(name)
        over = (*entries[place], *cut)
        ways = math.prod(sizes[a] for a in over)
        if shape[place] % ways == 0:
            entries[place] = over
            break
        if strict and name == "expert":
            legal = ", ".join(str(n) for n in range(1, shape[place] + 1) if shape[place] % n == 0)
            raise ConfigError(
                f"{tensor} {list(shape)}: its axis {name!r} of {shape[place]} cannot be cut over "
                f"{' × '.join(f'{a} {sizes[a]}' for a in over)} = {ways} devices, as mesh.fsdp asks; legal are "
                f"{' × '.join(COPIES)} in {legal}, or mesh.fsdp False"
            )
    return P(*(entry or None for entry in entries))


def shardings(
    tree: Any, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, *, at_rest: bool = False, strict: bool = False
) -> Any:
    """`NamedSharding` of every parameter of a (possibly abstract) module, with the module's own structure.

    Args:
        tree: also optimizer state, or any other tree with parameters for nodes; other leaves are whole everywhere.
        mesh: a `Mesh`, or inside `jit` an `AbstractMesh`.
        at_rest: the layout at rest instead of the one parameters are used in.
        strict: see `rest_spec`.

    Raises:
        ConfigError: see `used_spec` and `rest_spec`.
    """

    def place(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable) and not jax.tree.leaves(leaf):
            return leaf  # optax keeps an empty node for a parameter that another transformation trains
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(mesh, P())
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        described = (name, tuple(leaf.shape), logical_axes(leaf), dict(mesh.shape))
        value = rest_spec(*described, strict=strict) if at_rest else used_spec(*described)
        return jax.tree.map(lambda _: NamedSharding(mesh, value), leaf)

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def to_rest[T](tree: T) -> T:
    """Every parameter (or gradient) of a module in its layout at rest, for use under `jit`; no mesh: as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.empty else jax.tree.map(jax.sharding.reshard, tree, shardings(tree, mesh, at_rest=True))


def is_at_rest(tree: Any) -> bool:
    """Whether some parameter is cut more than where it is used, and so has to be gathered before that."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return False
    places = shardings(tree, mesh)
    return any(layout(x) != place.spec for x, place in zip(*map(jax.tree.leaves, (tree, places))))


def gathered[T](tree: T) -> T:
    """Every parameter of a module in the layout that it is used in; its gradient comes back in the one it had.

    Call it inside what is rematerialised: otherwise the backward pass keeps what was gathered.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.empty else jax.tree.map(lambda x, p: _laid_out(x, p.spec), tree, shardings(tree, mesh))


def parallel_axes() -> tuple[str, ...]:
    """Mesh axes larger than 1 that parameters and their state may be cut over."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return tuple(a for a in COPIES if sizes.get(a, 1) > 1)


def axes_of(x: jax.Array, *dimensions: int) -> tuple[str, ...]:
    """Mesh axes that these dimensions of `x` are cut over, in order; all dimensions if none is named."""
    entries = layout(x)
    named = (entries[d] for d in dimensions or range(len(entries)))
    return tuple(a for entry in named for a in names(entry))


def place[T](tree: T, *entries: Any) -> T:
    """Arrays in another layout: `entries` are those of a `PartitionSpec` for their leading dimensions."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree.map(lambda x: jax.sharding.reshard(x, P(*entries)), tree)


def whole_sequence(x: jax.Array) -> jax.Array:
    """Activations [B, T, …] with T cut over "context" only; the rest of the mesh then cuts heads or columns."""
    if "tensor" not in axes_of(x, 1):
        return x
    batch, time, *rest = layout(x)
    return place(x, batch, tuple(a for a in names(time) if a != "tensor") or None, *rest)


def contract(subscripts: str, a: jax.Array, b: jax.Array, like: jax.Array) -> jax.Array:
    """A product [B, T, …] that sums over an axis which may be cut over "tensor", in the layout of `like`."""
    if not axes_of(b):
        return place_like(jnp.einsum(subscripts, a, b), like)
    batch, time, *_ = layout(a)
    out = NamedSharding(jax.sharding.get_abstract_mesh(), P(batch, time))
    return place_like(jnp.einsum(subscripts, a, b, out_sharding=out), like)


def place_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x` in the layout of `other`."""
    return _laid_out(x, layout(other))


def _laid_out(x: jax.Array, spec: P) -> jax.Array:
    return x if layout(x) == spec else jax.sharding.reshard(x, spec)


def island(fn: Callable[..., Any], *args: Any, out: Any) -> Any:
    """Runs `fn` on every device's shards of the arrays in `args` (`jax.shard_map` over all of the mesh).

    `out` is the `PartitionSpec`s of what `fn` returns, as a prefix of its tree: `layout(x)` is that of an array. Copies
    must have been made equal by `fn`: see `all_sum`. A plain call where nothing is cut.
    """
    leaves = jax.tree.leaves(args)
    if not any(axes_of(x) for x in leaves):
        return fn(*args)
    in_specs = jax.tree.map(layout, args)
    # check_vma=False: custom_vjp rules inside would otherwise have to know that replicated weights need a psum
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out, check_vma=False)(*args)


def layout(x: jax.Array) -> P:
    """The `PartitionSpec` of an array."""
    return jax.typeof(x).sharding.spec


def all_sum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside an `island`: sum over the devices of these mesh axes."""
    return jax.lax.psum(x, axes) if axes else x


def all_max(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Inside an `island`: maximum over the devices of these mesh axes, without gradient."""
    return jax.lax.pmax(jax.lax.stop_gradient(x), axes) if axes else x


def embed_lookup(table_VD: jax.Array, ids_BT: jax.Array, *, split: bool = True) -> jax.Array:
    """Rows of an embedding table whose vocabulary may be cut over "tensor" → [B, T, D].

    `split` says whether T is cut over "tensor" too, as in the residual stream; else as in `ids_BT`.
    """
    ids = jax.typeof(ids_BT).sharding
    if not axes_of(table_VD):
        return table_VD.at[ids_BT].get(out_sharding=NamedSharding(ids.mesh, P(*ids.spec, None)))
    (axis,) = axes_of(table_VD)

    def local(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
        row_BT = ids_BT - jax.lax.axis_index(axis) * len(table_VD)
        here_BT = (row_BT >= 0) & (row_BT < len(table_VD))
        x = jnp.where(here_BT[..., None], table_VD[jnp.where(here_BT, row_BT, 0)], 0)
        if split:
            return jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)
        return jax.lax.psum(x, axis)

    batch, time = ids.spec
    time = (*axes_of(ids_BT, 1), axis) if split else time
    return island(local, table_VD, ids_BT, out=P(batch, time, None))
