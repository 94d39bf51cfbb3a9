"""Products of matrices that are symmetric, as a Mosaic GPU kernel (Hopper): A Aᵀ, and a polynomial of it.

Half of such a product is the other half's mirror image: of its tiles of 128 × 128 only those on and above the diagonal
are computed, and each of them is stored twice, as it is and transposed. A matrix of 6 × 6 tiles takes 21 of them.

Each block has one warpgroup that fills a ring of stages by TMA and one that runs wgmma and stores by TMA. The grid is
persistent, with two blocks on a multiprocessor: one multiplies while the other stores.

Legend: n matrices, M rows of each, K columns, T tiles of one product, S steps of a sum.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3jax.ops.mosaic import Kit, multiprocessors, smem

TILE = 128
DEPTH = 64  # terms of a sum in one stage: 128 bytes, the widest swizzle
STAGES = 3  # with two, products take half as long again (H200)
SLOTS = 2  # pieces that may be on their way out
PIECE = 64  # rows and columns of what one copy stores


def why_not(rows: int, columns: int, dtype: Any) -> str | None:
    """Why the kernel does not take matrices of this shape; None if it does."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"it multiplies bfloat16, not {jnp.dtype(dtype).name}"
    if rows % TILE or columns % TILE or rows < 2 * TILE:
        return f"rows and columns must be multiples of {TILE}, and at least {2 * TILE} rows; got {rows} × {columns}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret", "blocks"))  # lowered once for all products of a shape
def symmetric_product(
    a_nMK: jax.Array, coefficients: jax.Array | None = None, *, interpret: bool = False, blocks: int | None = None
) -> jax.Array:
    """A Aᵀ of each matrix; with coefficients, for symmetric A: first · A A + second · A.

    Sums are float32 and rounded once. The result is symmetric to the bit.

    Args:
        a_nMK: bfloat16, M and K multiples of 128. With coefficients M = K, and each matrix equals its transpose.
        coefficients: float32 [2].
        interpret: run on the interpreter (any device).
        blocks: the size of the grid; None: two for each multiprocessor.

    Returns:
        [n, M, M] in the dtype of A.
    """
    (n, M, K), kit = a_nMK.shape, Kit(interpret)
    across, steps = M // TILE, K // DEPTH
    own = TILE // DEPTH  # stages that hold the columns of one tile
    polynomial = coefficients is not None
    table = np.asarray([(i, j) for i in range(across) for j in range(i, across)], np.int32)
    T = len(table)
    grid = blocks or (2 if interpret else 2 * multiprocessors())
    tiles = n * T

    def body(a_g, table_g, coefficients_g, out_g, left_s, right_s, staged, full, empty):
        wg, block = lax.axis_index("wg"), lax.axis_index("block")
        mine = lax.div(jnp.int32(tiles - 1) - block, jnp.int32(grid)) + 1

        def place(turn: Any) -> tuple[Any, Any, Any]:
            """Matrix, and row and column of the tile."""
            index = block + turn * grid
            t = lax.rem(index, jnp.int32(T))
            return lax.div(index, jnp.int32(T)), table_g[t, 0], table_g[t, 1]

        @pl.when(wg == 1)
        def _():
            plgpu.set_max_registers(40, action="decrease")

            def fill(turn, step):
                matrix, i, j = place(turn)

                def load(k, step):
                    slot = lax.rem(step, jnp.int32(STAGES))

                    @pl.when(step >= STAGES)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    # the terms of the tile's own columns last: what is added to the product lies in them
                    term = lax.rem(k + (j + 1) * own, jnp.int32(steps)) if polynomial else k
                    terms = pl.ds(pl.multiple_of(term * DEPTH, DEPTH), DEPTH)
                    for tile, target in ((i, left_s), (j, right_s)):
                        rows = pl.ds(pl.multiple_of(tile * TILE, TILE), TILE)
                        plgpu.copy_gmem_to_smem(a_g.at[matrix, rows, terms], target.at[slot], full.at[slot])
                    return step + 1

                return lax.fori_loop(0, steps, load, step)

            filled = lax.fori_loop(0, mine, fill, jnp.int32(0))
            for i in range(1, STAGES + 1):

                @pl.when(filled >= i)
                def _(i=i):
                    plgpu.barrier_wait(empty.at[lax.rem(filled - i, jnp.int32(STAGES))])

        @pl.when(wg == 0)
        def _():
            plgpu.set_max_registers(216, action="increase")

            def release(step):
                plgpu.barrier_arrive(empty.at[lax.rem(step, jnp.int32(STAGES))])

            def tile(turn, _):
                (matrix, i, j), first = place(turn), turn * steps

                def compute(acc):
                    def multiply(k):
                        slot = lax.rem(first + k, jnp.int32(STAGES))
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, left_s.at[slot], right_s.at[slot].transpose((1, 0)))
                        return slot

                    @pl.loop(0, steps - own)
                    def _(k):
                        multiply(k)
                        plgpu.wgmma_wait(1)

                        @pl.when(k > 0)
                        def _():
                            release(first + k - 1)

                    added = []
                    for k in range(steps - own, steps):
                        slot = multiply(k)
                        if polynomial:
                            added.append(kit.load(left_s.at[slot]))
                        plgpu.wgmma_wait(1)
                        if k > 0:
                            release(first + k - 1)
                    value = acc[...]
                    release(first + steps - 1)
                    if polynomial:
                        square, linear = coefficients_g[0], coefficients_g[1]
                    pieces = []
                    for c in range(TILE // PIECE):
                        columns = value[:, c * PIECE : (c + 1) * PIECE]
                        if polynomial:
                            columns = columns * square + added[c].astype(jnp.float32) * linear
                        columns = columns.astype(a_nMK.dtype)
                        pieces += [(r, c, columns[r * PIECE : (r + 1) * PIECE]) for r in range(TILE // PIECE)]

                    def at(tile_row, row, tile_column, column):
                        start = tile_row * TILE + row * PIECE, tile_column * TILE + column * PIECE
                        return out_g.at[matrix, *(pl.ds(pl.multiple_of(s, PIECE), PIECE) for s in start)]

                    def put(slot, piece, target, mirrored):
                        ref = staged.at[slot]
                        kit.store(kit.t(ref) if mirrored else ref, piece)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(ref, target)

                    def put_all(mirrored):
                        copies = [(piece, at(i, r, j, c), False) for r, c, piece in pieces]
                        if mirrored:
                            copies += [(piece, at(j, c, i, r), True) for r, c, piece in pieces]
                        for turn, copy in enumerate(copies):
                            # all that were there before are done once at most these are not
                            plgpu.wait_smem_to_gmem(min(turn, SLOTS - 1), wait_read_only=True)
                            put(turn % SLOTS, *copy)

                    pl.when(i == j)(lambda: put_all(mirrored=False))
                    pl.when(i != j)(lambda: put_all(mirrored=True))

                pl.run_scoped(compute, plgpu.ACC((TILE, TILE), jnp.float32))
                return ()

            lax.fori_loop(0, mine, tile, ())
            plgpu.wait_smem_to_gmem(0)

    if coefficients is None:
        coefficients = jnp.zeros(2, jnp.float32)
    stage = smem((STAGES, TILE, DEPTH), a_nMK.dtype)
    return kit.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, M, M), a_nMK.dtype),
        grid=(grid,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        scratch_types=[
            stage,
            stage,
            smem((SLOTS, PIECE, PIECE), a_nMK.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        ],
    )(a_nMK, jnp.asarray(table), coefficients)
