"""Next-token cross-entropy straight from features, without the [B·T, V] logits.

    ℓ = x W     nll = logsumexp(ℓ) − ℓ[target]     loss = Σ mask · (nll + z_loss · logsumexp(ℓ)²)

    loss_sum, aux = linear_cross_entropy(x, lm_head, targets, mask)
    loss = loss_sum / aux.tokens

A chunk of tokens goes through all of its work at once. When the sum is differentiated, its gradient is taken in the
forward pass while the chunk's logits are there: three products instead of four, and the logits are written once.

Legend: B batch, T time, D hidden, V vocabulary, n chunks, c tokens of a row in one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

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
    vocab_axis: str | None = None,
) -> tuple[jax.Array, LossAux]:
    """Sum (not mean) of the cross-entropy of `targets_BT` under softmax(x W).

    The product is taken in `x_BTD.dtype` and accumulated in at least float32, as is all else. The gradient of `w_DV`
    is summed over chunks in at least float32 before it is rounded to its dtype: pass the float32 master weights.

    Args:
        targets_BT: int32 in [0, V).
        mask_BT: bool, or weights; a token with 0 contributes exactly 0 to the loss and to every gradient, whatever its
            features hold.
        chunk: tokens of each row whose logits exist at once ("chunked"), forward and backward. Each chunk reads and
            writes the float32 gradient of `w_DV` once.
        z_loss: coefficient of logsumexp², 0 for none.
        vocab_axis: inside `shard_map`, the mesh axis that V is cut over: `w_DV` is then this device's part; targets are
            still ids of the whole vocabulary, and what is returned is of the whole vocabulary too. The gradient of
            `x_BTD` is this part's contribution, to be summed over the axis, as `shard_map(check_vma=False)` does.

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
    if name == "chunked":
        total, nll, lse = _chunked(x, w_DV, targets_BT, mask, chunk, _Static(z_loss, vocab_axis))
    elif vocab_axis is not None:
        raise ValueError("linear_cross_entropy: vocab_axis needs implementation 'chunked'")
    else:
        nll, lse = _reference(x, w_DV, targets_BT)
        total = _total(nll, lse, mask, z_loss)
    z_sum = z_loss * jnp.sum(jnp.square(lse) * mask)
    return total, LossAux(jnp.sum(mask), z_sum, nll * mask)


def _total(nll: jax.Array, lse: jax.Array, mask: jax.Array, z_loss: float) -> jax.Array:
    return jnp.sum(nll * mask) + z_loss * jnp.sum(jnp.square(lse) * mask)


class _Static(NamedTuple):
    z_loss: float
    vocab_axis: str | None = None


def _terms(logits: jax.Array, targets: jax.Array, axis: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihood and logsumexp of each token."""
    # a masked sum and not a gather: it needs no communication of logits when V is sharded
    target = jnp.sum(jnp.where(_is_target(logits, targets, axis), logits, 0), axis=-1)
    if axis is None:
        lse = jax.nn.logsumexp(logits, axis=-1)
        return lse - target, lse
    largest = jax.lax.pmax(jnp.max(logits, axis=-1), axis)
    total, target = jax.lax.psum((jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1), target), axis)
    lse = largest + jnp.log(total)
    return lse - target, lse


def _is_target(logits: jax.Array, targets: jax.Array, axis: str | None = None) -> jax.Array:
    first = 0 if axis is None else jax.lax.axis_index(axis) * logits.shape[-1]
    return jnp.arange(logits.shape[-1], dtype=targets.dtype) + first == targets[..., None]


def _reference(x_BTD: jax.Array, w_DV: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _terms(einsum("btd,dv->btv", wide(x_BTD), w_DV.astype(wide_dtype(x_BTD.dtype))), targets_BT)


def _chunked(x_BTD, w_DV, targets_BT, mask_BT, chunk: int, static: _Static) -> tuple[jax.Array, jax.Array, jax.Array]:
    T = x_BTD.shape[1]
    n = -(-T // chunk)
    c = -(-T // n)  # even chunks: 600 tokens are 2 × 300, not 512 + 88 padded to 1024

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, ((0, 0), (0, n * c - T), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(x.shape[0], n, c, *x.shape[2:]), 1, 0)

    def join(x_nBc: jax.Array) -> jax.Array:
        return jnp.moveaxis(x_nBc, 0, 1).reshape(-1, n * c)[:, :T]

    args = vary_alike(split(x_BTD), w_DV, split(targets_BT), split(mask_BT))
    total, nll, lse = _chunk_sums(*args, static)
    return total, join(nll), join(lse)


def _logits(x_BcD: jax.Array, w_DV: jax.Array) -> jax.Array:
    return einsum("bcd,dv->bcv", x_BcD, w_DV.astype(x_BcD.dtype))


def _chunk_grads(x_BcD, w_DV, targets, logits, lse, d_nll, d_lse, axis: str | None) -> tuple[jax.Array, jax.Array]:
    """Gradients of one chunk's features and of the weights from those of its terms."""
    dtype = x_BcD.dtype
    softmax = jnp.exp(logits - lse[..., None])
    d_logits = softmax * (d_nll + d_lse)[..., None] - jnp.where(_is_target(logits, targets, axis), d_nll[..., None], 0)
    d_logits = d_logits.astype(dtype)
    dx = einsum("bcv,dv->bcd", d_logits, w_DV.astype(dtype), sharding_of(x_BcD)).astype(dtype)
    return dx, einsum("bcd,bcv->dv", x_BcD, d_logits, sharding_of(w_DV))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunk_sums(x_nBcD, w_DV, targets_nBc, mask_nBc, static: _Static) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sum, and the terms of every token."""
    chunks = (x_nBcD, targets_nBc)
    nll, lse = jax.lax.map(lambda c: _terms(_logits(c[0], w_DV), c[1], static.vocab_axis), chunks)
    return _total(nll, lse, mask_nBc, static.z_loss), nll, lse


def _over_chunks(step: Any, w_DV: jax.Array, chunks: tuple) -> tuple[jax.Array, Any]:
    """Σ of the gradients of `w_DV` that `step(chunk)` returns first, and the stacked rest of what it returns."""

    def body(dw, chunk):
        more, out = step(*chunk)
        return dw + more, out

    if chunks[0].shape[0] == 1:
        dw, out = step(*(a[0] for a in chunks))
        return dw, jax.tree.map(lambda a: a[None], out)
    return jax.lax.scan(body, jnp.zeros_like(w_DV, dtype=wide_dtype(chunks[0].dtype)), chunks)


def _chunk_sums_fwd(x_nBcD, w_DV, targets_nBc, mask_nBc, static):
    z_loss, axis = static
    x_nBcD, w_DV, targets_nBc, mask_nBc = (a.value for a in (x_nBcD, w_DV, targets_nBc, mask_nBc))

    def step(x, targets, mask):
        logits = _logits(x, w_DV)
        nll, lse = _terms(logits, targets, axis)
        dx, dw = _chunk_grads(x, w_DV, targets, logits, lse, mask, 2 * z_loss * lse * mask, axis)
        return dw, (nll, lse, dx)

    dw, (nll, lse, dx) = _over_chunks(step, w_DV, (x_nBcD, targets_nBc, mask_nBc))
    residuals = (x_nBcD, w_DV, targets_nBc, nll, lse, dx, dw)
    return (_total(nll, lse, mask_nBc, z_loss), nll, lse), residuals


def _chunk_sums_bwd(static, residuals, cotangents):
    z_loss, axis = static
    x_nBcD, w_DV, targets_nBc, nll, lse, dx, dw = residuals
    d_own = cotangents[0]
    if axis is not None:  # every device of the axis returned the whole sum, and each has a share of its cotangent
        whole = lambda d: d if isinstance(d, SymbolicZero) else jax.lax.psum(d, axis)  # noqa: E731
        cotangents = [whole(d) for d in cotangents]
    d_total, *d_terms = cotangents
    scale = jnp.zeros((), lse.dtype) if isinstance(d_total, SymbolicZero) else d_total
    dx, dw = (scale * wide(dx)).astype(dx.dtype), scale * dw
    d_mask = (0 if isinstance(d_own, SymbolicZero) else d_own) * (nll + z_loss * jnp.square(lse))
    if not all(isinstance(d, SymbolicZero) for d in d_terms):  # terms of single tokens have gradients of their own
        d_nll, d_lse = (jnp.zeros_like(lse) if isinstance(d, SymbolicZero) else d for d in d_terms)

        def step(x, targets, lse, d_nll, d_lse):
            dx, dw = _chunk_grads(x, w_DV, targets, _logits(x, w_DV), lse, d_nll, d_lse, axis)
            return dw, dx

        more_dw, more_dx = _over_chunks(step, w_DV, (x_nBcD, targets_nBc, lse, d_nll, d_lse))
        dx, dw = dx + more_dx, dw + more_dw
    return dx, dw.astype(w_DV.dtype), None, d_mask


_chunk_sums.defvjp(_chunk_sums_fwd, _chunk_sums_bwd, symbolic_zeros=True)
