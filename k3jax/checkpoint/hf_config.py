"""A released `config.json` as a `ModelConfig`, and back.

Kimi K3 nests its text model under `text_config`. Kimi-Linear-48B has the same `model_type` there without K3's fields;
what is absent then means: softplus gate, low-rank output gate, no attention residuals, no MLA output gate, SwiGLU, and
experts on the full hidden state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from k3jax.checkpoint.layout import GROUP, CheckpointFormatError
from k3jax.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig, diff_dicts, from_dict, to_dict

QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""How the release says that its experts are MXFP4."""

# what this implementation does, whatever the field says otherwise; absent is fine
_FIXED = {"moe_layer_freq": 1, "mla_use_nope": True, "tie_word_embeddings": False, "num_nextn_predict_layers": 0}


_FIXED_VISION = {
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
}


# of how the function is computed or trained, not of the function
_UNSTORED = frozenset(
    {
        "dtype",
        "param_dtype",
        "init_std",
        "kda.chunk_size",
        "kda.implementation",
        "mla.implementation",
        "moe.implementation",
        "moe.dispatch",
        "moe.qb_bins",
        "moe.qat",
        "moe.qat_scale_rule",
    }
)


def check_stored(config: ModelConfig, stored: ModelConfig) -> None:
    """Refuses a model of which a `config.json`, read as `stored`, would say something else; a tower may be left out.

    Raises:
        CheckpointFormatError: which fields differ.
    """
    if config.vision is None:
        stored = dataclasses.replace(stored, vision=None)
    changes = diff_dicts(to_dict(config), to_dict(stored))
    silent = set(_UNSTORED)
    if config.moe.latent_size is None:
        silent.add("moe.latent_norm")
    if config.kda.gate == "softplus":
        silent.add("kda.gate_lower_bound")
    wrong = [
        f"model.{name} is {ours!r}, a reader takes {theirs!r}"
        for name, (ours, theirs) in changes.items()
        if name not in silent
    ]
    if wrong:
        raise CheckpointFormatError(f"config.json cannot say what the model computes: {'; '.join(wrong)}")


def text_of(values: dict[str, Any]) -> dict[str, Any]:
    """The text model's part of a `config.json`."""
    return values.get("text_config", values)


def config_from_hf(values: dict[str, Any], **overrides: Any) -> ModelConfig:
    """`ModelConfig` from a released `config.json`; a text config by itself is one of a model without a tower.

    Raises:
        CheckpointFormatError: a field is missing, or asks for what this model does not do.
    """
    text = text_of(values)
    if not isinstance(text, dict):
        raise CheckpointFormatError("config.json: text_config is no JSON object")
    part = "its text model"
    try:
        config = from_dict(ModelConfig, to_dict(_from_text(text)), "text model: ")
        part = "its vision tower"
        config = dataclasses.replace(config, vision=_from_vision(values, config.hidden_size))
    except KeyError as missing:
        raise CheckpointFormatError(f"config.json has no field {missing} for {part}") from None
    except (AttributeError, IndexError, TypeError) as error:
        raise CheckpointFormatError(f"config.json has a field of the wrong type for {part}: {error}") from None
    return dataclasses.replace(config, **overrides)


def _from_text(text: dict[str, Any]) -> ModelConfig:
    for name, only in _FIXED.items():
        if text.get(name, only) != only:
            raise CheckpointFormatError(f"config.json: {name} is {text[name]!r}; only {only!r} is supported")
    linear = text["linear_attn_config"]
    lower_bound = linear.get("gate_lower_bound")
    situ = text.get("activation_situ_beta") is not None
    if not situ and text["hidden_act"] != "silu":
        raise CheckpointFormatError(f"config.json: hidden_act is {text['hidden_act']!r}; supported are 'situ', 'silu'")
    mla_layers = tuple(l - 1 for l in linear["full_attn_layers"])  # 1-based there
    rest = [l + 1 for l in range(text["num_hidden_layers"]) if l not in mla_layers]
    if linear.get("kda_layers", rest) != rest:
        raise CheckpointFormatError("config.json: kda_layers and full_attn_layers do not share out the layers")
    return ModelConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        mla_layers=mla_layers,
        dense_size=text["intermediate_size"],
        num_dense_layers=text["first_k_dense_replace"],
        attn_res_block_size=text.get("attn_res_block_size"),
        situ_beta=text["activation_situ_beta"] if situ else None,
        situ_linear_beta=text.get("activation_situ_linear_beta"),
        norm_eps=text["rms_norm_eps"],
        kda=KDAConfig(
            num_heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_size=linear["short_conv_kernel_size"],
            full_rank_output_gate=linear.get("use_full_rank_gate", False),
            gate="softplus" if lower_bound is None else "lower_bound",
            gate_lower_bound=KDAConfig.gate_lower_bound if lower_bound is None else lower_bound,
        ),
        mla=MLAConfig(
            num_heads=text["num_attention_heads"],
            q_lora_rank=text.get("q_lora_rank"),
            kv_lora_rank=text["kv_lora_rank"],
            qk_nope_head_dim=text["qk_nope_head_dim"],
            qk_rope_head_dim=text["qk_rope_head_dim"],
            v_head_dim=text["v_head_dim"],
            output_gate=text.get("mla_use_output_gate", False),
        ),
        moe=MoEConfig(
            num_experts=text["num_experts"],
            experts_per_token=text["num_experts_per_token"],
            expert_size=text["moe_intermediate_size"],
            latent_size=text.get("routed_expert_hidden_size"),
            num_shared_experts=text["num_shared_experts"],
            router_activation=text["moe_router_activation_func"],
            renormalize=text["moe_renormalize"],
            routed_scaling_factor=text["routed_scaling_factor"],
            num_groups=text["num_expert_group"],
            topk_groups=text["topk_group"],
            latent_norm=text.get("latent_moe_use_norm", False),
        ),
    )


def _from_vision(values: dict[str, Any], text_width: int) -> VisionConfig | None:
    if "vision_config" not in values:
        return None
    vision = values["vision_config"]
    for name, only in _FIXED_VISION.items():
        if vision.get(name, only) != only:
            raise CheckpointFormatError(
                f"config.json: vision_config.{name} is {vision[name]!r}; only {only!r} is supported"
            )
    heads, width, merge = vision["vt_num_attention_heads"], vision["qkv_hidden_size"], vision["merge_kernel_size"]
    linked = {"mm_hidden_size": vision["vt_hidden_size"], "text_hidden_size": text_width}
    linked["merge_kernel_size"] = [merge[0], merge[0]]
    for name, wanted in linked.items():
        if vision[name] != wanted:
            raise CheckpointFormatError(f"config.json: vision_config.{name} is {vision[name]}, it must be {wanted}")
    if heads == 0 or width % heads:
        raise CheckpointFormatError(
            f"config.json: vision_config.qkv_hidden_size {width} is no multiple of {heads} heads"
        )
    fields = {
        "hidden_size": vision["vt_hidden_size"],
        "num_layers": vision["vt_num_hidden_layers"],
        "num_heads": heads,
        "head_dim": width // heads,
        "mlp_size": vision["vt_intermediate_size"],
        "patch_size": vision["patch_size"],
        "position_grid": [vision["init_pos_emb_height"], vision["init_pos_emb_width"]],
        "merge": merge[0],
        "max_frames": vision.get("init_pos_emb_time", VisionConfig.max_frames),
        "projector_norm_eps": vision.get("projector_ln_eps", VisionConfig.projector_norm_eps),
    }
    return from_dict(VisionConfig, fields, "vision_config: ")


def _vision_to_hf(config: VisionConfig, text_width: int) -> dict[str, Any]:
    return _FIXED_VISION | {
        "init_pos_emb_height": config.position_grid[0],
        "init_pos_emb_time": config.max_frames,
        "init_pos_emb_width": config.position_grid[1],
        "merge_kernel_size": [config.merge, config.merge],
        "mm_hidden_size": config.hidden_size,
        "patch_size": config.patch_size,
        "projector_ln_eps": config.projector_norm_eps,
        "qkv_hidden_size": config.num_heads * config.head_dim,
        "text_hidden_size": text_width,
        "vt_hidden_size": config.hidden_size,
        "vt_intermediate_size": config.mlp_size,
        "vt_num_attention_heads": config.num_heads,
        "vt_num_hidden_layers": config.num_layers,
    }


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """A `config.json` of the model: nested as K3's, or flat as Kimi-Linear's where the model has no K3 field."""
    kda, mla, moe = config.kda, config.mla, config.moe
    numbers = range(1, config.num_layers + 1)
    linear: dict[str, Any] = {
        "full_attn_layers": [l + 1 for l in config.mla_layers],
        "head_dim": kda.head_dim,
        "kda_layers": [l for l in numbers if l - 1 not in config.mla_layers],
        "num_heads": kda.num_heads,
        "short_conv_kernel_size": kda.conv_size,
    }
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "dtype": dtype,
        "first_k_dense_replace": config.num_dense_layers,
        "hidden_act": "silu" if config.situ_beta is None else "situ",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_size,
        "kv_lora_rank": mla.kv_lora_rank,
        "linear_attn_config": linear,
        "mla_use_nope": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": moe.expert_size,
        "moe_layer_freq": 1,
        "moe_renormalize": moe.renormalize,
        "moe_router_activation_func": moe.router_activation,
        "num_attention_heads": mla.num_heads,
        "num_expert_group": moe.num_groups,
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": mla.num_heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": moe.num_shared_experts,
        "q_lora_rank": mla.q_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "rms_norm_eps": config.norm_eps,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "tie_word_embeddings": False,
        "topk_group": moe.topk_groups,
        "topk_method": "noaux_tc",
        "v_head_dim": mla.v_head_dim,
        "vocab_size": config.vocab_size,
    }
    if is_kimi_linear(config):
        return text
    linear["use_full_rank_gate"] = kda.full_rank_output_gate
    if kda.gate == "lower_bound":
        linear["gate_lower_bound"] = kda.gate_lower_bound
    text |= {
        "activation_situ_beta": config.situ_beta,
        "activation_situ_linear_beta": config.situ_linear_beta,
        "attn_res_block_size": config.attn_res_block_size,
        "latent_moe_use_norm": moe.latent_norm,
        "mla_use_output_gate": mla.output_gate,
        "routed_expert_hidden_size": moe.latent_size,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": dtype,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
    } | ({} if config.vision is None else {"vision_config": _vision_to_hf(config.vision, config.hidden_size)})


def is_kimi_linear(config: ModelConfig) -> bool:
    """Whether the model has none of the fields that K3 added."""
    k3 = (config.attn_res_block_size, config.situ_beta, config.situ_linear_beta, config.moe.latent_size, config.vision)
    gates = config.mla.output_gate or config.kda.full_rank_output_gate or config.kda.gate == "lower_bound"
    return not gates and k3 == (None,) * 5


def quantization(values: dict[str, Any]) -> bool:
    """Whether a `config.json` declares MXFP4 weights as the release does; False: it declares nothing.

    Raises:
        CheckpointFormatError: another quantisation, with the field and value that differ.
    """
    declared = text_of(values).get("quantization_config") or values.get("quantization_config")
    if not declared:
        return False
    groups = declared.get("config_groups") or {} if isinstance(declared, dict) else None
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) and isinstance(group.get("weights") or {}, dict) for group in groups.values()
    ):
        raise CheckpointFormatError("config.json: quantization_config is none that can be read: not of JSON objects")
    found = {"quant_method": declared.get("quant_method"), "format": declared.get("format")}
    wanted: dict[str, Any] = {name: QUANTIZATION[name] for name in found}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        for field in ("num_bits", "type", "group_size", "strategy", "symmetric"):
            found[f"config_groups.{name}.weights.{field}"] = weights.get(field)
            wanted[f"config_groups.{name}.weights.{field}"] = QUANTIZATION["config_groups"]["group_0"]["weights"][field]
    wrong = [f"{name} is {found[name]!r}, not {wanted[name]!r}" for name in found if found[name] != wanted[name]]
    if wrong or not groups:
        raise CheckpointFormatError(
            "config.json: quantization_config is none that can be read: " + ("; ".join(wrong) or "it has no groups")
        )
    return True
