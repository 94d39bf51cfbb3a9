"""Initialisers. `A_log` 0, Mamba-style `dt_bias` and zero AttnRes queries are the report's; N(0, 0.02) for matrices and
the uniform ±1/√W of the short convolutions (PyTorch's default for a depthwise filter) are our choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.config import ModelConfig
from k3jax.sharding import param

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]

zeros: Init = jax.nn.initializers.zeros
ones: Init = jax.nn.initializers.ones


def normal(std: float) -> Init:
    return jax.nn.initializers.normal(std)


def conv_uniform(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """U(±1/√W) for filters [..., W]."""
    bound = 1 / math.sqrt(shape[-1])
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def mamba_dt_bias(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """softplus⁻¹ of a step drawn log-uniformly from [1e-3, 1e-1]."""
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(1e-1)))
    return (step + jnp.log(-jnp.expm1(-step))).astype(dtype)


class Maker:
    """Hands out parameters of one module: a fresh key and the config's dtype for each."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        self._key = key
        self._dtype = jnp.dtype(config.param_dtype)
        self._normal = normal(config.init_std)

    def __call__(self, axes: str, *shape: int, init: Init | None = None, wide: bool = False):
        """`make("embed heads kda_key", D, H, K)`; matrices are N(0, init_std) unless told otherwise.

        `wide` parameters are at least float32 whatever the config says: the release stores them so.
        """
        self._key, key = jax.random.split(self._key)
        dtype = jnp.promote_types(self._dtype, jnp.float32) if wide else self._dtype
        return param(key, shape, tuple(axes.split()), init or self._normal, dtype)

    def key(self) -> jax.Array:
        self._key, key = jax.random.split(self._key)
        return key
