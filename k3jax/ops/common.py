"""What the ops share: accumulation in at least float32, and types under explicit and manual mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """At least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """`x` in at least float32."""
    return x.astype(wide_dtype(x.dtype))


def einsum(subscripts: str, a: jax.Array, b: jax.Array, out_sharding: NamedSharding | None = None) -> jax.Array:
    """Product of two arrays of one dtype, accumulated and returned in at least float32.

    float32 operands are multiplied in full: the default on NVIDIA GPUs would be TF32.
    """
    acc = wide_dtype(a.dtype)
    precision = jax.lax.Precision.HIGHEST if a.dtype == acc else None
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=acc, out_sharding=out_sharding)


def sharding_of(x: jax.Array) -> NamedSharding | None:
    """The sharding in the type of `x` for `out_sharding=`; None where no mesh axis is Explicit."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.explicit_axes else None


def vary_alike(*trees: Any) -> list[Any]:
    """Makes all arrays vary over the manual mesh axes that any of them varies over.

    A `custom_vjp` rule must return gradients typed like its inputs. Inside `jax.shard_map(check_vma=True)` the gradient
    of replicated weights is not replicated; cast outside the rule, autodiff adds the missing `psum`.
    """
    leaves = jax.tree.leaves(trees)
    axes = frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return jax.lax.pcast(x, missing, to="varying") if missing else jnp.asarray(x)

    return [jax.tree.map(cast, tree) for tree in trees]
