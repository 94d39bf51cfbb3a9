"""SiTU between the two products of an expert, in the kernels' registers, and a kernel for its gradients.

    hidden = scale · SiTU(gate, up)     gate, up = x w13_e     d_hidden = dy w2_eᵀ

The gradient kernel forms all three products of a tile and applies SiTU's backward pass to them: neither they nor
anything of their size but its results is written to memory. It has not yet run on a GPU (`Glu.apply` has).

Legend: M rows, L latent width, F expert width, E groups, T pairs of half-tiles.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.grouped_matmul.ragged import (
    ALIGN,
    DEFAULT,
    DEPTH,
    HALF,
    Producer,
    Ring,
    RowTiles,
    Tiling,
    div,
    launch,
    rem,
    roles,
    span,
    store_line,
    values_of_rows,
)
from k3jax.ops.mosaic import ROW, Kit, along_rows, smem

_LINE = 64  # bytes of a row of an output stage: what is in registers at a time of six arrays


class Glu(NamedTuple):
    """scale · SiTU(gate, up) on values in registers."""

    scale_M: jax.Array  # float32
    beta: float
    linear_beta: float | None

    def _parts(self, gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """tanh(gate / β), sigmoid(gate), the clipped up, and tanh(up / λ).

        The square of a reciprocal root is one instruction of the special-function unit, where a division is many.
        """
        root = lax.rsqrt(1 + jnp.exp(-gate))
        tanh = jnp.tanh(gate * (1 / self.beta))
        if self.linear_beta is None:
            return tanh, root * root, up, None
        clipped = jnp.tanh(up * (1 / self.linear_beta))
        return tanh, root * root, self.linear_beta * clipped, clipped

    def apply(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Without the scale; 1 / (1 + e^-g) keeps its relative accuracy where the sigmoid is near 0."""
        if self.linear_beta is not None:
            up = self.linear_beta * jnp.tanh(up * (1 / self.linear_beta))
        return self.beta * jnp.tanh(gate * (1 / self.beta)) * up / (1 + jnp.exp(-gate))

    def gradient(self, gate: jax.Array, up: jax.Array, d_hidden: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        """hidden, d_gate, d_up, and what summed over a row is d_scale."""
        tanh, sigmoid, up, clipped = self._parts(gate, up)
        curved = self.beta * tanh
        opened = curved * sigmoid
        out, scaled = opened * up, d_hidden * scale
        d_gate = scaled * up * sigmoid * ((1 - tanh * tanh) + (curved - opened))
        d_up = scaled * opened
        if clipped is not None:
            d_up = d_up * (1 - clipped * clipped)
        return out * scale, d_gate, d_up, out * d_hidden


def glu_gradient(
    x_ML: jax.Array,
    dy_ML: jax.Array,
    w13: jax.Array,
    w2: jax.Array,
    tiles: RowTiles,
    glu: Glu,
    *,
    tiling: Tiling = DEFAULT,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """hidden, d_gate, d_up [M, F] in the dtype of x, and d_scale [M] float32; rows past the last group are 0.

    Args:
        x_ML, dy_ML: M a multiple of 8, at least 64; widths multiples of 128.
        w13: [E, L, 2F], gate then up; w2: [E, F, L].
    """
    (M, L), (E, F, _), dtype = x_ML.shape, w2.shape, x_ML.dtype
    width = tiling.width(2 * F) // 2
    across, terms, line = F // width, L // DEPTH, _LINE // dtype.itemsize
    kit, blocks = Kit(tiling.interpret), tiling.grid

    def body(x_g, dy_g, w13_g, w2_g, table_g, count_g, scale_g, *refs):
        hidden_g, d_gate_g, d_up_g, sums_g, x_s, (w13_s, w2_s), stage, full, empty, _ = refs
        wg, ring = lax.axis_index("wg"), Ring(full, empty, tiling.stages)

        def produce(index: Any) -> tuple[Any, Any]:
            t, column = div(index, across), rem(index, across) * width
            group = table_g[t, 0]
            rows = [pl.multiple_of(table_g[t, 1 + j], ALIGN) for j in range(2)]

            def load(k, slot):
                def fill(source: Any, matrix_tiles: list, term: Any) -> None:
                    for j in range(2):
                        piece = source.at[pl.ds(rows[j], HALF), span(term, DEPTH)]
                        plgpu.copy_gmem_to_smem(piece, x_s.at[slot, j], full.at[slot])
                    for matrix, target in matrix_tiles:
                        plgpu.copy_gmem_to_smem(matrix, target, full.at[slot])

                @pl.when(k < terms)
                def _():
                    at = span(k * DEPTH, DEPTH)
                    both = [(w13_g.at[group, at, span(column + j * F, width)], w13_s.at[slot, j]) for j in range(2)]
                    fill(x_g, both, k * DEPTH)

                @pl.when(k >= terms)
                def _():
                    term, half = (k - terms) * DEPTH, width // 2  # in halves: a stage is four copies
                    at = span(term, DEPTH)
                    halves = [
                        (w2_g.at[group, span(column + j * half, half), at], w2_s.at[slot, pl.ds(j * half, half)])
                        for j in range(2)
                    ]
                    fill(dy_g, halves, term)

            return jnp.where(group < E, 2 * terms, 0), load

        def entry(index: Any) -> tuple:
            t = jnp.minimum(div(index, across), tiles.table.shape[0] - 1)
            count = jnp.where(table_g[t, 0] < E, terms, 0)
            return count, table_g[t, 1 + wg], table_g[t, 3 + 2 * wg], table_g[t, 4 + 2 * wg]

        def finish(values: tuple, row: Any, only: tuple, column: Any, scale: jax.Array) -> jax.Array:
            """Stores the results of a tile, and returns d_scale's sum over its columns."""
            sums, stores = [], 0
            for c in range(0, width, line):
                gate, up, d_hidden = (value[:, c : c + line] for value in values)
                *results, products = glu.gradient(gate, up, d_hidden, along_rows(scale, (HALF, line)))
                results = [result.astype(dtype) for result in results]
                for result, out in zip(results, (hidden_g, d_gate_g, d_up_g)):
                    # an odd number of stores ends on the slot that the next tile fills first
                    pending = 1 if stores or (3 * width // line) % 2 == 0 else 0
                    store_line(result, wg, stage, stores % 2, pending, out, row, column + c, only)
                    stores += 1
                sums.append(jnp.sum(products, axis=1))
            return reduce(jnp.add, sums)

        def consume(index, step, count, row, low, high):
            row = pl.multiple_of(row, ALIGN)
            t, tile = div(index, across), rem(index, across)

            def compute(gate, up, d_hidden):
                @pl.loop(0, count)
                def _(k):
                    slot = ring.wait(step + k)
                    for acc, j in ((gate, 0), (up, 1)):
                        plgpu.wgmma(acc, x_s.at[slot, wg], w13_s.at[slot, j])
                    plgpu.wgmma_wait(2)
                    ring.release(step + k - 1, k > 0)

                @pl.loop(count, 2 * count)
                def _(k):
                    slot = ring.wait(step + k)
                    plgpu.wgmma(d_hidden, x_s.at[slot, wg], w2_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)
                    ring.release(step + k - 1, True)

                values = gate[...], up[...], d_hidden[...]
                ring.release(step + 2 * count - 1, count > 0)
                scale = kit.load(scale_g.at[pl.ds(row, HALF)], ROW, optimized=False)
                sums_g[tile, t, wg] = finish(values, row, (low, high), tile * width, scale)

            @pl.when(high > low)
            def _():
                pl.run_scoped(compute, *[plgpu.ACC((HALF, width), jnp.float32)] * 3)

            @pl.when(high <= low)
            def _():
                ring.skip(step, 2 * count)

            return step + 2 * count

        roles(count_g[0] * across, blocks, Producer(ring, produce), consume, entry)

    matrices = plgpu.RefUnion(smem((tiling.stages, 2, DEPTH, width), dtype), smem((tiling.stages, width, DEPTH), dtype))
    stages = smem((tiling.stages, 2, HALF, DEPTH), dtype), matrices
    out = [jax.ShapeDtypeStruct((M, F), dtype)] * 3
    out += [jax.ShapeDtypeStruct((across, tiles.table.shape[0], 2, HALF), jnp.float32)]
    args = (x_ML, dy_ML, w13, w2, *tiles, glu.scale_M)
    *results, sums = launch(tiling, body, out, stages, 4, args, _LINE)
    return *results, values_of_rows(sums, tiles, M)
