"""Grouped products in plain JAX: the reference, `lax.ragged_dot`, and batched products of aligned blocks.

Legend: E experts, D input width, F output width, M rows, b blocks, a rows in a block.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from k3jax.ops.common import einsum, wide, wide_dtype
from k3jax.ops.mx import PackedMX, unpacked

Matrices = jax.Array | PackedMX

_BATCH_ELEMENTS = 2**29  # of gathered weights held at once by "blocked": 1 GiB in bf16, 2 GiB for their gradient


def _group_of(start: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """Index of the group that row `start` lies in, E past the last one."""
    return jnp.sum(start[:, None] >= jnp.cumsum(sizes_E), axis=1, dtype=jnp.int32)


def reference(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    E = w_EDF.shape[0]
    group_M = _group_of(jnp.arange(x_MD.shape[0]), sizes_E)
    x = wide(jnp.where((group_M < E)[:, None], x_MD, 0))
    y = einsum("md,mdf->mf", x, wide(w_EDF)[jnp.minimum(group_M, E - 1)])
    return jnp.where((group_M < E)[:, None], y, 0)


def _head_rows(x: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """`x` with every row past the last group 0."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes_E))[:, None], x, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ragged(dtype: jnp.dtype, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
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
    return ragged(dtype, x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)


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


ragged.defvjp(_ragged_fwd, _ragged_bwd)


def _block_product(subscripts: str, x_bac: jax.Array, w_EDF: Matrices, group_b: jax.Array, dtype: jnp.dtype):
    """Each block times its group's matrix; 0 past the last group. Bounds how many matrices are gathered at once."""

    def one(x_ac: jax.Array, group: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, group, keepdims=False), w_EDF)
        w_DF = unpacked(w, x_ac.dtype)
        return jnp.where(group < w_EDF.shape[0], einsum(subscripts, x_ac, w_DF), 0).astype(dtype)

    return jax.lax.map(lambda block: one(*block), (x_bac, group_b), batch_size=_batch(len(group_b), w_EDF))


def _batch(blocks: int, w_EDF: Matrices) -> int:
    """Blocks whose matrices are gathered at once, in batches as even as can be."""
    batches = -(-blocks * w_EDF.shape[1] * w_EDF.shape[2] // _BATCH_ELEMENTS)
    return -(-blocks // min(max(batches, 1), blocks))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def blocked(align: int, dtype: jnp.dtype, x_MD: jax.Array, w_EDF: Matrices, sizes_E: jax.Array) -> jax.Array:
    group_b = _group_of(jnp.arange(0, x_MD.shape[0], align), sizes_E)
    blocks = x_MD.reshape(-1, align, x_MD.shape[1])
    return _block_product("ad,df->af", blocks, w_EDF, group_b, dtype).reshape(-1, w_EDF.shape[2])


def _blocked_fwd(align: int, dtype: jnp.dtype, x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array):
    return blocked(align, dtype, x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)


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


blocked.defvjp(_blocked_fwd, _blocked_bwd)
