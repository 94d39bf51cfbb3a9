"""Matrix products of rows grouped by expert, and the layout that brings tokens into that order and back.

    layout = group_layout(experts_NK, valid_NK, num_experts, align)
    x_MD = dispatch(x_ND, layout)                                            rows of one expert contiguous
    y_MF = grouped_matmul(x_MD, w_EDF, layout.group_sizes_E, align=align)    y_r = x_r w_{expert of r}
    out_NF = combine(y_MF, layout, weights_NK)                               Σ_k weight · row of slot (n, k)

`expert_mlp` is the whole of it for a gated feed-forward expert, with a backward pass that keeps only its inputs.

Legend: N tokens, K experts of a token, E experts, D input width, F output width, M rows.
"""

from __future__ import annotations

from k3jax.ops.grouped_matmul.experts import ExpertOptions, expert_mlp
from k3jax.ops.grouped_matmul.layout import GroupLayout, combine, dispatch, group_layout, padded_rows
from k3jax.ops.grouped_matmul.product import (
    Implementation,
    default_implementation,
    grouped_matmul,
    why_not_pallas,
)
from k3jax.ops.grouped_matmul.ragged import Tiling

__all__ = [
    "ExpertOptions",
    "GroupLayout",
    "Implementation",
    "Tiling",
    "combine",
    "default_implementation",
    "dispatch",
    "expert_mlp",
    "group_layout",
    "grouped_matmul",
    "padded_rows",
    "why_not_pallas",
]
