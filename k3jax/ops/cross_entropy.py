"""Next-token cross-entropy straight from features, without the [B·T, V] logits.

    ℓ = x W     nll = logsumexp(ℓ) − ℓ[target]     loss = Σ mask · (nll + z_loss · logsumexp(ℓ)²)

    loss_sum, aux = linear_cross_entropy(x, lm_head, targets, mask)
    loss = loss_sum / aux.tokens

Legend: B batch, T time, D hidden, V vocabulary, n chunks, c tokens of a row in one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.common import einsum, sharding_of, vary_alike, wide, wide_dtype

Implementation = Literal["reference", "chunked"]


class LossAux(NamedTuple):
    """What came with a summed loss; at least float32. All sums are over the tokens that count."""

    tokens: jax.Array  # Σ mask
    z_sum: jax.Array  # the z-loss part of the sum: loss_sum − z_sum is the cross-entropy
    token_loss_BT: jax.Array  # cross-entropy of each token in nats, 0 where masked


def default_implementation() -> Implementation:
    """What `implementation=None` runs: "chunked", which supports every input."""
    return "chunked"


def linear_cross_entropy(
    x_BTD: jax.Array,
    w_DV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    chunk: int = 512,
    z_loss: float = 0.0,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, LossAux]:
    """Sum (not mean) of the cross-entropy of `targets_BT` under softmax(x W).

    The product is taken in `x_BTD.dtype` and accumulated in at least float32, as is all else. The gradient of `w_DV`
    is summed over chunks in at least float32 before it is rounded to its dtype: pass the float32 master weights.

    Args:
        targets_BT: int32 in [0, V).
        mask_BT: bool, or weights; a token with 0 contributes exactly 0 to the loss and to every gradient, whatever its
            features hold.
        chunk: tokens of each row whose logits exist at once ("chunked"), forward and backward.
        z_loss: coefficient of logsumexp², 0 for none.

    Returns:
        The scalar sum and `LossAux`.

    Raises:
        ValueError: shapes that do not fit, or an unknown implementation.
    """
    (B, T, D), name = x_BTD.shape, implementation or default_implementation()
    if w_DV.shape[0] != D or targets_BT.shape != (B, T) or mask_BT.shape != (B, T):
        raise ValueError(
            f"linear_cross_entropy: x {x_BTD.shape}, w {w_DV.shape}, targets {targets_BT.shape}, mask {mask_BT.shape}"
            " must be [B,T,D], [D,V], [B,T] and [B,T]"
        )
    if chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk must be positive, got {chunk}")
    if name not in ("reference", "chunked"):
        raise ValueError(f"linear_cross_entropy: implementation must be 'reference' or 'chunked', got {name!r}")

    mask = mask_BT.astype(wide_dtype(x_BTD.dtype))
    x = jnp.where((mask != 0)[..., None], x_BTD, 0)  # garbage in a masked token would turn its zero gradient into NaN
    nll, lse = _reference(x, w_DV, targets_BT) if name == "reference" else _chunked(x, w_DV, targets_BT, chunk)
    token_loss = nll * mask
    z_sum = z_loss * jnp.sum(jnp.square(lse) * mask)
    return jnp.sum(token_loss) + z_sum, LossAux(jnp.sum(mask), z_sum, token_loss)


def _terms(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood and logsumexp of each token."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    # a masked sum and not a gather: it needs no communication of logits when V is sharded
    return lse - jnp.sum(jnp.where(_is_target(logits, targets), logits, 0), axis=-1), lse


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[-1], dtype=targets.dtype) == targets[..., None]


def _reference(x_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _terms(einsum("btd,dv->btv", wide(x_BTD), w_DV.astype(wide_dtype(x_BTD.dtype))), targets_BT)


def _chunked(x_BTD, w_DV, targets_BT, chunk: int) -> tuple[jax.Array, jax.Array]:
    T = x_BTD.shape[1]
    n = -(-T // chunk)
    c = -(-T // n)  # even chunks: 600 tokens are 2 × 300, not 512 + 88 padded to 1024

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, n * c - T), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(x.shape[0], n, c, *x.shape[2:]), 1, 0)

    def join(x_nBc: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_nBc, 0, 1).reshape(-1, n * c)[:, :T]

    nll, lse = _chunk_terms(*vary_alike(split(x_BTD), w_DV, split(targets_BT)))
    return join(nll), join(lse)


def _logits(x_BcD: jax.Array, w_DV: jax.Array) -> jax.Array:
    return einsum("bcd,dv->bcv", x_BcD, w_DV.astype(x_BcD.dtype))


@jax.custom_vjp
def _chunk_terms(x_nBcD, w_DV, targets_nBc) -> tuple[jax.Array, jax.Array]:
    return jax.lax.map(lambda chunk: _terms(_logits(chunk[0], w_DV), chunk[1]), (x_nBcD, targets_nBc))


def _chunk_terms_fwd(x_nBcD, w_DV, targets_nBc):
    nll, lse = _chunk_terms(x_nBcD, w_DV, targets_nBc)
    return (nll, lse), (x_nBcD, w_DV, targets_nBc, lse)


def _chunk_terms_bwd(residuals, cotangents):
    x_nBcD, w_DV, targets_nBc, lse_nBc = residuals
    dtype = x_nBcD.dtype

    def step(dw, chunk):
        x, targets, lse, d_nll, d_lse = chunk
        logits = _logits(x, w_DV)
        softmax = jnp.exp(logits - lse[..., None])
        d_logits = softmax * (d_nll + d_lse)[..., None] - jnp.where(_is_target(logits, targets), d_nll[..., None], 0)
        d_logits = d_logits.astype(dtype)
        dx = einsum("bcv,dv->bcd", d_logits, w_DV.astype(dtype), sharding_of(x)).astype(dtype)
        return dw + einsum("bcd,bcv->dv", x, d_logits, sharding_of(w_DV)), dx

    zeros = jnp.zeros_like(w_DV, dtype=lse_nBc.dtype)
    dw, dx = jax.lax.scan(step, zeros, (x_nBcD, targets_nBc, lse_nBc, *cotangents))
    return dx, dw.astype(w_DV.dtype), None


_chunk_terms.defvjp(_chunk_terms_fwd, _chunk_terms_bwd)
