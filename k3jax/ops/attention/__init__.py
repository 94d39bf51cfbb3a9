"""Causal attention within documents, for key and value heads of different width, and its absorbed decode step.

    s = scale · q kᵀ   over keys at or before the query, of its document      o = softmax(s) v

Softmax and accumulation are in at least float32.

    o, max_logit = attention(q, k, v, scale=192**-0.5, segment_ids=segment_ids)

The plain forms (`blockwise.py`) return o unrounded, and their backward pass reads it so: an o rounded to bfloat16
biases Σ_v do_v o_v (the report keeps o in float32 too). cuDNN (`fused.py`) rounds it. The caller rounds after gating.

Legend: B batch, T queries, S keys, H heads, K key width, V value width, R latent rank, r shared key width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from k3jax.ops.attention import blockwise, cudnn, fused, peak
from k3jax.ops.attention.blockwise import finite
from k3jax.ops.common import einsum

__all__ = [
    "Implementation",
    "attention",
    "default_block_size",
    "max_logit_pass",
    "mla_decode",
    "resolve_implementation",
]

Implementation = Literal["reference", "xla", "cudnn"]


def resolve_implementation(
    implementation: Implementation | None = None,
    *,
    dtype: Any,
    key_width: int,
    value_width: int,
    self_attention: bool = True,
) -> Implementation:
    """What runs for such inputs: "cudnn" where it can, else "xla", unless one is named.

    Args:
        self_attention: queries and keys are the same tokens, in the same documents, from position 0.

    Raises:
        ValueError: an unknown implementation, or "cudnn" named where it cannot run; the message says why.
    """
    if implementation not in (None, *get_args(Implementation)):
        names = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"attention: implementation must be one of {names}, got {implementation!r}")
    if implementation in ("reference", "xla"):
        return implementation
    refusal = cudnn.refusal(dtype, key_width, value_width)
    if refusal is None and not self_attention:
        refusal = "it is causal here, over the same tokens from position 0 (no q_offset, no kv_segment_ids)"
    if refusal is None:
        return "cudnn"
    if implementation == "cudnn":
        raise ValueError(f"attention: 'cudnn' cannot run: {refusal}; 'xla' runs everywhere")
    return "xla"


def default_block_size(implementation: Implementation) -> int:
    """Tokens in a block: what stays in a CPU's cache, or keeps a GPU's matrix units fed; "cudnn": in a masked tile."""
    if implementation == "cudnn":
        return 128
    return 128 if jax.default_backend() == "cpu" else 1024


def attention(
    q_BTHK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHV: jax.Array,
    *,
    scale: float,
    segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    q_offset: int | jax.Array = 0,
    causal: bool = True,
    return_max_logit: bool = True,
    implementation: Implementation | None = None,
    block_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Document-masked softmax attention, causal unless told otherwise.

    Args:
        segment_ids: [B, T] int32, document of each query; 0 is padding, which sees nothing and outputs 0.
        kv_segment_ids: [B, S] int32, document of each key; defaults to `segment_ids` when S = T.
        q_offset: position of the first query among the keys: an int, a scalar, or one per row [B].
        causal: False lets every query see all keys of its document, wherever they stand ("reference", "xla").
        return_max_logit: False spares "cudnn", which does not know it, a pass over all logits.
        implementation: "reference" holds all T × S logits; "xla" holds one block of them per head at a time, forward
            and backward, and skips blocks in the future when `q_offset` is an int; "cudnn" needs bfloat16, an NVIDIA
            GPU from Hopper on, and keys that are the queries' tokens. None: `resolve_implementation`.
        block_size: largest number of queries and of keys in a block ("xla"), or in a tile that needs a mask ("cudnn",
            with documents); None: `default_block_size`.

    Returns:
        o [B, T, H, V] in at least float32, and the largest scaled logit of each head [H] over all (query, key) pairs
        that are not masked, float32, without gradient, for QK-clip; −inf if there are none or "cudnn" was not asked.

    Raises:
        ValueError: shapes that do not fit, an unknown implementation, or "cudnn" where it cannot run.
    """
    _check(q_BTHK, k_BSHK, v_BSHV, segment_ids, kv_segment_ids, block_size)
    if not causal:
        q_offset = k_BSHK.shape[1]  # no key stands behind that
    same = kv_segment_ids is None and isinstance(q_offset, int) and q_offset == 0 and q_BTHK.shape == k_BSHK.shape
    widths = {"key_width": q_BTHK.shape[-1], "value_width": v_BSHV.shape[-1]}
    chosen = resolve_implementation(implementation, dtype=q_BTHK.dtype, self_attention=same, **widths)
    size = default_block_size(chosen) if block_size is None else block_size
    if segment_ids is not None and kv_segment_ids is None:
        kv_segment_ids = segment_ids
    if chosen == "cudnn":
        o = fused.attend(q_BTHK, k_BSHK, v_BSHV, segment_ids, scale, size)
        if return_max_logit:
            peak_BH = _largest_logit(q_BTHK, k_BSHK, segment_ids, scale)
        else:
            peak_BH = jnp.full_like(o[:, 0, :, 0], -jnp.inf)
    else:
        run = blockwise.reference if chosen == "reference" else blockwise.xla
        o, peak_BH = run(q_BTHK, k_BSHK, v_BSHV, segment_ids, kv_segment_ids, q_offset, scale, size)
    return o, jax.lax.stop_gradient(jnp.max(peak_BH, axis=0)).astype(jnp.float32)


def max_logit_pass(dtype: Any, key_width: int) -> Literal["mosaic", "xla"]:
    """What computes the largest logit beside "cudnn": a Mosaic kernel on Hopper, else blocks of logits in memory."""
    return "xla" if peak.refusal(dtype, key_width) else "mosaic"


_MAX_BLOCK = 512  # tokens in a block of the pass for the largest logit in plain XLA


def _largest_logit(q, k, segment_ids, scale: float) -> jax.Array:
    """[B, H] float32."""
    blocks = partial(blockwise.largest_logit, scale=scale, block_size=_MAX_BLOCK)
    if scale <= 0 or max_logit_pass(q.dtype, q.shape[-1]) == "xla":
        return blocks(q, k, segment_ids)
    kernel = partial(peak.largest_logit, scale=scale)
    if segment_ids is None:
        return kernel(q, k, None)
    return jax.lax.cond(fused.are_runs(segment_ids), kernel, blocks, q, k, segment_ids)


def _check(q, k, v, segment_ids, kv_segment_ids, block_size: int | None) -> None:
    (B, T, H, K), S = q.shape, k.shape[1]
    if k.shape != (B, S, H, K) or v.shape[:3] != (B, S, H):
        raise ValueError(f"attention: q {q.shape}, k {k.shape} and v {v.shape} must be [B,T,H,K], [B,S,H,K], [B,S,H,V]")
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"attention: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError("attention: kv_segment_ids without segment_ids")
    if segment_ids is not None and segment_ids.shape != (B, T):
        raise ValueError(f"attention: segment_ids must be {(B, T)}, got {segment_ids.shape}")
    if segment_ids is not None and (segment_ids if kv_segment_ids is None else kv_segment_ids).shape != (B, S):
        raise ValueError(f"attention: kv_segment_ids must be given as {(B, S)}: keys are not the queries' tokens")
    if block_size is not None and block_size < 1:
        raise ValueError(f"attention: block_size must be positive, got {block_size}")


def mla_decode(
    q_nope_BHR: jax.Array,
    q_rope_BHr: jax.Array,
    latent_BSR: jax.Array,
    k_rope_BSr: jax.Array,
    *,
    scale: float,
    valid_BS: jax.Array,
) -> jax.Array:
    """One query a row over the latent cache, the key up-projection absorbed into the query.

        s_j = scale · (q̃ · ĉ_j + q_r · k_r,j)      context = Σ_j softmax(s)_j ĉ_j

    Args:
        q_nope_BHR: W_UKᵀ q_c, the content query carried into the latent.
        q_rope_BHr: the part that meets the shared key.
        latent_BSR, k_rope_BSr: the cache; its width is the key and, without k_rope, the value of every head.
        valid_BS: bool, which entries the query sees; a row without any gives 0.

    Returns:
        context [B, H, R] in at least float32, before the value up-projection.
    """
    content = einsum("bhr,bsr->bhs", q_nope_BHR, latent_BSR.astype(q_nope_BHR.dtype))
    shared = einsum("bhr,bsr->bhs", q_rope_BHr, k_rope_BSr.astype(q_rope_BHr.dtype))
    logits = jnp.where(valid_BS[:, None], (content + shared) * scale, -jnp.inf)
    weights = jnp.exp(logits - finite(jnp.max(logits, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    context = einsum("bhs,bsr->bhr", weights.astype(latent_BSR.dtype), latent_BSR)
    return context / jnp.where(total == 0, 1, total)
