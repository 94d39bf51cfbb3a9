"""The layout that brings (token, expert) slots into the order of experts and back.

Nothing here scatters with an addition, so results do not depend on the order in which a GPU runs its threads: every
gradient is a gather through the inverse map or a sum over K in fixed order.

Legend: N tokens, K experts of a token, E experts, D width, M rows.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.common import vary_alike, wide


class GroupLayout(NamedTuple):
    """Where each (token, choice) slot n·K + k lies in a buffer of M rows sorted by expert, and back."""

    row_of_NK: jax.Array  # [N, K] int32; M for an invalid slot
    slot_of_row: jax.Array  # [M] int32; N·K for a padding row
    group_sizes_E: jax.Array  # [E] int32, multiples of `align`; what lies past their sum is padding
    counts_E: jax.Array  # [E] int32, rows that hold a slot


def padded_rows(num_slots: int, num_experts: int, align: int) -> int:
    """Rows that hold any split of `num_slots` into groups padded to multiples of `align`, and no more."""
    return (num_slots + min(num_experts, num_slots) * (align - 1)) // align * align


def group_layout(experts_NK: jax.Array, valid_NK: jax.Array | None, num_experts: int, align: int = 1) -> GroupLayout:
    """Sorts slots by expert, then by token; each group starts at a multiple of `align`.

    Args:
        experts_NK: int32 in [0, num_experts).
        valid_NK: bool; slots with False get no row. None: all are valid.
    """
    (N, K), E = experts_NK.shape, num_experts
    M = padded_rows(N * K, E, align)
    expert_NK = jnp.asarray(experts_NK, jnp.int32)
    if valid_NK is not None:
        expert_NK = jnp.where(valid_NK, expert_NK, E)
    before_NK, counts = _counted_before(expert_NK, E)
    sizes = -(-counts // align) * align
    start_E = jnp.cumsum(sizes) - sizes
    row_NK = start_E[jnp.minimum(expert_NK, E - 1)] + before_NK
    row_NK = jnp.where(expert_NK < E, row_NK, M)
    slots = jnp.arange(N * K, dtype=jnp.int32)
    slot_of_row = jnp.full((M,), N * K, jnp.int32).at[row_NK.reshape(-1)].set(slots, mode="drop")
    return GroupLayout(row_NK, slot_of_row, sizes, counts)


def _counted_before(expert_NK: jax.Array, E: int) -> tuple[jax.Array, jax.Array]:
    """How many earlier slots have the expert of each slot [N, K], and how many slots each expert has [E], int32.

    A counting sort: comparisons within blocks of slots, sums over blocks. On a GPU far cheaper than a sort.
    """
    slots, block = expert_NK.size, 256
    blocks_bi = jnp.pad(expert_NK.reshape(-1), (0, -slots % block), constant_values=E).reshape(-1, block)
    same_bij = blocks_bi[:, :, None] == blocks_bi[:, None, :]
    within_bi = jnp.sum(same_bij & jnp.tri(block, k=-1, dtype=bool), axis=2, dtype=jnp.int32)
    counts_bE = jnp.sum(blocks_bi[:, :, None] == jnp.arange(E, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    before_bE = jnp.cumsum(counts_bE, axis=0) - counts_bE
    before_bi = within_bi + jnp.take_along_axis(before_bE, jnp.minimum(blocks_bi, E - 1), axis=1)
    return before_bi.reshape(-1)[:slots].reshape(expert_NK.shape), jnp.sum(counts_bE, axis=0, dtype=jnp.int32)


def dispatch(x_ND: jax.Array, layout: GroupLayout) -> jax.Array:
    """Rows of the grouped buffer → [M, D]; padding rows are 0."""
    x_ND, *maps = vary_alike(x_ND, *layout)
    return _dispatch(x_ND, GroupLayout(*maps))


def combine(y_MD: jax.Array, layout: GroupLayout, weights_NK: jax.Array) -> jax.Array:
    """Σ_k weights_NK · row of slot (n, k), in at least float32 and in the order of k → [N, D].

    An invalid slot contributes 0, and no padding row is read.
    """
    y_MD, weights_NK, *maps = vary_alike(y_MD, weights_NK, *layout)
    return _combine(y_MD, weights_NK, GroupLayout(*maps))


def rows_at(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]`, 0 where the index is past the end."""
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _dispatch(x_ND: jax.Array, layout: GroupLayout) -> jax.Array:
    return rows_at(x_ND, layout.slot_of_row // layout.row_of_NK.shape[1])


def _dispatch_fwd(x_ND: jax.Array, layout: GroupLayout):
    return _dispatch(x_ND, layout), layout


def _dispatch_bwd(layout: GroupLayout, dx_MD: jax.Array):
    K = layout.row_of_NK.shape[1]
    terms = [wide(rows_at(dx_MD, layout.row_of_NK[:, k])) for k in range(K)]
    return reduce(jnp.add, terms).astype(dx_MD.dtype), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def _combine(y_MD: jax.Array, weights_NK: jax.Array, layout: GroupLayout) -> jax.Array:
    K = weights_NK.shape[1]
    return reduce(jnp.add, [weights_NK[:, k, None] * wide(rows_at(y_MD, layout.row_of_NK[:, k])) for k in range(K)])


def _combine_fwd(y_MD: jax.Array, weights_NK: jax.Array, layout: GroupLayout):
    return _combine(y_MD, weights_NK, layout), (y_MD, weights_NK, layout)


def _combine_bwd(residuals, d_out_ND: jax.Array):
    y_MD, weights_NK, layout = residuals
    K = weights_NK.shape[1]
    weight_M = rows_at(weights_NK.reshape(-1), layout.slot_of_row)
    dy_MD = weight_M[:, None] * rows_at(d_out_ND, layout.slot_of_row // K)
    d_weights = [jnp.sum(wide(rows_at(y_MD, layout.row_of_NK[:, k])) * d_out_ND, axis=-1) for k in range(K)]
    return dy_MD.astype(y_MD.dtype), jnp.stack(d_weights, axis=1).astype(weights_NK.dtype), None


_combine.defvjp(_combine_fwd, _combine_bwd)
