"""Routed experts in MXFP4, groups along the input dimension: as numbers to train with, as codes to infer with.

Quantisation-aware training computes with the rounded experts and gives their gradient to the unrounded ones (straight
through), which are never made from codes. What is trained is what is served:

    model(quantized(params, config))  =  model(pack_experts(params, rule))

in float32 bit for bit as XLA compiles by default. With most of its optimisations off they may be 1e-6 apart over
several KDA layers. Where that was looked into, the first difference came before any expert, in KDA: besides those of
the experts, the fusion of k · exp(−gate) was the only one of floats that XLA laid out otherwise in the two programs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

from k3jax.config import ConfigError, ModelConfig
from k3jax.ops.mx import PackedMX, ScaleRule, fake_quant
from k3jax.sharding import axes_of, logical_axes


def quantized[T](params: T, config: ModelConfig) -> T:
    """`params` as the forward pass of `config` sees them: with `moe.qat` routed experts on the MXFP4 grid, in the
    compute dtype, which holds them exactly; else as they are.

    Args:
        params: a model or any tree of its parts, at rest or as used. Each device rounds what it holds.

    Raises:
        ConfigError: a bank whose groups would lie on several devices.
    """
    if config.moe.qat is None:
        return params
    round_bank = partial(fake_quant, format="mxfp4", scale_rule=config.moe.qat_scale_rule, axis=-2)
    with jax.named_scope("fake_quant"):
        return _experts(lambda w: round_bank(w).astype(config.dtype), params)


@partial(jax.jit, static_argnums=1)
def pack_experts[T](params: T, scale_rule: ScaleRule) -> T:
    """`params` with routed experts as MXFP4 codes and scales, `PackedMX`: 4.25 bits for each of their numbers.

    For inference: there is no gradient.

    Raises:
        ConfigError: as `quantized`.
    """
    return _experts(partial(PackedMX.of, scale_rule=scale_rule), params)


def served[T](params: T, config: ModelConfig) -> T:
    """`params` to generate with: packed after quantisation-aware training, else as they are."""
    return pack_experts(params, config.moe.qat_scale_rule) if config.moe.qat else params


def _experts[T](fn: Callable[[jax.Array], Any], params: T) -> T:
    """`fn` of every bank of routed experts [..., E, in, out]."""

    def one(path: tuple, leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable) or "expert" not in logical_axes(leaf):
            return leaf
        bank = leaf.get_value()
        if axes := axes_of(bank, -2):
            raise ConfigError(
                f"{jax.tree_util.keystr(path, simple=True, separator='/')} {list(bank.shape)} is cut over mesh axes "
                f"{', '.join(axes)} along its input dimension, and groups of 32 would lie on several devices; cut "
                "experts between them (mesh.expert, mesh.fsdp) only"
            )
        return leaf.replace(fn(bank))

    return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))
