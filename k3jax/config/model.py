"""Geometry and numerics of a model, and the released and small ones."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from k3jax.config.checks import require, require_positive

Mixer = Literal["kda", "mla"]
Ffn = Literal["dense", "moe"]
DType = Literal["float32", "bfloat16", "float64"]
ScaleRule = Literal["floor", "ceil", "even", "outlier"]


@dataclass(frozen=True)
class KDAConfig:
    """Kimi Delta Attention (report §2.1). Key and value head dims are both `head_dim`."""

    num_heads: int
    head_dim: int
    conv_size: int = 4
    gate: Literal["lower_bound", "softplus"] = "lower_bound"
    gate_lower_bound: float = -5.0
    full_rank_output_gate: bool = True
    """False gives Kimi-Linear's low-rank output gate (rank `head_dim`)."""
    chunk_size: int = 64
    implementation: Literal["reference", "xla", "pallas"] | None = None
    """Of the recurrence; None is "pallas" where it can run (Hopper GPUs), else "xla". Naming one of the first two also
    keeps decoding, the short convolution and the gated norm in plain JAX; they pick for themselves otherwise."""

    def __post_init__(self) -> None:
        require_positive(self, "num_heads", "head_dim")
        require(self.conv_size >= 2, f"KDAConfig.conv_size must be at least 2, got {self.conv_size}")
        require(
            -5.0 <= self.gate_lower_bound < 0,
            "KDAConfig.gate_lower_bound must be in [-5, 0): tiles of 16 tokens hold exp(±80) only",
        )
        require(
            self.chunk_size % 16 == 0 and self.chunk_size > 0,
            f"KDAConfig.chunk_size must be a multiple of 16, got {self.chunk_size}",
        )


@dataclass(frozen=True)
class MLAConfig:
    """Gated multi-head latent attention without position encoding."""

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the shared key part. The name is inherited; nothing is rotated."""
    v_head_dim: int
    q_lora_rank: int | None = None
    output_gate: bool = True
    lora_norm_eps: float = 1e-6
    implementation: Literal["reference", "xla", "cudnn"] | None = None
    """Of attention. With a cache (generation) "cudnn" is "xla": its queries are not the keys' tokens."""

    def __post_init__(self) -> None:
        require_positive(self, "num_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        require(self.qk_rope_head_dim >= 0, "MLAConfig.qk_rope_head_dim must be ≥ 0")
        require(self.q_lora_rank is None or self.q_lora_rank > 0, "MLAConfig.q_lora_rank must be positive or None")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoEConfig:
    """Stable LatentMoE. `latent_size` None runs the experts on the full hidden state."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    latent_size: int | None
    num_shared_experts: int = 2
    router_activation: Literal["sigmoid", "softmax"] = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    latent_norm: bool = True
    qb_bins: int = 1000
    """Bins of the quantile-balancing histogram."""
    implementation: Literal["dense", "blocked", "ragged", "pallas"] | None = None
    """How experts multiply; None picks "pallas" (Hopper GPUs, 16-bit compute) where it runs, else "blocked"."""
    dispatch: Literal["balanced", "home"] = "balanced"
    """How rows travel on a mesh with expert > 1: "balanced" (MoonEP) lets every rank compute the same number and copies
    busy experts for it; "home" sends all rows of an expert to its home, with room for the worst case."""
    qat: Literal["w4", "w4a8"] | None = None
    """Quantisation-aware training of routed experts: "w4" computes with weights rounded to MXFP4, "w4a8" also rounds
    what enters their products to MXFP8. The unrounded weights are trained. Generation from such a run holds codes."""
    qat_scale_rule: ScaleRule = "outlier"
    """How a group of 32 gets its scale (`k3jax.ops.mx`); the default has the least squared error in both formats."""

    def __post_init__(self) -> None:
        require_positive(
            self, "num_experts", "experts_per_token", "expert_size", "num_groups", "topk_groups", "qb_bins"
        )
        require(self.experts_per_token < self.num_experts, "MoEConfig.experts_per_token must be below num_experts")
        require(self.num_experts % self.num_groups == 0, "MoEConfig.num_groups must divide num_experts")
        require(self.topk_groups <= self.num_groups, "MoEConfig.topk_groups must be ≤ num_groups")
        selectable = self.topk_groups * (self.num_experts // self.num_groups)
        require(
            self.experts_per_token < selectable,  # quantile balancing reads the first expert that is not taken
            f"MoEConfig.experts_per_token must be below the {selectable} experts in topk_groups groups",
        )
        require(self.num_shared_experts >= 0, "MoEConfig.num_shared_experts must be ≥ 0")


@dataclass(frozen=True)
class LayerSpec:
    """What one decoder layer is made of."""

    mixer: Mixer
    ffn: Ffn


@dataclass(frozen=True)
class VisionConfig:
    """MoonViT-V2 and its projector. Images become tokens of `merge` × `merge` patches."""

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    """Times `num_heads` it may be wider than `hidden_size`."""
    mlp_size: int
    patch_size: int = 14
    position_grid: tuple[int, ...] = (64, 64)
    """Rows and columns of the table of positions, which is resized to the grid of each image."""
    merge: int = 2
    max_frames: int = 4
    """Of a piece of video; its frames are averaged into the tokens of one."""
    norm_eps: float = 1.1920929e-7
    """float32's epsilon: the release builds these norms without one, and PyTorch then takes that of its type."""
    projector_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        require_positive(
            self, "hidden_size", "num_layers", "num_heads", "mlp_size", "patch_size", "merge", "max_frames", "norm_eps"
        )
        require_positive(self, "projector_norm_eps")
        require(
            self.hidden_size % 2 == 0,
            f"VisionConfig.hidden_size must be even (sines and cosines of the frame), got {self.hidden_size}",
        )
        require(
            self.head_dim > 0 and self.head_dim % 4 == 0,
            f"VisionConfig.head_dim must be a multiple of 4 (pairs for rows and columns), got {self.head_dim}",
        )
        require(
            len(self.position_grid) == 2 and min(self.position_grid) > 0,
            f"VisionConfig.position_grid must be two positive numbers, got {self.position_grid}",
        )

    @property
    def merged_size(self) -> int:
        """Width of what the projector reads: the patches of one token side by side."""
        return self.merge**2 * self.hidden_size


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and numerics of a K3 model. Layer numbers are 0-based (the released config counts from 1)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    dense_size: int
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    num_dense_layers: int = 1
    attn_res_block_size: int | None = 12
    """Decoder layers in an AttnRes block; None turns attention residuals off (plain pre-norm residuals)."""
    situ_beta: float | None = 4.0
    """None: SwiGLU's SiLU instead of SiTU's bounded gate (Kimi-Linear, with `situ_linear_beta` None)."""
    situ_linear_beta: float | None = 25.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    dtype: DType = "float32"
    """Compute dtype of matrix products and of the residual stream."""
    param_dtype: DType = "float32"
    """Of parameters; gates, short convolutions and output norm of KDA are at least float32."""
    vision: VisionConfig | None = None
    """None: a model of text alone."""

    def __post_init__(self) -> None:
        require_positive(self, "vocab_size", "hidden_size", "num_layers", "dense_size", "norm_eps")
        wrong = [l for l in self.mla_layers if not 0 <= l < self.num_layers]
        require(
            not wrong,
            f"ModelConfig.mla_layers {wrong} are outside 0..{self.num_layers - 1} (layer numbers are 0-based)",
        )
        require(
            tuple(sorted(set(self.mla_layers))) == tuple(self.mla_layers),
            "ModelConfig.mla_layers must be sorted and without repeats",
        )
        require(0 <= self.num_dense_layers <= self.num_layers, "ModelConfig.num_dense_layers must be in 0..num_layers")
        require(
            self.attn_res_block_size is None or self.attn_res_block_size > 0,
            "ModelConfig.attn_res_block_size must be positive or None",
        )
        inputs = (
            ("moe.latent_size", self.moe.latent_size) if self.moe.latent_size else ("hidden_size", self.hidden_size)
        )
        for name, width in (inputs, ("moe.expert_size", self.moe.expert_size)):
            require(
                self.moe.qat is None or width % 32 == 0,
                f"ModelConfig.{name} {width} must be a multiple of 32, the size of an MX group, for moe.qat",
            )

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        mla = set(self.mla_layers)
        return tuple(
            LayerSpec("mla" if l in mla else "kda", "dense" if l < self.num_dense_layers else "moe")
            for l in range(self.num_layers)
        )

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def num_blocks(self) -> int:
        """AttnRes blocks; 1 when attention residuals are off."""
        return 1 if self.attn_res_block_size is None else math.ceil(self.num_layers / self.attn_res_block_size)


def _mla_layers(num_layers: int, period: int = 4) -> tuple[int, ...]:
    """Every fourth layer, and the last one whatever its number."""
    return tuple(sorted({*range(period - 1, num_layers, period), num_layers - 1}))


def nano(**overrides: Any) -> ModelConfig:
    """TINY-9: nine layers with the tail of the release, byte vocabulary; 3,092,296 trained parameters."""
    base = ModelConfig(
        vocab_size=512,
        hidden_size=128,
        num_layers=9,
        mla_layers=_mla_layers(9),
        dense_size=256,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=4, head_dim=32, chunk_size=16),  # the fastest on a CPU
        mla=MLAConfig(
            num_heads=4, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
        ),
        moe=MoEConfig(num_experts=16, experts_per_token=4, expert_size=64, latent_size=64),
    )
    return dataclasses.replace(base, **overrides)


def proxy(**overrides: Any) -> ModelConfig:
    """One-GPU proxy: 1.74B parameters, 0.50B active without the embedding."""
    base = ModelConfig(
        vocab_size=32_768,
        hidden_size=1536,
        num_layers=13,
        mla_layers=_mla_layers(13),
        dense_size=6144,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=12, head_dim=128),
        mla=MLAConfig(
            num_heads=12,
            q_lora_rank=384,
            kv_lora_rank=256,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoEConfig(num_experts=64, experts_per_token=8, expert_size=768, latent_size=768),
        dtype="bfloat16",
    )
    return dataclasses.replace(base, **overrides)


def k3(**overrides: Any) -> ModelConfig:
    """The released geometry: 2,779,484,393,568 trained text parameters."""
    base = ModelConfig(
        vocab_size=163_840,
        hidden_size=7168,
        num_layers=93,
        mla_layers=_mla_layers(93),
        dense_size=33_792,
        attn_res_block_size=12,
        kda=KDAConfig(num_heads=96, head_dim=128),
        mla=MLAConfig(
            num_heads=96,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MoEConfig(num_experts=896, experts_per_token=16, expert_size=3072, latent_size=3584),
        dtype="bfloat16",
    )
    return dataclasses.replace(base, **overrides)


def moonvit(**overrides: Any) -> VisionConfig:
    """The released tower: `k3(vision=moonvit())` has 447,358,976 parameters more than `k3()`."""
    base = VisionConfig(hidden_size=1024, num_layers=27, num_heads=12, head_dim=128, mlp_size=4096)
    return dataclasses.replace(base, **overrides)
