"""Block attention residuals: attention over depth with one learned pseudo-query per sublayer (arXiv 2603.15031).

    ℓ_i = Σ_c V_ic · rsqrt(mean(V_i²) + ε) · (γ_c w_c)        over sources V = [bank rows; partial sum]
    mix = Σ_i softmax(ℓ)_i V_i                                values are the un-normalised rows, no 1/√D

Two-phase form: the bank is constant within a block, so `read_bank` answers all queries of a block in one pass over
it, and `merge` folds in the one source that changes, the running partial sum, by online softmax. Everything is in
at least float32 until the single cast at the end.

Legend: N bank rows, Q queries, B batch, T time, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.common import wide

_HIGHEST = jax.lax.Precision.HIGHEST


class BankRead(NamedTuple):
    """What one query (or a stack of them) has read from the bank, before the partial sum is merged."""

    peak: jax.Array  # [..., B, T] largest logit
    total: jax.Array  # [..., B, T] Σ exp(ℓ − peak)
    value: jax.Array  # [..., B, T, D] Σ exp(ℓ − peak) V
    logits: jax.Array  # [..., N, B, T], −inf where a row is not valid


def _rstd(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1) + eps)


def read_bank(bank_NBTD: jax.Array, queries_QD: jax.Array, eps: float, valid_N: jax.Array | None = None) -> BankRead:
    """Phase one: every query of a block against every bank row.

    Args:
        bank_NBTD: block sources, oldest first.
        queries_QD: γ ⊙ w of each sublayer, float32.
        valid_N: bool, rows that exist yet; at least one must. None: all.
    """
    bank = wide(bank_NBTD)
    # one dot per row keeps a token's result independent of the other tokens' values
    logits = jnp.einsum("nbtd,qd->qnbt", bank, wide(queries_QD), precision=_HIGHEST) * _rstd(bank, eps)
    if valid_N is not None:
        logits = jnp.where(valid_N[:, None, None], logits, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=1))
    weights = jnp.exp(logits - peak[:, None])
    value = jnp.einsum("qnbt,nbtd->qbtd", weights, bank, precision=_HIGHEST)
    return BankRead(peak, jnp.sum(weights, axis=1), value, logits)


def merge(
    read: BankRead, partial_BTD: jax.Array, query_D: jax.Array, eps: float, include: jax.Array | bool = True
) -> tuple[jax.Array, jax.Array]:
    """Phase two: folds the partial sum into what one query read from the bank.

    Args:
        read: one query's `BankRead` (no leading axis).
        include: False leaves the partial out (the first attention of a block has none yet).

    Returns:
        mix [B, T, D] in `partial_BTD.dtype`, and the logit of the partial [B, T] (−inf where left out).
    """
    partial = wide(partial_BTD)
    logit = jnp.einsum("btd,d->bt", partial, wide(query_D), precision=_HIGHEST) * _rstd(partial, eps)
    logit = jnp.where(include, logit, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.maximum(read.peak, logit))
    old, new = jnp.exp(read.peak - peak), jnp.exp(logit - peak)
    mixed = (read.value * old[..., None] + partial * new[..., None]) / (read.total * old + new)[..., None]
    return mixed.astype(partial_BTD.dtype), logit


def depth_weights(logits_NBT: jax.Array, partial_logit_BT: jax.Array) -> jax.Array:
    """Softmax over the sources of one mix → [N + 1, B, T], the partial sum last."""
    return jax.nn.softmax(jnp.concatenate([logits_NBT, partial_logit_BT[None]]), axis=0)


def attn_res(
    bank_NBTD: jax.Array, partial_BTD: jax.Array | None, query_D: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Reference: the direct softmax over all sources → mix [B, T, D] and weights [sources, B, T].

    `partial_BTD` None mixes the bank alone; an empty bank returns the partial itself.
    """
    sources = bank_NBTD if partial_BTD is None else jnp.concatenate([bank_NBTD, partial_BTD[None]])
    rows = wide(sources)
    logits = jnp.einsum("nbtd,d->nbt", rows, wide(query_D), precision=_HIGHEST) * _rstd(rows, eps)
    weights = jax.nn.softmax(logits, axis=0)
    return jnp.einsum("nbt,nbtd->btd", weights, rows, precision=_HIGHEST).astype(sources.dtype), weights
