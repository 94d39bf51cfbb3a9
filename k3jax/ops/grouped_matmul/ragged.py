"""What the experts' Mosaic GPU kernels (Hopper) share: half-tiles of ragged rows, the ring of stages, stores.

One producer warpgroup fills a ring of shared-memory stages by TMA; two consumer warpgroups run wgmma, 64 rows of the
output each, and store by TMA. The grid is persistent, and the ring runs on from tile to tile, so the loads of a tile
overlap the epilogue of the one before.

Rows need no alignment, but a swizzled TMA copy starts at a multiple of 8 rows. A group is cut into half-tiles of 64
rows from the last such row before it; the last half-tile is moved back to end with the group, and computes a few rows a
second time, to the same bits. Where a half-tile holds rows of two groups only its own are stored, in copies of 32 to 1
rows, which is slower: groups aligned to 8 rows avoid it. Rows past the last group form a group without a matrix, whose
product has no terms: zeros.

What the products of `mosaic.py` use by default has run on an H200; turning `roles` have not yet.

Legend: M rows, E groups, T pairs of half-tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import Kit, multiprocessors, smem

HALF = 64  # rows of one consumer warpgroup: the height of wgmma
ALIGN = 8  # rows of a swizzled tile
DEPTH = 64  # terms of a sum in one stage: 128 bytes, the widest swizzle
LINE = 128  # bytes of a row of an output stage


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut and where it runs.

    `columns` × 128 rows is the output tile of a block, `stages` the depth of the ring, `blocks` the size of the grid
    (None: the multiprocessors of the device). `largest_first` takes the groups of a weight gradient by falling size,
    dealt back and forth, so that uneven groups load all blocks alike: not yet run on a GPU.
    """

    columns: int = 256
    stages: int = 4
    blocks: int | None = None
    interpret: bool = False
    largest_first: bool = False

    def width(self, columns: int) -> int:
        """Columns of a tile, a divisor of `columns` (itself a multiple of 128)."""
        fitting = [w for w in (self.columns, 256, 128, 64) if w <= self.columns and columns % w == 0]
        return fitting[0]

    @property
    def grid(self) -> int:
        if self.blocks is not None:
            return self.blocks
        return multiprocessors()


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


def rem(i: Any, n: int) -> Any:
    return lax.rem(i, jnp.int32(n))


def div(i: Any, n: int) -> Any:
    return lax.div(i, jnp.int32(n))


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages of shared memory between the producer and the consumers; `step` counts over all tiles of the block."""

    full: Any
    empty: Any
    stages: int

    def acquire(self, step: Any) -> Any:
        """Producer: the stage of `step`, once both consumers have left it."""
        slot = rem(step, self.stages)

        @pl.when(step >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def drain(self, steps: Any) -> None:
        """Producer: waits for the releases that nothing else has awaited."""
        for i in range(1, self.stages + 1):

            @pl.when(steps >= i)
            def _(i=i):
                plgpu.barrier_wait(self.empty.at[rem(steps - i, self.stages)])

    def wait(self, step: Any) -> Any:
        """Consumer: the stage of `step`, once it is loaded."""
        slot = rem(step, self.stages)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, step: Any, condition: Any) -> None:
        """Consumer: done with the stage of `step`, if `condition`."""

        @pl.when(condition)
        def _():
            plgpu.barrier_arrive(self.empty.at[rem(step, self.stages)])

    def skip(self, step: Any, steps: Any) -> None:
        """Consumer: leaves `steps` stages unread."""

        @pl.loop(0, steps)
        def _(k):
            self.wait(step + k)
            self.release(step + k, True)


def span(start: Any, width: int) -> Any:
    return pl.ds(pl.multiple_of(start, width), width)


def load_part(parts: tuple, width: int, index: Any, piece: Any, target: Any, barrier: Any) -> None:
    """Loads `piece(ref, index)` from the one of `parts`, each `width` wide, that holds column `index`."""
    for j, ref in enumerate(parts):

        def load(ref=ref, j=j):
            plgpu.copy_gmem_to_smem(piece(ref, index - j * width), target, barrier)

        if len(parts) == 1:
            load()
        else:
            pl.when(jnp.logical_and(index >= j * width, index < (j + 1) * width))(load)


def store(value: jax.Array, wg: Any, stage: Any, out: Any, row: Any, column: Any, only: tuple | None = None) -> None:
    """64 rows of registers to `out[row:, column:]`, 128 bytes of each at a time; `only` = rows low..high of them."""
    across = LINE // value.dtype.itemsize
    chunks = value.shape[1] // across
    # an even number of chunks ends on the slot that the next tile fills last
    pending = 1 if chunks % 2 == 0 else 0
    lines = [slice(c * across, (c + 1) * across) for c in range(chunks)]

    def store_all():
        for c, line in enumerate(lines):
            _store_whole(value, line, wg, stage, c % 2, pending, out, row, column)

    def store_some(low: Any, high: Any):
        for c, line in enumerate(lines):
            _store_some(value, line, wg, stage, c % 2, out, row, column, low, high)

    if only is None:
        store_all()
    else:
        whole = only[1] - only[0] == HALF
        pl.when(whole)(store_all)
        pl.when(jnp.logical_not(whole))(lambda: store_some(*only))


def _fill(ref: Any, value: jax.Array, line: slice, pending: int) -> None:
    plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
    ref[...] = value[:, line]
    plgpu.commit_smem()


def _store_whole(
    value: jax.Array, line: slice, wg: Any, stage: Any, slot: int, pending: int, out: Any, row: Any, column: Any
) -> None:
    ref = stage[0].at[wg, slot]
    _fill(ref, value, line, pending)
    plgpu.copy_smem_to_gmem(ref, out.at[pl.ds(row, HALF), span(column + line.start, line.stop - line.start)])


def _store_some(
    value: jax.Array, line: slice, wg: Any, stage: Any, slot: int, out: Any, row: Any, column: Any, low: Any, high: Any
) -> None:
    ref, start = stage[1].at[wg, slot], low
    _fill(ref, value, line, 0)
    for size in (32, 16, 8, 4, 2, 1):  # TMA copies have static sizes
        taken = jnp.bitwise_and(high - low, size)

        @pl.when(taken != 0)
        def _(size=size, start=start):
            target = out.at[pl.ds(row + start, size), span(column + line.start, line.stop - line.start)]
            plgpu.copy_smem_to_gmem(ref.at[pl.ds(start, size)], target)

        start = start + taken


def roles(tiles: Any, blocks: int, produce: Any, consume: Any, entry: Any, turning: bool = False) -> None:
    """Walks the tiles that are this block's in all three warpgroups.

    `produce(index, step) → step`; `consume(index, step, *entry(index)) → step`, whose entry was read a tile ahead. Tile
    i is that of block i mod `blocks`; `turning` deals every second round backwards, so that tiles of falling size give
    all blocks nearly the same work.
    """
    wg, block = lax.axis_index("wg"), lax.axis_index("block")

    def index_of(turn: Any) -> Any:
        return (place(turn) if turning else block) + turn * blocks

    def place(turn: Any) -> Any:
        return jnp.where(rem(turn, 2) == 1, blocks - 1 - block, block)

    if turning:
        rounds = div(tiles, blocks)
        mine = rounds + jnp.where(place(rounds) < rem(tiles, blocks), 1, 0)
    else:
        mine = jnp.maximum(div(tiles - block + blocks - 1, blocks), 0)

    @pl.when(wg == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        produce.drain(lax.fori_loop(0, mine, lambda i, step: produce.tile(index_of(i), step), jnp.int32(0)))

    @pl.when(wg < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")

        def tile(i, carry):
            following = entry(index_of(i + 1))
            return consume(index_of(i), *carry), *following

        lax.fori_loop(0, mine, tile, (jnp.int32(0), *entry(block)))
        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class Producer:
    """`terms(index)` gives how many stages a tile fills and the function that fills one."""

    ring: Ring
    terms: Any

    def tile(self, index: Any, step: Any) -> Any:
        count, load = self.terms(index)

        def fill(k, step):
            load(k, self.ring.acquire(step))
            return step + 1

        return lax.fori_loop(0, count, fill, step)

    def drain(self, steps: Any) -> None:
        self.ring.drain(steps)


def launch(tiling: Tiling, body: Any, out: Any, stages: tuple, copies: int, args: tuple) -> Any:
    """`stages`: shared memory of the two operands; `copies`: TMA copies that fill a stage."""
    dtype = jax.tree.leaves(out)[0].dtype
    shape = (2, 2, HALF, LINE // dtype.itemsize)  # warpgroup, slot
    return Kit(tiling.interpret).kernel(
        body,
        out_type=out,
        grid=(tiling.grid,),
        grid_names=("block",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            *stages,
            plgpu.RefUnion(smem(shape, dtype), plgpu.SMEM(shape, dtype)),
            plgpu.Barrier(num_arrivals=copies, num_barriers=tiling.stages),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*args)
