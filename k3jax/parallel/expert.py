"""Expert parallelism: the experts lie on several devices, and the tokens travel to them and back.

All functions with an `axis` run inside `shard_map`, over the named axis that experts and tokens are sharded on. Rank r
is the home of experts r·H … r·H + H − 1 and has N tokens.

"balanced" is MoonEP (the K3 report, arXiv 2607.24653; github.com/MoonshotAI/MoonEP): experts with too many rows are
copied for one layer, so that every rank computes N·K rows, whatever the router picks. "home" is the ordinary dispatch
to compare with: every expert stays at home, and each rank has room for the worst case, R·N·min(K, H) rows. Neither
drops a row, and no shape depends on the counts. They are one path with two plans (`expert_plan`):

    rows sorted by expert → slices travel → rows of experts at home, then of copies → expert MLP → slices travel back

A slice is the rows of one source rank for one segment of one destination; slices overlap on neither side. The backward
pass keeps the tokens, the plan, the router weights and the experts at home: it sends the tokens and fetches the copies
again.

The routing weight travels with its row and multiplies the activation, as in `expert_mlp`: what returns is only added.
Not here: a token with several experts on one rank is sent once for each of them.

Legend: R ranks, E experts, H = E/R experts at home on a rank, B slots for copies, G = H + B segments, N tokens, K
experts of a token, L latent width, F expert width, M rows of a rank's segments, A arriving gradients of copies.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from k3jax.ops.common import vary_alike, wide
from k3jax.ops.grouped_matmul import (
    ExpertOptions,
    GroupLayout,
    combine,
    dispatch,
    expert_mlp,
    group_layout,
    padded_rows,
)
from k3jax.ops.grouped_matmul.layout import rows_at
from k3jax.ops.grouped_matmul.xla import Matrices
from k3jax.ops.mx import PackedMX
from k3jax.parallel.expert_plan import Plan, Slices, before, plan_at_home, plan_balanced

Balance = Literal["balanced", "home"]
Transport = Literal["ragged", "gathered"]


def default_transport() -> Transport:
    """What `transport=None` runs: "ragged" on GPUs and TPUs, "gathered" on CPUs."""
    return "gathered" if jax.default_backend() == "cpu" else "ragged"


def exchange(x: Array, slices: Slices, rows: int, *, axis: str, transport: Transport | None = None) -> Array:
    """Sends slices of x to other ranks; called inside `shard_map`. Not for autodiff: give a rule around it.

    Args:
        x: [rows of the sender, ...].
        slices: the same on all ranks, disjoint at the receiver.
        rows: of the result.
        axis: the mesh axis of ranks.
        transport: "ragged" is `lax.ragged_all_to_all`, which XLA lacks on CPUs; "gathered" gathers all x on every rank
            and picks from them: the same result for R times the memory.

    Returns:
        [rows, ...] in the dtype of x, 0 where no slice arrives.

    Raises:
        ValueError: an unknown transport.
    """
    transport = transport or default_transport()
    if transport not in get_args(Transport):
        raise ValueError(f"exchange: transport must be one of {get_args(Transport)}, got {transport!r}")
    me = lax.axis_index(axis)
    if transport == "ragged":
        size, at_sender, at_receiver = (table[me].reshape(-1) for table in slices)
        arriving = slices.size[:, me].reshape(-1)
        out = jnp.zeros((rows, *x.shape[1:]), x.dtype)
        args = vary_alike(x, out, at_sender, size, at_receiver, arriving)
        return lax.ragged_all_to_all(*args, axis_name=axis)

    size, at_sender, at_receiver = (table[:, me].reshape(-1) for table in slices)
    sender = jnp.repeat(jnp.arange(slices.size.shape[0], dtype=jnp.int32), slices.size.shape[2])
    start = jnp.where(size > 0, at_receiver, rows)  # empty slices last
    order = jnp.argsort(start)
    row = jnp.arange(rows, dtype=jnp.int32)
    of_row = order[jnp.maximum(jnp.searchsorted(start[order], row, side="right") - 1, 0)]
    within = row - start[of_row]
    filled = (within >= 0) & (within < size[of_row])
    index = sender[of_row] * len(x) + at_sender[of_row] + within
    everything = lax.all_gather(x, axis, tiled=True)
    return rows_at(everything, jnp.where(filled, index, len(everything)))


class _Static(NamedTuple):
    options: ExpertOptions
    axis: str
    transport: Transport | None
    rows: int  # M


def expert_mlp_over_ranks(
    z_NL: Array,
    w13: Matrices,
    w2: Matrices,
    experts_NK: Array,
    weights_NK: Array,
    valid_N: Array | None,
    options: ExpertOptions,
    *,
    axis: str,
    balance: Balance = "balanced",
    transport: Transport | None = None,
) -> Array:
    """`expert_mlp` with experts and tokens sharded on `axis`: Σ_k weight · expert(z) of this rank's tokens.

    Communicates once the counts [R, E]; then in each direction the rows, and for "balanced" the copied experts. In the
    backward pass the gradients of copies return and are added at home in at least float32, in a fixed order.

    Args:
        z_NL: this rank's tokens, in the dtype of products.
        w13: [H, L, 2F], gate then up; w2: [H, F, L]: the experts at home here, in the dtype of `z_NL` or a wider one,
            which is rounded before anything is sent. Their gradients have their dtype. Or `PackedMX` codes, without a
            gradient: copies travel as codes.
        experts_NK: int32 in [0, E), E = R·H; for "home" those of a token must differ.
        weights_NK: at least float32.
        valid_N: bool; padding tokens (False) are sent nowhere and output 0. None: all are valid.
        options: of `expert_mlp`; segments are aligned to `options.align`.
        axis: the mesh axis of ranks.
        balance: "balanced" (MoonEP) computes N·K rows on each rank, "home" up to R·N·min(K, H).
        transport: as in `exchange`.

    Returns:
        [N, L] in the dtype of `z_NL`.

    Raises:
        ValueError: an unknown balance or transport, or as `grouped_matmul`.
    """
    if balance not in get_args(Balance):
        raise ValueError(f"expert_mlp_over_ranks: balance must be one of {get_args(Balance)}, got {balance!r}")
    (N, K), H, R = experts_NK.shape, w13.shape[0], lax.axis_size(axis)
    valid_NK = None if valid_N is None else jnp.broadcast_to(valid_N[:, None], (N, K))
    layout = group_layout(experts_NK, valid_NK, R * H)
    counts_RE = lax.all_gather(layout.counts_E, axis)
    make = plan_balanced if balance == "balanced" else plan_at_home
    plan = make(counts_RE, options.align)
    most = N * K if balance == "balanced" else R * N * min(K, H)
    static = _Static(options, axis, transport, padded_rows(most, plan.expert_RG.shape[1], options.align))
    floats = vary_alike(z_NL, w13, w2, weights_NK, layout.counts_E)[:4]
    return _over_ranks(static, *floats, plan, layout)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_ranks(static: _Static, z_NL, w13, w2, weights_NK, plan: Plan, layout: GroupLayout) -> Array:
    rows_ML, weights_M = _sent(static, z_NL, weights_NK, plan, layout)
    w13, w2 = (w if isinstance(w, PackedMX) else w.astype(z_NL.dtype) for w in (w13, w2))
    w13, w2 = (_with_copies(static, w, plan) for w in (w13, w2))
    return _returned(static, _computed(static, plan, rows_ML, w13, w2, weights_M), plan, layout)


def _fwd(static: _Static, *args):
    return _over_ranks(static, *args), args


def _bwd(static: _Static, residuals, d_out_NL: Array):
    *floats, plan, layout = residuals
    # else the compiler may take what the forward pass received for what is to be sent again, and keep it until here
    z_NL, w13, w2, weights_NK, d_out_NL = lax.optimization_barrier((*floats, d_out_NL))
    rows_ML, weights_M = _sent(static, z_NL, weights_NK, plan, layout)
    d_rows_ML = _rows_to_experts(static, dispatch(d_out_NL, layout), plan)
    everything = (_with_copies(static, w.astype(z_NL.dtype), plan) for w in (w13, w2))
    # the output is not used, so the compiler drops what only it needs
    _, pull = jax.vjp(partial(_computed, static, plan), rows_ML, *everything, weights_M)
    dz_ML, dw13, dw2, d_weights_M = pull(d_rows_ML)
    d_weights = exchange(d_weights_M, plan.slices.back(), weights_NK.size, axis=static.axis, transport=static.transport)
    return (
        _returned(static, dz_ML, plan, layout),
        _summed_at_home(static, dw13, plan, len(w13)).astype(w13.dtype),
        _summed_at_home(static, dw2, plan, len(w2)).astype(w2.dtype),
        rows_at(d_weights, layout.row_of_NK),
        None,
        None,
    )


_over_ranks.defvjp(_fwd, _bwd)


def _rows_to_experts(static: _Static, x: Array, plan: Plan) -> Array:
    return exchange(x, plan.slices, static.rows, axis=static.axis, transport=static.transport)


def _sent(static: _Static, z_NL: Array, weights_NK: Array, plan: Plan, layout: GroupLayout) -> tuple[Array, Array]:
    """Tokens and routing weights of the rows that this rank computes: [M, L], [M]; 0 in padding rows."""
    weights = rows_at(weights_NK.reshape(-1), layout.slot_of_row)
    return _rows_to_experts(static, dispatch(z_NL, layout), plan), _rows_to_experts(static, weights, plan)


def _returned(static: _Static, y_ML: Array, plan: Plan, layout: GroupLayout) -> Array:
    """Each row back to its token, whose K rows are added in at least float32: [N, L]."""
    slots = layout.row_of_NK.size
    y = exchange(y_ML, plan.slices.back(), slots, axis=static.axis, transport=static.transport)
    return combine(y, layout, jnp.ones(layout.row_of_NK.shape, wide(y_ML[:0]).dtype)).astype(y_ML.dtype)


def _computed(static: _Static, plan: Plan, rows_ML: Array, w13: Matrices, w2: Matrices, weights_M: Array) -> Array:
    """`expert_mlp` on rows that lie in their segments already; w13 and w2 of all G segments."""
    M, me = static.rows, lax.axis_index(static.axis)
    sizes_G, rows_G = plan.sizes_RG[me], plan.rows_RG[me]
    row_M = jnp.arange(M, dtype=jnp.int32)
    end_G = lax.cumsum(sizes_G)
    segment_M = jnp.searchsorted(end_G, row_M, side="right")
    real_M = row_M < rows_at(end_G - sizes_G + rows_G, segment_M)
    index_M = jnp.where(real_M, row_M, M)
    layout = GroupLayout(index_M[:, None], index_M, sizes_G, rows_G)
    return expert_mlp(rows_ML, w13, w2, weights_M[:, None], layout, static.options)


def _copies(plan: Plan, H: int) -> Slices:
    """How experts travel from their homes to the slots for copies, one a slice: [R, R, B]."""
    R = len(plan.expert_RG)
    copied_RB = plan.expert_RG[:, H:]
    slot_RB = jnp.broadcast_to(jnp.arange(copied_RB.shape[1], dtype=jnp.int32), copied_RB.shape)
    travels = copied_RB // H == jnp.arange(R, dtype=jnp.int32)[:, None, None]  # an empty slot's E has no home
    at_home, slot = jnp.where(travels, copied_RB % H, 0), jnp.where(travels, slot_RB, 0)
    return Slices(travels.astype(jnp.int32), at_home, slot)


def _with_copies[W: Matrices](static: _Static, w: W, plan: Plan) -> W:
    """The matrices of all segments [G, ...] from those at home [H, ...]; 0 in empty slots."""
    H, G = w.shape[0], plan.expert_RG.shape[1]
    if G == H:
        return w
    send = partial(exchange, slices=_copies(plan, H), rows=G - H, axis=static.axis, transport=static.transport)
    return jax.tree.map(lambda a: jnp.concatenate([a, send(a)]), w)


def _summed_at_home(static: _Static, dw: Array, plan: Plan, H: int) -> Array:
    """Gradients of experts at home [H, ...], with those of their copies, from those of all segments [G, ...].

    Added one after the other in at least float32, by rank and slot. A move takes all that is left of each of its
    experts but one, so that at most H + R − 1 copies of a home's experts are made.
    """
    R, G = plan.expert_RG.shape
    total = wide(dw[:H])
    if G == H:
        return total
    arrivals = min((G - H) * (R - 1), H + R - 1)
    copies = _copies(plan, H)
    there_RS = copies.size.reshape(R, -1)  # by home; over ranks and slots
    place = jnp.where(there_RS > 0, before(there_RS, 1), 0).reshape(copies.size.shape)
    arrived = exchange(
        dw[H:], copies._replace(at_sender=place).back(), arrivals, axis=static.axis, transport=static.transport
    )
    me = lax.axis_index(static.axis)
    slot = jnp.where(copies.size[me] > 0, place[me], arrivals).reshape(-1)
    expert_A = jnp.full((arrivals,), H, jnp.int32).at[slot].set(copies.at_sender[me].reshape(-1), mode="drop")

    def add(a: int, total: Array) -> Array:
        return total.at[expert_A[a]].add(wide(arrived[a]), mode="drop")

    return lax.fori_loop(0, arrivals, add, total)
