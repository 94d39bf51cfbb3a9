"""Attention in plain JAX: all logits at once (the reference), or block by block with an online softmax.

Legend: B batch, T queries, S keys, H heads, K key width, V value width, n/m number of blocks of queries/keys,
t/s tokens in one.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.common import einsum, vary_alike, wide, wide_dtype
from k3jax.ops.remat import checkpoint_name

_NEVER = np.iinfo(np.int32).max  # position of a key that no query sees


class Where(NamedTuple):
    """Position and document of queries and keys, in blocks."""

    pairs: jax.Array  # [p, 2] (query block, key block), all that have anything to see; each query block is there
    q_pos: jax.Array  # [n, B or 1, t]
    kv_pos: jax.Array  # [m, 1, s]
    q_ids: jax.Array | None  # [n, B, t]
    kv_ids: jax.Array | None  # [m, B, s]


def _query_positions(q_offset: int | jax.Array, T: int) -> jax.Array:
    """[B or 1, T] int32."""
    return jnp.asarray(q_offset, jnp.int32).reshape(-1, 1) + jnp.arange(T, dtype=jnp.int32)


def visible(q_pos, kv_pos, q_ids, kv_ids) -> jax.Array:
    """[B or 1, queries, keys]: at or before the query, and of its document."""
    mask = kv_pos[:, None, :] <= q_pos[:, :, None]
    if q_ids is not None:
        mask &= (q_ids[:, :, None] == kv_ids[:, None, :]) & (q_ids[:, :, None] != 0)
    return mask


def finite(peak: jax.Array) -> jax.Array:
    """0 for a query that sees nothing, so that exp(−inf − peak) is 0 and not NaN."""
    return jnp.where(jnp.isneginf(peak), 0, peak)


def reference(q, k, v, q_ids, kv_ids, q_offset, scale: float, block_size: int) -> tuple[jax.Array, jax.Array]:
    """→ o [B, T, H, V] and the largest logit [B, H]; `block_size` has no meaning here."""
    kv_pos = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    mask = visible(_query_positions(q_offset, q.shape[1]), kv_pos, q_ids, kv_ids)
    logits = jnp.where(mask[:, None], einsum("bthk,bshk->bhts", wide(q), wide(k)) * scale, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - finite(peak)[..., None])
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return einsum("bhts,bshv->bthv", weights / jnp.where(total == 0, 1, total), wide(v)), jnp.max(peak, axis=-1)


def plan(q, k, q_ids, kv_ids, q_offset: int | jax.Array, block_size: int) -> Where:
    """Even blocks of at most `block_size` tokens, and which pairs of them have anything to see."""
    T, S = q.shape[1], k.shape[1]
    n, m = -(-T // block_size), -(-S // block_size)
    t, s = -(-T // n), -(-S // m)  # even blocks: 600 tokens are 2 × 300, not 512 + 88 padded to 1024
    # a traced offset can be anything; block 0 is never left out, so that each query block is visited
    last = (lambda i: q_offset + (i + 1) * t - 1) if isinstance(q_offset, int) else lambda i: S
    pairs = [(i, j) for i in range(n) for j in range(m) if j == 0 or j * s <= last(i)]
    return Where(
        jnp.asarray(pairs, jnp.int32),
        _row_blocks(_query_positions(q_offset, T), n, t, -1),
        _row_blocks(jnp.arange(S, dtype=jnp.int32)[None], m, s, _NEVER),
        None if q_ids is None else _row_blocks(q_ids, n, t, 0),
        None if kv_ids is None else _row_blocks(kv_ids, m, s, 0),
    )


def xla(q, k, v, q_ids, kv_ids, q_offset, scale: float, block_size: int) -> tuple[jax.Array, jax.Array]:
    """→ o [B, T, H, V] and the largest logit [B, H]."""
    return over_pairs(q, k, v, plan(q, k, q_ids, kv_ids, q_offset, block_size), scale)


def over_pairs(q, k, v, where: Where, scale: float) -> tuple[jax.Array, jax.Array]:
    """`xla` over the pairs of blocks that `where` names."""
    q, k, v, *leaves = vary_alike(q, k, v, *jax.tree.leaves(where))
    return _blockwise(scale, q, k, v, jax.tree.unflatten(jax.tree.structure(where), leaves))


def two_pieces(pieces: int, per_piece: int) -> np.ndarray:
    """Pairs of blocks for each of R = `pieces` / 2 devices that has the queries of pieces r and `pieces` − 1 − r.

    Of a row in `pieces` pieces of `per_piece` blocks each: every device then has as many pairs as any other.

    Returns:
        int32 [R, p, 2]: a query block of the two pieces, one after the other, and a key block of the row.
    """
    blocks = np.arange(per_piece)
    return np.asarray(
        [
            [
                (half * per_piece + i, j)
                for half, piece in enumerate((r, pieces - 1 - r))
                for i in blocks
                for j in range(piece * per_piece + i + 1)
            ]
            for r in range(pieces // 2)
        ],
        np.int32,
    )


def largest_logit(q, k, q_ids, scale: float, block_size: int) -> jax.Array:
    """Largest scaled logit of the visible pairs [B, H] in at least float32, −inf without any; no gradient.

    For attention whose kernel does not tell. Each block of logits is written once and read once.
    """
    where = plan(q, k, q_ids, q_ids, 0, block_size)
    q, k, *leaves = vary_alike(jax.lax.stop_gradient(q), jax.lax.stop_gradient(k), *jax.tree.leaves(where))
    where = jax.tree.unflatten(jax.tree.structure(where), leaves)
    (n, _, t), (m, _, s) = where.q_pos.shape, where.kv_pos.shape
    qb, kb = _head_blocks(q, n, t), _head_blocks(k, m, s)

    def step(peak, i, j):
        logits = _logits(scale, _pick(qb, i), _pick(kb, j), where, i, j)
        return jnp.maximum(peak, jnp.max(logits, axis=(-1, -2)))

    return _scan_pairs(where, step, jnp.full_like(q[:, 0, :, 0], -jnp.inf, wide_dtype(q.dtype)))


def _row_blocks(x_BT: jax.Array, n: int, t: int, fill: int) -> jax.Array:
    """[B, T] → [n, B, t], the last block filled up."""
    B, T = x_BT.shape
    return jnp.moveaxis(jnp.pad(x_BT, ((0, 0), (0, n * t - T)), constant_values=fill).reshape(B, n, t), 1, 0)


def _head_blocks(x_BTHK: jax.Array, n: int, t: int) -> jax.Array:
    """[B, T, H, K] → [n, B, H, t, K], the last block filled up: matrices contiguous, blocks outermost."""
    B, T, H, K = x_BTHK.shape
    padded = jnp.pad(x_BTHK, ((0, 0), (0, n * t - T), (0, 0), (0, 0)))
    return padded.reshape(B, n, t, H, K).transpose(1, 0, 3, 2, 4)


def _from_head_blocks(x_nBHtK: jax.Array, T: int) -> jax.Array:
    n, B, H, t, K = x_nBHtK.shape
    return x_nBHtK.transpose(1, 0, 3, 2, 4).reshape(B, n * t, H, K)[:, :T]


def _pick(tree, i: jax.Array):
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def _put(x: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)


def _logits(scale: float, q_BHtK, k_BHsK, where: Where, i, j) -> jax.Array:
    q_pos, q_ids = _pick((where.q_pos, where.q_ids), i)
    kv_pos, kv_ids = _pick((where.kv_pos, where.kv_ids), j)
    mask = visible(q_pos, kv_pos, q_ids, kv_ids)
    return jnp.where(mask[:, None], einsum("bhtk,bhsk->bhts", q_BHtK, k_BHsK) * scale, -jnp.inf)


def _scan_pairs(where: Where, step, carry):
    """One scan over the visible pairs of blocks: no work in the future, and a trace that does not grow with T."""
    return jax.lax.scan(lambda c, ij: (step(c, ij[0], ij[1]), None), carry, where.pairs)[0]


def forward(scale: float, q, k, v, where: Where):
    """Online softmax → o, largest logit [B, H], and log Σ exp of each query [n, B, H, t] (0 if it sees nothing)."""
    (n, _, t), (m, _, s) = where.q_pos.shape, where.kv_pos.shape
    qb, kb, vb = _head_blocks(q, n, t), _head_blocks(k, m, s), _head_blocks(v, m, s)
    total = jnp.zeros_like(qb[..., 0], dtype=wide_dtype(q.dtype))
    acc = jnp.broadcast_to(total[..., None], (*total.shape, v.shape[-1]))

    def step(carry, i, j):
        peaks, totals, accs = carry
        peak, total, acc = _pick(carry, i)
        logits = _logits(scale, _pick(qb, i), _pick(kb, j), where, i, j)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - finite(new_peak)[..., None])
        decay = jnp.exp(peak - finite(new_peak))
        value = einsum("bhts,bhsv->bhtv", weights.astype(v.dtype), _pick(vb, j))
        return (
            _put(peaks, new_peak, i),
            _put(totals, total * decay + jnp.sum(weights, axis=-1), i),
            _put(accs, acc * decay[..., None] + value, i),
        )

    peak, total, acc = _scan_pairs(where, step, (total - jnp.inf, total, acc))
    safe = jnp.where(total == 0, 1, total)
    o = _from_head_blocks(acc / safe[..., None], q.shape[1])
    return o, jnp.max(peak, axis=(0, 3)), finite(peak) + jnp.log(safe)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(scale: float, q, k, v, where: Where) -> tuple[jax.Array, jax.Array]:
    return forward(scale, q, k, v, where)[:2]


def _blockwise_fwd(scale: float, q, k, v, where: Where):
    o, peak, lse = forward(scale, q, k, v, where)
    # for a rematerialisation to keep: without both, the backward pass begins with another forward pass
    o, lse = checkpoint_name(o, "attention"), checkpoint_name(lse, "attention", exact=True)
    return (o, peak), (q, k, v, where, o, lse)


def _blockwise_bwd(scale: float, residuals, cotangents):
    q, k, v, where, o, lse = residuals
    return *backward(scale, q, k, v, where, o, lse, cotangents[0]), None


def backward(scale: float, q, k, v, where: Where, o, lse, d_o):
    """Gradients of q, k and v from what `forward` returned."""
    (n, _, t), (m, _, s) = where.q_pos.shape, where.kv_pos.shape
    qb, kb, vb = _head_blocks(q, n, t), _head_blocks(k, m, s), _head_blocks(v, m, s)
    d_o = d_o.astype(v.dtype)
    # Σ_s p_ts dp_ts from the same rounded d_o that dp is made of, so that Σ_s ds_ts = 0
    delta = jnp.sum(_head_blocks(wide(o) * wide(d_o), n, t), axis=-1)
    d_ob = _head_blocks(d_o, n, t)

    def step(carry, i, j):
        dq, dk, dv = carry
        q_i, d_o_i, k_j, v_j = _pick(qb, i), _pick(d_ob, i), _pick(kb, j), _pick(vb, j)
        weights = jnp.exp(_logits(scale, q_i, k_j, where, i, j) - _pick(lse, i)[..., None])
        d_weights = einsum("bhtv,bhsv->bhts", d_o_i, v_j)
        d_logits = (weights * (d_weights - _pick(delta, i)[..., None]) * scale).astype(q.dtype)
        return (
            _put(dq, _pick(dq, i) + einsum("bhts,bhsk->bhtk", d_logits, k_j), i),
            _put(dk, _pick(dk, j) + einsum("bhts,bhtk->bhsk", d_logits, q_i), j),
            _put(dv, _pick(dv, j) + einsum("bhts,bhtv->bhsv", weights.astype(v.dtype), d_o_i), j),
        )

    zeros = tuple(jnp.zeros_like(x, dtype=wide_dtype(q.dtype)) for x in (qb, kb, vb))
    dq, dk, dv = _scan_pairs(where, step, zeros)
    return tuple(_from_head_blocks(d, x.shape[1]).astype(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v)))


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)
