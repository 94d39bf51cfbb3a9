"""MoonEP's plan: every row is computed once, and every rank computes as many rows, whatever the router picks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3jax.parallel.expert_plan import copy_slots, plan_at_home, plan_balanced

KINDS = 8


def routing_counts(rng, kind, ranks, experts, tokens, picks):
    """Rows [R, E] that each rank has for each expert, `tokens · picks` a rank (`kind` 7: fewer, as with padding)."""
    rows, home = tokens * picks, experts // ranks
    if kind == 0:
        share = np.full(experts, 1 / experts)
    elif kind in (1, 7):
        share = rng.dirichlet(np.full(experts, 0.1))
    elif kind == 2:
        share = np.eye(experts)[rng.integers(experts)]  # one expert
    elif kind == 3:
        share = np.repeat(np.eye(ranks)[rng.integers(ranks)], home) / home  # one rank's experts
    elif kind == 4:
        share = np.repeat(rng.permutation(np.arange(ranks) > 0), home) / (home * max(ranks - 1, 1))  # none on one rank
        share = share if ranks > 1 else np.full(experts, 1 / experts)
    elif kind == 5:
        share = rng.dirichlet(np.full(experts, 0.02), size=ranks)  # each rank its own favourites
    else:  # all alike, to the last row: ties everywhere
        return np.full((ranks, experts), max(1, rows // experts))
    share = np.broadcast_to(share, (ranks, experts))
    sent = np.full(ranks, rows) if kind != 7 else rng.integers(0, rows + 1, ranks)
    return np.stack([rng.multinomial(n, s / s.sum()) for n, s in zip(sent, share)])


def cover(start, size, length):
    """How often each row [cases, length] lies in one of the slices [cases, slices]."""
    edges = np.zeros((len(start), length + 1), int)
    case = np.arange(len(start))[:, None]
    np.add.at(edges, (case, np.minimum(start, length)), (size > 0).astype(int))
    np.add.at(edges, (case, np.minimum(start + size, length)), -(size > 0).astype(int))
    assert (np.where(size > 0, start + size, 0) <= length).all()
    return np.cumsum(edges[:, :-1], axis=1)


def check(counts, plan, align):
    """All that holds for any plan; counts [cases, R, E] and a plan of as many cases."""
    _, ranks, experts = counts.shape
    home = experts // ranks
    expert, rows, sizes, (size, at_sender, at_receiver) = jax.tree.map(np.asarray, plan)
    assert (expert[:, :, :home] == np.arange(experts).reshape(ranks, home)).all(), "home experts first"
    assert (rows >= 0).all()
    assert (rows[expert == experts] == 0).all()
    assert (sizes % align == 0).all() & (sizes - rows < align).all()
    np.testing.assert_array_equal(size.sum(1), rows)
    starts = np.cumsum(sizes, -1) - sizes
    sent, kept = counts.sum(-1), sizes.sum(-1)
    for r in range(ranks):
        # at its source every row lies in one slice, and in one of its own expert
        length = int(sent.max())
        slices = [x[:, r].reshape(len(x), -1) for x in (at_sender, size)]
        assert (cover(*slices, length) == (np.arange(length) < sent[:, r, None])).all()
        bounds = np.pad(np.cumsum(counts[:, r], -1), ((0, 0), (1, 1)))
        of_slice = expert.reshape(len(expert), -1)
        first, last = (np.take_along_axis(bounds, of_slice + i, 1) for i in (0, 1))
        used = slices[1] > 0
        assert (slices[0] >= first)[used].all()
        assert (slices[0] + slices[1] <= last)[used].all()
        # at its destination slices of different ranks fill the segments, without holes
        length = int(kept.max())
        segment = np.arange(length)
        inside = (segment >= starts[:, r, :, None]) & (segment < (starts + rows)[:, r, :, None])
        slices = [x[:, :, r].reshape(len(x), -1) for x in (at_receiver, size)]
        assert (cover(*slices, length) == inside.any(1)).all()


@functools.partial(jax.jit, static_argnums=1)
def plans(counts, align):
    return jax.vmap(lambda c: plan_balanced(c, align))(counts)


CASES = [(1, 4), (2, 2), (2, 8), (4, 8), (4, 16), (8, 8), (8, 32)]


def check_balanced(ranks, experts, cases, seed):
    rng = np.random.default_rng(seed)
    tokens, picks = int(rng.integers(1, 40)), int(rng.integers(1, min(experts, 6) + 1))
    kinds = np.arange(cases) % KINDS
    counts = np.stack([routing_counts(rng, kind, ranks, experts, tokens, picks) for kind in kinds])
    align = int(rng.choice([1, 8]))
    plan = plans(counts, align)
    check(counts, plan, align)
    expert, rows = np.asarray(plan.expert_RG), np.asarray(plan.rows_RG)
    computed, total = rows.sum(-1), counts.sum((1, 2))
    assert (computed[np.isin(kinds, range(6))] == tokens * picks).all(), "exactly N·K"
    assert (computed >= total[:, None] // ranks).all()
    assert (computed <= -(-total[:, None] // ranks)).all()

    home = experts // ranks
    copies = expert[:, :, home:]
    used = copies < experts
    assert copies.shape[-1] == copy_slots(experts, ranks)
    assert (rows[:, :, home:] > 0)[used].all(), "no copy without rows"
    donors = np.where(used, copies // home, -1)
    assert (donors != np.arange(ranks)[:, None]).all()
    assert (
        np.where(used, donors, donors.max(-1, keepdims=True, initial=-1)) == donors.max(-1, keepdims=True, initial=-1)
    ).all()
    assert (used.any(-1).sum(-1) <= ranks - 1).all()
    for h in range(ranks):
        assert ((donors == h).sum((1, 2)) <= home + ranks - 1).all(), "copies made of one home's experts"
    in_use = np.where(used, copies, -1 - np.arange(copies.shape[-1]))
    assert all(len(set(row)) == len(row) for case in in_use for row in case), "no expert twice on a rank"
    return used.sum(-1).max(initial=0)


@pytest.mark.parametrize(("ranks", "experts"), CASES)
def test_every_row_is_computed_once_and_every_rank_computes_as_many(ranks, experts):
    for seed in range(3):
        check_balanced(ranks, experts, 80, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "experts"), [*CASES, (16, 64), (3, 9), (5, 35)])
def test_ten_thousand_plans(ranks, experts):
    for seed in range(10):
        check_balanced(ranks, experts, 104, 100 + seed)


def test_the_bound_on_copies_is_that_of_the_report_and_is_reached():
    assert [copy_slots(896, ranks) for ranks in (8, 16, 32, 64)] == [98, 53, 28, 14]
    # all rows evenly on one rank's experts: each other rank must take 3 of 4 quarters of them for its share
    counts = np.zeros((2, 8), int)
    counts[:, :4] = 10
    plan = plan_balanced(counts)
    assert copy_slots(8, 2) == 2 == int(np.sum(np.asarray(plan.expert_RG[1, 4:]) < 8))


def test_a_balanced_routing_moves_nothing_and_no_expert_is_copied():
    """An argmax over ranks of which none has too much must not move expert 0."""
    for counts in (np.full((4, 8), 3), np.zeros((4, 8), int)):
        plan = plan_balanced(counts)
        assert (np.asarray(plan.expert_RG[:, 2:]) == 8).all()


def test_the_first_rows_of_an_expert_stay_at_home():
    counts = np.zeros((4, 4), int)
    counts[:, 2] = [5, 3, 4, 4]
    slices = plan_balanced(counts).slices
    at_home = np.asarray(slices.size[:, 2, 0])
    np.testing.assert_array_equal(at_home, [4, 0, 0, 0])
    np.testing.assert_array_equal(np.asarray(slices.size).sum((0, 2)), 4)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_ordinary_plan_keeps_every_expert_at_home(ranks):
    rng = np.random.default_rng(ranks)
    counts = np.stack([routing_counts(rng, kind, ranks, 16, 9, 3) for kind in range(KINDS)])
    plan = jax.vmap(lambda c: plan_at_home(c, 8))(counts)
    check(counts, plan, 8)
    np.testing.assert_array_equal(plan.rows_RG, counts.sum(1).reshape(KINDS, ranks, -1))


def test_every_rank_plans_the_same_and_new_counts_compile_nothing():
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    def planned(counts):
        plan = plan_balanced(jax.lax.all_gather(counts[0], "expert"))
        return jax.tree.map(lambda x: x[None], plan)

    rng = np.random.default_rng(0)
    for kind in range(KINDS):
        counts = routing_counts(rng, kind, 8, 16, 32, 4)
        want = jax.jit(plan_balanced)(counts)
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x, np.stack([y] * 8)), planned(jnp.asarray(counts)), want
        )
    assert planned._cache_size() == 1


def test_experts_that_do_not_divide_are_refused():
    for make in (plan_balanced, plan_at_home):
        with pytest.raises(ValueError, match="divisor of 6"):
            make(np.ones((4, 6), int))
