"""Block attention residuals: attention over depth with one learned pseudo-query per sublayer (arXiv 2603.15031).

    ℓ_i = Σ_c V_ic · rsqrt(mean(V_i²) + ε) · (γ_c w_c)        over sources V = [bank rows; partial sum]
    mix = Σ_i softmax(ℓ)_i V_i                                values are the un-normalised rows, no 1/√D

The bank is constant within a block. `read_bank` takes the logits of all queries of a block against it in one pass;
`mix` adds the one source that changes, the running partial sum, and reads every source once more for the weighted sum.
Neither a stack of sources nor a float32 copy of them is made, and the backward recomputes the mix.

The gradient of the bank is Σ_q π_q ⊗ d mix_q plus what comes through the logits. Adding it up sublayer by sublayer
would read and write every row in every sublayer, so `mix` sends the factors π_q and d mix_q back to `read_bank` (as the
cotangents of two outputs of it that hold no values), which makes the whole sum in one pass, in float32.

    (read,) = read_bank(rows, [queries_QD], eps)
    x, _, partial = mix_norm(rows, query_read(read, q), partial, queries_QD[q], norm_weight, eps)

Everything is in at least float32 until the single cast at the end.

Legend: N bank rows, Q queries, B batch, T time, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial as bind
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from k3jax.ops import attn_res_pallas, mosaic
from k3jax.ops.common import sharding_of, vary_alike, wide
from k3jax.ops.norms import rms_norm

_HIGHEST = jax.lax.Precision.HIGHEST

Rows = Sequence[jax.Array]  # N × [B, T, D], oldest first
Implementation = Literal["xla", "pallas"]


class BankRead(NamedTuple):
    """What queries know of the bank; leading axes are those of the queries."""

    logits: jax.Array  # [..., N, B, T], −inf where a row is not valid
    weights_slot: jax.Array  # [..., N, B, T] and
    mix_slot: jax.Array  # [..., B, T, D] are never read: their cotangents bring π and d mix back from `mix`


def query_read(read: BankRead, index: int) -> BankRead:
    """The read of one query. Each may be mixed once only: the factors of two mixes do not add."""
    return jax.tree.map(lambda a: a[index], read)


@jax.jit  # one line of a trace and of a profile per row
def _add_scaled(total_BTD: jax.Array, scale_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
    return total_BTD + scale_BT[..., None] * wide(x_BTD)


@jax.jit
def _rstd(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(wide(x)), axis=-1) + eps)


def _pieces(x: jax.Array, count: int) -> list[jax.Array]:
    """float32 as a sum of bfloat16: three hold it all, two 16 bits."""
    out = []
    for _ in range(count):
        # a plain round trip may be optimised away
        out.append(jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16))
        x = x - out[-1].astype(x.dtype)
    return out


@jax.jit
def _dot_queries(row_BTD: jax.Array, queries_QD: jax.Array) -> jax.Array:
    """V · query of every query → [Q, B, T]; a bfloat16 row is multiplied as it is, and exactly."""
    if row_BTD.dtype != jnp.bfloat16:
        return jnp.einsum("btd,qd->qbt", wide(row_BTD), queries_QD, precision=_HIGHEST)
    pieces = jnp.stack(_pieces(queries_QD, 3))
    return jnp.sum(jnp.einsum("btd,pqd->pqbt", row_BTD, pieces, preferred_element_type=jnp.float32), axis=0)


def _sum_rows(weights_QBT: jax.Array, row_BTD: jax.Array, like_QD: jax.Array) -> jax.Array:
    """Σ_bt weights · V → [Q, D]."""
    out = sharding_of(like_QD)
    if row_BTD.dtype != jnp.bfloat16:
        return jnp.einsum("qbt,btd->qd", weights_QBT, wide(row_BTD), precision=_HIGHEST, out_sharding=out)
    high, low = (
        jnp.einsum("qbt,btd->qd", piece, row_BTD, preferred_element_type=jnp.float32, out_sharding=out)
        for piece in _pieces(weights_QBT, 2)
    )
    return high + low


def read_bank(
    rows: Rows | jax.Array, queries: Sequence[jax.Array], eps: float, valid_N: jax.Array | None = None
) -> list[BankRead]:
    """Logits of every query of a block against every bank row.

    Args:
        rows: the bank, [B, T, D] each, oldest first; at least one.
        queries: groups of γ ⊙ w, [..., D] in at least float32; the groups keep their gradients apart.
        valid_N: bool, rows that exist yet; at least one must. None: all.

    Returns:
        a `BankRead` for each group.
    """
    arrays = vary_alike(*rows, *map(wide, queries))
    return _read_bank(tuple(arrays[: len(rows)]), tuple(arrays[len(rows) :]), valid_N, eps)


@bind(jax.custom_vjp, nondiff_argnums=(3,))
def _read_bank(rows: Rows, queries: Sequence[jax.Array], valid_N: jax.Array | None, eps: float) -> list[BankRead]:
    return _read_bank_fwd(rows, queries, valid_N, eps)[0]


def _flat(queries: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([q.reshape(-1, q.shape[-1]) for q in queries])


def _read_bank_fwd(rows, queries, valid_N, eps):
    flat_QD = _flat(queries)
    rstd_NBT = jnp.stack([_rstd(row, eps) for row in rows])
    logits = jnp.stack([_dot_queries(row, flat_QD) for row in rows], axis=1) * rstd_NBT
    seen = logits if valid_N is None else jnp.where(valid_N[:, None, None], logits, -jnp.inf)
    reads, start = [], 0
    for query in queries:
        lead, stop = query.shape[:-1], start + query[..., 0].size
        part = seen[start:stop].reshape(*lead, *seen.shape[1:])
        empty = jnp.zeros_like(rows[0])
        reads.append(BankRead(part, jnp.zeros_like(part), jnp.broadcast_to(empty, (*lead, *empty.shape))))
        start = stop
    return reads, (rows, queries, rstd_NBT, logits)


def _read_bank_bwd(eps, residuals, cotangents):
    rows, queries, rstd_NBT, logits_QNBT = residuals
    # XLA would otherwise keep the float32 copies that the forward pass converts to on its way
    rows = jax.lax.optimization_barrier(rows)
    flat_QD, D = _flat(queries), rows[0].shape[-1]

    def join(name: str) -> jax.Array:
        return jnp.concatenate([getattr(c, name).reshape(-1, *logits_QNBT.shape[1:]) for c in cotangents])

    d_logits, weights = join("logits"), join("weights_slot")
    d_dots = d_logits * rstd_NBT  # of V · query
    shrink_NBT = jnp.sum(d_logits * logits_QNBT, axis=0) * jnp.square(rstd_NBT) / D
    # kept in their groups and summed one by one: they fuse into one pass over all of them, with nothing copied
    d_mixes = [m for c in cotangents for m in c.mix_slot.reshape(-1, *c.mix_slot.shape[-3:])]
    d_rows = []
    for i, row in enumerate(rows):
        total = -shrink_NBT[i][..., None] * wide(row)
        for q, d_mix in enumerate(d_mixes):
            total = _add_scaled(total, weights[q, i], d_mix) + d_dots[q, i][..., None] * flat_QD[q]
        d_rows.append(total.astype(row.dtype))
    d_flat = jnp.zeros_like(flat_QD)
    for i, row in enumerate(rows):
        d_flat += _sum_rows(d_dots[:, i], row, flat_QD)
    d_queries, start = [], 0
    for query in queries:
        stop = start + query[..., 0].size
        d_queries.append(d_flat[start:stop].reshape(query.shape))
        start = stop
    return tuple(d_rows), tuple(d_queries), None


_read_bank.defvjp(_read_bank_fwd, _read_bank_bwd)


def mix(
    rows: Rows | jax.Array,
    read: BankRead,
    partial_BTD: jax.Array,
    query_D: jax.Array,
    eps: float,
    include: jax.Array | bool = True,
) -> tuple[jax.Array, jax.Array]:
    """The input of a sublayer: the softmax-weighted sum of the bank rows and the partial sum.

    Gradients of the bank go through `read` (see above), which must come from the same rows.

    Args:
        rows: the bank, as given to `read_bank`.
        read: of this sublayer's query alone.
        include: False leaves the partial out (the first attention of a block has none yet).

    Returns:
        mix [B, T, D] in `partial_BTD.dtype`, and the weights [N + 1, B, T], the partial's last, without a gradient.
    """
    partial_BTD, query_D, *fixed = vary_alike(partial_BTD, wide(query_D), *rows)
    fixed = tuple(jax.lax.stop_gradient(row) for row in fixed)
    mixed, weights = _mix(fixed, read, partial_BTD, query_D, jnp.asarray(include), eps)
    return mixed, jax.lax.stop_gradient(weights)


def _as_stored(rows: Rows, partial_BTD: jax.Array) -> tuple[Rows, jax.Array]:
    """The sources, which XLA may not convert to float32 ahead: it would do so once, before the loop over the layers,
    and read copies of twice the size from then on."""
    return jax.lax.optimization_barrier((rows, partial_BTD))


def _weights(logits_NBT: jax.Array, partial_BTD: jax.Array, query_D: jax.Array, include: jax.Array, eps: float):
    """Softmax over the sources [N + 1, B, T], and of the partial its V · query and 1 / rms [B, T]."""
    rstd = _rstd(partial_BTD, eps)
    dot = jnp.einsum("btd,d->bt", wide(partial_BTD), query_D, precision=_HIGHEST)
    logit = jnp.where(include, dot * rstd, -jnp.inf)
    return jax.nn.softmax(jnp.concatenate([logits_NBT, logit[None]]), axis=0), dot, rstd


@bind(jax.custom_vjp, nondiff_argnums=(5,))
def _mix(rows, read, partial_BTD, query_D, include, eps):
    return _mix_fwd(rows, read, partial_BTD, query_D, include, eps)[0]


def _mix_fwd(rows, read, partial_BTD, query_D, include, eps):
    rows, partial_BTD = _as_stored(rows, partial_BTD)
    weights, _, _ = _weights(read.logits, partial_BTD, query_D, include, eps)
    mixed = weights[-1][..., None] * wide(partial_BTD)
    for weight, row in zip(weights, rows):
        mixed = _add_scaled(mixed, weight, row)
    return (mixed.astype(partial_BTD.dtype), weights), (rows, read.logits, partial_BTD, query_D, include)


def _mix_bwd(eps, residuals, cotangents):
    rows, logits, partial_BTD, query_D, include = residuals
    rows, partial_BTD = _as_stored(rows, partial_BTD)
    d_mix_BTD, D = cotangents[0], partial_BTD.shape[-1]
    weights, dot, rstd = _weights(logits, partial_BTD, query_D, include, eps)
    d_mix, p = wide(d_mix_BTD), wide(partial_BTD)
    d_weights = jnp.stack([jnp.sum(d_mix * wide(v), axis=-1) for v in (*rows, partial_BTD)])
    d_logits = weights * (d_weights - jnp.sum(weights * d_weights, axis=0))
    d_dot = d_logits[-1] * rstd
    shrink = d_logits[-1] * dot * rstd**3 / D
    d_partial = weights[-1][..., None] * d_mix + d_dot[..., None] * query_D - shrink[..., None] * p
    d_query = _sum_rows(d_dot[None], partial_BTD, query_D[None])[0]
    d_read = BankRead(d_logits[:-1], weights[:-1], d_mix_BTD)
    return None, d_read, d_partial.astype(partial_BTD.dtype), d_query, None


_mix.defvjp(_mix_fwd, _mix_bwd)


def why_not_pallas(rows: Rows | jax.Array, partial_BTD: jax.Array) -> str | None:
    """Why "pallas" cannot run on these arrays and the default device; None if it can."""
    shape, sharding = partial_BTD.shape, sharding_of(partial_BTD)
    if sharding is not None:
        if sharding.spec[2:] not in ((), (None,)):
            return f"the hidden axis must not be sharded, but it is, on {sharding.spec[2]!r}"
        shape = sharding.shard_shape(shape)
    return attn_res_pallas.why_not(shape, *(a.dtype for a in (partial_BTD, *rows))) or mosaic.why_not_here()


def mix_norm(
    rows: Rows | jax.Array,
    read: BankRead,
    partial_BTD: jax.Array,
    query_D: jax.Array,
    norm_D: jax.Array,
    eps: float,
    include: jax.Array | bool = True,
    *,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`rms_norm(mix(...))`, what every sublayer starts with.

    Args:
        norm_D: weight of the norm.
        implementation: "pallas" has a backward in one kernel on NVIDIA Hopper GPUs; None picks it where it can run.

    Returns:
        the normed mix [B, T, D], the weights of `mix`, and `partial_BTD` to continue from: the gradient of its other
        uses is then added in the same pass.

    Raises:
        ValueError: an unknown implementation, or "pallas" where it cannot run, with the reason.
    """
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"attn_res: unknown implementation {implementation!r}; there are {get_args(Implementation)}")
    reason = None if implementation == "xla" else why_not_pallas(rows, partial_BTD)
    if implementation == "pallas" and reason:
        raise ValueError(f"attn_res: implementation 'pallas' cannot run here: {reason}")
    if implementation == "xla" or reason:
        mixed, weights = mix(rows, read, partial_BTD, query_D, eps, include)
        return rms_norm(mixed, norm_D, eps), weights, partial_BTD
    partial_BTD, query_D, norm_D, *fixed = vary_alike(partial_BTD, wide(query_D), norm_D, *rows)
    fixed = tuple(jax.lax.stop_gradient(row) for row in fixed)
    normed, weights, partial_BTD = _mix_norm(fixed, read, partial_BTD, query_D, norm_D, jnp.asarray(include), eps)
    return normed, jax.lax.stop_gradient(weights), partial_BTD


@bind(jax.custom_vjp, nondiff_argnums=(6,))
def _mix_norm(rows, read, partial_BTD, query_D, norm_D, include, eps):
    return _mix_norm_fwd(rows, read, partial_BTD, query_D, norm_D, include, eps)[0]


def _mix_norm_fwd(rows, read, partial_BTD, query_D, norm_D, include, eps):
    # XLA makes one kernel of the weighted sum and the norm
    (mixed, weights), saved = _mix_fwd(rows, read, partial_BTD, query_D, include, eps)
    return (rms_norm(mixed, norm_D, eps), weights, partial_BTD), (*saved, norm_D)


def _mix_norm_bwd(eps, residuals, cotangents):
    rows, logits, partial_BTD, query_D, include, norm_D = residuals
    d_out_BTD, _, d_partial_BTD = cotangents
    bias = jnp.where(include, 0.0, -jnp.inf).astype(jnp.float32).reshape(1)
    arrays = (rows, partial_BTD, d_out_BTD, d_partial_BTD, logits, query_D, norm_D, bias)
    run, sharding = bind(_kernel, eps=eps), sharding_of(partial_BTD)
    grads = run(*arrays) if sharding is None else _on_shards(run, sharding.spec, arrays)
    *d_read, d_partial, d_query, d_norm = grads
    return None, BankRead(*d_read), d_partial, d_query, d_norm.astype(norm_D.dtype), None


def _kernel(rows, partial_BTD, d_out_BTD, d_partial_BTD, logits_NBT, query_D, norm_D, bias, *, eps):
    D = partial_BTD.shape[-1]
    flat_rows = tuple(a.reshape(-1, D) for a in rows)
    p, d_out, d_p = (a.reshape(-1, D) for a in (partial_BTD, d_out_BTD, d_partial_BTD))
    logits = logits_NBT.reshape(len(rows), -1)
    grads = attn_res_pallas.mix_norm_backward(flat_rows, p, d_out, d_p, logits, query_D, norm_D, bias, eps)
    d_mix, d_partial = (a.reshape(partial_BTD.shape) for a in (grads.mix_MD, grads.partial_MD))
    d_logits, weights = (a.reshape(logits_NBT.shape) for a in (grads.logits_NM, grads.weights_NM))
    return d_logits, weights, d_mix, d_partial, grads.query_D, grads.norm_D


def _on_shards(run, spec: P, arrays: tuple):
    """`run` on each device's tokens; the gradients of the two vectors are summed over the devices."""
    batch, time = (*spec, None, None)[:2]
    rows, sources = P(batch, time, None), P(None, batch, time)
    axes = [name for part in (batch, time) if part for name in (part if isinstance(part, tuple) else (part,))]

    def local(*arrays):
        *tokens, d_query, d_norm = run(*arrays)
        return *tokens, *jax.lax.psum((d_query, d_norm), axes)

    *tokens, query_D, norm_D, bias = arrays
    vectors = [jax.sharding.reshard(a, P()) for a in (query_D, norm_D, bias)]
    *tokens, d_query, d_norm = jax.shard_map(
        local,
        in_specs=(rows, rows, rows, rows, sources, P(), P(), P()),
        out_specs=(sources, sources, rows, rows, P(), P()),
        check_vma=False,
    )(*tokens, *vectors)
    back = [jax.sharding.reshard(d, jax.typeof(a).sharding.spec) for d, a in ((d_query, query_D), (d_norm, norm_D))]
    return *tokens, *back


_mix_norm.defvjp(_mix_norm_fwd, _mix_norm_bwd)


def attn_res(
    bank_NBTD: jax.Array, partial_BTD: jax.Array | None, query_D: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Reference: the direct softmax over all sources → mix [B, T, D] and weights [sources, B, T].

    `partial_BTD` None mixes the bank alone; an empty bank returns the partial itself.
    """
    sources = bank_NBTD if partial_BTD is None else jnp.concatenate([bank_NBTD, partial_BTD[None]])
    rows = wide(sources)
    # one dot per row keeps a token's result independent of the other tokens' values
    logits = jnp.einsum("nbtd,d->nbt", rows, wide(query_D), precision=_HIGHEST) * _rstd(rows, eps)
    weights = jax.nn.softmax(logits, axis=0)
    return jnp.einsum("nbt,nbtd->btd", weights, rows, precision=_HIGHEST).astype(sources.dtype), weights
