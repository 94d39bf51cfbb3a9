"""Causal attention within documents on cuDNN's two kernels, causal and rectangle (`cudnn.py`).

Without documents it is one causal call. With documents, contiguous runs of tokens, the triangle of causal pairs is cut
into tiles on its diagonal and squares below them: the square at (n, c) holds the pairs of the queries [(2n + 1)c,
(2n + 2)c) and the keys [2nc, (2n + 1)c), for c = t, 2t, 4t, … < T.

Only the document that crosses the corner of a square has pairs in it: its first queries in the square and its last
keys, a rectangle of two lengths. cuDNN skips what lies outside; it wants *first* keys, so their order is turned round.
The tiles of t tokens on the diagonal need a mask and run in plain XLA. The softmax of a query is put together from its
log Σ exp in each part; backward, every part is given that of the whole row.

So no mask of [T, T], no bound on the number of documents, and work that follows the documents' lengths. Documents that
are not runs in increasing order of their ids (padding inside one, an id that comes back) go block by block.

cuDNN rounds o to bfloat16, and its backward pass reads that for Σ_v do_v o_v.

Legend: B rows, T time, H heads, K key width, V value width, n squares or tiles in a row, c tokens in a square's side,
t/s tokens in a tile.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.attention import blockwise, cudnn
from k3jax.ops.common import einsum, vary_alike, wide
from k3jax.ops.remat import checkpoint_name

_SLOW_BLOCK = 512  # for documents that are not runs


class Split(NamedTuple):
    """What the kernels are compiled for."""

    scale: float
    tile: int
    levels: int  # squares have sides of tile · 2^level

    @property
    def sides(self) -> list[int]:
        return [self.tile << level for level in range(self.levels)]


def split(scale: float, T: int, largest_tile: int) -> Split:
    """Tiles of at most about `largest_tile` tokens, as many as a power of two, that cover T with little to spare."""
    levels = max(0, (-(-T // largest_tile) - 1).bit_length())
    tile = -(-T // (8 << levels)) * 8
    return Split(scale, tile, levels)


def attend(q, k, v, segment_ids, scale: float, largest_tile: int) -> jax.Array:
    """→ o [B, T, H, V] in at least float32, of bfloat16's precision."""
    if segment_ids is None:
        return wide(_causal(scale, *vary_alike(q, k, v)))
    T = q.shape[1]
    plan = split(scale, T, largest_tile)
    fill = (plan.tile << plan.levels) - T
    q, k, v, ids = (jnp.pad(x, ((0, 0), (0, fill)) + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, segment_ids))
    return _documents(plan, *vary_alike(q, k, v, ids))[:, :T]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _causal(scale: float, q, k, v) -> jax.Array:
    return cudnn.forward(q, k, v, scale=scale)[0]


def _causal_fwd(scale: float, q, k, v):
    o, lse = cudnn.forward(q, k, v, scale=scale)
    o, lse = checkpoint_name(o, "attention"), checkpoint_name(lse, "attention", exact=True)
    return o, (q, k, v, o, lse)


def _causal_bwd(scale: float, residuals, d_o):
    q, k, v, o, lse = residuals
    return cudnn.backward(q, k, v, o, lse, d_o.astype(o.dtype), scale=scale)


_causal.defvjp(_causal_fwd, _causal_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _documents(plan: Split, q, k, v, ids) -> jax.Array:
    return _documents_fwd(plan, q, k, v, ids)[0]


def _documents_fwd(plan: Split, q, k, v, ids):
    runs = are_runs(ids)
    o, lse = jax.lax.cond(runs, partial(_forward, plan), partial(_slow_forward, plan), q, k, v, ids)
    # for a rematerialisation to keep: without both, the backward pass begins with another forward pass
    o, lse = checkpoint_name(o, "attention"), checkpoint_name(lse, "attention", exact=True)
    return o, (q, k, v, ids, runs, o.astype(v.dtype), lse)


def _documents_bwd(plan: Split, residuals, d_o):
    q, k, v, ids, runs, o, lse = residuals
    args = (q, k, v, ids, o, lse, d_o.astype(v.dtype))
    return *jax.lax.cond(runs, partial(_backward, plan), partial(_slow_backward, plan), *args), None


_documents.defvjp(_documents_fwd, _documents_bwd)


def are_runs(ids_BT: jax.Array) -> jax.Array:
    """Whether every document of every row is one run of tokens, with ids that increase along the row; a scalar bool."""
    largest = jax.lax.cummax(ids_BT, axis=1)
    before, largest_before = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (ids_BT, largest))
    return jnp.all((ids_BT == 0) | (ids_BT == before) | (ids_BT > largest_before))


class _Squares(NamedTuple):
    """Side c: rows of a batch are the squares of all rows."""

    q_length: jax.Array  # [B·n] int32, at least 1
    kv_length: jax.Array
    queries: jax.Array  # [B·n, c] bool, which are in the rectangle
    keys: jax.Array  # in turned order


def _squares(ids_BT: jax.Array, c: int) -> _Squares:
    halves = ids_BT.reshape(-1, 2, c)
    left, right = halves[:, 0], halves[:, 1]
    crossing = (left[:, -1] != 0) & (left[:, -1] == right[:, 0])
    counts = [jnp.sum(half == left[:, -1:], axis=1, dtype=jnp.int32) * crossing for half in (right, left)]
    # a square without a pair computes one that nobody reads
    lengths = [jnp.maximum(count, 1) for count in counts]
    inside = [jnp.arange(c) < count[:, None] for count in counts]
    return _Squares(*lengths, *inside)


def _half(x: jax.Array, c: int, side: int) -> jax.Array:
    """[B, T, ...] → [B·n, c, ...]: the left (0) or right (1) half of every 2c tokens."""
    return x.reshape(-1, 2, c, *x.shape[2:])[:, side]


def _whole(x: jax.Array, B: int, side: int) -> jax.Array:
    """Back from `_half`, the other halves zero."""
    other = jnp.zeros_like(x)
    both = jnp.stack([other, x] if side else [x, other], axis=1)
    return both.reshape(B, -1, *x.shape[2:])


def _turned_half(x: jax.Array, c: int) -> jax.Array:
    return jnp.flip(_half(x, c, 0), axis=1)


def _kept(mask: jax.Array, x: jax.Array) -> jax.Array:
    """`x` in float32, 0 where it is unspecified (and may be NaN)."""
    return jnp.where(mask.reshape(*mask.shape, *(1,) * (x.ndim - 2)), wide(x), 0)


def _forward(plan: Split, q, k, v, ids) -> tuple[jax.Array, jax.Array]:
    """→ o [B, T, H, V] float32, log Σ exp [B, T, H] float32 (0 for a query that sees nothing)."""
    B = q.shape[0]
    parts = [_tiles_forward(plan, q, k, v, ids)]
    for c in plan.sides:
        at = _squares(ids, c)
        lengths = (at.q_length, at.kv_length)
        args = (_half(q, c, 1), _turned_half(k, c), _turned_half(v, c))
        o, lse = cudnn.forward(*args, scale=plan.scale, lengths=lengths)
        # −inf in the left halves too: zeros of `_whole` would count as a part
        seen = _whole(at.queries, B, 1)[..., None]
        lse = jnp.where(seen, _whole(_kept(at.queries, jnp.swapaxes(lse, 1, 2)), B, 1), -jnp.inf)
        parts.append((_whole(_kept(at.queries, o), B, 1), lse))
    every = jnp.stack([lse for _, lse in parts])
    peak = blockwise.finite(jnp.max(every, axis=0))
    total = jnp.sum(jnp.exp(every - peak), axis=0)
    lse = peak + jnp.log(jnp.where(total == 0, 1, total))
    weighted = [o * jnp.exp(part - lse)[..., None] for o, part in parts]
    return reduce(jnp.add, weighted), lse


def _tiled(plan: Split, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1, plan.tile, *x.shape[2:])


def _tile_logits(plan: Split, q, k, ids) -> jax.Array:
    """[B, n, H, t, s], −inf where not visible."""
    ids = ids.reshape(-1, plan.tile)
    at = jnp.arange(plan.tile)[None]
    mask = blockwise.visible(at, at, ids, ids).reshape(q.shape[0], -1, 1, plan.tile, plan.tile)
    logits = einsum("bnthk,bnshk->bnhts", _tiled(plan, q), _tiled(plan, k)) * plan.scale
    return jnp.where(mask, logits, -jnp.inf)


def _tiles_forward(plan: Split, q, k, v, ids) -> tuple[jax.Array, jax.Array]:
    logits = _tile_logits(plan, q, k, ids)
    peak = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - blockwise.finite(peak)[..., None])
    total = jnp.sum(weights, axis=-1)
    o = einsum("bnhts,bnshv->bnthv", weights.astype(v.dtype), _tiled(plan, v))
    safe = jnp.swapaxes(jnp.where(total == 0, 1, total), 2, 3)
    lse = jnp.swapaxes(peak, 2, 3) + jnp.log(safe)
    return (o / safe[..., None]).reshape(v.shape), lse.reshape(v.shape[:-1])


def _backward(plan: Split, q, k, v, ids, o, lse, d_o):
    B = q.shape[0]
    dq, dk, dv = _tiles_backward(plan, q, k, v, ids, o, lse, d_o)
    for c in plan.sides:
        at = _squares(ids, c)
        lengths = (at.q_length, at.kv_length)
        args = (_half(q, c, 1), _turned_half(k, c), _turned_half(v, c), _half(o, c, 1))
        lse_c = jnp.swapaxes(_half(lse, c, 1), 1, 2)
        parts = cudnn.backward(*args, lse_c, _half(d_o, c, 1), scale=plan.scale, lengths=lengths)
        dq += _whole(_kept(at.queries, parts[0]), B, 1)
        dk += _whole(jnp.flip(_kept(at.keys, parts[1]), axis=1), B, 0)
        dv += _whole(jnp.flip(_kept(at.keys, parts[2]), axis=1), B, 0)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _tiles_backward(plan: Split, q, k, v, ids, o, lse, d_o):
    delta, lse, d_o_t = (_tiled(plan, x) for x in (jnp.sum(wide(o) * wide(d_o), axis=-1), lse, d_o))
    weights = jnp.exp(_tile_logits(plan, q, k, ids) - jnp.swapaxes(lse, 2, 3)[..., None])
    d_weights = einsum("bnthv,bnshv->bnhts", d_o_t, _tiled(plan, v))
    d_logits = weights * (d_weights - jnp.swapaxes(delta, 2, 3)[..., None]) * plan.scale
    d_logits = d_logits.astype(q.dtype)
    dq = einsum("bnhts,bnshk->bnthk", d_logits, _tiled(plan, k))
    dk = einsum("bnhts,bnthk->bnshk", d_logits, _tiled(plan, q))
    dv = einsum("bnhts,bnthv->bnshv", weights.astype(v.dtype), d_o_t)
    return dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)


def _slow(q, k, ids) -> blockwise.Where:
    where = blockwise.plan(q, k, ids, ids, 0, _SLOW_BLOCK)
    leaves = vary_alike(q, *jax.tree.leaves(where))[1:]
    return jax.tree.unflatten(jax.tree.structure(where), leaves)


def _slow_forward(plan: Split, q, k, v, ids) -> tuple[jax.Array, jax.Array]:
    o, _, lse_nBHt = blockwise.forward(plan.scale, q, k, v, _slow(q, k, ids))
    B, T, H = q.shape[:3]
    return o, lse_nBHt.transpose(1, 0, 3, 2).reshape(B, -1, H)[:, :T]


def _slow_backward(plan: Split, q, k, v, ids, o, lse, d_o):
    where = _slow(q, k, ids)
    (n, _, t), (B, T, H) = where.q_pos.shape, lse.shape
    lse = jnp.pad(lse, ((0, 0), (0, n * t - T), (0, 0))).reshape(B, n, t, H).transpose(1, 0, 3, 2)
    return blockwise.backward(plan.scale, q, k, v, where, o, lse, d_o)
