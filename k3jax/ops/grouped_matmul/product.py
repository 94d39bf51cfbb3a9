"""`grouped_matmul`: one product per group of rows, by the implementation that fits.

Legend: E experts, D input width, F output width, M rows.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from k3jax.ops import mosaic as kit
from k3jax.ops.common import vary_alike
from k3jax.ops.grouped_matmul import mosaic, ragged, xla
from k3jax.ops.mx import PackedMX, unpacked

Implementation = Literal["reference", "ragged", "blocked", "pallas"]


def why_not_pallas(dtype: jnp.dtype, D: int, F: int, *, interpret: bool = False) -> str | None:
    """Why the Mosaic kernel cannot run [D → F] products of this dtype on the default device; None if it can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"its rows must be bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if D % 128 or F % 128:
        return f"its widths must be multiples of 128, not {D} and {F}"
    return None if interpret else kit.why_not_here()


def refuse_pallas(dtype: jnp.dtype, D: int, F: int, tiling: ragged.Tiling) -> None:
    """Raises a ValueError with the reason where "pallas" cannot run."""
    if reason := why_not_pallas(dtype, D, F, interpret=tiling.interpret):
        raise ValueError(f"grouped_matmul: 'pallas' cannot run: {reason}")


def default_implementation(rows: int, align: int, dtype: jnp.dtype, D: int, F: int) -> Implementation:
    """What `implementation=None` runs: "pallas" where it can, else "blocked" when groups are aligned, else "ragged"."""
    if why_not_pallas(dtype, D, F) is None:
        return "pallas"
    return "blocked" if align > 1 and rows % align == 0 else "ragged"


def grouped_matmul(
    x_MD: jax.Array,
    w_EDF: xla.Matrices,
    group_sizes_E: jax.Array,
    *,
    align: int = 1,
    implementation: Implementation | None = None,
    preferred_element_type: jnp.dtype | None = None,
    tiling: ragged.Tiling = ragged.DEFAULT,
) -> jax.Array:
    """Multiplies each row by the matrix of its group: the first `group_sizes_E[0]` rows by `w_EDF[0]`, and so on.

    Rows past the last group output exactly 0, get exactly 0 as gradient and do not touch the gradient of `w_EDF`, even
    if they or their cotangents hold NaN; a group without rows gets exactly 0.

    Args:
        w_EDF: of the dtype of `x_MD`. "pallas" also takes float32 matrices with 16-bit rows: they are rounded to the
            dtype of the rows, and their gradient is a float32 sum that was never rounded. `PackedMX` codes [E, D, F]
            give what their numbers in the dtype of `x_MD` give, without a gradient: "blocked" decodes the matrices that
            it gathers, and so the experts that have rows only; the others decode all at once.
        align: promise that every group size is a multiple of it.
        implementation: "reference" gathers one matrix per row; "ragged" is `jax.lax.ragged_dot`, slow on GPUs and CPUs;
            "blocked" needs `align` and gathers one matrix per `align` rows for a batched product; "pallas" is a kernel
            for Hopper GPUs with 16-bit rows and widths that are multiples of 128, fastest when `align` is a multiple
            of 8.
        preferred_element_type: dtype of the result, by default that of x; accumulated in at least float32 in any case.
        tiling: how "pallas" cuts the product, and whether it runs in interpret mode.

    Returns:
        [M, F].

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown implementation, "blocked" without aligned rows, or
            "pallas" where it cannot run.
    """
    (M, D), (E, _, F) = x_MD.shape, w_EDF.shape
    name = implementation or default_implementation(M, align, x_MD.dtype, D, F)
    if D != w_EDF.shape[1] or group_sizes_E.shape != (E,):
        raise ValueError(
            f"grouped_matmul: x {x_MD.shape}, w {w_EDF.shape} and group_sizes {group_sizes_E.shape}"
            " must be [M, D], [E, D, F] and [E]"
        )
    w_dtype = x_MD.dtype if isinstance(w_EDF, PackedMX) else w_EDF.dtype
    if x_MD.dtype != w_dtype and not (name == "pallas" and w_dtype == jnp.float32):
        raise ValueError(f"grouped_matmul: x and w must have one dtype, got {x_MD.dtype} and {w_dtype}")
    if name not in get_args(Implementation):
        raise ValueError(f"grouped_matmul: implementation must be one of {get_args(Implementation)}, got {name!r}")
    if name == "blocked" and (align < 2 or M % align):
        raise ValueError(f"grouped_matmul: 'blocked' needs align ≥ 2 that divides the rows, got {align} for {M}")
    if name == "pallas":
        refuse_pallas(x_MD.dtype, D, F, tiling)

    dtype = jnp.dtype(preferred_element_type or x_MD.dtype)
    if name == "blocked":
        return xla.blocked(align, dtype, *vary_alike(x_MD, w_EDF, group_sizes_E))
    w_EDF = unpacked(w_EDF, x_MD.dtype)
    if name == "pallas":
        return _pallas(dtype, tiling, *vary_alike(x_MD, w_EDF, group_sizes_E))
    if name == "ragged":
        return xla.ragged(dtype, *vary_alike(x_MD, w_EDF, group_sizes_E))
    return xla.reference(x_MD, w_EDF, group_sizes_E).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _pallas(dtype: jnp.dtype, tiling: ragged.Tiling, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array):
    return _pallas_fwd(dtype, tiling, x_MD, w_EDF, sizes_E)[0]


def _pallas_fwd(dtype: jnp.dtype, tiling: ragged.Tiling, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array):
    w = w_EDF.astype(x_MD.dtype)
    x = ragged.pad_rows(x_MD)
    y = mosaic.rows_times_matrices(x, w, ragged.row_tiles(sizes_E, len(x)), out_dtype=dtype, tiling=tiling)
    return y[: len(x_MD)], (x_MD, w, sizes_E, w_EDF[:0])  # the last for its dtype


def _pallas_bwd(dtype: jnp.dtype, tiling: ragged.Tiling, residuals, dy_MF: jax.Array):
    x_MD, w, sizes_E, like_w = residuals
    x, dy = ragged.pad_rows(x_MD), ragged.pad_rows(dy_MF.astype(x_MD.dtype))
    dx = mosaic.rows_times_matrices(dy, w, ragged.row_tiles(sizes_E, len(x)), transpose=True, tiling=tiling)
    dw = mosaic.outer_products(x, dy, sizes_E, out_dtype=like_w.dtype, tiling=tiling)
    return dx[: len(x_MD)], dw, None


_pallas.defvjp(_pallas_fwd, _pallas_bwd)
