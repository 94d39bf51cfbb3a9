"""MoonEP's plan: which rank computes which rows, so that all compute the same number, whatever the router picks.

The K3 report (arXiv 2607.24653), MoonEP; github.com/MoonshotAI/MoonEP. Rank r is the home of experts r·H … r·H + H − 1.
A rank with too many rows lets others compute some, which for that hold copies of its experts. Integers only, from the
counts of all ranks, with shapes that do not depend on them: every rank computes the same plan on its device.

    plan_balanced(counts_RE)      T/R rows on each rank, at most `copy_slots` copies
    plan_at_home(counts_RE)       the ordinary plan: no copies, no balance

Legend: R ranks, E experts, H = E/R experts at home on a rank, B slots for copies, G = H + B segments.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Slices(NamedTuple):
    """Runs of rows that travel: int32 [sender, receiver, slices of a pair]. Empty ones start at 0."""

    size: Array
    at_sender: Array  # first row in the sender's buffer
    at_receiver: Array

    def back(self) -> Slices:
        """The same rows on their way back."""
        size, at_sender, at_receiver = (x.swapaxes(0, 1) for x in self)
        return Slices(size, at_receiver, at_sender)


class Plan(NamedTuple):
    """Who computes which rows; the same on every rank."""

    expert_RG: Array  # int32, the expert of each segment: H at home, then B copies; E for an empty slot
    rows_RG: Array  # int32, rows of each segment
    sizes_RG: Array  # int32, the same padded to the alignment; segments lie one behind the other
    slices: Slices  # [R, R, G]: from rows sorted by expert to segments


def copy_slots(num_experts: int, ranks: int) -> int:
    """⌈E(R − 1)/R²⌉: slots for copied experts on each rank that `plan_balanced` never runs out of (report, MoonEP).

    Why: let each rank be due Q or Q + 1 rows. The surpluses of all ranks sum to 0, and a move takes q ≤ Q + 1 rows from
    the largest, which is at least q/(R − 1): the giver has at least Q + q/(R − 1) rows. The move takes the largest of
    its at most H experts, and the first n − 1 of n whole, so fewer than q rows: (n − 1)/H ≤ (q − 1)/(Q + q/(R − 1)),
    which is less than (R − 1)/R. No rank gets two moves.
    """
    return -(-num_experts * (ranks - 1) // ranks**2)


def plan_balanced(counts_RE: Array, align: int = 1) -> Plan:
    """MoonEP's plan: every rank computes the same number of rows, with at most `copy_slots` experts copied to it.

    With T rows in all, ⌊T/R⌋ on each rank, and one more on the first T mod R ranks: N·K exactly when no token of the N
    on each rank is padding. A rank takes copies from one other rank only, in one of at most R − 1 moves. The first rows
    of an expert, in order of source rank and token, stay at home. Ties go to the lower rank or expert.

    Args:
        counts_RE: int32 [R, E], rows that each rank has for each expert.
        align: each segment starts at a multiple of it.

    Raises:
        ValueError: the experts don't divide evenly among the ranks.
    """
    counts_RE = _checked(counts_RE)
    R, E = counts_RE.shape
    computed_RE = _balanced_rows(counts_RE)
    copied_RE = (computed_RE > 0) & (jnp.arange(R)[:, None] != _home_E(R, E))
    slots = copy_slots(E, R)
    slot_RE = jnp.where(copied_RE, before(copied_RE, 1), slots)
    copies_RB = jnp.full((R, slots), E, jnp.int32)
    copies_RB = copies_RB.at[jnp.arange(R)[:, None], slot_RE].set(jnp.arange(E, dtype=jnp.int32), mode="drop")
    return _plan(counts_RE, computed_RE, copies_RB, align)


def plan_at_home(counts_RE: Array, align: int = 1) -> Plan:
    """The ordinary plan: all rows of an expert go to its home, no copies. Arguments and errors as `plan_balanced`."""
    counts_RE = _checked(counts_RE)
    R, E = counts_RE.shape
    total_E = jnp.sum(counts_RE, axis=0, dtype=jnp.int32)
    computed_RE = jnp.where(jnp.arange(R)[:, None] == _home_E(R, E), total_E, 0)
    return _plan(counts_RE, computed_RE, jnp.zeros((R, 0), jnp.int32), align)


def _checked(counts_RE: Array) -> Array:
    R, E = counts_RE.shape
    if E % R:
        raise ValueError(f"expert parallelism: {E} experts don't divide among {R} ranks; use a divisor of {E}")
    return jnp.asarray(counts_RE, jnp.int32)


def _home_E(R: int, E: int) -> Array:
    return jnp.arange(E, dtype=jnp.int32) // (E // R)


def before(x: Array, axis: int) -> Array:
    """Sum of what comes before along an axis, int32."""
    x = x.astype(jnp.int32)
    return lax.cumsum(x, axis) - x


def _balanced_rows(counts_RE: Array) -> Array:
    """How many rows of each expert each rank computes [R, E]."""
    R, E = counts_RE.shape
    at_home_RH = jnp.sum(counts_RE, axis=0, dtype=jnp.int32).reshape(R, E // R)
    group_R = jnp.sum(at_home_RH, axis=1, dtype=jnp.int32)
    total = jnp.sum(group_R, dtype=jnp.int32)
    due_R = total // R + (jnp.arange(R) < total % R).astype(jnp.int32)

    def move(_: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at_home_RH, moved_RRH, surplus_R = state
        giver, taker = jnp.argmax(surplus_R), jnp.argmin(surplus_R)
        quantity = jnp.where(surplus_R[giver] > 0, -surplus_R[taker], 0)
        left_H = at_home_RH[giver]
        order_H = jnp.argsort(-left_H, stable=True)
        largest_H = left_H[order_H]
        taken_H = jnp.zeros_like(left_H).at[order_H].set(jnp.clip(quantity - before(largest_H, 0), 0, largest_H))
        surplus_R = surplus_R.at[giver].add(-quantity).at[taker].add(quantity)
        return at_home_RH.at[giver].add(-taken_H), moved_RRH.at[taker, giver].add(taken_H), surplus_R

    # zeros that vary over the mesh as the counts do
    moved_RRH = jnp.zeros((R, R, E // R), jnp.int32) + 0 * at_home_RH
    at_home_RH, moved_RRH, _ = lax.fori_loop(0, R - 1, move, (at_home_RH, moved_RRH, group_R - due_R))
    return (moved_RRH + jnp.eye(R, dtype=jnp.int32)[:, :, None] * at_home_RH).reshape(R, E)


def _plan(counts_RE: Array, computed_RE: Array, copies_RB: Array, align: int) -> Plan:
    """Places rows: those of an expert, by source rank and token, fill its home and then the ranks after it."""
    R, E = counts_RE.shape
    home_RH = jnp.arange(E, dtype=jnp.int32).reshape(R, E // R)
    expert_RG = jnp.concatenate([home_RH, copies_RB], axis=1)
    used_RG, e_RG = expert_RG < E, jnp.minimum(expert_RG, E - 1)
    rows_RG = jnp.where(used_RG, jnp.take_along_axis(computed_RE, e_RG, axis=1), 0)
    sizes_RG = -(-rows_RG // align) * align

    turned_RE = (jnp.arange(R, dtype=jnp.int32)[:, None] + _home_E(R, E)) % R  # ranks, from each expert's home on
    first_RE = before(jnp.take_along_axis(computed_RE, turned_RE, axis=0), 0)
    first_RE = jnp.take_along_axis(first_RE, (jnp.arange(R, dtype=jnp.int32)[:, None] - _home_E(R, E)) % R, axis=0)

    # all [source, destination, segment]; `first` and `rows` count among all rows of the segment's expert
    first_RG = jnp.take_along_axis(first_RE, e_RG, axis=1)
    source_first, source_rows, source_start = (
        x[:, e_RG] for x in (before(counts_RE, 0), counts_RE, before(counts_RE, 1))
    )
    start = jnp.maximum(source_first, first_RG)
    size = jnp.maximum(jnp.minimum(source_first + source_rows, first_RG + rows_RG) - start, 0)
    at_sender = jnp.where(size > 0, source_start + start - source_first, 0)
    at_receiver = jnp.where(size > 0, before(sizes_RG, 1) + start - first_RG, 0)
    return Plan(expert_RG, rows_RG, sizes_RG, Slices(size, at_sender, at_receiver))
