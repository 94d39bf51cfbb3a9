"""What a token costs: parameters and floating-point operations by mechanism, and the peak that MFU divides by.

Operations of one training step per token, 2 per multiply-add, backward = 2 × forward, recomputation not counted:

    6 · weights of the matrix products that a token passes (its k experts; the head counts, the embedding look-up not)
    6 · H · (qk + v) · L / 2                        per MLA layer: logits and values over the causal half of L tokens
    6 · H · (3 K² + 5/2 C K + C²/6)                 per KDA layer: the chunkwise recurrence, see `_kda_recurrence`

The vision tower costs by image, not by token: `tower_flops`.

Elementwise work, norms, softmax, short convolutions and the AttnRes mixes are left out, as is usual.
"""

import dataclasses
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from k3jax.config import KDAConfig, ModelConfig

KDA_CHUNK = 64
"""Chunk that the recurrence is counted at, whatever chunk runs: more work by a longer one is not more useful work."""

# Dense bf16 FLOP/s of one device by word of its name, most specific first (makers' data sheets, without sparsity).
PEAKS = (
    ("H200 NVL", 835.5e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("GH200", 989.4e12),
    ("H200", 989.4e12),
    ("H100", 989.4e12),
    ("H20", 148e12),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("TPU v4", 275e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v6 lite", 918e12),
)


@dataclass(frozen=True)
class ParameterCounts:
    """Trained parameters. `by_mechanism` sums to `total`; `active` ones serve a token (its k experts of each layer)."""

    by_mechanism: dict[str, int]
    total: int
    active: int
    active_without_embedding: int


@dataclass(frozen=True)
class Peak:
    """FLOP/s that the devices of a run could do together (None: unknown), and what was assumed."""

    flops: float | None
    description: str

    def describe(self) -> str:
        if self.flops is None:
            return self.description
        return f"{self.flops / 1e12:,.4g} TFLOP/s ({self.description})"


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Parameters by mechanism from the geometry alone (router biases are not trained and not counted)."""
    mechanisms = _mechanisms(model)
    by_mechanism = {name: matrices + rest for name, (matrices, rest) in mechanisms.items()}
    by_mechanism["vision"] = _vision_parameters(model)
    total, routed = sum(by_mechanism.values()), by_mechanism["routed_experts"]
    active = total - routed + _active(model, routed) - by_mechanism["vision"]
    return ParameterCounts(by_mechanism, total, active, active - by_mechanism["embedding"])


def flops_by_mechanism(model: ModelConfig, sequence_length: int) -> dict[str, int]:
    """Forward and backward operations per token at this sequence length (one document per sequence)."""
    flops = {name: 6 * matrices for name, (matrices, _) in _mechanisms(model).items() if matrices}
    flops["routed_experts"] = _active(model, flops.get("routed_experts", 0))
    mla, num_mla = model.mla, len(model.mla_layers)
    flops["mla_attention"] = num_mla * 3 * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim) * sequence_length
    flops["kda_recurrence"] = (model.num_layers - num_mla) * 6 * _kda_recurrence(model.kda)
    return flops


def flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Sum of `flops_by_mechanism`."""
    return sum(flops_by_mechanism(model, sequence_length).values())


def tower_flops(model: ModelConfig, grids: Iterable[tuple[int, int, int]]) -> int:
    """Forward and backward operations of the tower and the projector on items of (frames, rows, columns) of patches."""
    vision = model.vision
    if vision is None:
        return 0
    D, attention = vision.hidden_size, vision.num_heads * vision.head_dim
    merged = vision.merged_size
    patch = 3 * vision.patch_size**2 * D + vision.num_layers * (4 * D * attention + 2 * D * vision.mlp_size)
    feature = merged * merged + merged * model.hidden_size
    total = 0
    for frames, rows, columns in grids:
        patches = frames * rows * columns
        pairs = vision.num_layers * 2 * attention * patches * patches
        total += 6 * (patch * patches + pairs + feature * rows * columns // vision.merge**2)
    return total


def _vision_parameters(model: ModelConfig) -> int:
    vision = model.vision
    if vision is None:
        return 0
    D, merged = vision.hidden_size, vision.merged_size
    block = 4 * D * vision.num_heads * vision.head_dim + 2 * D * vision.mlp_size + 2 * D
    embedding = (3 * vision.patch_size**2 + vision.position_grid[0] * vision.position_grid[1]) * D
    projector = merged * merged + merged * model.hidden_size + model.hidden_size
    return embedding + vision.num_layers * block + D + projector


def stage_costs(model: ModelConfig, sequence_length: int) -> list[int]:
    """Operations per token of every layer, the head's with the last one's."""
    head = flops_by_mechanism(model, sequence_length)["head"]
    kinds = {}
    for spec in set(model.layers):
        mla, dense = ((0,) if spec.mixer == "mla" else ()), int(spec.ffn == "dense")
        one = dataclasses.replace(model, num_layers=1, mla_layers=mla, num_dense_layers=dense)
        kinds[spec] = flops_per_token(one, sequence_length) - head
    costs = [kinds[spec] for spec in model.layers]
    return [*costs[:-1], costs[-1] + head]


def mfu(tokens_per_second: float, flops_per_token: float, peak: Peak) -> float | None:
    """Model FLOP utilisation in [0, 1]; None when the peak is unknown."""
    return None if peak.flops is None else tokens_per_second * flops_per_token / peak.flops


def peak_flops(mesh: jax.sharding.Mesh, dtype: str = "bfloat16") -> Peak:
    """Peak of all devices of a mesh: dense bf16 of known accelerators, measured on a CPU, None for anything else.

    `dtype` is the compute dtype; another one than bf16 does not change the denominator, but the description says so.
    """
    devices = list(mesh.devices.flat)
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        hosts = len({d.process_index for d in devices})  # simulated devices share one CPU
        return Peak(hosts * _measured_peak(), f"{hosts} CPU host(s), measured: float32 matrix product by NumPy")
    for name, flops in PEAKS:
        if re.search(rf"\b{name}\b", kind):
            note = "" if dtype == "bfloat16" else f", although the model computes in {dtype}"
            return Peak(len(devices) * flops, f"{len(devices)} × {kind} at {flops / 1e12:,.4g} in dense bf16{note}")
    return Peak(None, f"no known peak for {kind!r}, so no MFU")


def _measured_peak(size: int = 1024, repeats: int = 5) -> float:
    """Best FLOP/s of a float32 matrix product on this host; NumPy, because a mesh may be set in JAX."""
    x = np.ones((size, size), np.float32)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        x @ x
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def _active(model: ModelConfig, routed: int) -> int:
    return routed * model.moe.experts_per_token // model.moe.num_experts


def _kda_recurrence(kda: KDAConfig, chunk: int = KDA_CHUNK) -> int:
    """Forward multiply-adds of the chunkwise recurrence, per token and layer (Kimi Linear, arXiv 2510.26692).

    A chunk of C tokens with K = V, per head; triangular factors count their half:

        A = k kᵀ (strictly lower), B = q kᵀ (lower)           C² K
        T = (I + A)⁻¹, unit lower triangular                  C³ / 6
        W = T k, U = T v, and B ṽ                             3/2 · C² K
        W S, q S, and kᵀ ṽ with the state S [K, V]            3 C K²
    """
    K = kda.head_dim
    return kda.num_heads * (18 * K * K + 15 * chunk * K + chunk * chunk) // 6


def _kda(model: ModelConfig) -> tuple[int, int]:
    """Weights of matrix products and the rest, of one layer; likewise below."""
    D, H, K, W = model.hidden_size, model.kda.num_heads, model.kda.head_dim, model.kda.conv_size
    low_rank = D * K + K * H * K
    gate = D * H * K if model.kda.full_rank_output_gate else low_rank
    return 4 * D * H * K + low_rank + gate + D * H, 3 * H * K * W + H + H * K + K


def _mla(model: ModelConfig) -> tuple[int, int]:
    mla, D = model.mla, model.hidden_size
    H, R, Q, V = mla.num_heads, mla.kv_lora_rank, mla.q_lora_rank, mla.v_head_dim
    query = D * H * mla.qk_head_dim if Q is None else D * Q + Q * H * mla.qk_head_dim
    key_value = D * (R + mla.qk_rope_head_dim) + R * H * (mla.qk_nope_head_dim + V)
    return query + key_value + (1 + mla.output_gate) * D * H * V, (Q or 0) + R


def _mechanisms(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """(weights of matrix products, other parameters) of every mechanism, over all layers and experts."""
    D, moe, layers, num_moe = model.hidden_size, model.moe, model.num_layers, model.num_moe_layers
    num_mla = len(model.mla_layers)
    L = moe.latent_size or D
    expert = 3 * L * moe.expert_size
    latent = (2 * D * L, L * moe.latent_norm) if moe.latent_size is not None else (0, 0)
    mixes = 0 if model.attn_res_block_size is None else 2 * layers + 1

    def times(count: int, counts: tuple[int, int]) -> tuple[int, int]:
        return count * counts[0], count * counts[1]

    return {
        "embedding": (0, model.vocab_size * D),
        "kda": times(layers - num_mla, _kda(model)),
        "mla": times(num_mla, _mla(model)),
        "dense_mlp": (model.num_dense_layers * 3 * D * model.dense_size, 0),
        "router": (num_moe * D * moe.num_experts, 0),
        "latent": times(num_moe, latent),
        "routed_experts": (num_moe * moe.num_experts * expert, 0),
        "shared_experts": (num_moe * 3 * D * moe.num_shared_experts * moe.expert_size, 0),
        "attn_res": (0, mixes * 2 * D),
        "norms": (0, (2 * layers + 1) * D),
        "head": (D * model.vocab_size, 0),
    }
