"""How layers are stacked: runs of equal layers, repeated units of runs, and blocks that look alike.

K3's 93 layers become three segments (the block with the dense layer, six equal blocks, the tail); within a block the
period KDA ×3, MLA is scanned. Depth then adds scan steps, not traced code.

    >>> from k3jax.config import k3
    >>> [s.num_blocks for s in plan_layers(k3())]
    [1, 6, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from k3jax.config import ConfigError, LayerSpec, ModelConfig


@dataclass(frozen=True)
class Run:
    """`count` equal layers in a row, stacked."""

    spec: LayerSpec
    count: int


@dataclass(frozen=True)
class Repeat:
    """`count` times the same sequence of runs."""

    count: int
    runs: tuple[Run, ...]

    @property
    def unit(self) -> int:
        """Layers in one repetition."""
        return sum(r.count for r in self.runs)


@dataclass(frozen=True)
class SegmentPlan:
    """`num_blocks` AttnRes blocks of one pattern, from layer `first_layer` on.

    At the border of a pipeline stage it may also be a piece of one block: its beginning, or, where `begins` is False,
    what goes on from the partial sum of the layers before.
    """

    first_layer: int
    first_block: int
    num_blocks: int
    repeats: tuple[Repeat, ...]
    begins: bool = True

    @property
    def block_layers(self) -> int:
        return sum(r.count * r.unit for r in self.repeats)

    def run_layers(self) -> list[tuple[LayerSpec, tuple[int, ...]]]:
        """For every run, in order: its kind and the layer numbers in its stack (block, repetition, place)."""
        out = []
        start = 0
        for repeat in self.repeats:
            within = 0
            for run in repeat.runs:
                numbers = tuple(
                    self.first_layer + b * self.block_layers + start + r * repeat.unit + within + c
                    for b in range(self.num_blocks)
                    for r in range(repeat.count)
                    for c in range(run.count)
                )
                out.append((run.spec, numbers))
                within += run.count
            start += repeat.count * repeat.unit
        return out


def _compress(specs: tuple[LayerSpec, ...]) -> tuple[Repeat, ...]:
    """Runs of equal layers, then the repetition that covers most, greedily from the front."""
    runs = [Run(spec, len(list(group))) for spec, group in groupby(specs)]
    repeats: list[Repeat] = []
    i = 0
    while i < len(runs):
        best = Repeat(1, (runs[i],))
        for period in range(1, (len(runs) - i) // 2 + 1):
            unit, n = runs[i : i + period], 1
            while runs[i + n * period : i + (n + 1) * period] == unit:
                n += 1
            if n > 1 and n * period > best.count * len(best.runs):
                best = Repeat(n, tuple(unit))
        repeats.append(best)
        i += best.count * len(best.runs)
    return tuple(repeats)


def plan_layers(config: ModelConfig, start: int = 0, stop: int | None = None) -> tuple[SegmentPlan, ...]:
    """Segments of the decoder, in order; with `start` or `stop`, of its layers `start..stop - 1` only."""
    stop = config.num_layers if stop is None else stop
    size = config.attn_res_block_size or config.num_layers
    edges = [start, *range((start // size + 1) * size, stop, size), stop]
    pieces = [(a, a % size == 0, _compress(config.layers[a:b])) for a, b in pairwise(edges)]
    segments: list[SegmentPlan] = []
    for (begins, pattern), group in groupby(pieces, key=lambda piece: piece[1:]):
        firsts = [first for first, *_ in group]
        segments.append(SegmentPlan(firsts[0], firsts[0] // size, len(firsts), pattern, begins))
    return tuple(segments)


def blocks_pushed(config: ModelConfig, start: int, stop: int) -> tuple[int, ...]:
    """Numbers of the AttnRes blocks that begin in layers `start..stop - 1`: each pushes one row into the bank."""
    size = config.attn_res_block_size
    return () if size is None else tuple(first // size for first in range(start, stop) if first % size == 0)


def legal_cuts(config: ModelConfig) -> tuple[int, ...]:
    """Layers before which a pipeline may be cut: where the repeating pattern of mixers starts again.

    The pattern is the shortest one that fills the decoder at least twice from the front; a rest that is unfinished or
    different is one more piece. Without such a pattern there are no cuts.
    """
    mixers = [layer.mixer for layer in config.layers]
    for period in range(1, len(mixers) // 2 + 1):
        whole = len(mixers) // period * period
        if mixers[:whole] == mixers[:period] * (whole // period):
            return tuple(range(period, len(mixers), period))
    return ()


def cut_layers(config: ModelConfig, count: int, costs: Sequence[float]) -> tuple[tuple[int, int], ...]:
    """`count` stages as (first layer, end): the heaviest is as light as legal cuts allow, the others even.

    Args:
        costs: of every layer; what the ends of the model cost is part of the first and the last.

    Raises:
        ConfigError: more stages than legal cuts make.
    """
    edges = (0, *legal_cuts(config), config.num_layers)
    if not 1 <= count < len(edges):
        raise ConfigError(
            f"mesh.pipe × mesh.virtual = {count} stages: {config.num_layers} layers are cut where their pattern of "
            f"mixers starts again, so legal {'is 1 stage' if len(edges) == 2 else f'are 1 to {len(edges) - 1} stages'}"
        )
    # best[e]: (heaviest stage, sum of squares, stages) of the layers before edge e; each round adds a stage
    Best = dict[int, tuple[float, float, tuple[tuple[int, int], ...]]]
    best: Best = {0: (0.0, 0.0, ())}
    for _ in range(count):
        longer: Best = {}
        for end in edges[1:]:
            options = []
            for begin, (heaviest, squares, stages) in best.items():
                if begin < end:
                    cost = sum(costs[begin:end])
                    options.append((max(heaviest, cost), squares + cost**2, (*stages, (begin, end))))
            if options:
                longer[end] = min(options)
        best = longer
    return best[config.num_layers][2]
