"""Selection of experts: float32 scores, biased top-k, un-biased renormalised weights (report §2.3).

Ties are broken by a rotation of the expert ids that depends on the token's position in its document and on nothing
else, so that equal scores load all experts equally and neither packing nor sharding changes a choice.

Legend: N tokens, D hidden, E experts, K picked experts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """Choice of experts for N tokens."""

    experts_NK: jax.Array  # int32, by falling biased score
    weights_NK: jax.Array  # at least float32
    scores_NE: jax.Array  # activated router output, un-biased
    threshold_N: jax.Array  # the (K+1)-th largest biased score, quantile balancing's α


def router_logits(x_ND: jax.Array, w_DE: jax.Array) -> jax.Array:
    """x w in at least float32 → [N, E].

    A float32 product of bfloat16 tokens needs no float32 arithmetic units and no float32 copy of the tokens: a float32
    matrix is the sum of three bfloat16 ones, whose products with the tokens are exact and summed in float32.
    """
    wide = jnp.promote_types(x_ND.dtype, jnp.float32)
    if x_ND.dtype == jnp.bfloat16 and w_DE.dtype == jnp.float32:
        return _split_logits(x_ND, w_DE)
    return jnp.einsum("nd,de->ne", x_ND.astype(wide), w_DE.astype(wide), precision=jax.lax.Precision.HIGHEST)


def _thirds(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum is the float32 `x`."""
    # not a pair of casts: XLA may take float32 → bfloat16 → float32 for the identity
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    middle = jax.lax.reduce_precision(x - high, exponent_bits=8, mantissa_bits=7)
    return [part.astype(jnp.bfloat16) for part in (high, middle, x - high - middle)]


def _matmul(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _sum_of_thirds(product: jax.Array) -> jax.Array:
    high, middle, low = jnp.split(product, 3, axis=1)
    return high + (middle + low)


@jax.custom_vjp
def _split_logits(x_ND: jax.Array, w_DE: jax.Array) -> jax.Array:
    return _sum_of_thirds(_matmul("nd,de->ne", x_ND, jnp.concatenate(_thirds(w_DE), axis=1)))


def _split_logits_fwd(x_ND: jax.Array, w_DE: jax.Array):
    return _split_logits(x_ND, w_DE), (x_ND, w_DE)


def _split_logits_bwd(residuals, d_NE: jax.Array):
    x_ND, w_DE = residuals
    (high, middle, low), (w_high, w_middle, _) = _thirds(d_NE), _thirds(w_DE)
    dw = _sum_of_thirds(_matmul("nd,ne->de", x_ND, jnp.concatenate([high, middle, low], axis=1)))
    # to 16 bits of 24: the result is rounded to bfloat16
    d, w = jnp.concatenate([high, high, middle], axis=1), jnp.concatenate([w_high, w_middle, w_high], axis=1)
    return _matmul("ne,de->nd", d, w).astype(x_ND.dtype), dw


_split_logits.defvjp(_split_logits_fwd, _split_logits_bwd)


_COUNTED = 128  # up to so many experts a GPU counts E² comparisons faster than it sorts


def _rotated_ranks(scores_NE: jax.Array, shift_N: jax.Array) -> jax.Array:
    """How many experts come before each one: with a larger score, or an equal one and nearer after `shift_N` [N, E]."""
    E = scores_NE.shape[-1]
    places_NE = (jnp.arange(E, dtype=jnp.int32) - shift_N[:, None]) % E
    mine, others = scores_NE[:, :, None], scores_NE[:, None, :]
    tied = (others == mine) & (places_NE[:, None, :] < places_NE[:, :, None])
    return jnp.sum((others > mine) | tied, axis=2, dtype=jnp.int32)


def _rotated_top_k(scores_NE: jax.Array, k: int, shift_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """top_k whose ties go to the first expert at or after `shift_N` (cyclically)."""
    E = scores_NE.shape[-1]
    order_NE = (jnp.arange(E, dtype=jnp.int32) + shift_N[:, None]) % E
    values, places = jax.lax.top_k(jnp.take_along_axis(scores_NE, order_NE, axis=-1), k)
    return values, (places + shift_N[:, None]) % E


def _pick(scores_NE: jax.Array, biased_NE: jax.Array, k: int, shift_N: jax.Array) -> tuple[jax.Array, ...]:
    """The k experts with the largest biased scores, their scores, and the (k + 1)-th largest biased score.

    With few experts by counting, where every step and every gradient is a sum over a mask, not a sort or a scatter.
    """
    E = scores_NE.shape[-1]
    if E > _COUNTED:
        values, experts = _rotated_top_k(biased_NE, k + 1, shift_N)
        return experts[:, :k], jnp.take_along_axis(scores_NE, experts[:, :k], axis=-1), values[:, k]
    ranks_NE = _rotated_ranks(biased_NE, shift_N)
    chosen_NKE = ranks_NE[:, None, :] == jnp.arange(k, dtype=jnp.int32)[:, None]
    experts = jnp.sum(jnp.where(chosen_NKE, jnp.arange(E, dtype=jnp.int32), 0), axis=2, dtype=jnp.int32)
    weights = jnp.sum(jnp.where(chosen_NKE, scores_NE[:, None, :], 0), axis=2)
    return experts, weights, jnp.sum(jnp.where(ranks_NE == k, biased_NE, 0), axis=1)


def route(
    logits_NE: jax.Array,
    bias_E: jax.Array,
    positions_N: jax.Array,
    *,
    experts_per_token: int,
    activation: Literal["sigmoid", "softmax"] = "sigmoid",
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> Routing:
    """Picks experts.

    Args:
        logits_NE: router output, at least float32.
        bias_E: selection bias, float32; moves the choice, never the weights, and gets no gradient.
        positions_N: int32, position of the token in its document.
        num_groups, topk_groups: with more than one group, only experts of the `topk_groups` groups with the largest
            sum of their two best biased scores can be picked.
    """
    k, E = experts_per_token, logits_NE.shape[-1]
    scores = jax.nn.sigmoid(logits_NE) if activation == "sigmoid" else jax.nn.softmax(logits_NE, axis=-1)
    biased = jax.lax.stop_gradient(scores + bias_E)
    if topk_groups < num_groups:
        grouped = biased.reshape(-1, num_groups, E // num_groups)
        group_scores = jnp.sum(jax.lax.top_k(grouped, min(2, E // num_groups))[0], axis=-1)
        _, kept = _rotated_top_k(group_scores, topk_groups, positions_N * topk_groups % num_groups)
        allowed = jnp.any(kept[:, :, None] == jnp.arange(num_groups), axis=1)
        biased = jnp.where(jnp.repeat(allowed, E // num_groups, axis=-1), biased, -jnp.inf)
    experts, weights, threshold = _pick(scores, biased, k, positions_N * k % E)
    if renormalize and k > 1:
        # over the largest first: the gradient of a / b holds b⁻², which overflows when all scores are near 0
        largest = jnp.maximum(jax.lax.stop_gradient(jnp.max(weights, axis=-1, keepdims=True)), 1e-30)
        weights = weights / largest
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20 / largest)
    return Routing(experts, weights * scaling_factor, scores, threshold)
