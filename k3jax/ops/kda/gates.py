"""What turns the raw inputs of KDA into the quantities of its recurrence.

Shape suffixes: B batch, T time, H heads, K key dim, V value dim. The functions also take inputs without T (one token).
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

Gate = Literal["none", "lower_bound", "softplus"]

L2_EPS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """The static choices of an op call: how its raw inputs are read. Hashable, so that it can be a static argument."""

    gate: Gate
    lower_bound: float
    beta_is_logit: bool
    qk_l2norm: bool
    scale: float


def compute_dtype(*arrays: Array) -> jnp.dtype:
    """At least float32; float64 if any input is."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def l2_normalise(x: Array) -> Array:
    """`x * rsqrt(sum(x^2) + 1e-6)` over the last axis: the sum, not the mean, and eps inside the root."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def log_decay(g: Array, A_log: Array, dt_bias: Array | None, gate: Gate, lower_bound: float) -> Array:
    """Log-decay [..., H, K], never above 0, from the raw gate.

    "lower_bound" (Kimi K3, report §2.1) is `lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`, in
    (lower_bound, 0); "softplus" (Kimi Linear, arXiv 2510.26692) is `-exp(A_log) * softplus(g + dt_bias)`, unbounded.
    A_log [H] is per head, dt_bias [H, K] per head and channel.
    """
    z = g if dt_bias is None else g + dt_bias.astype(g.dtype)
    rate = jnp.exp(A_log.astype(g.dtype))[:, None]
    if gate == "lower_bound":
        return lower_bound * jax.nn.sigmoid(rate * z)
    return -rate * jax.nn.softplus(z)


def activate(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    A_log: Array | None,
    dt_bias: Array | None,
    how: Activation,
    real: Array | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Normalised scaled q, normalised k, v, log-decay and beta in (0, 1), in at least float32.

    Tokens where `real` [B, T] is False come out as zeros (no decay, no write, no read) and get exactly zero gradients
    whatever they hold, NaN included: they are replaced by a select before anything is computed from them, and the gate
    and sigmoid of those zeros (which are not zero) by a second one.
    """
    dtype = compute_dtype(q, k, v, g, beta)

    def keep(x: Array) -> Array:
        return x if real is None else jnp.where(real.reshape(real.shape + (1,) * (x.ndim - real.ndim)), x, 0)

    q, k, v, g, beta = (keep(x).astype(dtype) for x in (q, k, v, g, beta))
    if how.qk_l2norm:
        q, k = l2_normalise(q), l2_normalise(k)
    if how.gate != "none":
        assert A_log is not None
        g = keep(log_decay(g, A_log, dt_bias, how.gate, how.lower_bound))
    if how.beta_is_logit:
        beta = keep(jax.nn.sigmoid(beta))
    return q * how.scale, k, v, g, beta
