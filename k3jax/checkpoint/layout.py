"""The released tensor layout: names, shapes and dtypes of tensors, and the parameter that each becomes.

Linear weights are [out, in] there and [in, *out] here; experts are one tensor each there and one stack here; `A_log` is
padded with zeros to a multiple of 128 there and holds one value per head here; `kv_b_proj` is two parameters here.
Everything is said by `leaves`: import, preflight and export read that one table.

Names of Kimi K3 are those of its released index. Kimi-Linear-48B has no `language_model.` prefix; its `g_a_proj`,
`g_b_proj` and `A_log` [1, 1, H, 1] are known from public ports only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import nnx

from k3jax.config import KDAConfig, LayerSpec, MLAConfig, ModelConfig, MoEConfig
from k3jax.model.k3 import K3
from k3jax.model.plan import plan_layers

A_LOG_MULTIPLE = 128
PREFIX = "language_model."
ROUTER_BIAS = "router_bias"
GROUP = 32
"""Elements along the input dimension that share an MXFP4 scale."""

Kind = Literal["plain", "linear", "linear2", "row", "conv", "flat", "a_log", "k_b", "v_b", "patch", "q", "k", "v"]


class CheckpointFormatError(ValueError):
    """A directory or tensor that does not follow the released layout; the message names it.

    `problems` is everything that was found, where the message has to stop at some.
    """

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class Entry(NamedTuple):
    """One tensor of the released layout and the parameter that holds it."""

    name: str  # within the layer, or of the whole model
    path: str  # dotted path in the module
    kind: Kind
    """"linear" [out, in] is [in, *out] here, "linear2" [out, in] is [*in, out]; "k_b" and "v_b" share a tensor,
    and so do "q", "k" and "v". "patch" [out, channel, row, column] is [inputs, out]. Others
    keep the order of elements: "row" is [1, D] there, "conv" [channels, 1, taps], "flat" one axis, "a_log" padded."""


_GLOBAL = [
    Entry("model.embed_tokens.weight", "embed", "plain"),
    Entry("model.norm.weight", "final_norm", "plain"),
    Entry("lm_head.weight", "lm_head", "linear"),
]
_OUTPUT_RES = [
    Entry("model.output_attn_res_proj.weight", "output_res.proj", "row"),
    Entry("model.output_attn_res_norm.weight", "output_res.norm", "plain"),
]
_NORMS = [
    Entry("input_layernorm.weight", "input_norm", "plain"),
    Entry("post_attention_layernorm.weight", "post_norm", "plain"),
]
_ATTN_RES = [
    Entry("self_attention_res_proj.weight", "attn_res.proj", "row"),
    Entry("self_attention_res_norm.weight", "attn_res.norm", "plain"),
    Entry("mlp_res_proj.weight", "mlp_res.proj", "row"),
    Entry("mlp_res_norm.weight", "mlp_res.norm", "plain"),
]
_EXPERTS = [Entry(f"block_sparse_moe.experts.{{expert}}.{w}.weight", f"ffn.{w}", "linear") for w in ("w1", "w2", "w3")]
_VISION = [
    Entry("vision_tower.patch_embed.proj.weight", "vision.patch_embed", "patch"),
    Entry("vision_tower.patch_embed.pos_emb.weight", "vision.positions", "plain"),
    Entry("vision_tower.encoder.final_layernorm.weight", "vision.final_norm", "plain"),
    Entry("mm_projector.proj.0.weight", "vision.projector.fc0", "linear"),
    Entry("mm_projector.proj.2.weight", "vision.projector.fc1", "linear"),
    Entry("mm_projector.post_norm.weight", "vision.projector.post_norm", "plain"),
]
_VISION_BLOCK = [
    Entry("norm0.weight", "vision.blocks.input_norm", "plain"),
    Entry("norm1.weight", "vision.blocks.post_norm", "plain"),
    Entry("wqkv.weight", "vision.blocks.q_proj", "q"),
    Entry("wqkv.weight", "vision.blocks.k_proj", "k"),
    Entry("wqkv.weight", "vision.blocks.v_proj", "v"),
    Entry("wo.weight", "vision.blocks.o_proj", "linear2"),
    Entry("mlp.fc0.weight", "vision.blocks.fc0", "linear"),
    Entry("mlp.fc1.weight", "vision.blocks.fc1", "linear"),
]
_BIAS = "block_sparse_moe.gate.e_score_correction_bias"
_WIDE = ("A_log", "dt_bias", "conv1d.weight", "self_attn.o_norm.weight", "e_score_correction_bias")


def stored_wide(name: str) -> bool:
    """Whether the release stores this tensor as float32 beside bfloat16 ones."""
    return name.endswith(_WIDE)


def _entries(prefix: str, module: str, names: dict[str, str], kind: Kind) -> list[Entry]:
    return [Entry(f"{prefix}{theirs}", f"{module}.{ours}", kind) for theirs, ours in names.items()]


def kda_entries(config: KDAConfig) -> list[Entry]:
    gate = {"g_proj": "g_proj"} if config.full_rank_output_gate else {"g_a_proj": "g_a", "g_b_proj": "g_b"}
    linear = {n: n for n in ("q_proj", "k_proj", "v_proj", "b_proj")} | {"f_a_proj": "f_a", "f_b_proj": "f_b"} | gate

    def weights(names: dict[str, str]) -> dict[str, str]:
        return {f"{n}.weight": ours for n, ours in names.items()}

    return [
        *_entries("self_attn.", "mixer", weights(linear), "linear"),
        *_entries("self_attn.", "mixer", weights({"o_proj": "o_proj"}), "linear2"),
        *_entries("self_attn.", "mixer", weights({f"{x}_conv1d": f"{x}_conv" for x in "qkv"}), "conv"),
        *_entries("self_attn.", "mixer", {"o_norm.weight": "o_norm"}, "plain"),
        *_entries("self_attn.", "mixer", {"dt_bias": "dt_bias"}, "flat"),
        *_entries("self_attn.", "mixer", {"A_log": "A_log"}, "a_log"),
    ]


def mla_entries(config: MLAConfig) -> list[Entry]:
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
        *_entries("self_attn.", "mixer", {"kv_b_proj.weight": "k_b"}, "k_b"),
        *_entries("self_attn.", "mixer", {"kv_b_proj.weight": "v_b"}, "v_b"),
        *_entries("self_attn.", "mixer", plain, "plain"),
    ]


def mlp_entries(prefix: str, module: str) -> list[Entry]:
    return _entries(prefix, module, {f"{n}_proj.weight": n for n in ("gate", "up", "down")}, "linear")


def moe_entries(config: MoEConfig) -> list[Entry]:
    """Without the experts."""
    prefix = "block_sparse_moe."
    out = [Entry(prefix + "gate.weight", "ffn.router", "linear")]
    if config.latent_size is not None:
        latent = {"routed_expert_down_proj.weight": "latent_down", "routed_expert_up_proj.weight": "latent_up"}
        out += _entries(prefix, "ffn", latent, "linear")
        if config.latent_norm:
            out.append(Entry(prefix + "routed_expert_norm.weight", "ffn.latent_norm", "plain"))
    if config.num_shared_experts:
        out += mlp_entries(prefix + "shared_experts.", "ffn.shared")
    return out


def _layer_entries(config: ModelConfig, spec: LayerSpec) -> list[Entry]:
    return [
        *_NORMS,
        *(_ATTN_RES if config.attn_res_block_size is not None else []),
        *(kda_entries(config.kda) if spec.mixer == "kda" else mla_entries(config.mla)),
        *(mlp_entries("mlp.", "ffn") if spec.ffn == "dense" else [*moe_entries(config.moe), *_EXPERTS]),
    ]


class Leaf(NamedTuple):
    """One parameter (stacked over layers and experts) and the tensors it is read from and written to."""

    path: str
    """Dotted, in the module; `ROUTER_BIAS` is the one leaf that is no parameter."""
    template: str
    """Name of its tensors, with places for {layer} and {expert}."""
    layers: tuple[int, ...] | None
    """Layer numbers along its first axis; None: not stacked."""
    experts: int | None
    """Length of its axis of experts; None: a tensor holds all of the layer's parameter."""
    shape: tuple[int, ...]
    """Of a tensor."""
    view: tuple[int, ...]
    """The tensor's elements in their order, with one axis for each of the parameter's."""
    order: tuple[int, ...]
    """Axes of the view in the parameter's order."""
    window: tuple[int, int, int] | None
    """(axis, start, stop) of the view that the parameter holds; None: all of it."""

    @property
    def of_tower(self) -> bool:
        """Whether it belongs to the vision tower or its projector."""
        return self.path.startswith("vision.")

    @property
    def stack(self) -> tuple[int, ...]:
        layers = () if self.layers is None else (len(self.layers),)
        return layers if self.experts is None else (*layers, self.experts)

    @property
    def held(self) -> tuple[int, ...]:
        """Shape of what the parameter holds of the view."""
        if self.window is None:
            return self.view
        axis, start, stop = self.window
        return (*self.view[:axis], stop - start, *self.view[axis + 1 :])

    def name(self, *index: int) -> str:
        """The tensor at a place of the stack."""
        layer = None if self.layers is None else self.layers[index[0]]
        return self.template.format(layer=layer, expert=None if self.experts is None else index[-1])

    def names(self) -> Iterator[str]:
        return (self.name(*index) for index in np.ndindex(*self.stack))

    def to_param(self, tensor: np.ndarray) -> np.ndarray:
        """What one tensor of this layout gives of the parameter, as a view where it can be."""
        if self.window is not None:
            axis, start, stop = self.window
            tensor = tensor.reshape(self.view)[(slice(None),) * axis + (slice(start, stop),)]
        return tensor.reshape(self.held).transpose(self.order)

    def to_view(self, value: Any) -> Any:
        """Inverse of `to_param`, with the axes of the view; leading axes of the stack stay."""
        lead = value.ndim - len(self.order)
        return value.transpose(*range(lead), *(lead + self.order.index(i) for i in range(len(self.order))))


def packed_names(name: str) -> tuple[str, str]:
    """Names of the MXFP4 codes and scales of an expert's tensor."""
    stem = name.removesuffix(".weight")
    return stem + ".weight_packed", stem + ".weight_scale"


def packed_shapes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes, two to a byte, and of the scales."""
    return (*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // GROUP)


def packed_leaves(found: Leaf) -> tuple[Leaf, Leaf]:
    """Codes and scales of a bank of experts, in the order of axes that they have in the file."""
    order = tuple(range(len(found.view)))
    codes, scales = (
        found._replace(template=name, shape=shape, view=shape, order=order)
        for name, shape in zip(packed_names(found.template), packed_shapes(found.shape))
    )
    return codes, scales


def held_leaves(found: Leaf) -> tuple[Leaf, Leaf]:
    """Codes and scales of a bank of experts as a `PackedMX` holds them, in the parameter's order of axes."""
    codes, scales = (one._replace(order=found.order) for one in packed_leaves(found))
    return codes._replace(path=f"{found.path}.codes"), scales._replace(path=f"{found.path}.scales")


def leaf(
    entry: Entry,
    shape: tuple[int, ...],
    *,
    kv_width: int = 0,
    layers: tuple[int, ...] | None = None,
    experts: int | None = None,
    prefix: str = "",
) -> Leaf:
    """The `Leaf` of an entry whose parameter has `shape` in one layer (and expert); `kv_width` is nope + v."""
    n, window = len(shape), None
    view, order, tensor = shape, tuple(range(n)), shape
    match entry.kind:
        case "plain":
            pass
        case "linear":
            view, order = (*shape[1:], shape[0]), (n - 1, *range(n - 1))
            tensor = (math.prod(shape[1:]), shape[0])
        case "linear2":
            view, order = (shape[-1], *shape[:-1]), (*range(1, n), 0)
            tensor = (shape[-1], math.prod(shape[:-1]))
        case "k_b" | "v_b":
            rank, heads, width = shape
            view, order, tensor = (heads, kv_width, rank), (2, 0, 1), (heads * kv_width, rank)
            window = (1, 0, width) if entry.kind == "k_b" else (1, kv_width - width, kv_width)
        case "q" | "k" | "v":
            inputs, heads, width = shape
            part = "qkv".index(entry.kind)
            view, order, tensor = (3 * heads, width, inputs), (2, 0, 1), (3 * heads * width, inputs)
            window = (0, part * heads, (part + 1) * heads)
        case "patch":
            side = math.isqrt(shape[0] // 3)
            view, order, tensor = shape[::-1], (1, 0), (shape[1], 3, side, side)
        case "row":
            tensor = (1, *shape)
        case "conv":
            tensor = (math.prod(shape[:-1]), 1, shape[-1])
        case "flat":
            tensor = (math.prod(shape),)
        case "a_log":
            tensor = view = (shape[0] + -shape[0] % A_LOG_MULTIPLE,)
            window = (0, 0, shape[0])
    return Leaf(entry.path, prefix + entry.name, layers, experts, tensor, view, order, window)


@lru_cache(maxsize=4)
def abstract_model(config: ModelConfig) -> K3:
    """The model's tree of shapes and dtypes."""
    return nnx.eval_shape(lambda: K3(config, rngs=nnx.Rngs(0)))


def leaves(config: ModelConfig, prefix: str = PREFIX) -> list[Leaf]:
    """Every parameter in the order of the checkpoint's layers as far as stacks allow; then the router biases and the
    tower."""
    shapes = nnx.to_pure_dict(nnx.state(abstract_model(config)))
    kv_width = config.mla.qk_nope_head_dim + config.mla.v_head_dim
    out = [
        leaf(entry, tuple(get(shapes, entry.path).shape), prefix=prefix)
        for entry in _GLOBAL + (_OUTPUT_RES if config.attn_res_block_size is not None else [])
    ]
    for i, plan in enumerate(plan_layers(config)):
        for j, (spec, numbers) in enumerate(plan.run_layers()):
            for entry in _layer_entries(config, spec):
                shape = tuple(get(shapes["segments"][i]["runs"][j], entry.path).shape)[1:]
                experts = config.moe.num_experts if "{expert}" in entry.name else None
                made = leaf(
                    entry._replace(path=f"segments.{i}.runs.{j}.{entry.path}"),
                    shape if experts is None else shape[1:],
                    kv_width=kv_width,
                    layers=numbers,
                    experts=experts,
                    prefix=prefix + "model.layers.{layer}.",
                )
                out.append(made)
    if config.num_moe_layers:
        layers = tuple(range(config.num_dense_layers, config.num_layers))
        bias = Entry(_BIAS, ROUTER_BIAS, "plain")
        shape = (config.moe.num_experts,)
        out.append(leaf(bias, shape, layers=layers, prefix=prefix + "model.layers.{layer}."))
    return out + vision_leaves(config)


def vision_leaves(config: ModelConfig) -> list[Leaf]:
    """Every parameter of the tower and the projector; none where the model has no tower."""
    if config.vision is None:
        return []
    shapes = nnx.to_pure_dict(nnx.state(abstract_model(config)))
    out = [leaf(entry, tuple(get(shapes, entry.path).shape)) for entry in _VISION]
    blocks, prefix = tuple(range(config.vision.num_layers)), "vision_tower.encoder.blocks.{layer}."
    for entry in _VISION_BLOCK:
        out.append(leaf(entry, tuple(get(shapes, entry.path).shape)[1:], layers=blocks, prefix=prefix))
    return out


def get(tree: Any, path: str) -> Any:
    """The node at a dotted path of nested dicts with names and list positions for keys."""
    for part in path.split("."):
        tree = tree[int(part)] if part.isdigit() else tree[part]
    return tree


def put(tree: dict, path: str, value: Any) -> None:
    """Sets the node at a dotted path, making dicts on the way."""
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[last] = value
