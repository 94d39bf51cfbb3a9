"""What a training step keeps between its forward and its backward pass."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AxisType, NamedSharding

from k3jax.config import ConfigError, Remat, RunConfig
from k3jax.sharding import AXES, shardings, spec
from k3jax.train.batch import DEVICE_KEYS
from k3jax.train.state import abstract_params
from k3jax.train.step import head_sums

_SCOPES = r"\b(attn_res|kda|mla|dense|moe|head)\b"
_NAMES = ("name", "compressible")
# the same bytes under another shape
_VIEWS = frozenset({"reshape", "squeeze", "stop_gradient", "optimization_barrier", *_NAMES})
# nothing computed: what they return is called after what they read
_MOVES = _VIEWS | {"split", "unstack", "slice", "transpose", "broadcast_in_dim", "convert_element_type"}
_MOVES |= {"reshard", "copy", "dynamic_slice", "reduce_precision"}


@dataclass(frozen=True)
class Saved:
    """Arrays of one kind that the backward pass reads."""

    scope: str
    """What made them: "kda", "mla", "dense", "moe", "attn_res", "head", "parameters" (slices and casts of weights), or
    "model" (what is outside of all these)."""
    name: str
    """Of `k3jax.ops.remat.checkpoint_name`, else the primitive."""
    source: str
    """FILE:LINE of the primitive, in k3jax; empty for weights."""
    shape: tuple[int, ...]
    """On one device; what loops keep has an axis for each, in front."""
    dtype: str
    arrays: int
    bytes: int
    """Of all of them, on one device."""


def saved_for_backward(config: RunConfig, remat: Remat | None = None) -> list[Saved]:
    """What autodiff keeps of one micro-batch of text, largest first; parameters and the batch itself are not counted.

    Exact for the program that is handed to XLA on this machine: the residuals of `jax.vjp` of the loss, traced and
    never run. Reshaped copies count once. XLA may keep less (what it shares between the passes or forms again), and on
    another accelerator other kernels run, which keep other things: on a CPU these are the residuals of plain JAX. An
    estimate for GPUs is `k3jax.plan`.

    Args:
        config: of its mesh, sizes count and not devices: none is needed.
        remat: another preset than `config.train.remat`.

    Raises:
        ConfigError: a pipeline, whose stages hold other layers each, or a preset that `train.remat_policy` forbids.
    """
    if config.mesh.pipe > 1:
        raise ConfigError(f"mesh.pipe {config.mesh.pipe}: ask for a mesh without pipe, or see `python -m k3jax.plan`")
    if remat is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, remat=remat))
    jaxpr = _backward(config)
    inputs, views = {*jaxpr.invars, *jaxpr.constvars}, _producers(jaxpr)
    roots = dict.fromkeys(_followed(v, views, _VIEWS) for v in jaxpr.outvars if not isinstance(v, Literal))
    found: Counter[tuple] = Counter()
    for root in roots:
        if root not in inputs and not isinstance(root, Literal):
            found[(*_origin(jaxpr, root, ""), _local(root.aval), str(root.aval.dtype))] += 1
    rows = [
        Saved(scope, name, source, shape, dtype, n, n * math.prod(shape) * jnp.dtype(dtype).itemsize)
        for (scope, name, source, shape, dtype), n in found.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _backward(config: RunConfig) -> Any:
    """The program whose results are the residuals of the loss of a micro-batch."""
    model, train = config.model, config.train
    shape = (config.data.batch_size // train.accumulation, config.data.sequence_length)
    mesh = jax.sharding.AbstractMesh(config.mesh.sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES))

    def loss(batch: dict[str, Any], params: Any) -> jax.Array:
        options: dict[str, Any] = {"remat": train.remat, "remat_policy": train.remat_policy, "unroll": train.unroll}
        x, aux = params.features(batch["tokens"], batch["segment_ids"], histogram=True, **options)
        token_bytes = jnp.asarray(np.ones(model.vocab_size, np.int32))
        return head_sums(config, params, x, aux, batch, token_bytes, train=True)[0]

    def residuals(params: Any, batch: dict[str, Any]) -> list[jax.Array]:
        return jax.tree.leaves(jax.vjp(partial(loss, batch), params)[1])

    with jax.sharding.use_abstract_mesh(mesh):
        place = NamedSharding(mesh, spec("batch", "time"))
        types = dict.fromkeys(DEVICE_KEYS, jnp.int32) | {"loss_mask": jnp.bool_}
        batch = {key: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for key, dtype in types.items()}
        params = abstract_params(model)
        places = shardings(params, mesh, at_rest=config.mesh.fsdp, strict=config.mesh.fsdp)
        params = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), params, places)
        return jax.make_jaxpr(residuals)(params, batch).jaxpr


def _local(aval: Any) -> tuple[int, ...]:
    return tuple(aval.sharding.shard_shape(aval.shape)) if aval.sharding.mesh.size else tuple(aval.shape)


def _producers(jaxpr: Any) -> dict[Any, tuple[Any, int]]:
    """Variable → (equation, which of its results)."""
    return {v: (eqn, i) for eqn in jaxpr.eqns for i, v in enumerate(eqn.outvars)}


def _followed(v: Any, producers: dict[Any, tuple[Any, int]], through: frozenset[str]) -> Any:
    """What `v` is after some operations on."""
    while v in producers and producers[v][0].primitive.name in through:
        eqn, i = producers[v]
        v = eqn.invars[i if eqn.primitive.name == "optimization_barrier" else 0]
        if isinstance(v, Literal):
            break
    return v


def _origin(jaxpr: Any, v: Any, outer: str) -> tuple[str, str, str]:
    """Scope, name and source of a variable."""
    found = _search(jaxpr, v, outer)
    return ("parameters", "weights", "") if isinstance(found, int) else found


def _search(jaxpr: Any, v: Any, outer: str) -> tuple[str, str, str] | int:
    """`_origin`, or the number of the input of `jaxpr` that `v` was moved from."""
    producers = _producers(jaxpr)
    names = {w: eqn for eqn in jaxpr.eqns if eqn.primitive.name in _NAMES for w in (*eqn.invars, *eqn.outvars)}
    while True:
        if v in names:
            eqn = names[v]
            return _scope(outer, eqn), eqn.params["name"].removesuffix(":exact"), _source(eqn)
        if v not in producers:
            return jaxpr.invars.index(v) if v in jaxpr.invars else ("model", "constant", "")
        eqn, i = producers[v]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        if eqn.primitive.name in _MOVES:
            v = eqn.invars[i if eqn.primitive.name == "optimization_barrier" else 0]
        elif inner is not None and len(inner.outvars) > i:  # a kernel's writes to its arguments and returns nothing
            if isinstance(inner.outvars[i], Literal):
                return _scope(outer, eqn), "constant", _source(eqn)
            found = _search(inner, inner.outvars[i], f"{outer}/{eqn.source_info.name_stack}")
            if not isinstance(found, int):
                return found
            v = eqn.invars[found]
        else:
            return _scope(outer, eqn), eqn.primitive.name, _source(eqn)
        if isinstance(v, Literal):
            return _scope(outer, eqn), "constant", _source(eqn)


def _scope(outer: str, eqn: Any) -> str:
    words = re.findall(_SCOPES, f"{outer}/{eqn.source_info.name_stack}")
    return words[-1] if words else "model"


def _source(eqn: Any) -> str:
    """The innermost line in k3jax."""
    home = Path(__file__).parents[1]
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        path = Path(frame.file_name)
        if path.is_relative_to(home) and path.name != "remat.py":
            return f"{path.relative_to(home.parent)}:{frame.line_num}"
    return ""
