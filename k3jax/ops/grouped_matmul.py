"""Matrix products of rows grouped by expert, and the layout that brings tokens into that order and back.

    layout = group_layout(experts_NK, valid_NK, num_experts, align)
    x_MD = dispatch(x_ND, layout)                                            rows of one expert contiguous
    y_MF = grouped_matmul(x_MD, w_EDF, layout.group_sizes_E, align=align)    y_r = x_r w_{expert of r}
    out_NF = combine(y_MF, layout, weights_NK)                               Σ_k weight · row of slot (n, k)

Nothing here scatters with an addition, so results do not depend on the order in which a GPU runs its threads: every
gradient is a gather through the inverse map, a sum over K in fixed order, or a matrix product.

Legend: N tokens, K experts of a token, E experts, D input width, F output width, M rows, b blocks, a rows in a block.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.common import einsum, vary_alike, wide, wide_dtype

Implementation = Literal["reference", "ragged", "blocked"]

_BATCH_ELEMENTS = 2**29  # of gathered weights held at once by "blocked": 1 GiB in bf16, 2 GiB for their gradient


class GroupLayout(NamedTuple):
    """Where each (token, choice) slot n·K + k lies in a buffer of M rows sorted by expert, and back."""

    row_of_NK: jax.Array  # [N, K] int32; M for an invalid slot
    slot_of_row: jax.Array  # [M] int32; N·K for a padding row
    group_sizes_E: jax.Array  # [E] int32, multiples of `align`; what lies past their sum is padding
    counts_E: jax.Array  # [E] int32, rows that hold a slot


def padded_rows(num_slots: int, num_experts: int, align: int) -> int:
    """Rows that hold any split of `num_slots` into groups padded to multiples of `align`, and no more."""
    return (num_slots + min(num_experts, num_slots) * (align - 1)) // align * align


def group_layout(experts_NK: jax.Array, valid_NK: jax.Array | None, num_experts: int, align: int = 1) -> GroupLayout:
    """Sorts slots by expert, then by token; each group starts at a multiple of `align`.

    Args:
        experts_NK: int32 in [0, num_experts).
        valid_NK: bool; slots with False get no row. None: all are valid.
    """
    N, K = experts_NK.shape
    M = padded_rows(N * K, num_experts, align)
    expert = jnp.asarray(experts_NK, jnp.int32).reshape(-1)
    if valid_NK is not None:
        expert = jnp.where(valid_NK.reshape(-1), expert, num_experts)
    counts = jnp.sum(expert[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    sizes = -(-counts // align) * align
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    # padding in front of a group, M for the invalid slots behind the last one
    shift = jnp.append(jnp.cumsum(sizes) - sizes - (jnp.cumsum(counts) - counts), M).astype(jnp.int32)
    row = jnp.minimum(jnp.arange(N * K, dtype=jnp.int32) + shift[expert[order]], M)
    row_of = jnp.zeros_like(order).at[order].set(row, unique_indices=True)
    slot_of_row = jnp.full((M,), N * K, jnp.int32).at[row].set(order, mode="drop")
    return GroupLayout(row_of.reshape(N, K), slot_of_row, sizes, counts)


def dispatch(x_ND: jax.Array, layout: GroupLayout) -> jax.Array:
    """Rows of the grouped buffer → [M, D]; padding rows are 0."""
    x_ND, *maps = vary_alike(x_ND, *layout)
    return _dispatch(x_ND, GroupLayout(*maps))


def combine(y_MD: jax.Array, layout: GroupLayout, weights_NK: jax.Array) -> jax.Array:
    """Σ_k weights_NK · row of slot (n, k), in at least float32 and in the order of k → [N, D].

    An invalid slot contributes 0, and no padding row is read.
    """
    y_MD, weights_NK, *maps = vary_alike(y_MD, weights_NK, *layout)
    return _combine(y_MD, weights_NK, GroupLayout(*maps))


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """`x[index]`, 0 where the index is past the end."""
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _dispatch(x_ND: jax.Array, layout: GroupLayout) -> jax.Array:
    return _rows(x_ND, layout.slot_of_row // layout.row_of_NK.shape[1])


def _dispatch_fwd(x_ND: jax.Array, layout: GroupLayout):
    return _dispatch(x_ND, layout), layout


def _dispatch_bwd(layout: GroupLayout, dx_MD: jax.Array):
    K = layout.row_of_NK.shape[1]
    terms = [wide(_rows(dx_MD, layout.row_of_NK[:, k])) for k in range(K)]
    return reduce(jnp.add, terms).astype(dx_MD.dtype), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def _combine(y_MD: jax.Array, weights_NK: jax.Array, layout: GroupLayout) -> jax.Array:
    K = weights_NK.shape[1]
    return reduce(jnp.add, [weights_NK[:, k, None] * wide(_rows(y_MD, layout.row_of_NK[:, k])) for k in range(K)])


def _combine_fwd(y_MD: jax.Array, weights_NK: jax.Array, layout: GroupLayout):
    return _combine(y_MD, weights_NK, layout), (y_MD, weights_NK, layout)


def _combine_bwd(residuals, d_out_ND: jax.Array):
    y_MD, weights_NK, layout = residuals
    K = weights_NK.shape[1]
    weight_M = _rows(weights_NK.reshape(-1), layout.slot_of_row)
    dy_MD = weight_M[:, None] * _rows(d_out_ND, layout.slot_of_row // K)
    d_weights = [jnp.sum(wide(_rows(y_MD, layout.row_of_NK[:, k])) * d_out_ND, axis=-1) for k in range(K)]
    return dy_MD.astype(y_MD.dtype), jnp.stack(d_weights, axis=1).astype(weights_NK.dtype), None


_combine.defvjp(_combine_fwd, _combine_bwd)


def default_implementation(rows: int, align: int) -> Implementation:
    """What `implementation=None` runs: "blocked" when groups are aligned, else "ragged"."""
    return "blocked" if align > 1 and rows % align == 0 else "ragged"


def grouped_matmul(
    x_MD: jax.Array,
    w_EDF: jax.Array,
    group_sizes_E: jax.Array,
    *,
    align: int = 1,
    implementation: Implementation | None = None,
    preferred_element_type: jnp.dtype | None = None,
) -> jax.Array:
    """Multiplies each row by the matrix of its group: the first `group_sizes_E[0]` rows by `w_EDF[0]`, and so on.

    Rows past the last group output exactly 0, get exactly 0 as gradient and do not touch the gradient of `w_EDF`, even
    if they or their cotangents hold NaN; a group without rows gets exactly 0.

    Args:
        align: promise that every group size is a multiple of it.
        implementation: "reference" gathers one matrix per row; "ragged" is `jax.lax.ragged_dot`, slow on GPUs and CPUs;
            "blocked" needs `align` and gathers one matrix per `align` rows for a batched product.
        preferred_element_type: dtype of the result, by default that of x; accumulated in at least float32 in any case.

    Returns:
        [M, F].

    Raises:
        ValueError: shapes or dtypes that do not fit, an unknown implementation, or "blocked" without aligned rows.
    """
    M, E = x_MD.shape[0], w_EDF.shape[0]
    name = implementation or default_implementation(M, align)
    if x_MD.shape[1] != w_EDF.shape[1] or group_sizes_E.shape != (E,):
        raise ValueError(
            f"grouped_matmul: x {x_MD.shape}, w {w_EDF.shape} and group_sizes {group_sizes_E.shape}"
            " must be [M, D], [E, D, F] and [E]"
        )
    if x_MD.dtype != w_EDF.dtype:
        raise ValueError(f"grouped_matmul: x and w must have one dtype, got {x_MD.dtype} and {w_EDF.dtype}")
    if name not in ("reference", "ragged", "blocked"):
        raise ValueError(f"grouped_matmul: implementation must be 'reference', 'ragged' or 'blocked', got {name!r}")
    if name == "blocked" and (align < 2 or M % align):
        raise ValueError(f"grouped_matmul: 'blocked' needs align ≥ 2 that divides the rows, got {align} for {M}")

    dtype = jnp.dtype(preferred_element_type or x_MD.dtype)
    if name == "blocked":
        return _blocked(align, dtype, *vary_alike(x_MD, w_EDF, group_sizes_E))
    if name == "ragged":
        return _ragged(dtype, *vary_alike(x_MD, w_EDF, group_sizes_E))
    return _reference(x_MD, w_EDF, group_sizes_E).astype(dtype)


def _group_of(start: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Index of the group that row `start` lies in, E past the last one."""
    return jnp.sum(start[:, None] >= jnp.cumsum(sizes_E), axis=1, dtype=jnp.int32)


def _reference(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    E = w_EDF.shape[0]
    group_M = _group_of(jnp.arange(x_MD.shape[0]), sizes_E)
    x = wide(jnp.where((group_M < E)[:, None], x_MD, 0))
    y = einsum("md,mdf->mf", x, wide(w_EDF)[jnp.minimum(group_M, E - 1)])
    return jnp.where((group_M < E)[:, None], y, 0)


def _head_rows(x: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """`x` with every row past the last group 0."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes_E))[:, None], x, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(dtype: jnp.dtype, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return _ragged_product(x_MD, w_EDF, sizes_E, dtype)


def _precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == wide_dtype(dtype) else None


def _ragged_product(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, dtype: jnp.dtype) -> jax.Array:
    y = jax.lax.ragged_dot(
        _head_rows(x_MD, sizes_E),
        w_EDF,
        sizes_E,
        precision=_precision(x_MD.dtype),
        preferred_element_type=wide_dtype(x_MD.dtype),
    )
    return _head_rows(y, sizes_E).astype(dtype)


def _ragged_fwd(dtype: jnp.dtype, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array):
    return _ragged(dtype, x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)


def _ragged_bwd(dtype: jnp.dtype, residuals, dy_MF: jax.Array):
    x_MD, w_EDF, sizes_E = residuals
    dy_MF = dy_MF.astype(x_MD.dtype)
    dw = jax.lax.ragged_dot_general(
        _head_rows(x_MD, sizes_E),
        _head_rows(dy_MF, sizes_E),
        sizes_E,
        jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]),
        precision=_precision(x_MD.dtype),
        preferred_element_type=wide_dtype(x_MD.dtype),
    )
    dw = jnp.where((sizes_E > 0)[:, None, None], dw, 0).astype(w_EDF.dtype)
    return _ragged_product(dy_MF, w_EDF.swapaxes(1, 2), sizes_E, x_MD.dtype), dw, None


_ragged.defvjp(_ragged_fwd, _ragged_bwd)


def _block_product(subscripts: str, x_bac: jax.Array, w_EDF: jax.Array, group_b: jax.Array, dtype: jnp.dtype):
    """Each block times its group's matrix; 0 past the last group. Bounds how many matrices are gathered at once."""

    def one(x_ac: jax.Array, group: jax.Array) -> jax.Array:
        w_DF = jax.lax.dynamic_index_in_dim(w_EDF, group, keepdims=False)
        return jnp.where(group < w_EDF.shape[0], einsum(subscripts, x_ac, w_DF), 0).astype(dtype)

    return jax.lax.map(lambda block: one(*block), (x_bac, group_b), batch_size=_batch(len(group_b), w_EDF))


def _batch(blocks: int, w_EDF: jax.Array) -> int:
    """Blocks whose matrices are gathered at once, in batches as even as can be."""
    batches = -(-blocks * w_EDF.shape[1] * w_EDF.shape[2] // _BATCH_ELEMENTS)
    return -(-blocks // min(max(batches, 1), blocks))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _blocked(align: int, dtype: jnp.dtype, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    group_b = _group_of(jnp.arange(0, x_MD.shape[0], align), sizes_E)
    blocks = x_MD.reshape(-1, align, x_MD.shape[1])
    return _block_product("ad,df->af", blocks, w_EDF, group_b, dtype).reshape(-1, w_EDF.shape[2])


def _blocked_fwd(align: int, dtype: jnp.dtype, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array):
    return _blocked(align, dtype, x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)


def _blocked_bwd(align: int, dtype: jnp.dtype, residuals, dy_MF: jax.Array):
    x_MD, w_EDF, sizes_E = residuals
    E, D, F = w_EDF.shape
    group_b = _group_of(jnp.arange(0, x_MD.shape[0], align), sizes_E)
    x, dy = (_head_rows(rows.astype(x_MD.dtype), sizes_E) for rows in (x_MD, dy_MF))
    x, dy = x.reshape(-1, align, D), dy.reshape(-1, align, F)
    dx = _block_product("af,df->ad", dy, w_EDF, group_b, x_MD.dtype).reshape(-1, D)

    def partial_dw(x_baD: jax.Array, dy_baF: jax.Array, group_b: jax.Array) -> jax.Array:
        # a product with a one-hot matrix, not a segment sum: that would be an unordered scatter-add on a GPU
        member_bE = jax.nn.one_hot(group_b, E, dtype=wide_dtype(x_baD.dtype))
        return einsum("be,bdf->edf", member_bE, einsum("bad,baf->bdf", x_baD, dy_baF))

    size = _batch(len(group_b), w_EDF)
    full = len(group_b) // size * size
    dw = jnp.zeros_like(w_EDF, dtype=wide_dtype(w_EDF.dtype))
    if full:
        batches = tuple(z[:full].reshape(-1, size, *z.shape[1:]) for z in (x, dy, group_b))
        dw = jax.lax.scan(lambda acc, batch: (acc + partial_dw(*batch), None), dw, batches)[0]
    if full < len(group_b):
        dw += partial_dw(x[full:], dy[full:], group_b[full:])
    return dx, dw.astype(w_EDF.dtype), None


_blocked.defvjp(_blocked_fwd, _blocked_bwd)
