"""Gated feed-forward experts on routed tokens: gather, two grouped products around SiTU, weighted sum.

    out_n = Σ_k p_nk E_{e(n, k)}(z_n)        E_e(z) = (SiTU(z w1_e, z w3_e)) w2_e

The routing weight multiplies the activation instead of the expert's output, which is the same number: then the backward
pass needs no expert output, so w2's product is not repeated, and the weights' gradient is a sum over the width that the
activation's own backward pass forms on the way.

Only the inputs are kept for the backward pass, which forms the pre-activations anew. Under rematerialisation of the
layer nothing is therefore computed a third time.

With "pallas" the grouped products and the activation behind the first are kernels, and have run on an H200.

Legend: N tokens, K experts of a token, E experts, L latent width, F expert width, M rows.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3jax.ops.common import vary_alike, wide
from k3jax.ops.grouped_matmul import mosaic, ragged
from k3jax.ops.grouped_matmul.glu import Glu
from k3jax.ops.grouped_matmul.layout import GroupLayout, rows_at
from k3jax.ops.grouped_matmul.product import Implementation, grouped_matmul, refuse_pallas
from k3jax.ops.grouped_matmul.xla import Matrices
from k3jax.ops.mx import ScaleRule, fake_quant, unpacked
from k3jax.ops.situ import situ_glu, situ_glu_backward


class ExpertOptions(NamedTuple):
    """What is static about `expert_mlp`."""

    beta: float | None
    linear_beta: float | None
    align: int
    implementation: Implementation
    tiling: ragged.Tiling = ragged.DEFAULT
    activation_rule: ScaleRule | None = None
    """Round the activation, before its routing weight, to MXFP8 with this rule for scales (straight through)."""


def expert_mlp(
    z_NL: jax.Array,
    w13: Matrices,
    w2: Matrices,
    weights_NK: jax.Array,
    layout: GroupLayout,
    options: ExpertOptions,
) -> jax.Array:
    """Σ_k weight · expert(z) → [N, L] in the dtype of `z_NL`, summed in at least float32; an invalid slot adds 0.

    Args:
        z_NL: tokens, in the dtype of products.
        w13: [E, L, 2F], gate then up; w2: [E, F, L]. In the dtype of `z_NL`, or `PackedMX` codes as in
            `grouped_matmul`.
        weights_NK: at least float32.
        layout: with groups aligned to `options.align`.

    Raises:
        ValueError: as `grouped_matmul`.
    """
    if options.implementation == "pallas":
        refuse_pallas(z_NL.dtype, z_NL.shape[1], w2.shape[1], options.tiling)
        layout = layout._replace(slot_of_row=_enough_rows(layout))
    z_NL, w13, w2, weights_NK, *maps = vary_alike(z_NL, w13, w2, weights_NK, *layout)
    return _expert_mlp(options, z_NL, w13, w2, weights_NK, GroupLayout(*maps))


def _enough_rows(layout: GroupLayout) -> jax.Array:
    """`slot_of_row` with padding rows behind it until the kernels take it. Row M, which invalid slots name, is 0."""
    rows, num_slots = len(layout.slot_of_row), layout.row_of_NK.size
    more = ragged.enough_rows(rows) - rows
    return jnp.pad(layout.slot_of_row, (0, more), constant_values=num_slots)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _expert_mlp(options: ExpertOptions, z_NL, w13, w2, weights_NK, layout: GroupLayout) -> jax.Array:
    return _forward(options, z_NL, w13, w2, weights_NK, layout)


@partial(jax.jit, static_argnums=0)  # kernels are lowered once for all layers
def _forward(options: ExpertOptions, z_NL, w13, w2, weights_NK, layout: GroupLayout) -> jax.Array:
    rows_ML, scale_M = _rows_of(z_NL, layout), rows_at(weights_NK.reshape(-1), layout.slot_of_row)
    if options.implementation == "pallas":
        tiles = ragged.row_tiles(layout.group_sizes_E, len(rows_ML))
        w13, w2 = (unpacked(w, rows_ML.dtype) for w in (w13, w2))
        rule = options.activation_rule
        glu = Glu(scale_M if rule is None else jnp.ones_like(scale_M), options.beta, options.linear_beta)
        hidden_MF = mosaic.rows_times_matrices(rows_ML, w13, tiles, glu=glu, tiling=options.tiling)
        if rule is not None:
            hidden_MF = _scaled(_rounded(options, hidden_MF), scale_M)
        y_ML = mosaic.rows_times_matrices(hidden_MF, w2, tiles, tiling=options.tiling)
    else:
        gate_MF, up_MF = jnp.split(_product(options, layout, rows_ML, w13), 2, axis=1)
        hidden_MF = _activated(options, gate_MF, up_MF, scale_M)
        y_ML = _product(options, layout, hidden_MF, w2)
    return _sum_of_slots(y_ML, layout)


def _rounded(options: ExpertOptions, hidden_MF: jax.Array) -> jax.Array:
    """What a server with MXFP8 activations multiplies: without the routing weight, which would move the grid."""
    assert options.activation_rule is not None
    return fake_quant(hidden_MF, format="mxfp8", scale_rule=options.activation_rule)


def _scaled(hidden_MF: jax.Array, scale_M: jax.Array) -> jax.Array:
    return (wide(hidden_MF) * scale_M[:, None]).astype(hidden_MF.dtype)


def _activated(options: ExpertOptions, gate_MF: jax.Array, up_MF: jax.Array, scale_M: jax.Array) -> jax.Array:
    if options.activation_rule is None:
        return situ_glu(gate_MF, up_MF, options.beta, options.linear_beta, scale_M)
    return _scaled(_rounded(options, situ_glu(gate_MF, up_MF, options.beta, options.linear_beta)), scale_M)


def _activation_backward(options: ExpertOptions, gate_MF, up_MF, d_hidden_MF, scale_M) -> tuple[jax.Array, ...]:
    """The scaled activation, and the gradients of gate, up and scale; straight through a rounded activation."""
    backward = situ_glu_backward(gate_MF, up_MF, d_hidden_MF, scale_M, options.beta, options.linear_beta)
    if options.activation_rule is None:
        return backward
    rounded_MF = _rounded(options, situ_glu(gate_MF, up_MF, options.beta, options.linear_beta))
    d_scale_M = jnp.sum(wide(rounded_MF) * wide(d_hidden_MF), axis=-1)
    return _scaled(rounded_MF, scale_M), *backward[1:3], d_scale_M


def _rows_of(z_NL: jax.Array, layout: GroupLayout) -> jax.Array:
    """Each row's token → [M, L]; 0 in padding rows."""
    return rows_at(z_NL, layout.slot_of_row // layout.row_of_NK.shape[1])


def _sum_of_slots(y_ML: jax.Array, layout: GroupLayout) -> jax.Array:
    """Σ_k row of slot (n, k), summed in at least float32 and in the order of k → [N, L]."""
    K = layout.row_of_NK.shape[1]
    return reduce(jnp.add, [wide(rows_at(y_ML, layout.row_of_NK[:, k])) for k in range(K)]).astype(y_ML.dtype)


def _product(options: ExpertOptions, layout: GroupLayout, x: jax.Array, w: Matrices) -> jax.Array:
    name, align = options.implementation, options.align
    return grouped_matmul(x, w, layout.group_sizes_E, align=align, implementation=name, tiling=options.tiling)


def _fwd(options: ExpertOptions, *args):
    return _expert_mlp(options, *args), args


@partial(jax.jit, static_argnums=0)
def _bwd(options: ExpertOptions, residuals, d_out_NL: jax.Array):
    z_NL, w13, w2, weights_NK, layout = residuals
    rows_ML, dy_ML = _rows_of(z_NL, layout), _rows_of(d_out_NL, layout)
    scale_M = rows_at(weights_NK.reshape(-1), layout.slot_of_row)
    activation = partial(_activation_backward, options)
    if options.implementation == "pallas":
        sizes, tiling = layout.group_sizes_E, options.tiling
        tiles = ragged.row_tiles(sizes, len(rows_ML))
        multiply = partial(mosaic.rows_times_matrices, tiles=tiles, tiling=tiling)
        gate_MF, up_MF = jnp.split(multiply(rows_ML, w13), 2, axis=1)
        d_hidden_MF = multiply(dy_ML, w2, transpose=True)
        # two arrays of one shape: XLA writes them, `hidden` and the row sums in one pass
        hidden_MF, d_gate, d_up, d_scale_M = activation(gate_MF, up_MF, d_hidden_MF, scale_M)
        d_rows_ML = multiply((d_gate, d_up), w13, transpose=True)
        dw13 = mosaic.outer_products(rows_ML, (d_gate, d_up), sizes, tiling=tiling)
        dw2 = mosaic.outer_products(hidden_MF, dy_ML, sizes, tiling=tiling)
    else:
        product = partial(_product, options, layout)
        both, pull13 = jax.vjp(product, rows_ML, w13)
        gate_MF, up_MF = jnp.split(both, 2, axis=1)
        hidden_MF = _activated(options, gate_MF, up_MF, scale_M)
        d_hidden_MF, dw2 = jax.vjp(product, hidden_MF, w2)[1](dy_ML)
        _, d_gate, d_up, d_scale_M = activation(gate_MF, up_MF, d_hidden_MF, scale_M)
        d_rows_ML, dw13 = pull13(jnp.concatenate([d_gate, d_up], axis=1))
    dz_NL = _sum_of_slots(d_rows_ML, layout)
    d_weights_NK = rows_at(d_scale_M, layout.row_of_NK).astype(weights_NK.dtype)
    return dz_NL, dw13, dw2, d_weights_NK, None


_expert_mlp.defvjp(_fwd, _bwd)
