"""Rows picked by index as Mosaic GPU kernels (Hopper): one TMA copy for each.

XLA's gather of 1.5 KB rows takes three times as long as an H200's memory needs. A TMA copy of a row past the end fills
with zeros, so such indices cost nothing. Neither kernel has run on a GPU yet: the fill is
untested, as the interpreter is given a row of zeros instead.

Legend: N rows of the source, M picked rows, K rows of a sum, D width.
"""

from __future__ import annotations

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from k3jax.ops.mosaic import Kit

ROWS = 8  # of a gather's block
_TOKENS = 2  # of a sum's block


def _lines(x_ND: jax.Array) -> jax.Array:
    """[N, D / w, w]: a TMA copy takes at most 256 elements along an axis."""
    N, D = x_ND.shape
    return x_ND.reshape(N, -1, 256 if D % 256 == 0 else 128)


def _source(x_ND: jax.Array, index: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Lines of `x_ND`, and `index` limited to one past the end, which the interpreter needs to be a row."""
    index = jnp.minimum(index, len(x_ND))
    return _lines(jnp.pad(x_ND, ((0, 1), (0, 0))) if interpret else x_ND), index


def gather_rows(x_ND: jax.Array, index_M: jax.Array, interpret: bool = False) -> jax.Array:
    """`x_ND[index_M]` → [M, D], 0 where an index is N or more. M is a multiple of 8, D of 128."""
    source, index_M = _source(x_ND, index_M, interpret)
    line = source.shape[1:]

    def body(source_g, index_g, out_g, rows_s, arrived):
        start = lax.axis_index("tile") * ROWS
        picked = [index_g[start + r] for r in range(ROWS)]  # all at once: each waits for memory
        for r in range(ROWS):
            plgpu.copy_gmem_to_smem(source_g.at[picked[r]], rows_s.at[r], arrived)
        plgpu.barrier_wait(arrived)
        plgpu.copy_smem_to_gmem(rows_s, out_g.at[pl.ds(start, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    out = Kit(interpret).kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(index_M), *line), x_ND.dtype),
        grid=(len(index_M) // ROWS,),
        grid_names=("tile",),
        num_threads=1,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((ROWS, *line), x_ND.dtype), plgpu.Barrier(num_arrivals=ROWS)],
        kernel_name="gather_rows",
    )(source, index_M)
    return out.reshape(len(index_M), -1)


def sum_rows(x_MD: jax.Array, index_NK: jax.Array, interpret: bool = False) -> jax.Array:
    """Σ_k `x_MD[index_NK[:, k]]` → [N, D] in the dtype of x, summed in float32 in the order of k.

    An index of M or more adds 0. D is a multiple of 128.
    """
    N, K = index_NK.shape
    source, index_NK = _source(x_MD, index_NK, interpret)
    index_NK = jnp.pad(index_NK, ((0, -N % _TOKENS), (0, 0)), constant_values=len(x_MD))
    line, total = source.shape[1:], len(index_NK)
    kit = Kit(interpret)
    layout = plgpu.Layout.WG_STRIDED(line, vec_size=2 if line[0] * line[1] % 256 == 0 else 1)

    def body(source_g, index_g, out_g, rows_s, *arrived):
        start = lax.axis_index("tile") * _TOKENS
        picked = [[index_g[start + t, k] for k in range(K)] for t in range(_TOKENS)]
        for t in range(_TOKENS):
            for k in range(K):
                plgpu.copy_gmem_to_smem(source_g.at[picked[t][k]], rows_s.at[t, k], arrived[t])
        for t in range(_TOKENS):
            plgpu.barrier_wait(arrived[t])
            rows = [kit.load(rows_s.at[t, k], layout, optimized=False).astype(jnp.float32) for k in range(K)]
            value = rows[0]
            for row in rows[1:]:
                value = value + row
            out_g[start + t] = value.astype(x_MD.dtype)

    out = kit.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((total, *line), x_MD.dtype),
        grid=(total // _TOKENS,),
        grid_names=("tile",),
        num_threads=1,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((_TOKENS, K, *line), x_MD.dtype),
            *[plgpu.Barrier(num_arrivals=K) for _ in range(_TOKENS)],
        ],
        kernel_name="sum_rows",
    )(source, index_NK)
    return out.reshape(total, -1)[:N]
