"""Pipeline parallelism: the schedule as data, and the executor that runs programs of stages in its order.

The model is cut into chunks 0 … P·V − 1; rank p of the pipeline holds chunks p, p + P, p + 2P, … (virtual stages).
Every chunk has two programs on the submesh of its rank, forward and backward, and the host issues them; JAX runs what
does not depend on each other at the same time. One program for all ranks would not do: stages differ (embedding, head,
dense layers, size of the bank), collectives inside branches that only some devices take can deadlock, and XLA allocates
for the most that could be live, where 1F1B's bound comes from the order of the calls.

A chunk reads the partial sum of the chunk before and every bank row that was pushed before it (`k3jax.ops.attn_res`).
A rank receives a row once for a micro-batch and keeps it for all its chunks:

    rows sent with the partial to chunk g    those pushed by chunks g − P + 1 … g − 1: what its rank has not seen
    cotangents sent back with the partial's  of the same rows, each the sum over all readers behind that hop

so a row makes P − 1 hops whatever V is, and the sum of its readers' cotangents reaches the chunk that pushed it once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
from jax.sharding import NamedSharding

Tree = Any


@dataclass(frozen=True)
class Op:
    """Forward or backward of one micro-batch through one chunk."""

    kind: Literal["F", "B"]
    chunk: int
    micro: int


Schedule = tuple[tuple[Op, ...], ...]
"""For every rank its operations in order."""


def one_f_one_b(ranks: int, virtual: int, micro_batches: int) -> Schedule:
    """1F1B, interleaved when `virtual` > 1: rank p warms up, then takes one forward and one backward in turn.

    With `virtual` = 1 rank p never holds more than `ranks` − p micro-batches. Otherwise it holds up to
    2 (ranks − p − 1) + (virtual − 1) ranks + 1 inputs of chunks.

    Raises:
        ValueError: virtual stages and a number of micro-batches that is no multiple of `ranks`.
    """
    if virtual > 1 and micro_batches % ranks:
        raise ValueError(
            f"{micro_batches} micro-batches with {virtual} virtual stages must be a multiple of {ranks} ranks"
        )
    schedule = []
    for rank in range(ranks):
        forward, backward = _rank_order(rank, ranks, virtual, micro_batches)
        warmup = ranks - rank - 1 if virtual == 1 else 2 * (ranks - rank - 1) + (virtual - 1) * ranks
        warmup = min(warmup, len(forward))
        steady = [op for pair in zip(forward[warmup:], backward) for op in pair]
        schedule.append((*forward[:warmup], *steady, *backward[len(forward) - warmup :]))
    return tuple(schedule)


def gpipe(ranks: int, virtual: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards: the same bubble, and every micro-batch in flight at once."""
    orders = (_rank_order(rank, ranks, virtual, micro_batches) for rank in range(ranks))
    return tuple((*forward, *backward) for forward, backward in orders)


def _rank_order(rank: int, ranks: int, virtual: int, micro_batches: int) -> tuple[list[Op], list[Op]]:
    """Forwards and backwards of a rank: groups of `ranks` micro-batches through one chunk after the other."""
    chunks = range(rank, ranks * virtual, ranks)
    groups = [range(m, min(m + ranks, micro_batches)) for m in range(0, micro_batches, ranks)]
    forward = [Op("F", chunk, m) for group in groups for chunk in chunks for m in group]
    backward = [Op("B", chunk, m) for group in groups for chunk in reversed(chunks) for m in group]
    return forward, backward


def timeline(schedule: Schedule) -> list[list[tuple[int, Op]]]:
    """The operations (rank, op) of every tick, if each takes one and starts when its rank is free and its input there.

    A forward waits for that of the chunk before; a backward for that of the chunk behind and for its own forward.

    Raises:
        ValueError: the orders of the ranks wait for each other for ever.
    """
    last = max(op.chunk for ops in schedule for op in ops)
    done: set[Op] = set()
    places = [0] * len(schedule)
    ticks = []

    def ready(op: Op) -> bool:
        if op.kind == "F":
            return op.chunk == 0 or Op("F", op.chunk - 1, op.micro) in done
        behind = op.chunk == last or Op("B", op.chunk + 1, op.micro) in done
        return behind and Op("F", op.chunk, op.micro) in done

    while any(place < len(ops) for place, ops in zip(places, schedule)):
        tick = [(r, ops[places[r]]) for r, ops in enumerate(schedule) if places[r] < len(ops) and ready(ops[places[r]])]
        if not tick:
            raise ValueError("the schedule waits for itself")
        for rank, op in tick:
            places[rank] += 1
            done.add(op)
        ticks.append(tick)
    return ticks


def bubble(schedule: Schedule) -> float:
    """Share of the time that ranks wait, in unit time."""
    ticks = timeline(schedule)
    return 1 - sum(map(len, ticks)) / (len(ticks) * len(schedule))


@dataclass(frozen=True)
class Layout:
    """Which chunk is on which rank and which pushes which rows."""

    ranks: int
    pushes: tuple[tuple[int, ...], ...]
    """Rows that each chunk pushes; the rows of all chunks are 0, 1, 2, … in order."""

    @property
    def chunks(self) -> int:
        return len(self.pushes)

    def rank(self, chunk: int) -> int:
        return chunk % self.ranks

    def _rows(self, first: int, stop: int) -> tuple[int, ...]:
        return tuple(row for chunk in range(max(first, 0), max(stop, 0)) for row in self.pushes[chunk])

    def read(self, chunk: int) -> tuple[int, ...]:
        """Rows that were pushed before a chunk."""
        return self._rows(0, chunk)

    def sent(self, chunk: int) -> tuple[int, ...]:
        """Rows that travel with the partial sum to a chunk: its rank has not seen them."""
        return self._rows(chunk - self.ranks + 1, chunk)

    def retired(self, chunk: int) -> tuple[int, ...]:
        """Rows that the rank of a chunk needs no more after its backward: no earlier chunk there reads them."""
        return self._rows(chunk - self.ranks, chunk)

    def is_last_on_rank(self, chunk: int) -> bool:
        return chunk + self.ranks >= self.chunks

    def contributions(self, chunk: int, row: int) -> int:
        """Sums of cotangents of a row that lie on the rank of a chunk when its backward starts: its own, received."""
        return (not self.is_last_on_rank(chunk)) + (chunk + 1 < self.chunks and row in self.sent(chunk + 1))


class StagePrograms(Protocol):
    """What a chunk computes; every method only issues work."""

    def forward(self, micro: int, rows: tuple, partial: Any) -> tuple[Any, tuple]:
        """Partial sum for the next chunk and the rows pushed here. Arguments stay as they are."""

    def backward(self, micro: int, rows: tuple, partial: Any, d_partial: Any, d_pushed: tuple, d_rows: tuple) -> Any:
        """Computes the chunk again and its gradients, which the implementation adds up over micro-batches.

        Args:
            partial: given up; None for the first chunk.
            d_partial: given up; None for the last chunk, which starts from the loss.
            d_pushed: for every row pushed here a tuple of cotangents whose sum is its own; given up.
            d_rows: for every row read a tuple of cotangents, perhaps empty, that the chunk's own is added to; given up.

        Returns:
            the cotangents of the partial and of every row read; (None, ()) for the first chunk.
        """


@dataclass
class Traffic:
    """What an executor moved and held, in bytes of one device."""

    live: list[int]
    """By rank, now: inputs of chunks that wait for their backward, rows, cotangents."""
    peak: list[int]
    """By rank, the most that `live` was."""
    sent: int = 0
    """Partial sums, rows and cotangents between chunks."""


def send(tree: Tree, sharding: NamedSharding | Tree) -> Tree:
    """Arrays on another rank's submesh, in its `sharding` or each in its own. The one place where stages exchange data.

    All submeshes belong to this process. With one process a rank, this is where a `ppermute` over the two submeshes,
    issued by both, would stand.
    """
    return jax.device_put(tree, sharding)


class Executor:
    """Runs the programs of all chunks over the micro-batches of a step.

    Args:
        programs: of every chunk.
        shardings: of a partial sum or row, by rank.
    """

    def __init__(self, layout: Layout, programs: Sequence[StagePrograms], shardings: Sequence[NamedSharding]) -> None:
        self.layout, self.programs, self.shardings = layout, programs, shardings
        self.traffic = Traffic([0] * layout.ranks, [0] * layout.ranks)

    def run(self, ticks: list[list[tuple[int, Op]]]) -> None:
        """A training step: every forward and backward, issued in the order of a `timeline`."""
        # by (rank, micro-batch): row → array, and row → cotangents so far; by (chunk, micro-batch): partial sums
        self._rows: dict[tuple[int, int], dict[int, Any]] = {}
        self._cotangents: dict[tuple[int, int], dict[int, tuple]] = {}
        self._partials: dict[tuple[int, int], Any] = {}
        self._d_partials: dict[tuple[int, int], Any] = {}
        for tick in ticks:
            for _, op in tick:
                (self._forward if op.kind == "F" else self._backward)(op.chunk, op.micro)
        assert not any(any(kept.values()) for kept in (self._rows, self._cotangents))
        assert not self._partials

    def run_forward(self, micro: int) -> tuple[tuple, Any]:
        """Only the forwards of one micro-batch, up to the inputs of the last chunk (rows, partial)."""
        layout, cache = self.layout, [{} for _ in range(self.layout.ranks)]
        partial = None
        for chunk in range(layout.chunks - 1):
            rank, after = layout.rank(chunk), layout.rank(chunk + 1)
            rows = tuple(cache[rank][row] for row in layout.read(chunk))
            partial, pushed = self.programs[chunk].forward(micro, rows, partial)
            cache[rank].update(zip(layout.pushes[chunk], pushed))
            sent = layout.sent(chunk + 1)
            partial, moved = send((partial, tuple(cache[rank][row] for row in sent)), self.shardings[after])
            cache[after].update(zip(sent, moved))
        return tuple(cache[layout.rank(layout.chunks - 1)][row] for row in layout.read(layout.chunks - 1)), partial

    def _forward(self, chunk: int, micro: int) -> None:
        layout, rank = self.layout, self.layout.rank(chunk)
        if chunk + 1 == layout.chunks:
            return  # its backward computes it once more anyway
        cache = self._rows.setdefault((rank, micro), {})
        rows = tuple(cache[row] for row in layout.read(chunk))
        partial, pushed = self.programs[chunk].forward(micro, rows, self._partials.get((chunk, micro)))
        known = cache | dict(zip(layout.pushes[chunk], pushed))
        after, sent = layout.rank(chunk + 1), layout.sent(chunk + 1)
        moved = self._send((partial, tuple(known[row] for row in sent)), after)
        self._partials[chunk + 1, micro] = moved[0]
        self._rows.setdefault((after, micro), {}).update(zip(sent, moved[1]))
        if not layout.is_last_on_rank(chunk):
            cache.update(zip(layout.pushes[chunk], pushed))
            self._hold(rank, pushed)

    def _backward(self, chunk: int, micro: int) -> None:
        layout, rank = self.layout, self.layout.rank(chunk)
        cache = self._rows.setdefault((rank, micro), {})
        cotangents = self._cotangents.setdefault((rank, micro), {})
        read = layout.read(chunk)
        inputs = (self._partials.pop((chunk, micro), None), self._d_partials.pop((chunk, micro), None))
        last = chunk + 1 == layout.chunks
        d_pushed = () if last else tuple(cotangents.pop(row) for row in layout.pushes[chunk])
        d_rows = tuple(cotangents.pop(row, ()) for row in read)
        self._drop(rank, (inputs, d_pushed, d_rows))
        rows = tuple(cache[row] for row in read)
        d_partial, d_read = self.programs[chunk].backward(micro, rows, *inputs, d_pushed, d_rows)
        cotangents.update((row, (d_row,)) for row, d_row in zip(read, d_read))
        self._hold(rank, d_read)
        for row in layout.retired(chunk):
            self._drop(rank, cache.pop(row))
        if chunk == 0:
            return
        before, sent = layout.rank(chunk - 1), layout.sent(chunk)
        back = tuple(cotangents.pop(row)[0] for row in sent)
        self._drop(rank, back)
        self._d_partials[chunk - 1, micro], moved = self._send((d_partial, back), before)
        there = self._cotangents.setdefault((before, micro), {})
        for row, d_row in zip(sent, moved):
            there[row] = (*there.get(row, ()), d_row)

    def _send(self, tree: Tree, rank: int) -> Tree:
        moved = send(tree, self.shardings[rank])
        self.traffic.sent += local_bytes(moved)
        self._hold(rank, moved)
        return moved

    def _hold(self, rank: int, tree: Tree) -> None:
        traffic = self.traffic
        traffic.live[rank] += local_bytes(tree)
        traffic.peak[rank] = max(traffic.peak[rank], traffic.live[rank])

    def _drop(self, rank: int, tree: Tree) -> None:
        self.traffic.live[rank] -= local_bytes(tree)


def local_bytes(tree: Tree) -> int:
    """Bytes that one device holds of arrays, or of shapes with shardings."""

    def local(x: Any) -> int:  # shapes of a traced function on one device say no sharding
        return math.prod(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(map(local, jax.tree.leaves(tree)))
