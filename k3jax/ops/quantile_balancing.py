"""Quantile balancing (QB) of the router bias (report §2.3.3, eqs. 13-14, appendices C and D).

With k experts per token, token i admits expert j exactly when bias_j ≥ margin_ij = alpha_i − score_ij, where alpha_i is
the (k+1)-th largest *biased* score of the token. An expert gets its fair share k/E of the tokens when its bias is the
k/E quantile of its margins. The quantile is read from an integer histogram over the whole global batch: histograms of
micro-batches and devices add up exactly, so neither accumulation nor sharding can change the result.

The new bias serves from the next step on. It gets no gradient and is frozen in evaluation.

Shape suffixes: N tokens (any number of leading axes), E experts, X histogram bins, L layers (optional leading axis).
"""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def _range(bias_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bounds that hold every margin: scores are in (0, 1) and alpha in (min b, 1 + max b)."""
    return bias_E.min(-1, keepdims=True) - 1, bias_E.max(-1, keepdims=True) + 1


def qb_threshold(scores_NE: jax.Array, bias_E: jax.Array, experts_per_token: int) -> jax.Array:
    """Admission threshold alpha of every token [N]: its (k+1)-th largest biased score."""
    return jax.lax.top_k(scores_NE + bias_E, experts_per_token + 1)[0][..., -1]


def qb_histogram(
    scores_NE: jax.Array,
    bias_E: jax.Array,
    *,
    experts_per_token: int,
    bins: int,
    mask_N: jax.Array | None = None,
    alpha_N: jax.Array | None = None,
) -> jax.Array:
    """Counts of the margins of every expert in uniform bins over [min b − 1, max b + 1].

    Args:
        scores_NE: router scores in (0, 1), without the bias; any number of leading token axes.
        bias_E: the bias that routed these tokens.
        experts_per_token: k, below E.
        bins: number of bins X.
        mask_N: true for tokens that count; padding must be false. None counts every token.
        alpha_N: alpha when the router has it already (`qb_threshold`); None computes it.

    Returns:
        int32 [E, X]; every row sums to the number of counted tokens. Carries no gradient. With a mesh in Explicit mode
        the counts are those of all devices, replicated; inside `shard_map` they are the device's own.
    """
    num_experts = scores_NE.shape[-1]
    if not 0 < experts_per_token < num_experts:
        raise ValueError(f"quantile balancing needs 0 < experts_per_token < {num_experts}, got {experts_per_token}")
    scores_NE, bias_E = jax.lax.stop_gradient((scores_NE, bias_E))
    if alpha_N is None:
        alpha_N = qb_threshold(scores_NE, bias_E, experts_per_token)
    if mask_N is None:
        mask_N = jnp.ones_like(alpha_N, dtype=bool)

    def count(scores_NE, bias_E, alpha_N, mask_N):
        lo, hi = _range(bias_E)
        bin_NE = jnp.floor((alpha_N[..., None] - scores_NE - lo) * bins / (hi - lo))
        flat_NE = jnp.clip(bin_NE, 0, bins - 1).astype(jnp.int32) + bins * jnp.arange(num_experts)
        counted_NE = jnp.broadcast_to(mask_N[..., None], flat_NE.shape).astype(jnp.int32)
        return jnp.zeros(num_experts * bins, jnp.int32).at[flat_NE].add(counted_NE).reshape(num_experts, bins)

    explicit_axes = jax.sharding.get_abstract_mesh().explicit_axes
    if explicit_axes:
        # A scatter of sharded updates into one histogram is a sum over devices: only the partitioner writes that.
        auto = jax.sharding.auto_axes(count, axes=explicit_axes, out_sharding=PartitionSpec())
        count = cast(Callable[..., jax.Array], auto)
    return count(scores_NE, bias_E, jax.lax.stop_gradient(alpha_N), mask_N)


def qb_update(histogram_EX: jax.Array, bias_E: jax.Array, *, experts_per_token: int, ema: float = 0.0) -> jax.Array:
    """The bias for the next step from the summed histogram of the step that `bias_E` routed.

    Args:
        histogram_EX: int32 [E, X] or [L, E, X], summed over micro-batches and devices.
        bias_E: [E] or [L, E], the bias the histogram was made with.
        experts_per_token: k.
        ema: share of the old bias in the new one. The report names the option and gives no coefficient.

    Returns:
        The mean-centred bias, in the shape and dtype of `bias_E`; unchanged where no token was counted.
    """
    num_experts, bins = histogram_EX.shape[-2:]
    tokens_E = histogram_EX.sum(-1)
    # The rank q = tokens·k/E is split into whole and rest, so that neither int32 nor float32 loses a unit.
    whole_E, rest_E = tokens_E // num_experts * experts_per_token, tokens_E % num_experts * experts_per_token
    rank_E = whole_E + (rest_E + num_experts - 1) // num_experts
    cumulative_EX = jnp.cumsum(histogram_EX, -1)
    first_E1 = jnp.argmax(cumulative_EX >= rank_E[..., None], -1, keepdims=True)
    count_E = jnp.take_along_axis(histogram_EX, first_E1, -1)[..., 0]
    before_E = jnp.take_along_axis(cumulative_EX, first_E1, -1)[..., 0] - count_E

    lo, hi = _range(bias_E)
    inside_E = (whole_E - before_E + rest_E / num_experts) / jnp.maximum(count_E, 1)
    new_E = lo + (first_E1[..., 0] + jnp.clip(inside_E, 0, 1)) * ((hi - lo) / bins)
    new_E = new_E - new_E.mean(-1, keepdims=True)
    new_E = ema * bias_E + (1 - ema) * new_E
    return jnp.where(tokens_E > 0, new_E, bias_E).astype(bias_E.dtype)


def qb_exact(scores_NE: jax.Array, bias_E: jax.Array, experts_per_token: int) -> jax.Array:
    """Reference for `qb_update` without a histogram: the order statistic of rank ceil(N·k/E) of each expert's margins.

    scores_NE [N, E] holds every token of the global batch. Returns the mean-centred bias [E].
    """
    tokens, num_experts = scores_NE.shape
    margins_NE = qb_threshold(scores_NE, bias_E, experts_per_token)[:, None] - scores_NE
    rank = -(-tokens * experts_per_token // num_experts)
    new_E = jnp.sort(margins_NE, axis=0)[rank - 1]
    return new_E - new_E.mean()
