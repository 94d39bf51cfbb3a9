"""How layers are stacked: runs of equal layers, repeated units of runs, and blocks that look alike.

K3's 93 layers become three segments (the block with the dense layer, six equal blocks, the tail); within a block the
period KDA ×3, MLA is scanned. Depth then adds scan steps, not traced code.

    >>> from k3jax.config import k3
    >>> [s.num_blocks for s in plan_layers(k3())]
    [1, 6, 1]
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from k3jax.config import LayerSpec, ModelConfig


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
    """`num_blocks` AttnRes blocks of one pattern, from layer `first_layer` on."""

    first_layer: int
    first_block: int
    num_blocks: int
    repeats: tuple[Repeat, ...]

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


def plan_layers(config: ModelConfig) -> tuple[SegmentPlan, ...]:
    """Segments of the decoder, in order."""
    layers = config.layers
    size = config.attn_res_block_size or len(layers)
    patterns = [_compress(layers[i : i + size]) for i in range(0, len(layers), size)]
    segments: list[SegmentPlan] = []
    block = 0
    for pattern, group in groupby(patterns):
        count = len(list(group))
        segments.append(SegmentPlan(block * size, block, count, pattern))
        block += count
    return tuple(segments)
