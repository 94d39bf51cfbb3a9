"""Sizes of a geometry that no mesh changes: parameters, states, caches, the published checkpoint."""

from __future__ import annotations

from k3jax.config import ModelConfig
from k3jax.train.flops import flops_per_token, parameter_counts

VISION = 447_358_976
"""Parameters of the released vision tower, which are not part of the text model; bfloat16 in the checkpoint."""
PADDED_HEADS = 128
"""Length of `A_log` in the released checkpoint; more than the heads are zeros."""


def layer_parameters(model: ModelConfig) -> dict[str, int]:
    """Trained parameters of one KDA mixer, one MLA mixer and one routed expert."""
    counts, num_mla = parameter_counts(model).by_mechanism, len(model.mla_layers)
    latent = model.moe.latent_size or model.hidden_size
    return {
        "kda": counts["kda"] // max(1, model.num_layers - num_mla),
        "mla": counts["mla"] // max(1, num_mla),
        "expert": 3 * latent * model.moe.expert_size,
    }


def checkpoint_bytes(model: ModelConfig, vision: int = VISION) -> int:
    """The published format: experts in MXFP4 (4 bits and a byte of scale for 32), the rest bfloat16 but for gates,
    convolutions, output norms of KDA and router biases, which are float32."""
    counts = parameter_counts(model)
    H, K, W = model.kda.num_heads, model.kda.head_dim, model.kda.conv_size
    layers = model.num_layers - len(model.mla_layers)
    routed, wide = counts.by_mechanism["routed_experts"], layers * (H * K + 3 * H * K * W + K)
    biases = model.num_moe_layers * model.moe.num_experts
    bfloat16 = counts.total - routed - wide - layers * H + vision
    return routed * 17 // 32 + 2 * bfloat16 + 4 * (wide + layers * max(H, PADDED_HEADS) + biases)


def sizes(model: ModelConfig, sequence: int) -> dict[str, int]:
    """Exact sizes by name: parameters, bytes, operations.

    Args:
        sequence: tokens of a sequence, for operations a token.
    """
    counts, each = parameter_counts(model), layer_parameters(model)
    kda, mla, num_mla = model.kda, model.mla, len(model.mla_layers)
    num_kda, D = model.num_layers - num_mla, model.hidden_size
    state = num_kda * kda.num_heads * kda.head_dim**2
    return {
        "layers, KDA": num_kda,
        "layers, MLA": num_mla,
        "parameters": counts.total,
        "parameters, routed experts": counts.by_mechanism["routed_experts"],
        "parameters, elsewhere": counts.total - counts.by_mechanism["routed_experts"],
        "parameters, active for a token (without the embedding)": counts.active_without_embedding,
        "parameters, one KDA layer's mixer": each["kda"],
        "parameters, one MLA layer's mixer": each["mla"],
        "parameters, one routed expert": each["expert"],
        "bytes, weights in bfloat16": 2 * counts.total,
        "bytes, float32 masters and momentum": 8 * counts.total,
        "bytes, published checkpoint with vision": checkpoint_bytes(model),
        "bytes, KDA state of a sequence in float32": 4 * state,
        "bytes, KDA state of a sequence in bfloat16": 2 * state,
        "bytes, convolution state of a sequence in bfloat16": 2
        * num_kda
        * 3
        * kda.num_heads
        * kda.head_dim
        * (kda.conv_size - 1),
        "bytes, MLA cache of a token in bfloat16": 2 * num_mla * (mla.kv_lora_rank + mla.qk_rope_head_dim),
        "bytes, one AttnRes block of 64k tokens in bfloat16": 2 * D * 65_536,
        "AttnRes sources of the last mix": model.num_blocks + (model.attn_res_block_size is not None),
        "FLOPs, a token, forward and backward": flops_per_token(model, sequence),
    }
