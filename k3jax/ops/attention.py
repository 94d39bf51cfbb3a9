"""Causal attention within documents, for key and value heads of different width, and its absorbed decode step.

    s = scale · q kᵀ   over keys at or before the query, of its document      o = softmax(s) v

Softmax, accumulation and output are in at least float32: rounding the output to bf16 before the backward pass reads it
biases the gradient (the report keeps it in float32 too), so the caller rounds after gating.

    o, max_logit = attention(q, k, v, scale=192**-0.5, segment_ids=segment_ids)

Legend: B batch, T queries, S keys, H heads, K key width, V value width, R latent rank, r shared key width,
n/m number of blocks of queries/keys, t/s tokens in one.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.ops.common import einsum, vary_alike, wide, wide_dtype

Implementation = Literal["reference", "xla"]

_NEVER = np.iinfo(np.int32).max  # position of a key that no query sees


class _Static(NamedTuple):
    """What the blockwise form is compiled for."""

    scale: float
    blocks: tuple[tuple[int, int], ...]  # (query block, key block) pairs with at least one visible pair in them


class _Where(NamedTuple):
    """Position and document of queries and keys, in blocks."""

    q_pos: jax.Array  # [n, B or 1, t]
    kv_pos: jax.Array  # [m, 1, s]
    q_ids: jax.Array | None  # [n, B, t]
    kv_ids: jax.Array | None  # [m, B, s]


def default_implementation() -> Implementation:
    """What `implementation=None` runs: "xla", which supports every input."""
    return "xla"


def default_block_size() -> int:
    """Tokens in a block on this backend: what stays in a CPU's cache, or keeps a GPU's matrix units fed."""
    return 128 if jax.default_backend() == "cpu" else 1024


def attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    *,
    scale: float,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    implementation: Implementation | None = None,
    block_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal, document-masked softmax attention.

    Args:
        segment_ids: [B, T] int32, document of each query; 0 is padding, which sees nothing and outputs 0.
        kv_segment_ids: [B, S] int32, document of each key; defaults to `segment_ids` when S = T.
        q_offset: position of the first query among the keys: an int, a scalar, or one per row [B].
        implementation: "reference" holds all T × S logits; "xla" holds one block of them per head at a time, forward
            and backward, and skips blocks in the future when `q_offset` is an int.
        block_size: largest number of queries and of keys in a block ("xla"); None: `default_block_size()`.

    Returns:
        o [B, T, H, V] in at least float32, and the largest scaled logit of each head [H] over all (query, key) pairs
        that are not masked, float32, without gradient (−inf if there are none), for QK-clip.

    Raises:
        ValueError: shapes that do not fit, or an unknown implementation.
    """
    block_size = default_block_size() if block_size is None else block_size
    _check(q_BTHK, k_BSHK, v_BSHV, segment_ids, kv_segment_ids, block_size)
    if segment_ids is not None and kv_segment_ids is None:
        kv_segment_ids = segment_ids
    run = {"reference": _reference, "xla": _xla}.get(implementation or default_implementation())
    if run is None:
        raise ValueError(f"attention: implementation must be 'reference' or 'xla', got {implementation!r}")
    o, peak_BH = run(q_BTHK, k_BSHK, v_BSHV, segment_ids, kv_segment_ids, q_offset, scale, block_size)
    return o, jax.lax.stop_gradient(jnp.max(peak_BH, axis=0)).astype(jnp.float32)


def _check(q, k, v, segment_ids, kv_segment_ids, block_size: int) -> None:
    (B, T, H, K), S = q.shape, k.shape[1]
    if k.shape != (B, S, H, K) or v.shape[:3] != (B, S, H):
        raise ValueError(f"attention: q {q.shape}, k {k.shape} and v {v.shape} must be [B,T,H,K], [B,S,H,K], [B,S,H,V]")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"attention: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError("attention: kv_segment_ids without segment_ids")
    if segment_ids is not None and segment_ids.shape != (B, T):
        raise ValueError(f"attention: segment_ids must be {(B, T)}, got {segment_ids.shape}")
    if segment_ids is not None and (segment_ids if kv_segment_ids is None else kv_segment_ids).shape != (B, S):
        raise ValueError(f"attention: kv_segment_ids must be given as {(B, S)}: keys are not the queries' tokens")
    if block_size < 1:
        raise ValueError(f"attention: block_size must be positive, got {block_size}")


def _query_positions(q_offset: int | jax.Array, T: int) -> jax.Array:
    """[B or 1, T] int32."""
    return jnp.asarray(q_offset, jnp.int32).reshape(-1, 1) + jnp.arange(T, dtype=jnp.int32)


def _visible(q_pos, kv_pos, q_ids, kv_ids) -> jax.Array:
    """[B or 1, queries, keys]: at or before the query, and of its document."""
    mask = kv_pos[:, None, :] <= q_pos[:, :, None]
    if q_ids is not None:
        mask &= (q_ids[:, :, None] == kv_ids[:, None, :]) & (q_ids[:, :, None] != 0)
    return mask


def _finite(peak: jax.Array) -> jax.Array:
    """0 for a query that sees nothing, so that exp(−inf − peak) is 0 and not NaN."""
    return jnp.where(jnp.isneginf(peak), 0, peak)


def _reference(q, k, v, q_ids, kv_ids, q_offset, scale: float, block_size: int) -> tuple[jax.Array, jax.Array]:
    kv_pos = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    mask = _visible(_query_positions(q_offset, q.shape[1]), kv_pos, q_ids, kv_ids)
    logits = jnp.where(mask[:, None], einsum("bthk,bshk->bhts", wide(q), wide(k)) * scale, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
    weights = jnp.exp(logits - _finite(peak)[..., None])
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return einsum("bhts,bshv->bthv", weights / jnp.where(total == 0, 1, total), wide(v)), jnp.max(peak, axis=-1)


def _xla(q, k, v, q_ids, kv_ids, q_offset, scale: float, block_size: int) -> tuple[jax.Array, jax.Array]:
    T, S = q.shape[1], k.shape[1]
    n, m = -(-T // block_size), -(-S // block_size)
    t, s = -(-T // n), -(-S // m)  # even blocks: 600 tokens are 2 × 300, not 512 + 88 padded to 1024
    # a traced offset can be anything; block 0 is never left out, so that each query block is visited
    last = (lambda i: q_offset + (i + 1) * t - 1) if isinstance(q_offset, int) else lambda i: S
    pairs = [(i, j) for i in range(n) for j in range(m) if j == 0 or j * s <= last(i)]
    where = _Where(
        _row_blocks(_query_positions(q_offset, T), n, t, -1),
        _row_blocks(jnp.arange(S, dtype=jnp.int32)[None], m, s, _NEVER),
        None if q_ids is None else _row_blocks(q_ids, n, t, 0),
        None if kv_ids is None else _row_blocks(kv_ids, m, s, 0),
    )
    q, k, v, *leaves = vary_alike(q, k, v, *jax.tree.leaves(where))
    where = jax.tree.unflatten(jax.tree.structure(where), leaves)
    return _blockwise(_Static(scale, tuple(pairs)), q, k, v, where)


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


def _logits(static: _Static, q_BHtK, k_BHsK, where: _Where, i, j) -> jax.Array:
    q_pos, q_ids = _pick((where.q_pos, where.q_ids), i)
    kv_pos, kv_ids = _pick((where.kv_pos, where.kv_ids), j)
    mask = _visible(q_pos, kv_pos, q_ids, kv_ids)
    return jnp.where(mask[:, None], einsum("bhtk,bhsk->bhts", q_BHtK, k_BHsK) * static.scale, -jnp.inf)


def _scan_pairs(static: _Static, step, carry):
    """One scan over the visible pairs of blocks: no work in the future, and a trace that does not grow with T."""
    pairs = jnp.asarray(static.blocks, jnp.int32)
    return jax.lax.scan(lambda c, ij: (step(c, ij[0], ij[1]), None), carry, pairs)[0]


def _forward(static: _Static, q, k, v, where: _Where):
    """Online softmax → o, largest logit [B, H], and log Σ exp of each query [n, B, H, t] (0 if it sees nothing)."""
    (n, _, t), (m, _, s) = where.q_pos.shape, where.kv_pos.shape
    qb, kb, vb = _head_blocks(q, n, t), _head_blocks(k, m, s), _head_blocks(v, m, s)
    total = jnp.zeros_like(qb[..., 0], dtype=wide_dtype(q.dtype))
    acc = jnp.broadcast_to(total[..., None], (*total.shape, v.shape[-1]))

    def step(carry, i, j):
        peaks, totals, accs = carry
        peak, total, acc = _pick(carry, i)
        logits = _logits(static, _pick(qb, i), _pick(kb, j), where, i, j)
        new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1))
        weights = jnp.exp(logits - _finite(new_peak)[..., None])
        decay = jnp.exp(peak - _finite(new_peak))
        value = einsum("bhts,bhsv->bhtv", weights.astype(v.dtype), _pick(vb, j))
        return (
            _put(peaks, new_peak, i),
            _put(totals, total * decay + jnp.sum(weights, axis=-1), i),
            _put(accs, acc * decay[..., None] + value, i),
        )

    peak, total, acc = _scan_pairs(static, step, (total - jnp.inf, total, acc))
    safe = jnp.where(total == 0, 1, total)
    o = _from_head_blocks(acc / safe[..., None], q.shape[1])
    return o, jnp.max(peak, axis=(0, 3)), _finite(peak) + jnp.log(safe)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(static: _Static, q, k, v, where: _Where) -> tuple[jax.Array, jax.Array]:
    return _forward(static, q, k, v, where)[:2]


def _blockwise_fwd(static: _Static, q, k, v, where: _Where):
    o, peak, lse = _forward(static, q, k, v, where)
    return (o, peak), (q, k, v, where, o, lse)


def _blockwise_bwd(static: _Static, residuals, cotangents):
    q, k, v, where, o, lse = residuals
    (n, _, t), (m, _, s) = where.q_pos.shape, where.kv_pos.shape
    qb, kb, vb = _head_blocks(q, n, t), _head_blocks(k, m, s), _head_blocks(v, m, s)
    d_o = cotangents[0].astype(v.dtype)
    # Σ_s p_ts dp_ts from the same rounded d_o that dp is made of, so that Σ_s ds_ts = 0
    delta = jnp.sum(_head_blocks(o * d_o.astype(o.dtype), n, t), axis=-1)
    d_ob = _head_blocks(d_o, n, t)

    def step(carry, i, j):
        dq, dk, dv = carry
        q_i, d_o_i, k_j, v_j = _pick(qb, i), _pick(d_ob, i), _pick(kb, j), _pick(vb, j)
        weights = jnp.exp(_logits(static, q_i, k_j, where, i, j) - _pick(lse, i)[..., None])
        d_weights = einsum("bhtv,bhsv->bhts", d_o_i, v_j)
        d_logits = (weights * (d_weights - _pick(delta, i)[..., None]) * static.scale).astype(q.dtype)
        return (
            _put(dq, _pick(dq, i) + einsum("bhts,bhsk->bhtk", d_logits, k_j), i),
            _put(dk, _pick(dk, j) + einsum("bhts,bhtk->bhsk", d_logits, q_i), j),
            _put(dv, _pick(dv, j) + einsum("bhts,bhtv->bhsv", weights.astype(v.dtype), d_o_i), j),
        )

    zeros = tuple(jnp.zeros_like(x, dtype=o.dtype) for x in (qb, kb, vb))
    dq, dk, dv = _scan_pairs(static, step, zeros)
    return *(_from_head_blocks(d, x.shape[1]).astype(x.dtype) for d, x in ((dq, q), (dk, k), (dv, v))), None


_blockwise.defvjp(_blockwise_fwd, _blockwise_bwd)


def mla_decode(
    q_nope_BHR: jax.Array,
    q_rope_BHr: jax.Array,
    latent_BSR: jax.Array,
    k_rope_BSr: jax.Array,
    *,
    scale: float,
    valid_BS: jax.Array,
) -> jax.Array:
    """One query a row over the latent cache, the key up-projection absorbed into the query.

        s_j = scale · (q̃ · ĉ_j + q_r · k_r,j)      context = Σ_j softmax(s)_j ĉ_j

    Args:
        q_nope_BHR: W_UKᵀ q_c, the content query carried into the latent.
        q_rope_BHr: the part that meets the shared key.
        latent_BSR, k_rope_BSr: the cache; its width is the key and, without k_rope, the value of every head.
        valid_BS: bool, which entries the query sees; a row without any gives 0.

    Returns:
        context [B, H, R] in at least float32, before the value up-projection.
    """
    content = einsum("bhr,bsr->bhs", q_nope_BHR, latent_BSR.astype(q_nope_BHR.dtype))
    shared = einsum("bhr,bsr->bhs", q_rope_BHr, k_rope_BSr.astype(q_rope_BHr.dtype))
    logits = jnp.where(valid_BS[:, None], (content + shared) * scale, -jnp.inf)
    weights = jnp.exp(logits - _finite(jnp.max(logits, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    context = einsum("bhs,bsr->bhr", weights.astype(latent_BSR.dtype), latent_BSR)
    return context / jnp.where(total == 0, 1, total)
