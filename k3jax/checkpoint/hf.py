"""The released tensor layout: names, shapes and the map to k3jax parameters, both ways.

Linear weights are [out, in] there and [in, *out] here; experts are one tensor each there and one stack here; `A_log`
is padded with zeros to a multiple of 128 there and holds one value per head here. Experts must be plain (not packed).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from k3jax.config import KDAConfig, LayerSpec, MLAConfig, ModelConfig, MoEConfig
from k3jax.model.k3 import K3
from k3jax.model.plan import plan_layers

A_LOG_MULTIPLE = 128
_LM = "language_model."


class CheckpointFormatError(ValueError):
    """A directory or tensor that does not follow the released layout; the message names it."""


class Entry(NamedTuple):
    """One tensor of the released layout and the parameter that holds it."""

    name: str  # within the layer, or of the whole model
    path: str  # dotted path in the module
    kind: str  # "linear": [out, in] ↔ [in, *out]; "linear2": two input axes; "plain": same order; "a_log"


_GLOBAL = [
    Entry(_LM + "model.embed_tokens.weight", "embed", "plain"),
    Entry(_LM + "model.norm.weight", "final_norm", "plain"),
    Entry(_LM + "lm_head.weight", "lm_head", "linear"),
]
_OUTPUT_RES = [
    Entry(_LM + "model.output_attn_res_proj.weight", "output_res.proj", "plain"),
    Entry(_LM + "model.output_attn_res_norm.weight", "output_res.norm", "plain"),
]
_NORMS = [
    Entry("input_layernorm.weight", "input_norm", "plain"),
    Entry("post_attention_layernorm.weight", "post_norm", "plain"),
]
_ATTN_RES = [
    Entry("self_attention_res_proj.weight", "attn_res.proj", "plain"),
    Entry("self_attention_res_norm.weight", "attn_res.norm", "plain"),
    Entry("mlp_res_proj.weight", "mlp_res.proj", "plain"),
    Entry("mlp_res_norm.weight", "mlp_res.norm", "plain"),
]


def _entries(prefix: str, module: str, names: dict[str, str], kind: str) -> list[Entry]:
    return [Entry(f"{prefix}{theirs}", f"{module}.{ours}", kind) for theirs, ours in names.items()]


def _kda_entries(config: KDAConfig) -> list[Entry]:
    gate = {"g_proj": "g_proj"} if config.full_rank_output_gate else {"g_a_proj": "g_a", "g_b_proj": "g_b"}
    linear = {n: n for n in ("q_proj", "k_proj", "v_proj", "b_proj")} | {"f_a_proj": "f_a", "f_b_proj": "f_b"} | gate
    plain = {"q_conv1d": "q_conv", "k_conv1d": "k_conv", "v_conv1d": "v_conv", "o_norm": "o_norm"}

    def weights(names: dict[str, str]) -> dict[str, str]:
        return {f"{n}.weight": ours for n, ours in names.items()}

    return [
        *_entries("self_attn.", "mixer", weights(linear), "linear"),
        *_entries("self_attn.", "mixer", weights({"o_proj": "o_proj"}), "linear2"),
        *_entries("self_attn.", "mixer", weights(plain) | {"dt_bias": "dt_bias"}, "plain"),
        Entry("self_attn.A_log", "mixer.A_log", "a_log"),
    ]


def _mla_entries(config: MLAConfig) -> list[Entry]:
    linear = {"kv_a_proj_with_mqa.weight": "kv_a"}
    plain = {"kv_a_layernorm.weight": "kv_a_norm"}
    if config.q_lora_rank is None:
        linear["q_proj.weight"] = "q_proj"
    else:
        linear |= {"q_a_proj.weight": "q_a", "q_b_proj.weight": "q_b"}
        plain["q_a_layernorm.weight"] = "q_a_norm"
    if config.output_gate:
        linear["g_proj.weight"] = "g_proj"
    return [
        *_entries("self_attn.", "mixer", linear, "linear"),
        *_entries("self_attn.", "mixer", {"o_proj.weight": "o_proj"}, "linear2"),
        *_entries("self_attn.", "mixer", plain, "plain"),
    ]


def _mlp_entries(prefix: str, module: str) -> list[Entry]:
    return _entries(prefix, module, {f"{n}_proj.weight": n for n in ("gate", "up", "down")}, "linear")


def _moe_entries(config: MoEConfig) -> list[Entry]:
    prefix = "block_sparse_moe."
    out = [Entry(prefix + "gate.weight", "ffn.router", "linear")]
    if config.latent_size is not None:
        latent = {"routed_expert_down_proj.weight": "latent_down", "routed_expert_up_proj.weight": "latent_up"}
        out += _entries(prefix, "ffn", latent, "linear")
        if config.latent_norm:
            out.append(Entry(prefix + "routed_expert_norm.weight", "ffn.latent_norm", "plain"))
    if config.num_shared_experts:
        out += _mlp_entries(prefix + "shared_experts.", "ffn.shared")
    return out


def _layer_entries(config: ModelConfig, spec: LayerSpec) -> list[Entry]:
    """Tensors of one layer, without kv_b_proj, the experts and the router bias, which do not map one to one."""
    return [
        *_NORMS,
        *(_ATTN_RES if config.attn_res_block_size is not None else []),
        *(_kda_entries(config.kda) if spec.mixer == "kda" else _mla_entries(config.mla)),
        *(_mlp_entries("mlp.", "ffn") if spec.ffn == "dense" else _moe_entries(config.moe)),
    ]


def _to_ours(entry: Entry, tensor: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    if entry.kind == "a_log":
        heads = shape[0]
        if tensor.ndim != 1 or tensor.size < heads or np.any(tensor[heads:] != 0):
            raise CheckpointFormatError(f"{name}: expected {heads} values and zero padding, got shape {tensor.shape}")
        return tensor[:heads]
    if tensor.size != np.prod(shape):
        raise CheckpointFormatError(f"{name}: shape {tensor.shape} does not hold the parameter's {shape}")
    return (tensor if entry.kind == "plain" else tensor.T).reshape(shape)


def _to_theirs(entry: Entry, value: np.ndarray) -> np.ndarray:
    if entry.kind == "a_log":
        return np.pad(value, (0, -len(value) % A_LOG_MULTIPLE))
    if entry.kind == "linear":
        return np.ascontiguousarray(value.reshape(value.shape[0], -1).T)
    if entry.kind == "linear2":
        return np.ascontiguousarray(value.reshape(-1, value.shape[-1]).T)
    if entry.name.endswith("conv1d.weight"):
        return value.reshape(-1, 1, value.shape[-1])
    if entry.name.endswith("_proj.weight"):  # AttnRes projections are [1, D] there
        return value.reshape(1, -1)
    return value.reshape(-1) if entry.name.endswith("dt_bias") else value


def _get(tree: Any, path: str) -> Any:
    for part in path.split("."):
        tree = tree[part]
    return tree


def _set(tree: dict, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _take(tensors: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in tensors:
        packed = name.removesuffix(".weight") + ".weight_packed"
        hint = " (its experts are MXFP4-packed, which is not supported here)" if packed in tensors else ""
        raise CheckpointFormatError(f"tensor {name} is missing{hint}")
    return tensors[name]


def _read_layer(
    tensors: Mapping[str, np.ndarray], prefix: str, spec: LayerSpec, shapes: dict, config: ModelConfig
) -> dict:
    """One layer's parameters as a nested dict of numpy arrays; `shapes` mirrors it with unstacked shapes."""
    layer: dict = {}
    for entry in _layer_entries(config, spec):
        name = prefix + entry.name
        _set(layer, entry.path, _to_ours(entry, _take(tensors, name), _get(shapes, entry.path), name))
    if spec.mixer == "mla":
        mla, name = config.mla, prefix + "self_attn.kv_b_proj.weight"
        width = mla.qk_nope_head_dim + mla.v_head_dim
        joined = _to_ours(
            Entry(name, "", "linear"), _take(tensors, name), (mla.kv_lora_rank, mla.num_heads, width), name
        )
        layer["mixer"]["k_b"] = joined[..., : mla.qk_nope_head_dim]
        layer["mixer"]["v_b"] = joined[..., mla.qk_nope_head_dim :]
    if spec.ffn == "moe":
        for w in ("w1", "w2", "w3"):
            names = [f"{prefix}block_sparse_moe.experts.{e}.{w}.weight" for e in range(config.moe.num_experts)]
            layer["ffn"][w] = np.stack([_take(tensors, name).T for name in names])
    return layer


def from_hf(tensors: Mapping[str, np.ndarray], config: ModelConfig) -> tuple[K3, jax.Array]:
    """Model and router biases [MoE layers, E] from tensors in the released layout.

    Raises:
        CheckpointFormatError: a tensor is missing, has the wrong shape, or is packed.
    """
    graph, state = nnx.split(nnx.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0))))
    shapes = jax.tree.map(lambda leaf: tuple(leaf.shape), nnx.to_pure_dict(state))
    pure: dict = {"segments": {}}
    for entry in _GLOBAL + (_OUTPUT_RES if config.attn_res_block_size is not None else []):
        _set(pure, entry.path, _to_ours(entry, _take(tensors, entry.name), _get(shapes, entry.path), entry.name))
    for i, plan in enumerate(plan_layers(config)):
        runs = pure["segments"].setdefault(i, {"runs": {}})["runs"]
        for j, (spec, numbers) in enumerate(plan.run_layers()):
            stacked = shapes["segments"][i]["runs"][j]
            single = jax.tree.map(lambda s: s[1:], stacked, is_leaf=lambda s: isinstance(s, tuple))
            layers = [_read_layer(tensors, f"{_LM}model.layers.{n}.", spec, single, config) for n in numbers]
            runs[j] = jax.tree.map(lambda *a: np.stack(a), *layers)
    dtype = jnp.dtype(config.param_dtype)
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda a: jnp.asarray(a, dtype), pure))
    moe_layers = range(config.num_dense_layers, config.num_layers)
    names = [f"{_LM}model.layers.{n}.block_sparse_moe.gate.e_score_correction_bias" for n in moe_layers]
    bias = np.stack([_take(tensors, name) for name in names]) if names else np.zeros((0, config.moe.num_experts))
    return nnx.merge(graph, state), jnp.asarray(bias, jnp.float32)


def to_hf(params: K3) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of every parameter of `params` (or of a gradient of its shape) in the released layout.

    Router biases are not parameters and are not included.
    """
    config, pure = params.config, nnx.to_pure_dict(nnx.state(params))
    for entry in _GLOBAL + (_OUTPUT_RES if config.attn_res_block_size is not None else []):
        yield entry.name, _to_theirs(entry, np.asarray(_get(pure, entry.path)))
    for i, plan in enumerate(plan_layers(config)):
        for j, (spec, numbers) in enumerate(plan.run_layers()):
            stack = pure["segments"][i]["runs"][j]
            for place, number in enumerate(numbers):
                layer = jax.tree.map(lambda a, k=place: np.asarray(a[k]), stack)
                yield from _write_layer(layer, f"{_LM}model.layers.{number}.", spec, config)


def _write_layer(layer: dict, prefix: str, spec: LayerSpec, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    for entry in _layer_entries(config, spec):
        yield prefix + entry.name, _to_theirs(entry, _get(layer, entry.path))
    if spec.mixer == "mla":
        joined = np.concatenate([layer["mixer"]["k_b"], layer["mixer"]["v_b"]], axis=-1)
        name = "self_attn.kv_b_proj.weight"
        yield prefix + name, _to_theirs(Entry(name, "", "linear"), joined)
    if spec.ffn == "moe":
        for w in ("w1", "w2", "w3"):
            for e, value in enumerate(layer["ffn"][w]):
                yield f"{prefix}block_sparse_moe.experts.{e}.{w}.weight", np.ascontiguousarray(value.T)


def config_from_hf(values: dict[str, Any], **overrides: Any) -> ModelConfig:
    """`ModelConfig` from a released `config.json` (its `text_config`, or the text config itself)."""
    text = values.get("text_config", values)
    linear = text["linear_attn_config"]
    base = ModelConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        num_layers=text["num_hidden_layers"],
        mla_layers=tuple(l - 1 for l in linear["full_attn_layers"]),  # 1-based there
        dense_size=text["intermediate_size"],
        num_dense_layers=text["first_k_dense_replace"],
        attn_res_block_size=text.get("attn_res_block_size"),
        situ_beta=text["activation_situ_beta"],
        situ_linear_beta=text["activation_situ_linear_beta"],
        norm_eps=text["rms_norm_eps"],
        kda=KDAConfig(
            num_heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_size=linear["short_conv_kernel_size"],
            gate_lower_bound=linear["gate_lower_bound"],
            full_rank_output_gate=linear["use_full_rank_gate"],
        ),
        mla=MLAConfig(
            num_heads=text["num_attention_heads"],
            q_lora_rank=text["q_lora_rank"],
            kv_lora_rank=text["kv_lora_rank"],
            qk_nope_head_dim=text["qk_nope_head_dim"],
            qk_rope_head_dim=text["qk_rope_head_dim"],
            v_head_dim=text["v_head_dim"],
            output_gate=text["mla_use_output_gate"],
        ),
        moe=MoEConfig(
            num_experts=text["num_experts"],
            experts_per_token=text["num_experts_per_token"],
            expert_size=text["moe_intermediate_size"],
            latent_size=text["routed_expert_hidden_size"],
            num_shared_experts=text["num_shared_experts"],
            router_activation=text["moe_router_activation_func"],
            renormalize=text["moe_renormalize"],
            routed_scaling_factor=text["routed_scaling_factor"],
            num_groups=text["num_expert_group"],
            topk_groups=text["topk_group"],
            latent_norm=text["latent_moe_use_norm"],
        ),
    )
    return dataclasses.replace(base, **overrides)


def load_hf(directory: str | Path, **overrides: Any) -> tuple[K3, jax.Array]:
    """Model and router biases from a directory in the released layout with plain experts, read whole into memory.

    Args:
        overrides: fields of `ModelConfig` to replace, e.g. `dtype="bfloat16"`.

    Raises:
        CheckpointFormatError: no config or shards, or tensors that do not match the config.
    """
    directory = Path(directory)
    files = sorted(directory.glob("*.safetensors"))
    if not (directory / "config.json").is_file() or not files:
        raise CheckpointFormatError(f"{directory} holds no config.json with .safetensors files beside it")
    config = config_from_hf(json.loads((directory / "config.json").read_text()), **overrides)
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        tensors |= load_file(file)
    return from_hf(tensors, config)
