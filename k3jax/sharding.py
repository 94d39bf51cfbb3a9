"""The mesh, the one table of rules from logical axes to mesh axes, and the `param()` helper.

Modules name what their axes mean ("embed", "heads", …); which mesh axis, if any, holds a slice of them is decided
here alone. Everything also runs with no mesh set: specs are then empty and islands are plain calls.

    mesh = make_mesh(MeshConfig(data=8))
    with jax.set_mesh(mesh): ...
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError, MeshConfig

AXES = ("pipe", "data", "expert", "context", "tensor")

# Logical axis → mesh axes. A mesh axis of size 1 never appears in a spec. Parameters are replicated for now.
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "expert"),
    "sequence": (),
    "layers": (),
    "vocab": (),
    "embed": (),
    "heads": (),
    "kda_key": (),
    "kda_value": (),
    "conv": (),
    "qk": (),
    "v": (),
    "lora": (),
    "mlp": (),
    "expert": (),
    "latent": (),
}


def make_mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """The device mesh in Explicit mode, axes `pipe, data, expert, context, tensor`.

    Raises:
        ConfigError: an axis that is not supported yet, or a product of sizes that is not the number of devices.
    """
    unsupported = [a for a, n in zip(AXES, config.sizes) if n > 1 and a not in ("data",)]
    if unsupported:
        raise ConfigError(f"mesh axes {', '.join(unsupported)} must be 1: only `data` can be larger so far")
    count, available = math.prod(config.sizes), jax.device_count()
    if count > available or available % count:
        raise ConfigError(f"mesh {dict(zip(AXES, config.sizes))} needs {count} devices, this machine has {available}")
    return jax.make_mesh(config.sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=jax.devices()[:count])


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
        axes = tuple(a for a in (RULES[name] if name else ()) if sizes.get(a, 1) > 1)
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


def shardings(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """`NamedSharding` of every parameter of a (possibly abstract) module, with the module's own structure."""

    def place(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable) and not jax.tree.leaves(leaf):
            return leaf  # optax keeps an empty node for a parameter that another transformation trains
        if isinstance(leaf, nnx.Variable):
            value = NamedSharding(mesh, spec(*logical_axes(leaf)))
            return jax.tree.map(lambda _: value, leaf)
        return NamedSharding(mesh, P())

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


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
    return tuple(a for a in RULES["batch"] if a in mesh.manual_axes and mesh.shape[a] > 1)


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
