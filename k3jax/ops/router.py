"""Selection of experts: float32 scores, biased top-k, un-biased renormalised weights (report §2.3).

Ties are broken by a rotation of the expert ids that depends on the token's position in its document and on nothing
else, so that equal scores load all experts equally and neither packing nor sharding changes a choice.

Legend: N tokens, E experts, K picked experts.
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


def _rotated_top_k(scores_NE: jax.Array, k: int, shift_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """top_k whose ties go to the first expert at or after `shift_N` (cyclically)."""
    E = scores_NE.shape[-1]
    order_NE = (jnp.arange(E, dtype=jnp.int32) + shift_N[:, None]) % E
    values, places = jax.lax.top_k(jnp.take_along_axis(scores_NE, order_NE, axis=-1), k)
    return values, (places + shift_N[:, None]) % E


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
    values, experts = _rotated_top_k(biased, k + 1, positions_N * k % E)
    experts = experts[:, :k]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if renormalize and k > 1:
        # over the largest first: the gradient of a / b holds b⁻², which overflows when all scores are near 0
        largest = jnp.maximum(jax.lax.stop_gradient(jnp.max(weights, axis=-1, keepdims=True)), 1e-30)
        weights = weights / largest
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20 / largest)
    return Routing(experts, weights * scaling_factor, scores, values[:, k])
