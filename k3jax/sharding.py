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
import jax.numpy as jnp
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
        if isinstance(leaf, nnx.Variable):
            value = NamedSharding(mesh, spec(*logical_axes(leaf)))
            return jax.tree.map(lambda _: value, leaf)
        return NamedSharding(mesh, P())

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _batch_axes() -> tuple[str, ...]:
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return tuple(a for a in RULES["batch"] if sizes.get(a, 1) > 1)


def batch_island(fn: Callable[..., Any], *args: Any, batched: tuple[bool, ...]) -> Any:
    """Runs `fn` on each device's rows of the batch (`jax.shard_map` over the batch axes).

    `batched[i]` says whether every array in `args[i]` has a leading batch axis; the others are replicated.
    `fn` returns `(batched outputs, replicated outputs)`; the latter must already be reduced by `batch_sum` or
    `batch_max`.
    """
    axes = _batch_axes()
    if not axes:
        return fn(*args)
    in_specs = tuple(P(axes) if b else P() for b in batched)
    # check_vma=False: custom_vjp rules inside would otherwise have to know that replicated weights need a psum
    return jax.shard_map(fn, in_specs=in_specs, out_specs=(P(axes), P()), check_vma=False)(*args)


def batch_sum(x: jax.Array) -> jax.Array:
    """Sum over the devices of a `batch_island`; the identity outside one."""
    axes = _batch_axes()
    return jax.lax.psum(x, axes) if axes else x


def batch_max(x: jax.Array) -> jax.Array:
    """Maximum over the devices of a `batch_island`; the identity outside one."""
    axes = _batch_axes()
    return jax.lax.pmax(jax.lax.stop_gradient(x), axes) if axes else x


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Reshards `x` to its logical axes; the identity when no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.sharding.reshard(x, spec(*logical))


def embed_lookup(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Rows of an embedding table, batch-sharded like `ids_BT` → [B, T, D]."""
    if jax.sharding.get_abstract_mesh().empty:
        return jnp.take(table_VD, ids_BT, axis=0)
    return table_VD.at[ids_BT].get(out_sharding=spec("batch", "sequence", "embed"))
