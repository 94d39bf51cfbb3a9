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
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError, MeshConfig

AXES = ("pipe", "data", "expert", "context", "tensor")
_BATCH = ("data", "expert")
_SUPPORTED = ("pipe", *_BATCH)


class Rule(NamedTuple):
    """Mesh axes that hold slices of a logical axis. A mesh axis of size 1 never appears in a spec."""

    used: tuple[str, ...] = ()
    """While it is computed with."""
    rest: tuple[str, ...] = ()
    """At rest, if it is the one that is cut: of one tensor that is the first in the order of the table whose size is a
    multiple of the number of devices. A tensor that has none stays whole everywhere."""


# Experts and heads come first: Muon's blocks then rest whole, each on one device, and its update moves nothing.
# "layers" is never cut at rest: every step of a scan would fetch from another device what all of them need at once.
RULES: Mapping[str, Rule] = {
    "batch": Rule(used=_BATCH),
    "sequence": Rule(),
    "layers": Rule(),
    "expert": Rule(rest=_BATCH),
    "heads": Rule(rest=_BATCH),
    "vocab": Rule(rest=_BATCH),
    "mlp": Rule(rest=_BATCH),
    "embed": Rule(rest=_BATCH),
    "latent": Rule(rest=_BATCH),
    "lora": Rule(rest=_BATCH),
    "kda_key": Rule(rest=_BATCH),
    "kda_value": Rule(rest=_BATCH),
    "qk": Rule(rest=_BATCH),
    "v": Rule(rest=_BATCH),
    "conv": Rule(),
}


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """The device mesh in Explicit mode, axes `pipe, data, expert, context, tensor`.

    Raises:
        ConfigError: an axis that is not supported yet, or a product of sizes that is not the number of devices.
    """
    unsupported = [a for a, n in zip(AXES, config.sizes) if n > 1 and a not in _SUPPORTED]
    if unsupported:
        legal = ", ".join(f"`{a}`" for a in _SUPPORTED)
        raise ConfigError(f"mesh axes {', '.join(unsupported)} must be 1: only {legal} can be larger so far")
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
        ConfigError: see `strict`.
    """
    for name, rule in RULES.items():
        cut = tuple(a for a in rule.rest if sizes.get(a, 1) > 1)
        if not cut or name not in axes:
            continue
        place, ways = axes.index(name), math.prod(sizes[a] for a in cut)
        if shape[place] % ways == 0:
            return P(*(cut if i == place else None for i in range(len(axes))))
        if strict and name == "expert" and set(axes[:place]) <= {"layers"}:  # a stack of experts, not the router
            legal = ", ".join(str(n) for n in range(1, shape[place] + 1) if shape[place] % n == 0)
            raise ConfigError(
                f"{tensor} {list(shape)}: its axis {name!r} of {shape[place]} cannot be cut over "
                f"{' × '.join(f'{a} {sizes[a]}' for a in cut)} = {ways} devices, as mesh.fsdp asks; legal are "
                f"{' × '.join(rule.rest)} in {legal}, or mesh.fsdp False"
            )
    return P(*(None for _ in axes))


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
        ConfigError: see `rest_spec`.
    """

    def place(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable) and not jax.tree.leaves(leaf):
            return leaf  # optax keeps an empty node for a parameter that another transformation trains
        if not isinstance(leaf, nnx.Variable):
            return NamedSharding(mesh, P())
        axes = logical_axes(leaf)
        if at_rest:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            value = rest_spec(name, tuple(leaf.shape), axes, dict(mesh.shape), strict=strict)
        else:
            value = spec(*axes)
        return jax.tree.map(lambda _: NamedSharding(mesh, value), leaf)

    return jax.tree_util.tree_map_with_path(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def to_rest[T](tree: T) -> T:
    """Every parameter (or gradient) of a module in its layout at rest, for use under `jit`; no mesh: as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    return tree if mesh.empty else jax.tree.map(jax.sharding.reshard, tree, shardings(tree, mesh, at_rest=True))


def is_at_rest(tree: Any) -> bool:
    """Whether some array of a tree is cut, and so has to be gathered before it is used."""
    return any(any(entry is not None for entry in jax.typeof(x).sharding.spec) for x in jax.tree.leaves(tree))


def gathered[T](tree: T) -> T:
    """Every parameter of a module in the layout that it is used in; its gradient comes back in the one it had.

    Call it inside what is rematerialised: otherwise the backward pass keeps what was gathered.
    """
    if not is_at_rest(tree):
        return tree
    return jax.tree.map(jax.sharding.reshard, tree, shardings(tree, jax.sharding.get_abstract_mesh()))


def batch_axes() -> tuple[str, ...]:
    """Mesh axes larger than 1 that the batch is sharded over, and that parameters and their state are cut over."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return tuple(a for a in _BATCH if sizes.get(a, 1) > 1)


def batch_island(fn: Callable[..., Any], *args: Any, batched: tuple[bool, ...]) -> Any:
    """Runs `fn` on each device's rows of the batch (`jax.shard_map` over the axes that the batch is sharded on).

    `batched[i]` says whether every array in `args[i]` has a leading batch axis; the others are replicated.
    `fn` returns `(batched outputs, replicated outputs)`; the latter must already be reduced by `batch_sum` or
    `batch_max`. A plain call when the batch is not sharded.
    """
    first = jax.tree.leaves(args[batched.index(True)])[0]
    axes = _sharded_on(first)
    if not axes:
        return fn(*args)
    in_specs = tuple(P(axes) if b else P() for b in batched)
    # check_vma=False: custom_vjp rules inside would otherwise have to know that replicated weights need a psum
    return jax.shard_map(fn, in_specs=in_specs, out_specs=(P(axes), P()), check_vma=False)(*args)


def _sharded_on(x: jax.Array) -> tuple[str, ...]:
    """Mesh axes of the leading dimension of `x`."""
    spec = jax.typeof(x).sharding.spec
    entry = spec[0] if len(spec) else None
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _island_axes() -> tuple[str, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(a for a in RULES["batch"].used if a in mesh.manual_axes and mesh.shape[a] > 1)


def batch_sum(x: jax.Array) -> jax.Array:
    """Sum over the devices of a `batch_island`; the identity outside one."""
    axes = _island_axes()
    return jax.lax.psum(x, axes) if axes else x


def batch_max(x: jax.Array) -> jax.Array:
    """Maximum over the devices of a `batch_island`; the identity outside one."""
    axes = _island_axes()
    return jax.lax.pmax(jax.lax.stop_gradient(x), axes) if axes else x


def embed_lookup(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Rows of an embedding table, sharded like `ids_BT` → [B, T, D]."""
    ids = jax.typeof(ids_BT).sharding
    return table_VD.at[ids_BT].get(out_sharding=NamedSharding(ids.mesh, P(*ids.spec, None)))
