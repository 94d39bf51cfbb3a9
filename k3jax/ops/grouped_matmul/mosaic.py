"""Grouped products of ragged rows as Mosaic GPU kernels (Hopper): y = x w_e, dx = dy w_eᵀ, dw_e = x_eᵀ dy_e.

One producer warpgroup fills a ring of shared-memory stages by TMA; two consumer warpgroups run wgmma, 64 rows of the
output each, and store by TMA. The grid is persistent, and the ring runs on from tile to tile, so the loads of a tile
overlap the epilogue of the one before.

Rows need no alignment, but a swizzled TMA copy starts at a multiple of 8 rows. A group is cut into half-tiles of 64
rows from the last such row before it; the last half-tile is moved back to end with the group, and computes a few rows a
second time, to the same bits. Where a half-tile holds rows of two groups only its own are stored, in copies of 32 to 1
rows, which is slower: groups aligned to 8 rows avoid it. Rows past the last group form a group without a matrix, whose
product has no terms: zeros.

Legend: M rows, D input width, F output width, E groups, N width of a result, K length of a sum.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import ROW, Kit, along_rows, smem

HALF = 64  # rows of one consumer warpgroup: the height of wgmma
ALIGN = 8  # rows of a swizzled tile
_DEPTH = 64  # terms of a sum in one stage: 128 bytes, the widest swizzle
_LINE = 128  # bytes of a row of an output stage


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut and where it runs.

    `columns` × 128 rows is the output tile of a block, `stages` the depth of the ring, `blocks` the size of the grid
    (None: the multiprocessors of the device).
    """

    columns: int = 256
    stages: int = 4
    blocks: int | None = None
    interpret: bool = False

    def width(self, columns: int) -> int:
        """Columns of a tile, a divisor of `columns` (itself a multiple of 128)."""
        fitting = [w for w in (self.columns, 256, 128, 64) if w <= self.columns and columns % w == 0]
        return fitting[0]

    @property
    def grid(self) -> int:
        if self.blocks is not None:
            return self.blocks
        abstract = jax.sharding.get_abstract_mesh().abstract_device
        return (abstract.num_cores if abstract else None) or jax.devices()[0].core_count


DEFAULT = Tiling()


class RowTiles(NamedTuple):
    """Pairs of half-tiles, in the order of rows."""

    table: jax.Array  # [T, 8] int32: group (E: no matrix), row of each half, low and high of the rows each stores
    count: jax.Array  # [1] int32, used entries


def row_tiles(sizes_E: jax.Array, rows: int) -> RowTiles:
    """Cuts every group, and the rows past the last one, into half-tiles. `rows` is a multiple of 8, at least 64."""
    E = sizes_E.shape[0]
    sizes = jnp.append(sizes_E, rows - jnp.sum(sizes_E)).astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    low, high = (ends - sizes) // ALIGN * ALIGN, -(-ends // ALIGN) * ALIGN
    tiles = jnp.where(sizes > 0, -(-(high - low) // (2 * HALF)), 0)
    last = jnp.cumsum(tiles)
    t = jnp.arange((rows + (2 * HALF + 2 * ALIGN) * (E + 1)) // (2 * HALF), dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(t[:, None] >= last, axis=1, dtype=jnp.int32), E)
    half = 2 * (t - (last - tiles)[group])

    def place(half: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        inside = low[group] + HALF * half < high[group]
        row = jnp.clip(high[group] - HALF, low[group], low[group] + HALF * jnp.where(inside, half, 0))
        row = jnp.minimum(row, rows - HALF)
        start, stop = jnp.maximum((ends - sizes)[group] - row, 0), jnp.minimum(ends[group] - row, HALF)
        return row, jnp.where(inside, start, 0), jnp.where(inside, stop, 0)

    (row_a, *bounds_a), (row_b, *bounds_b) = place(half), place(half + 1)
    table = jnp.stack([group, row_a, row_b, *bounds_a, *bounds_b, jnp.zeros_like(t)], axis=1)
    return RowTiles(table.astype(jnp.int32), last[-1:].astype(jnp.int32))


def enough_rows(rows: int) -> int:
    """The rows that the kernels need: a multiple of 8, at least 64."""
    return max(-(-rows // ALIGN) * ALIGN, HALF)


def pad_rows(x: jax.Array) -> jax.Array:
    """`x` with rows of 0 behind it until the kernels take it."""
    more = enough_rows(len(x)) - len(x)
    return jnp.pad(x, ((0, more), (0, 0))) if more else x


def _rem(i: Any, n: int) -> Any:
    return lax.rem(i, jnp.int32(n))


def _div(i: Any, n: int) -> Any:
    return lax.div(i, jnp.int32(n))


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Stages of shared memory between the producer and the consumers; `step` counts over all tiles of the block."""

    full: Any
    empty: Any
    stages: int

    def acquire(self, step: Any) -> Any:
        """Producer: the stage of `step`, once both consumers have left it."""
        slot = _rem(step, self.stages)

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def drain(self, steps: Any) -> None:
        """Producer: waits for the releases that nothing else has awaited."""
        for i in range(1, self.stages + 1):

            @pl.when(steps >= i)
            def _(i=i):
                plgpu.barrier_wait(self.empty.at[_rem(steps - i, self.stages)])

    def wait(self, step: Any) -> Any:
        """Consumer: the stage of `step`, once it is loaded."""
        slot = _rem(step, self.stages)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, step: Any, condition: Any) -> None:
        """Consumer: done with the stage of `step`, if `condition`."""

        @pl.when(condition)
        def _():
            plgpu.barrier_arrive(self.empty.at[_rem(step, self.stages)])

    def skip(self, step: Any, steps: Any) -> None:
        """Consumer: leaves `steps` stages unread."""

        @pl.loop(0, steps)
        def _(k):
            self.wait(step + k)
            self.release(step + k, True)


def _columns(start: Any, width: int) -> Any:
    return pl.ds(pl.multiple_of(start, width), width)


def _load_part(parts: tuple, width: int, index: Any, piece: Any, target: Any, barrier: Any) -> None:
    """Loads `piece(ref, index)` from the one of `parts`, each `width` wide, that holds column `index`."""
    for j, ref in enumerate(parts):

        def load(ref=ref, j=j):
            plgpu.copy_gmem_to_smem(piece(ref, index - j * width), target, barrier)

        if len(parts) == 1:
            load()
        else:
            pl.when(jnp.logical_and(index >= j * width, index < (j + 1) * width))(load)


def _store(value: jax.Array, wg: Any, stage: Any, out: Any, row: Any, column: Any, only: tuple | None = None) -> None:
    """64 rows of registers to `out[row:, column:]`, 128 bytes of each at a time; `only` = rows low..high of them."""
    tiled, plain = stage
    across = _LINE // value.dtype.itemsize
    chunks = value.shape[1] // across
    pending = 1 if chunks % 2 == 0 else 0  # an even number of chunks ends on the stage that the next tile fills last

    def fill(ref: Any, c: int, pending: int) -> None:
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        ref[...] = value[:, c * across : (c + 1) * across]
        plgpu.commit_smem()

    def store_all():
        for c in range(chunks):
            ref = tiled.at[wg, c % 2]
            fill(ref, c, pending)
            plgpu.copy_smem_to_gmem(ref, out.at[pl.ds(row, HALF), _columns(column + c * across, across)])

    def store_some(low: Any, high: Any):
        for c in range(chunks):
            ref, start = plain.at[wg, c % 2], low
            fill(ref, c, 0)
            for size in (32, 16, 8, 4, 2, 1):  # TMA copies have static sizes
                taken = jnp.bitwise_and(high - low, size)

                @pl.when(taken != 0)
                def _(size=size, start=start, c=c, ref=ref):
                    target = out.at[pl.ds(row + start, size), _columns(column + c * across, across)]
                    plgpu.copy_smem_to_gmem(ref.at[pl.ds(start, size)], target)

                start = start + taken

    if only is None:
        store_all()
    else:
        whole = only[1] - only[0] == HALF
        pl.when(whole)(store_all)
        pl.when(jnp.logical_not(whole))(lambda: store_some(*only))


def _roles(tiles: Any, blocks: int, produce: Any, consume: Any, entry: Any) -> None:
    """Walks the tiles that are this block's, tile i being that of block i mod `blocks`, in all three warpgroups.

    `produce(index, step) → step`; `consume(index, step, *entry(index)) → step`, whose entry was read a tile ahead.
    """
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    mine = jnp.maximum(_div(tiles - block + blocks - 1, blocks), 0)

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        produce.drain(lax.fori_loop(0, mine, lambda i, step: produce.tile(block + i * blocks, step), jnp.int32(0)))

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def tile(i, carry):
            following = entry(block + (i + 1) * blocks)
            return consume(block + i * blocks, *carry), *following

        lax.fori_loop(0, mine, tile, (jnp.int32(0), *entry(block)))
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Producer:
    """`terms(index)` gives how many stages a tile fills and the function that fills one."""

    ring: _Ring
    terms: Any

    def tile(self, index: Any, step: Any) -> Any:
        count, load = self.terms(index)

        def fill(k, step):
            load(k, self.ring.acquire(step))
            return step + 1

        return lax.fori_loop(0, count, fill, step)

    def drain(self, steps: Any) -> None:
        self.ring.drain(steps)


def _launch(tiling: Tiling, body: Any, out: Any, stages: tuple, copies: int, args: tuple) -> jax.Array:
    """`stages`: shared memory of the two operands; `copies`: TMA copies that fill a stage."""
    shape = (2, 2, HALF, _LINE // out.dtype.itemsize)  # warpgroup, slot
    return Kit(tiling.interpret).kernel(
        body,
        out_type=out,
        grid=(tiling.grid,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            *stages,
            plgpu.RefUnion(smem(shape, out.dtype), plgpu.SMEM(shape, out.dtype)),
            plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*args)


class Glu(NamedTuple):
    """scale · SiTU(gate, up) in the epilogue."""

    scale_M: jax.Array  # float32
    beta: float
    linear_beta: float | None

    def apply(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """In registers; 1 / (1 + e^-g) keeps its relative accuracy where the sigmoid is near 0."""
        if self.linear_beta is not None:
            up = self.linear_beta * jnp.tanh(up * (1 / self.linear_beta))
        return self.beta * jnp.tanh(gate * (1 / self.beta)) * up / (1 + jnp.exp(-gate))


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
    across, terms = N // width, part * len(xs) // _DEPTH
    dtype = jnp.dtype(out_dtype or xs[0].dtype)
    kit, blocks = Kit(tiling.interpret), tiling.grid

    def body(*refs):
        x_g, (w_g, table_g, count_g, scale_g, out_g, x_s, w_s, stage, full, empty, _) = refs[: len(xs)], refs[len(xs) :]
        wg, ring = lax.axis_index("wg"), _Ring(full, empty, tiling.stages)

        def produce(index: Any) -> tuple[Any, Any]:
            t, column = _div(index, across), _rem(index, across) * width
            group = table_g[t, 0]
            rows = [pl.multiple_of(table_g[t, 1 + j], ALIGN) for j in range(2)]

            def load(k, slot):
                term = k * _DEPTH
                for j in range(2):
                    piece = lambda ref, at, j=j: ref.at[pl.ds(rows[j], HALF), _columns(at, _DEPTH)]  # noqa: E731
                    _load_part(x_g, part, term, piece, x_s.at[slot, j], full.at[slot])
                for j in range(parts):
                    at = _columns(term, _DEPTH), _columns(column + j * N, width)
                    source = w_g.at[group, *(at[::-1] if transpose else at)]
                    plgpu.copy_gmem_to_smem(source, w_s.at[slot, j], full.at[slot])

            return jnp.where(group < E, terms, 0), load

        def entry(index: Any) -> tuple:
            t = jnp.minimum(_div(index, across), tiles.table.shape[0] - 1)
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
                _store(value.astype(dtype), wg, stage, out_g, row, _rem(index, across) * width, (low, high))

            @pl.when(high > low)
            def _():
                pl.run_scoped(compute, *[plgpu.ACC((HALF, width), jnp.float32)] * parts)

            @pl.when(high <= low)
            def _():
                ring.skip(step, count)

            return step + count

        _roles(count_g[0] * across, blocks, _Producer(ring, produce), consume, entry)

    w_tile = (width, _DEPTH) if transpose else (_DEPTH, width)
    stages = smem((tiling.stages, 2, HALF, _DEPTH), xs[0].dtype), smem((tiling.stages, parts, *w_tile), w.dtype)
    scale = glu.scale_M if glu else jnp.zeros(HALF, jnp.float32)
    out = jax.ShapeDtypeStruct((M, N), dtype)
    return _launch(tiling, body, out, stages, 2 + parts, (*xs, w, *tiles, scale))


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
        rest = _rem(index, per_group)
        return _div(rest, across) * (2 * HALF), _rem(rest, across) * width

    def aligned(start: Any) -> Any:
        return _div(start, ALIGN) * ALIGN

    def first_row(start: Any, k: Any) -> Any:
        """First row of block k of a group, inside the array."""
        return pl.multiple_of(jnp.minimum(aligned(start) + k * _DEPTH, M - _DEPTH), ALIGN)

    def count_of(start: Any, stop: Any) -> Any:
        return jnp.where(stop > start, _div(stop - aligned(start) + _DEPTH - 1, _DEPTH), 0)

    def body(*refs):
        dy_g, (x_g, bounds_g, out_g, x_s, dy_s, stage, full, empty, masked) = refs[: len(dys)], refs[len(dys) :]
        wg, ring = lax.axis_index("wg"), _Ring(full, empty, tiling.stages)

        def entry(index: Any) -> tuple:
            group = jnp.minimum(_div(index, per_group), E - 1)
            return bounds_g[group, 0], bounds_g[group, 1]

        def produce(index: Any) -> tuple[Any, Any]:
            (d, f), (start, stop) = place(index), entry(index)

            def load(k, slot):
                rows = pl.ds(first_row(start, k), _DEPTH)
                for j in range(2):
                    plgpu.copy_gmem_to_smem(x_g.at[rows, _columns(d + j * HALF, HALF)], x_s.at[slot, j], full.at[slot])
                piece = lambda ref, at: ref.at[rows, _columns(at, width)]  # noqa: E731
                _load_part(dy_g, part, f, piece, dy_s.at[slot], full.at[slot])

            return count_of(start, stop), load

        def select(slot: Any, low: Any, high: Any) -> None:
            """Zeroes the rows of a stage outside low..high: each warpgroup its x, and half of dy."""
            half = width // 2
            for ref, columns in ((x_s.at[slot, wg], HALF), (dy_s.at[slot, :, pl.ds(wg * half, half)], half)):
                row = kit.iota((_DEPTH, columns), 0)
                inside = jnp.logical_and(row >= low, row < high)
                kit.store(ref, jnp.where(inside, kit.load(ref), jnp.zeros((), x_MD.dtype)))
            plgpu.commit_smem()
            plgpu.barrier_arrive(masked)
            plgpu.barrier_wait(masked)

        def consume(index, step, start, stop):
            (d, f), count = place(index), count_of(start, stop)
            head = jnp.where(jnp.logical_and(count > 0, start > aligned(start)), 1, 0)
            whole = jnp.maximum(head, _div(stop - aligned(start), _DEPTH))

            def compute(acc):
                def multiply(k, slot):
                    plgpu.wgmma(acc, x_s.at[slot, wg].transpose((1, 0)), dy_s.at[slot])
                    plgpu.wgmma_wait(1)
                    ring.release(step + k - 1, k > 0)

                def edge(k):
                    slot, row = ring.wait(step + k), aligned(start) + k * _DEPTH
                    low, high = jnp.maximum(row, start), jnp.minimum(row + _DEPTH, stop)
                    select(slot, low - first_row(start, k), high - first_row(start, k))
                    multiply(k, slot)

                pl.loop(0, head)(edge)
                pl.loop(head, whole)(lambda k: multiply(k, ring.wait(step + k)))
                pl.loop(whole, count)(edge)
                value = acc[...]
                ring.release(step + count - 1, count > 0)
                _store(value.astype(dtype), wg, stage, out_g.at[_div(index, per_group)], d + wg * HALF, f)

            pl.run_scoped(compute, plgpu.ACC((HALF, width), jnp.float32))
            return step + count

        _roles(jnp.int32(E * per_group), blocks, _Producer(ring, produce), consume, entry)

    ends = jnp.cumsum(sizes_E.astype(jnp.int32))
    bounds = jnp.stack([ends - sizes_E, ends], axis=1).astype(jnp.int32)
    stages = smem((tiling.stages, 2, _DEPTH, HALF), x_MD.dtype), smem((tiling.stages, _DEPTH, width), x_MD.dtype)
    args = (*(dy.astype(x_MD.dtype) for dy in dys), x_MD, bounds)
    return _launch(tiling, body, jax.ShapeDtypeStruct((E, D, F), dtype), stages, 3, args)
