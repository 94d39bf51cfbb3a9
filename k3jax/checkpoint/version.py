"""One version of published weights: its manifest, its checksums, its canary, and how live weights become one.

Checksums are taken on the trainer's devices and again on the consumer's, after every copy, cast and change of layout
that lies between them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.checkpoint.store import CheckpointError, flat_paths
from k3jax.config import ExpertFormat, ModelConfig, RunConfig, to_dict
from k3jax.model.k3 import K3, init_cache
from k3jax.model.quantize import pack_experts, served
from k3jax.sharding import layout, place

FORMAT = 1
CANARY_LENGTH = 64
CANARY_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.1}
"""Mean |Δ log p| over the canary, by compute dtype: what other kernels and meshes differ by stays below (bfloat16: a
router may decide otherwise); a tensor that is missing, transposed or scaled makes 0.1 to 10."""


class PublicationError(CheckpointError):
    """A version that cannot be had or is not what its manifest says; the message names the tensor or the reason."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What a manifest says of an array."""

    shape: tuple[int, ...]
    dtype: str
    checksum: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a version consists of, and what it answers."""

    version: int
    config: dict[str, Any]
    """`to_dict` of the `RunConfig`."""
    experts: ExpertFormat
    tensors: dict[str, Tensor]
    """By dotted path, in the order that a stream sends them."""
    prompt: tuple[int, ...]
    """The canary: token ids."""
    log_probs: tuple[float, ...]
    """Of each token of the prompt but the first, after those before it."""

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Manifest:
        """Inverse of `to_json`.

        Raises:
            PublicationError: another format, or not a manifest.
        """
        try:
            values = dict(values)
            if (found := values.pop("format")) != FORMAT:
                raise PublicationError(f"a manifest of format {found}, this version reads {FORMAT}")
            tensors = {
                path: Tensor(tuple(map(int, t["shape"])), str(t["dtype"]), str(t["checksum"]))
                for path, t in values.pop("tensors").items()
            }
            if (experts := values["experts"]) not in typing.get_args(ExpertFormat):
                raise PublicationError(f"experts in a format that is unknown here: {experts!r}")
            prompt, log_probs = tuple(map(int, values.pop("prompt"))), tuple(map(float, values.pop("log_probs")))
            return cls(tensors=tensors, prompt=prompt, log_probs=log_probs, **values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PublicationError(f"not a manifest of published weights: {error!r}") from error


@dataclasses.dataclass(frozen=True)
class PublishedWeights:
    """One version: its manifest and its arrays by dotted path."""

    manifest: Manifest
    arrays: dict[str, jax.Array]


def checksum(x: jax.Array) -> jax.Array:
    """Two sums over the bits of `x`, uint32 [2], the same however it is sharded; for use under `jit`.

    Σ w·m and Σ mix(w + m) mod 2³² of its words w and the odd number m of their position. One word that changes always
    changes the first. Not a defence against people.
    """
    unsigned = {8: jnp.uint8, 16: jnp.uint16}.get(jax.dtypes.itemsize_bits(x.dtype), jnp.uint32)
    words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)  # of 64 bits: a last axis of two
    position, cuts = jnp.zeros((), jnp.uint32), layout(words)
    for axis, size in enumerate(words.shape):  # cut as the words are, or every device would compute all of it
        steps = place(jnp.arange(size, dtype=jnp.uint32), cuts[axis])
        position = position[..., None] * jnp.uint32(size) + steps
    odd = _mix(position) | 1
    sums = (jnp.sum((words + 1) * odd, dtype=jnp.uint32), jnp.sum(_mix(words + odd), dtype=jnp.uint32))
    return jnp.stack(sums)


_sums = jax.jit(lambda arrays: jax.tree.map(checksum, arrays))


def _mix(x: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser of 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


@jax.jit
def canary(model: K3, router_bias: jax.Array, prompt: jax.Array) -> jax.Array:
    """Log-probabilities [T − 1] of all tokens of `prompt` int32 [T] but the first, with a cache as in generation."""
    cache = init_cache(model.config, 1, prompt.size)
    x, _ = model.features(prompt[None], router_bias=router_bias, cache=cache)
    log_probs_TV = jax.nn.log_softmax(place(model.logits(x)[0]))
    return jnp.take_along_axis(log_probs_TV[:-1], prompt[1:, None], axis=-1)[:, 0]


_copies = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def abstract_weights(model: ModelConfig, experts: ExpertFormat) -> dict[str, Any]:
    """The tree of a version: parameters, with `PackedMX` for banks of experts that are quantised, and router biases."""
    params = jax.eval_shape(lambda: K3(model, rngs=nnx.Rngs(0)))
    bias = jax.ShapeDtypeStruct((model.num_moe_layers, model.moe.num_experts), jnp.float32)
    if experts == "mxfp4":
        params = jax.eval_shape(lambda params: pack_experts(params, model.moe.qat_scale_rule), params)
    return {"params": params, "router_bias": bias}


def to_serve(tree: dict[str, Any], model: ModelConfig, experts: ExpertFormat) -> K3:
    """The model of a version as it computes: packed where it was published or trained so."""
    return tree["params"] if experts == "mxfp4" else served(tree["params"], model)


def snapshot(
    params: K3, router_bias: jax.Array, *, version: int, config: RunConfig, prompt: Sequence[int]
) -> PublishedWeights:
    """A version of live weights: copies, so that the trainer may donate its own, with checksums and canary.

    Runs on the mesh that is set; of several processes all have to call.

    Args:
        prompt: token ids of the canary, repeated up to `CANARY_LENGTH`.

    Raises:
        PublicationError: the canary's log-probabilities are not finite.
    """
    experts = config.train.publish.experts
    packed = pack_experts(params, config.model.moe.qat_scale_rule) if experts == "mxfp4" else params
    tree = _copies({"params": packed, "router_bias": router_bias})
    arrays = flat_paths(tree)
    ids = np.resize(np.asarray(prompt, np.int32), CANARY_LENGTH)
    log_probs = np.asarray(canary(to_serve(tree, config.model, experts), router_bias, ids))
    if not np.isfinite(log_probs).all():
        raise PublicationError(f"version {version} is not published: its canary's log-probabilities are not finite")
    sums = checksums(arrays)
    manifest = Manifest(
        version=version,
        config=to_dict(config),
        experts=experts,
        tensors={path: Tensor(tuple(x.shape), str(x.dtype), sums[path]) for path, x in arrays.items()},
        prompt=tuple(ids.tolist()),
        log_probs=tuple(log_probs.tolist()),
    )
    return PublishedWeights(manifest, arrays)


def checksums(arrays: dict[str, jax.Array]) -> dict[str, str]:
    """`checksum` of each, as 16 hexadecimal digits."""
    return {path: "".join(f"{word:08x}" for word in sums) for path, sums in jax.device_get(_sums(arrays)).items()}
