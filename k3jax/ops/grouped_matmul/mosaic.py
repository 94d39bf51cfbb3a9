"""Grouped products of ragged rows as Mosaic GPU kernels (Hopper): y = x w_e, dx = dy w_eᵀ, dw_e = x_eᵀ dy_e.

`ragged.py` says how rows are cut and what each warpgroup does. All three products and the fused activation have run on
an H200, where they are exact to bfloat16; `Tiling.largest_first` has not yet run on a GPU.

Legend: M rows, D input width, F output width, E groups, N width of a result, K length of a sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.grouped_matmul.glu import Glu
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
    load_part,
    rem,
    roles,
    span,
    store,
)
from k3jax.ops.mosaic import ROW, Kit, along_rows, smem


def rows_times_matrices(
    x_MK: jax.Array | tuple[jax.Array, ...],
    w: jax.Array,
    tiles: RowTiles,
    *,
    transpose: bool = False,
    out_dtype: Any = None,
    glu: Glu | None = None,
    tiling: Tiling = DEFAULT,
) -> jax.Array:
    """Each row times the matrix of its group → [M, N]; rows past the last group are 0.

    Args:
        x_MK: or the parts of it, of equal width. M a multiple of 8, at least 64; widths multiples of 128.
        w: [E, K, N]; with `transpose` [E, N, K].
        glu: takes w as [E, K, 2N] = (gate, up), returns scale · SiTU(x gate, x up) and stores neither product.
    """
    xs = x_MK if isinstance(x_MK, tuple) else (x_MK,)
    (M, part), E, parts = xs[0].shape, w.shape[0], 2 if glu else 1
    N = w.shape[1] if transpose else w.shape[2] // parts
    width = tiling.width(parts * N) // parts
    across, terms = N // width, part * len(xs) // DEPTH
    dtype = jnp.dtype(out_dtype or xs[0].dtype)
    kit, blocks = Kit(tiling.interpret), tiling.grid

    def body(*refs):
        x_g, (w_g, table_g, count_g, scale_g, out_g, x_s, w_s, stage, full, empty, _) = refs[: len(xs)], refs[len(xs) :]
        wg, ring = lax.axis_index("wg"), Ring(full, empty, tiling.stages)

        def produce(index: Any) -> tuple[Any, Any]:
            t, column = div(index, across), rem(index, across) * width
            group = table_g[t, 0]
            rows = [pl.multiple_of(table_g[t, 1 + j], ALIGN) for j in range(2)]

            def load(k, slot):
                term = k * DEPTH
                for j in range(2):
                    piece = lambda ref, at, j=j: ref.at[pl.ds(rows[j], HALF), span(at, DEPTH)]  # noqa: E731
                    load_part(x_g, part, term, piece, x_s.at[slot, j], full.at[slot])
                for j in range(parts):
                    at = span(term, DEPTH), span(column + j * N, width)
                    source = w_g.at[group, *(at[::-1] if transpose else at)]
                    plgpu.copy_gmem_to_smem(source, w_s.at[slot, j], full.at[slot])

            return jnp.where(group < E, terms, 0), load

        def entry(index: Any) -> tuple:
            t = jnp.minimum(div(index, across), tiles.table.shape[0] - 1)
            count = jnp.where(table_g[t, 0] < E, terms, 0)
            return count, table_g[t, 1 + wg], table_g[t, 3 + 2 * wg], table_g[t, 4 + 2 * wg]

        def consume(index, step, count, row, low, high):
            row = pl.multiple_of(row, ALIGN)

            def compute(*accs):
                @pl.loop(0, count)
                def _(k):
                    slot = ring.wait(step + k)
                    for j, acc in enumerate(accs):
                        w_tile = w_s.at[slot, j]
                        plgpu.wgmma(acc, x_s.at[slot, wg], w_tile.transpose((1, 0)) if transpose else w_tile)
                    plgpu.wgmma_wait(parts)
                    ring.release(step + k - 1, k > 0)

                values = [acc[...] for acc in accs]
                ring.release(step + count - 1, count > 0)
                value = values[0]
                if glu:
                    scale = kit.load(scale_g.at[pl.ds(row, HALF)], ROW, optimized=False)
                    value = glu.apply(*values) * along_rows(scale, (HALF, width))
                store(value.astype(dtype), wg, stage, out_g, row, rem(index, across) * width, (low, high))

            @pl.when(high > low)
            def _():
                pl.run_scoped(compute, *[plgpu.ACC((HALF, width), jnp.float32)] * parts)

            @pl.when(high <= low)
            def _():
                ring.skip(step, count)

            return step + count

        roles(count_g[0] * across, blocks, Producer(ring, produce), consume, entry)

    w_tile = (width, DEPTH) if transpose else (DEPTH, width)
    stages = smem((tiling.stages, 2, HALF, DEPTH), xs[0].dtype), smem((tiling.stages, parts, *w_tile), w.dtype)
    scale = glu.scale_M if glu else jnp.zeros(HALF, jnp.float32)
    out = jax.ShapeDtypeStruct((M, N), dtype)
    return launch(tiling, body, out, stages, 2 + parts, (*xs, w, *tiles, scale))


def outer_products(
    x_MD: jax.Array,
    dy_MF: jax.Array | tuple[jax.Array, ...],
    sizes_E: jax.Array,
    *,
    out_dtype: Any = None,
    tiling: Tiling = DEFAULT,
) -> jax.Array:
    """x_eᵀ dy_e summed over the rows of every group → [E, D, F]; exactly 0 for an empty group.

    `dy_MF` may be given as its parts of equal width; shapes as in `rows_times_matrices`. What rows outside a group
    hold, NaN included, has no influence on it: they are replaced by 0 in shared memory.
    """
    dys = dy_MF if isinstance(dy_MF, tuple) else (dy_MF,)
    (M, D), part, E = x_MD.shape, dys[0].shape[1], sizes_E.shape[0]
    width, F = tiling.width(part), part * len(dys)
    across, per_group = F // width, D // (2 * HALF) * (F // width)
    dtype = jnp.dtype(out_dtype or x_MD.dtype)
    kit, blocks = Kit(tiling.interpret), tiling.grid

    def place(index: Any) -> tuple[Any, Any]:
        rest = rem(index, per_group)
        return div(rest, across) * (2 * HALF), rem(rest, across) * width

    def aligned(start: Any) -> Any:
        return div(start, ALIGN) * ALIGN

    def first_row(start: Any, k: Any) -> Any:
        """First row of block k of a group, inside the array."""
        return pl.multiple_of(jnp.minimum(aligned(start) + k * DEPTH, M - DEPTH), ALIGN)

    def count_of(start: Any, stop: Any) -> Any:
        return jnp.where(stop > start, div(stop - aligned(start) + DEPTH - 1, DEPTH), 0)

    def body(*refs):
        dy_g, (x_g, bounds_g, out_g, x_s, dy_s, stage, full, empty, masked) = refs[: len(dys)], refs[len(dys) :]
        wg, ring = lax.axis_index("wg"), Ring(full, empty, tiling.stages)

        def entry(index: Any) -> tuple:
            group = jnp.minimum(div(index, per_group), E - 1)
            return tuple(bounds_g[group, column] for column in range(bounds.shape[1]))

        def produce(index: Any) -> tuple[Any, Any]:
            (d, f), (start, stop, *_) = place(index), entry(index)

            def load(k, slot):
                rows = pl.ds(first_row(start, k), DEPTH)
                for j in range(2):
                    plgpu.copy_gmem_to_smem(x_g.at[rows, span(d + j * HALF, HALF)], x_s.at[slot, j], full.at[slot])
                piece = lambda ref, at: ref.at[rows, span(at, width)]  # noqa: E731
                load_part(dy_g, part, f, piece, dy_s.at[slot], full.at[slot])

            return count_of(start, stop), load

        def select(slot: Any, low: Any, high: Any) -> None:
            """Zeroes the rows of a stage outside low..high: each warpgroup its x, and half of dy."""
            half = width // 2
            for ref, width_s in ((x_s.at[slot, wg], HALF), (dy_s.at[slot, :, pl.ds(wg * half, half)], half)):
                row = kit.iota((DEPTH, width_s), 0)
                inside = jnp.logical_and(row >= low, row < high)
                kit.store(ref, jnp.where(inside, kit.load(ref), jnp.zeros((), x_MD.dtype)))
            plgpu.commit_smem()
            plgpu.barrier_arrive(masked)
            plgpu.barrier_wait(masked)

        def consume(index, step, start, stop, *group):
            (d, f), count = place(index), count_of(start, stop)
            head = jnp.where(jnp.logical_and(count > 0, start > aligned(start)), 1, 0)
            whole = jnp.maximum(head, div(stop - aligned(start), DEPTH))

            def compute(acc):
                def multiply(k, slot):
                    plgpu.wgmma(acc, x_s.at[slot, wg].transpose((1, 0)), dy_s.at[slot])
                    plgpu.wgmma_wait(1)
                    ring.release(step + k - 1, k > 0)

                def edge(k):
                    slot, row = ring.wait(step + k), aligned(start) + k * DEPTH
                    low, high = jnp.maximum(row, start), jnp.minimum(row + DEPTH, stop)
                    select(slot, low - first_row(start, k), high - first_row(start, k))
                    multiply(k, slot)

                pl.loop(0, head)(edge)
                pl.loop(head, whole)(lambda k: multiply(k, ring.wait(step + k)))
                pl.loop(whole, count)(edge)
                value = acc[...]
                ring.release(step + count - 1, count > 0)
                value = value.astype(dtype)
                out = out_g.at[group[0] if group else div(index, per_group)]
                store(value, wg, stage, out, d + wg * HALF, f)

            pl.run_scoped(compute, plgpu.ACC((HALF, width), jnp.float32))
            return step + count

        roles(jnp.int32(E * per_group), blocks, Producer(ring, produce), consume, entry, tiling.largest_first)

    ends = jnp.cumsum(sizes_E.astype(jnp.int32))
    bounds = jnp.stack([ends - sizes_E, ends], axis=1).astype(jnp.int32)
    if tiling.largest_first:
        order = jnp.argsort(sizes_E, descending=True).astype(jnp.int32)
        bounds = jnp.concatenate([bounds[order], order[:, None]], axis=1)
    stages = smem((tiling.stages, 2, DEPTH, HALF), x_MD.dtype), smem((tiling.stages, DEPTH, width), x_MD.dtype)
    args = (*(dy.astype(x_MD.dtype) for dy in dys), x_MD, bounds)
    return launch(tiling, body, jax.ShapeDtypeStruct((E, D, F), dtype), stages, 3, args)
