"""What a backward pass keeps of named arrays: the array, its FP8 form, a copy in host memory, or nothing.

    x = checkpoint_name(x, "operand")                                     # in a function
    jax.checkpoint(fn, policy=policy({"operand": "fp8"}))                 # around it

FP8 is E4M3 with one float32 scale for every 128 elements of the last axis. The forward pass is untouched: what follows
reads the exact array, and only the second computation, in the backward pass, starts from the rounded one. So gradients
are those at a point up to 2⁻⁴ away in each element, whatever is computed from it in the backward pass included (a token
whose best experts are nearly tied may be differentiated through another one).

jax's policies know arrays that are kept as they are, so FP8 needs a rule of its own for the split of a program into its
two passes: `jax.interpreters.partial_eval.partial_eval_jaxpr_custom_rules`, as every loop and call of jax has one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import ad_checkpoint
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

Action = Literal["save", "fp8", "offload", "recompute"]

BLOCK = 128
"""Elements of the last axis that share a scale."""
_FP8_MAX = 448.0
_EXACT = ":exact"


def checkpoint_name[T](tree: T, name: str, *, exact: bool = False) -> T:
    """Names arrays for a rematerialisation policy; the identity otherwise.

    Args:
        exact: what a relative error of 2⁻⁴ would ruin (logarithms, states); "fp8" keeps these as they are.
    """
    if exact:
        return ad_checkpoint.checkpoint_name(tree, name + _EXACT)
    return ad_checkpoint.checkpoint_name(jax.tree.map(lambda x: _compressible.bind(x, name=name), tree), name)


def policy(actions: Mapping[str, Action], otherwise: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """A policy for `jax.checkpoint`: what to do by name, names that are not mentioned are computed again.

    Args:
        otherwise: a policy for all that is not named, such as `jax.checkpoint_policies.dots_saveable`.
    """

    def names(action: Action) -> list[str]:
        return [name for name, chosen in actions.items() if chosen == action]

    exact = [name + _EXACT for name in [*names("save"), *names("fp8")]]
    offloaded = [full for name in names("offload") for full in (name, name + _EXACT)]
    named = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[*names("save"), *exact],
        names_which_can_be_offloaded=offloaded,
        offload_src="device",
        offload_dst="pinned_host",
    )
    compressed = frozenset(names("fp8"))

    def choose(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is _compressible:
            return params["name"] in compressed
        if otherwise is not None and otherwise(primitive, *avals, **params):
            return True
        return named(primitive, *avals, **params)

    return choose


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """E4M3 values of the shape of `x` [..., n], and float32 scales [..., ⌈n / 128⌉]: x ≈ values · scale.

    The error is at most 2⁻⁴ of an element, or 2⁻¹⁰ / 448 of the largest of its block where that is more.
    """
    wide = _blocks(x.astype(jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.where(largest > 0, largest / _FP8_MAX, 1.0)
    values = (wide / scale).astype(jnp.float8_e4m3fn)
    return _flat(values, x.shape[-1]), scale[..., 0]


def dequantize(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """Inverse of `quantize`, to rounding."""
    wide = _blocks(values.astype(jnp.float32)) * scales[..., None]
    return _flat(wide, values.shape[-1]).astype(dtype)


def _blocks(x: jax.Array) -> jax.Array:
    """[..., n] → [..., ⌈n / 128⌉, 128], zeros at the end."""
    missing = -x.shape[-1] % BLOCK
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, missing),)) if missing else x
    return x.reshape(*x.shape[:-1], -1, BLOCK)


def _flat(blocks: jax.Array, n: int) -> jax.Array:
    return blocks.reshape(*blocks.shape[:-2], math.prod(blocks.shape[-2:]))[..., :n]


_compressible = Primitive("compressible")
_compressible.def_impl(lambda x, *, name: x)
_compressible.def_abstract_eval(lambda x, *, name: x)
mlir.register_lowering(_compressible, lambda ctx, x, *, name: [x])
ad.primitive_jvps[_compressible] = lambda primals, tangents, *, name: (
    _compressible.bind(*primals, name=name),
    *tangents,
)
batching.primitive_batchers[_compressible] = lambda args, dims, *, name: (_compressible.bind(*args, name=name), *dims)


def _locally(fn: Callable, *arrays: jax.Array) -> Any:
    """`fn` on the part of each device where the last axis is cut: no block then has elements of two devices."""
    spec = jax.typeof(arrays[0]).sharding.spec
    if not len(spec) or spec[-1] is None:
        return fn(*arrays)
    names = {name for entry in spec if entry for name in ((entry,) if isinstance(entry, str) else entry)}
    return jax.shard_map(fn, in_specs=spec, out_specs=spec, axis_names=names)(*arrays)


@jax.jit
def _keep(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return x, *_locally(quantize, x)


@functools.partial(jax.jit, static_argnames="dtype")
def _restore(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    return _locally(functools.partial(dequantize, dtype=dtype), values, scales)


def _split(
    saveable: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    """The equation in both passes: (first, second, outputs unknown, outputs there in the second, kept for it)."""
    (x,), (y,) = eqn.invars, eqn.outvars
    if unknown[0]:
        return None, eqn, [True], [True], []
    if saveable(_compressible, x.aval, **eqn.params) is not True or not jnp.issubdtype(x.aval.dtype, jnp.floating):
        return eqn, eqn, [False], [True], [] if instantiated[0] else [x]
    keep = _equation(_keep, x.aval)
    # traced programs are cached: without new variables, two arrays of one type would be kept as one
    values, scales = (Var(kept.aval) for kept in keep.outvars[1:])
    restore = _equation(functools.partial(_restore, dtype=x.aval.dtype), values.aval, scales.aval)
    first = keep.replace(invars=[x], outvars=[y, values, scales])
    second = restore.replace(invars=[values, scales], outvars=[y])
    return first, second, [False], [True], [values, scales]


def _equation(fn: Callable, *avals: Any) -> Any:
    """The one equation of a program that calls a jitted function."""
    (eqn,) = jax.make_jaxpr(fn)(*avals).eqns
    return eqn


partial_eval.partial_eval_jaxpr_custom_rules[_compressible] = _split
