"""Context parallelism: the tokens of a row lie on several devices, in contiguous shards, first shard first.

All functions here run inside `shard_map`, over the named axis that time is sharded on.

KDA's state is an affine function of the one that enters a shard: S_out = P S_in + S̃, with S̃ what comes out for S_in = 0
and P = Π_t (I − β_t k_t k_tᵀ) Diag(γ_t). A shard computes its (P, S̃), one all-gather of fixed size passes them to all,
and each folds the shards before it into the state that it really starts from (the K3 report's KCP; arXiv 2607.24653).
Nothing is assumed to be forgotten. Documents take care of themselves: where one begins inside a shard, P is 0; where it
is at its first token, what comes in is dropped.

Shape suffixes: B batch, T time in this shard, H heads, K key dim, V value dim, W taps, R shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.attention import attention, default_block_size
from k3jax.ops.attention.blockwise import Where, over_pairs, two_pieces
from k3jax.ops.kda import kda
from k3jax.ops.kda.segments import document_starts
from k3jax.ops.short_conv import short_conv


def _documents(segment_ids_BT: Array | None, axis: str) -> Array | None:
    """[R, B] bool: whether the first document of each shard goes on from before it. None: always.

    The first and the last id of every shard, one after the other, are a row of documents themselves.
    """
    if segment_ids_BT is None:
        return None
    real = segment_ids_BT != 0
    ends_B2 = jnp.stack([jnp.argmax(real, axis=1), real.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)], axis=1)
    ids_B2 = jnp.take_along_axis(segment_ids_BT, ends_B2, axis=1)  # of the first and the last real token; 0 without
    return ~document_starts(lax.all_gather(ids_B2, axis, axis=1, tiled=True))[:, ::2].T


def _folded(transitions: Array, local: Array, initial: Array, goes_on: Array | None) -> Array:
    """The state that each shard starts from, and what comes out of the last: [R + 1, B, H, K, V].

    transitions: [R, B, H, K, K]; local: [R, B, H, K, V]; float32 or wider, multiplied as such.
    """
    state, states = initial, []
    for r, (transition, own) in enumerate(zip(transitions, local)):
        if goes_on is not None:
            state = jnp.where(goes_on[r][:, None, None, None], state, 0)
        states.append(state)
        state = jnp.einsum("bhkl,bhlv->bhkv", transition, state, precision=lax.Precision.HIGHEST) + own
    return jnp.stack([*states, state])


def kda_over_context(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    *,
    axis: str,
    initial_state: Array | None = None,
    segment_ids: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """`kda` over rows whose tokens are sharded on `axis`; called inside `shard_map`.

    Args:
      q, k: [B, T, H, K]. v: [B, T, H, V], V = K. g: [B, T, H, K]. beta: [B, T, H]: this shard's tokens.
      axis: the mesh axis of time.
      initial_state: [B, H, K, V] before the first token of the first shard, the same on all; None is zeros.
      segment_ids: [B, T] int, this shard's; as in `kda`.
      options: of `kda`, but for `cu_seqlens`, `return_final_state` and `state_interval`.

    Returns:
      (o [B, T, H, V] of this shard, state [B, H, K, V] after the last real token of the row, the same on all shards).

    Raises:
      ValueError: V differs from K, or an option is not available here.
    """
    heads, dim = q.shape[2:]
    if v.shape[-1] != dim:
        raise ValueError(f"kda_over_context: V must equal K, not V = {v.shape[-1]} and K = {dim}")
    for name in ("cu_seqlens", "return_final_state", "state_interval"):
        if name in options:
            raise ValueError(f"kda_over_context: {name} is not available when time is sharded")
    dtype = jnp.promote_types(v.dtype, jnp.float32)
    if initial_state is None:
        initial_state = jnp.zeros((q.shape[0], heads, dim, dim), dtype)
    options = options | {"segment_ids": segment_ids, "return_final_state": True}

    # One run finds both: as many heads again, without values and from the identity, end with P.
    def twice(x: Any, axis: int) -> Any:
        return None if x is None else jnp.concatenate([x, x], axis)

    identity = jnp.broadcast_to(jnp.eye(dim, dtype=dtype), initial_state.shape)
    start = jnp.concatenate([jnp.zeros_like(identity), identity], axis=1)
    values = jnp.concatenate([v, jnp.zeros_like(v)], axis=2)
    doubled: dict[str, Any] = options | {name: twice(options.get(name), 0) for name in ("A_log", "dt_bias")}
    q2, k2, g2, beta2 = (twice(x, 2) for x in (q, k, g, beta))
    _, ends = kda(q2, k2, values, g2, beta2, initial_state=start, **doubled)
    local, transitions = lax.all_gather((ends[:, :heads], ends[:, heads:]), axis)
    states = _folded(transitions, local, initial_state.astype(dtype), _documents(segment_ids, axis))
    mine = lax.dynamic_index_in_dim(states, lax.axis_index(axis), keepdims=False)
    o, _ = kda(q, k, v, g, beta, initial_state=mine, **options)
    last = lax.axis_index(axis) == lax.axis_size(axis) - 1
    return o, lax.psum(jnp.where(last, states[-1], 0), axis)


def short_conv_over_context(u: Array, weight: Array, segment_ids: Array | None = None, *, axis: str) -> Array:
    """`short_conv` over rows whose tokens are sharded on `axis`; called inside `shard_map`.

    The last W − 1 tokens of each shard are handed to the next one, and dropped there if they are another document's.

    Args:
      u: [B, T, *C], this shard's tokens. weight: [*C, W]. segment_ids: [B, T] int, this shard's.
      axis: the mesh axis of time.

    Returns:
      [B, T, *C] in the dtype of u.

    Raises:
      ValueError: a shard is shorter than W − 1 tokens.
    """
    reach = weight.shape[-1] - 1
    if u.shape[1] < reach:
        raise ValueError(
            f"short_conv_over_context: {u.shape[1]} tokens a shard, and a convolution of width {reach + 1} looks "
            f"{reach} back; use fewer shards on {axis!r}"
        )
    if reach == 0:
        return short_conv(u, weight, segment_ids)
    to_next = [(r, r + 1) for r in range(lax.axis_size(axis) - 1)]  # the first shard gets zeros
    tail = lax.ppermute(u[:, -reach:], axis, to_next)
    if segment_ids is not None:
        ids = lax.ppermute(segment_ids[:, -reach:], axis, to_next)
        same = (ids == segment_ids[:, :1])[(..., *(None,) * (u.ndim - 2))]
        tail = jnp.where(same, tail, 0)
    return short_conv(u, weight, segment_ids, tail)


def attention_over_context(
    q: Array,
    latents: tuple[Array, ...],
    expand: Callable[..., tuple[Array, Array]],
    *,
    axis: str,
    scale: float,
    segment_ids: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Causal attention of this shard's queries over the keys of all shards; called inside `shard_map`.

    What is gathered are the latents that keys and values are made of, and each shard expands them (for K3 a 512-wide
    latent and a 64-wide shared key: 1.15 kB a token in bfloat16, against 61 kB of keys and values). Without position
    encoding only order and documents matter, so KDA's contiguous layout stays.

    A later shard's queries have more to attend to. So a row is seen as 2 R pieces, and device r takes the queries of
    pieces r and 2 R − 1 − r, whose visible keys are as many on every device; outputs travel back. Where pieces cannot
    be cut into even blocks, and for implementations other than "xla", each shard keeps its own queries.

    Args:
      q: [B, T, H, K], this shard's queries.
      latents: arrays [B, T, ...] of this shard.
      expand: from the gathered latents, [B, R·T, ...], to keys [B, R·T, H, K] and values [B, R·T, H, V].
      axis: the mesh axis of time.
      segment_ids: [B, T] int, this shard's; 0 is padding.
      options: of `attention`, but for `kv_segment_ids` and `q_offset`.

    Returns:
      o [B, T, H, V] of this shard, and the largest logit of each head [H], over all shards and without gradient.
    """
    gathered = [lax.all_gather(x, axis, axis=1, tiled=True) for x in latents]
    ids = None if segment_ids is None else lax.all_gather(segment_ids, axis, axis=1, tiled=True)
    k, v = expand(*gathered)
    per_piece = _blocks_of_a_piece(q.shape[1], options.get("block_size") or default_block_size("xla"))
    if per_piece and options.get("implementation") in (None, "xla"):
        o, peak_BH = _balanced(q, k, v, segment_ids, ids, axis, scale, per_piece)
        max_logit = lax.stop_gradient(jnp.max(peak_BH, axis=0)).astype(jnp.float32)
    else:
        offset = lax.axis_index(axis) * q.shape[1]
        o, max_logit = attention(
            q, k, v, scale=scale, segment_ids=segment_ids, kv_segment_ids=ids, q_offset=offset, **options
        )
    return o, lax.pmax(max_logit, axis)


def _blocks_of_a_piece(T: int, block_size: int) -> int:
    """Blocks of at most `block_size` tokens, all of one size, that half a shard of T tokens consists of; 0: none."""
    least = -(-T // (2 * block_size))
    return next((n for n in range(least, 2 * least + 1) if T % (2 * n) == 0), 0)


def _balanced(q, k, v, ids, kv_ids, axis: str, scale: float, per_piece: int) -> tuple[Array, Array]:
    """→ o of this shard's queries in their dtype or float32, and the largest logit [B, H] of those computed here."""
    R, me, half = lax.axis_size(axis), lax.axis_index(axis), q.shape[1] // 2
    owner = [piece if piece < R else 2 * R - 1 - piece for piece in range(2 * R)]
    there = [[(r, owner[2 * r + odd]) for r in range(R)] for odd in range(2)]
    swapped = me % 2 == 1  # piece r comes as the second half of its shard

    def two(low: Array, high: Array) -> Array:
        low, high = jnp.where(swapped, high, low), jnp.where(swapped, low, high)
        return jnp.concatenate([low, high], axis=1)

    def travel(x: Array) -> Array:
        return two(*(lax.ppermute(x[:, h * half : (h + 1) * half], axis, there[h]) for h in range(2)))

    def back(x: Array) -> Array:
        parts = jnp.split(two(x[:, :half], x[:, half:]), 2, axis=1)  # of even pieces, of odd ones
        home = [[(to, r) for r, to in there[h]] for h in range(2)]
        return jnp.concatenate([lax.ppermute(part, axis, home[h]) for h, part in enumerate(parts)], axis=1)

    def blocks(x: Array, count: int) -> Array:
        """[rows, tokens] → [count, rows, tokens of a block]"""
        return jnp.moveaxis(x.reshape(x.shape[0], count, -1), 1, 0)

    pieces = jnp.stack([me, 2 * R - 1 - me])
    q_pos = (pieces[:, None] * half + jnp.arange(half)).reshape(1, -1).astype(jnp.int32)
    kv_pos = jnp.arange(k.shape[1], dtype=jnp.int32)[None]
    n, m = 2 * per_piece, 2 * R * per_piece
    where = Where(
        jnp.asarray(two_pieces(2 * R, per_piece))[me],
        blocks(q_pos, n),
        blocks(kv_pos, m),
        None if ids is None else blocks(travel(ids), n),
        None if kv_ids is None else blocks(kv_ids, m),
    )
    o, peak_BH = over_pairs(travel(q), k, v, where, scale)
    return back(o.astype(q.dtype)).astype(o.dtype), peak_BH
