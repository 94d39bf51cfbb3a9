"""Schedules of the pipeline as data, and the executor against plain automatic differentiation of a toy model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.config import ConfigError, MeshConfig, k3, nano
from k3jax.model.plan import blocks_pushed, cut_layers, legal_cuts, plan_layers
from k3jax.parallel import pipeline
from k3jax.parallel.pipeline import Executor, Layout, Op, bubble, gpipe, one_f_one_b, timeline
from k3jax.sharding import make_mesh, rank_meshes

SHAPES = [(1, 1, 3), (2, 1, 1), (2, 1, 5), (3, 1, 7), (4, 1, 4), (8, 1, 16), (2, 2, 4), (3, 2, 6), (4, 3, 8), (8, 2, 8)]


def in_flight(schedule, rank: int) -> int:
    """The most inputs of chunks that wait for their backward on a rank."""
    held = peak = 0
    for op in schedule[rank]:
        held += 1 if op.kind == "F" else -1
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
@pytest.mark.parametrize(("ranks", "virtual", "micro"), SHAPES)
def test_a_schedule_takes_every_micro_batch_through_every_chunk_in_order(make, ranks, virtual, micro):
    schedule = make(ranks, virtual, micro)
    for rank, ops in enumerate(schedule):
        wanted = {Op(k, c, m) for k in "FB" for c in range(rank, ranks * virtual, ranks) for m in range(micro)}
        assert len(ops) == len(wanted)
        assert set(ops) == wanted
    when = {op: tick for tick, ops in enumerate(timeline(schedule)) for _, op in ops}
    for op, tick in when.items():
        before = Op("F", op.chunk - 1, op.micro) if op.kind == "F" else Op("B", op.chunk + 1, op.micro)
        assert when.get(before, -1) < tick
        assert op.kind == "F" or when[Op("F", op.chunk, op.micro)] < tick


@pytest.mark.parametrize("make", [one_f_one_b, gpipe])
@pytest.mark.parametrize(("ranks", "virtual", "micro"), SHAPES)
def test_virtual_stages_make_the_bubble_smaller(make, ranks, virtual, micro):
    assert bubble(make(ranks, virtual, micro)) == pytest.approx((ranks - 1) / (virtual * micro + ranks - 1))


@pytest.mark.parametrize(("ranks", "virtual", "micro"), SHAPES)
def test_1f1b_bounds_what_is_in_flight_and_gpipe_does_not(ranks, virtual, micro):
    for rank in range(ranks):
        bound = ranks - rank if virtual == 1 else 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1
        assert in_flight(one_f_one_b(ranks, virtual, micro), rank) == min(bound, virtual * micro)
        assert in_flight(gpipe(ranks, virtual, micro), rank) == virtual * micro


def test_schedules_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="3 micro-batches .* multiple of 2"):
        one_f_one_b(2, 2, 3)
    waits = ((Op("F", 0, 0), Op("B", 0, 0)), (Op("B", 1, 0), Op("F", 1, 0)))
    with pytest.raises(ValueError, match="waits for itself"):
        timeline(waits)


def test_stages_are_cut_where_the_pattern_of_mixers_starts_again():
    assert legal_cuts(k3()) == tuple(range(4, 93, 4))
    assert legal_cuts(nano()) == (4, 8)
    assert cut_layers(k3(), 8, [1.0] * 93)[-1] == (84, 93)
    assert cut_layers(k3(), 24, [1.0] * 93)[-1] == (92, 93)
    with pytest.raises(ConfigError, match="2 stages: .* legal is 1 stage$"):
        cut_layers(nano(num_layers=1, mla_layers=(0,)), 2, [1.0])
    with pytest.raises(ConfigError, match="25 stages: .* legal are 1 to 24"):
        cut_layers(k3(), 25, [1.0] * 93)
    heavy_end = cut_layers(k3(), 4, [1.0] * 92 + [20.0])
    assert heavy_end == ((0, 28), (28, 56), (56, 84), (84, 93))


def test_the_pieces_of_all_stages_are_the_layers_of_the_model():
    config = k3()
    for count in (2, 5, 8, 16, 24):
        stages = cut_layers(config, count, [1.0] * 93)
        pieces = [piece for stage in stages for piece in plan_layers(config, *stage)]
        numbers = sorted(n for piece in pieces for _, layers in piece.run_layers() for n in layers)
        assert numbers == list(range(93))
        assert sum(piece.num_blocks for piece in pieces if piece.begins) == config.num_blocks == 8
        assert [row for stage in stages for row in blocks_pushed(config, *stage)] == list(range(8))


class Toy:
    """A chunk of a toy model: pushes its input where a block begins, then adds a function of all rows."""

    def __init__(self, weight, layout, number, data):
        self.weight, self.layout, self.number, self.data, self.gradient = weight, layout, number, data, 0.0

    def compute(self, weight, rows, partial, micro):
        partial = self.data[micro] if partial is None else partial
        pushed = (partial,) * len(self.layout.pushes[self.number])
        partial = partial * (0.5 if pushed else 1.0)
        partial = partial + weight * sum(
            (jnp.sin((i + 1) * row) for i, row in enumerate((*rows, *pushed))), 0.0 * partial
        )
        return jnp.sum(partial**3) if self.number + 1 == self.layout.chunks else (partial, pushed)

    def forward(self, micro, rows, partial):
        return self.compute(self.weight, rows, partial, micro)

    def backward(self, micro, rows, partial, d_partial, d_pushed, d_rows):
        out, pull = jax.vjp(lambda w, r, p: self.compute(w, r, p, micro), self.weight, rows, partial)
        last = self.number + 1 == self.layout.chunks
        for row, parts in zip(self.layout.pushes[self.number], () if last else d_pushed):
            assert len(parts) == self.layout.contributions(self.number, row)
        weight, d_read, d_partial = pull(
            jnp.ones_like(out) if last else (d_partial, tuple(sum(parts) for parts in d_pushed))
        )
        self.gradient = self.gradient + weight
        return d_partial, tuple(sum(parts, d) for d, parts in zip(d_read, d_rows))


@pytest.mark.parametrize(
    ("make", "ranks", "virtual", "every"),
    [
        (one_f_one_b, 2, 3, 2),
        (gpipe, 2, 2, 1),
        pytest.param(one_f_one_b, 2, 1, 1, marks=pytest.mark.slow),
        pytest.param(one_f_one_b, 4, 2, 1, marks=pytest.mark.slow),
        pytest.param(gpipe, 4, 2, 3, marks=pytest.mark.slow),
        pytest.param(one_f_one_b, 8, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_every_reader_of_a_block_counts_once_in_its_gradient(x64, make, ranks, virtual, every):
    chunks, micro = ranks * virtual, 2 * ranks
    numbers = iter(range(chunks))
    layout = Layout(ranks, tuple((next(numbers),) if c % every == 0 else () for c in range(chunks)))
    rng = np.random.default_rng(0)
    weights, data = rng.normal(size=chunks) / chunks, rng.normal(size=(micro, 4))
    meshes = rank_meshes(make_mesh(MeshConfig(pipe=ranks)))
    places = [NamedSharding(mesh, P(None)) for mesh in meshes]

    def loss(weights):
        total = 0.0
        for m in range(micro):
            rows, partial = (), None
            for c in range(chunks - 1):
                partial, pushed = Toy(None, layout, c, data).compute(weights[c], rows, partial, m)
                rows += pushed
            total += Toy(None, layout, chunks - 1, data).compute(weights[-1], rows, partial, m)
        return total

    expected = jax.grad(loss)(jnp.asarray(weights))
    programs = []
    for c in range(chunks):
        mesh = meshes[layout.rank(c)]
        with jax.set_mesh(mesh):
            weight = jax.device_put(weights[c], NamedSharding(mesh, P()))
            programs.append(Toy(weight, layout, c, jax.device_put(data, NamedSharding(mesh, P()))))
    executor = Executor(layout, programs, places)
    executor.run(timeline(make(ranks, virtual, micro)))
    np.testing.assert_allclose([p.gradient for p in programs], expected, rtol=1e-12)
    assert executor.traffic.live == [0] * ranks  # all was freed


class Idle:
    """A chunk that computes nothing."""

    def __init__(self, layout, number):
        self.pushes, self.first, self.x = len(layout.pushes[number]), number == 0, jnp.zeros(1, jnp.int8)

    def forward(self, micro, rows, partial):
        return self.x, (self.x,) * self.pushes

    def backward(self, micro, rows, partial, d_partial, d_pushed, d_rows):
        return None if self.first else self.x, (self.x,) * len(rows)


@pytest.mark.parametrize("pushes", [((0,), (), (1,), ()), ((0,), (1,), (2,), (3, 4))])
def test_1f1b_bounds_what_lies_on_a_rank_and_gpipe_does_not(monkeypatch, pushes):
    monkeypatch.setattr(pipeline, "send", lambda tree, sharding: tree)
    layout = Layout(4, pushes)

    def peak(make, micro):
        executor = Executor(layout, [Idle(layout, chunk) for chunk in range(4)], [None] * 4)
        executor.run(timeline(make(4, 1, micro)))
        assert executor.traffic.live == [0] * 4
        return executor.traffic.peak

    assert peak(one_f_one_b, 32) == peak(one_f_one_b, 8)
    for rank in range(1, 4):
        rows = len(layout.read(rank))
        # 4 - p micro-batches, one that came early, and the cotangents of one
        bound = (4 - rank + 1) * (1 + rows) + 1 + rows + len(pushes[rank])
        assert peak(one_f_one_b, 32)[rank] <= bound
        assert peak(gpipe, 32)[rank] > 32 * (1 + rows)


def test_a_row_makes_one_hop_to_each_other_rank_however_many_stages_a_rank_has():
    for virtual in (1, 2, 4):
        layout = Layout(4, tuple((c,) for c in range(4 * virtual)))
        for row in range(4 * virtual):
            hops = [chunk for chunk in range(layout.chunks) if row in layout.sent(chunk)]
            assert hops == [chunk for chunk in range(row + 1, row + 4) if chunk < layout.chunks]
        naive = sum(len(layout.read(chunk)) for chunk in range(layout.chunks))
        cached = sum(len(layout.sent(chunk)) for chunk in range(layout.chunks))
        assert cached <= 3 * 4 * virtual
        assert naive == 4 * virtual * (4 * virtual - 1) // 2
