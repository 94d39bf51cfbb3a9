"""Root-mean-square norms. Statistics in at least float32.

Legend: … any leading axes, D the normalised axis.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from k3jax.ops import gated_norm_gpu
from k3jax.ops.common import vary_alike, wide
from k3jax.ops.mosaic import xla_or_pallas


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x · rsqrt(mean(x²) + eps)`, rounded to `x.dtype`, then times `weight` [D] in that dtype → [..., D]."""
    x32 = wide(x)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.astype(x.dtype)


GatedNormImplementation = Literal["xla", "pallas"]


def resolve_gated_norm(
    x: jax.Array, gate: jax.Array, implementation: GatedNormImplementation | None = None
) -> GatedNormImplementation:
    """The implementation that runs when `implementation` is asked for; None means "pallas" where it can run.

    Shapes and dtypes decide: `jax.ShapeDtypeStruct`s do as arguments.

    Raises:
        ValueError: the kernels were asked for and cannot run here or on these arrays; the message says why.
    """
    return xla_or_pallas("gated_rms_norm", implementation, lambda: gated_norm_gpu.why_not(x, gate))


def gated_rms_norm(
    x: jax.Array,
    weight: jax.Array,
    gate: jax.Array,
    eps: float,
    implementation: GatedNormImplementation | None = None,
) -> jax.Array:
    """`rms_norm(x) · weight · sigmoid(gate)`, all in at least float32 with one rounding at the end (report §2.1).

    Keeps only its arguments for the backward pass.

    Args:
        x: [..., D] with `weight` [D] shared by all leading axes.
        gate: [..., D] pre-sigmoid.
        implementation: "pallas" (kernels for an NVIDIA GPU; D is 128), "xla"; None is `resolve_gated_norm`.

    Raises:
        ValueError: "pallas" cannot run; the message says why.
    """
    chosen = resolve_gated_norm(x, gate, implementation)
    x, weight, gate = vary_alike(x, weight, gate)
    return _gated_rms_norm(x, weight, gate, eps, chosen)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _gated_rms_norm(
    x: jax.Array, weight: jax.Array, gate: jax.Array, eps: float, implementation: GatedNormImplementation
) -> jax.Array:
    if implementation == "pallas":
        return gated_norm_gpu.forward(x, weight, gate, eps)
    x32 = wide(x)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * wide(weight) * jax.nn.sigmoid(wide(gate))).astype(gate.dtype)


def _gated_rms_norm_fwd(x, weight, gate, eps, implementation):
    return _gated_rms_norm(x, weight, gate, eps, implementation), (x, weight, gate)


def _gated_rms_norm_bwd(eps, implementation, residuals, d_y):
    x, weight, gate = residuals
    if implementation == "pallas":
        return gated_norm_gpu.backward(x, weight, gate, eps, d_y)
    x32, w32, dy32, open_ = wide(x), wide(weight), wide(d_y), jax.nn.sigmoid(wide(gate))
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    normed = x32 * scale
    d_scaled = dy32 * open_  # of normed · weight
    d_normed = d_scaled * w32
    d_x = scale * (d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True))
    d_gate = dy32 * normed * w32 * open_ * (1 - open_)
    d_weight = jnp.sum(d_scaled * normed, axis=tuple(range(x.ndim - 1)))
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype), d_gate.astype(gate.dtype)


_gated_rms_norm.defvjp(_gated_rms_norm_fwd, _gated_rms_norm_bwd)
