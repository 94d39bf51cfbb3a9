"""Tables and arrays of what a model does: parameters, depth attention, routing, decay gates.

What a layer does not report is computed again from the residual stream, layer by layer outside of the model
(`_layers`): one layer's inputs exist at a time.

Legend: B batch, T time, D hidden, E experts, H heads, K head dim, L layers, S sources, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from k3jax.config import ConfigError, ModelConfig
from k3jax.model.decoder import DecoderLayer, Tokens
from k3jax.model.k3 import K3, describe
from k3jax.model.kda import KDA
from k3jax.model.moe import LatentMoE
from k3jax.model.vision import Images
from k3jax.ops.attn_res import mix_norm, read_bank
from k3jax.ops.kda.gates import compute_dtype, log_decay
from k3jax.ops.norms import rms_norm
from k3jax.ops.router import route, router_logits
from k3jax.sharding import gathered, place
from k3jax.train.flops import parameter_counts
from k3jax.train.optimizer import path_names
from k3jax.train.step import max_violation

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""Of every distribution here."""
SATURATED = 0.01
"""How near to an end, as a share of its range, a gate counts as saturated."""


@dataclass(frozen=True)
class Mechanism:
    """The parameters of one mechanism, over all layers and experts."""

    name: str
    """As in `k3jax.train.flops.parameter_counts`."""
    arrays: int
    """Stacks of layers count as one."""
    count: int
    """Numbers; of experts held as codes, those that the codes stand for."""
    bytes: int
    bytes_per_device: int | None
    """None where the arrays have no sharding (`abstract_params`)."""
    specs: dict[str, PartitionSpec]
    """Spec by path, of arrays on a mesh."""


def parameters(model: Any, config: ModelConfig) -> list[Mechanism]:
    """Parameters by mechanism, in the order of `parameter_counts` and with its counts.

    Args:
        model: a `K3`, its abstract form (`k3jax.train.state.abstract_params`), or the parameters of a `TrainState`
            (abstract or not), whose shardings are then told.

    Raises:
        ConfigError: the model is not one of this configuration.
    """
    leaves: dict[str, list[tuple[str, nnx.Variable]]] = {}
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    for path, variable in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_variable):
        names = path_names(path)
        leaves.setdefault(_mechanism(names, model), []).append(("/".join(names), variable))
    rows = []
    for name, expected in parameter_counts(config).by_mechanism.items():
        row = _row(name, leaves.get(name, []))
        if row.count != expected:
            raise ConfigError(f"the model has {row.count:,} parameters of {name}, its configuration {expected:,}")
        rows += [row] if expected else []
    return rows


_TOP = {"embed": "embedding", "final_norm": "norms", "lm_head": "head", "output_res": "attn_res", "vision": "vision"}
_PARTS = {"attn_res": "attn_res", "mlp_res": "attn_res", "input_norm": "norms", "post_norm": "norms"}
_MOE = {"router": "router", "shared": "shared_experts"} | dict.fromkeys(("w1", "w2", "w3"), "routed_experts")


def _mechanism(names: list[str], model: K3) -> str:
    """Of the parameter at a path."""
    if names[0] in _TOP:
        return _TOP[names[0]]
    _, segment, _, run, part, *rest = names
    spec, _ = model.plans[int(segment)].run_layers()[int(run)]
    if part in _PARTS:
        return _PARTS[part]
    if part == "mixer":
        return spec.mixer
    return "dense_mlp" if spec.ffn == "dense" else _MOE.get(rest[0], "latent")


def _row(name: str, found: list[tuple[str, nnx.Variable]]) -> Mechanism:
    arrays = [a for _, variable in found for a in jax.tree.leaves(variable)]
    placed = all(getattr(a, "sharding", None) is not None for a in arrays)
    specs = {}
    for path, variable in found:
        spec = getattr(getattr(jax.tree.leaves(variable)[0], "sharding", None), "spec", None)
        specs |= {} if spec is None else {path: spec}
    return Mechanism(
        name,
        len(found),
        sum(math.prod(variable.get_value().shape) for _, variable in found),
        sum(_bytes(a.shape, a) for a in arrays),
        sum(_bytes(a.sharding.shard_shape(a.shape), a) for a in arrays) if placed else None,
        specs,
    )


def _bytes(shape: tuple[int, ...], array: Any) -> int:
    return math.prod(shape) * array.dtype.itemsize


@dataclass(frozen=True)
class DepthAttention:
    """Where sublayers read: a heat map, its axes and its labels."""

    weights: np.ndarray
    """float64 [2·L + 1, S + 1], means over tokens; rows sum to 1. NaN: no such source yet."""
    sublayers: tuple[str, ...]
    """ "layer 3 kda", "layer 3 moe", …, "output"."""
    sources: tuple[str, ...]
    """ "embedding", "block 0", …, and "partial": the running sum of the block that the sublayer is in."""


def depth_attention(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    router_bias: jax.Array | None = None,
    images: Images | None = None,
) -> DepthAttention:
    """Mean depth-attention weights by sublayer and source (block attention residuals, report §2.2).

    Args:
        tokens, segment_ids, router_bias, images: as for the call of `K3`; padding does not count.

    Raises:
        ValueError: a model with plain residuals, which have no weights, or tokens that are all padding.
    """
    config = model.config
    if config.attn_res_block_size is None:
        raise ValueError("this model has plain residuals (attn_res_block_size None): there is no depth attention")
    valid = _valid(tokens, segment_ids)
    weights = np.asarray(_mean_depth(model, tokens, segment_ids, router_bias, images, valid), np.float64)
    names = [f"layer {l} {part}" for l, spec in enumerate(config.layers) for part in (spec.mixer, spec.ffn)]
    block = [l // config.attn_res_block_size for l in range(config.num_layers) for _ in range(2)]
    for row, index in enumerate(block):  # the bank holds the embedding and the blocks before this one
        weights[row, index + 1 : -1] = np.nan
        if row % (2 * config.attn_res_block_size) == 0:
            weights[row, -1] = np.nan
    sources = ("embedding", *(f"block {i}" for i in range(config.num_blocks - 1)), "partial")
    return DepthAttention(weights, (*names, "output"), sources)


@jax.jit
def _mean_depth(model: K3, tokens, segment_ids, router_bias, images, valid_BT) -> jax.Array:
    _, aux = model.features(tokens, segment_ids, router_bias=router_bias, images=images, depth=True)
    assert aux.depth is not None
    depth, valid_BT = place((aux.depth, valid_BT))
    return jnp.einsum("lsbt,bt->ls", depth, valid_BT.astype(depth.dtype)) / valid_BT.sum()


@dataclass(frozen=True)
class Router:
    """How tokens chose experts; the rows of every array are MoE layers."""

    layers: tuple[int, ...]
    """Their numbers in the model."""
    load: np.ndarray
    """int [L, E], tokens sent to each expert."""
    max_violation: np.ndarray
    """float [L], load of the busiest expert over the mean, minus 1."""
    margin: np.ndarray
    """float [L, B, T], distance from the k-th to the (k+1)-th largest biased score; NaN at padding. A small one is a
    choice that rounding could turn."""
    bias: np.ndarray
    """float [L, E], the selection biases."""

    def table(self) -> list[dict[str, float]]:
        """A row for each layer: quantiles of the margins, idle experts, spread of the biases."""
        low, middle, high = np.nanquantile(self.margin, (0.01, 0.5, 0.99), axis=(1, 2))
        return [
            {
                "layer": layer,
                "max_violation": float(self.max_violation[i]),
                "busiest_share": float(self.load[i].max() / max(self.load[i].sum(), 1)),
                "idle_experts": int((self.load[i] == 0).sum()),
                "margin_1%": float(low[i]),
                "margin_median": float(middle[i]),
                "margin_99%": float(high[i]),
                "bias_min": float(self.bias[i].min()),
                "bias_max": float(self.bias[i].max()),
                "bias_std": float(self.bias[i].std()),
            }
            for i, layer in enumerate(self.layers)
        ]


def router(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    router_bias: jax.Array | None = None,
    images: Images | None = None,
) -> Router:
    """Loads, balance, margins of the choice and selection biases of every MoE layer (report §2.3).

    Args:
        tokens, segment_ids, router_bias, images: as for the call of `K3`; padding does not count.

    Raises:
        ValueError: a model without routed experts, or tokens that are all padding.
    """
    config = model.config
    if not config.num_moe_layers:
        raise ValueError(f"all {config.num_layers} layers of this model are dense: there is no router")
    found = [
        (view.number, *jax.device_get(_margins(view.layer.ffn, view.ffn_input, view.tokens, view.bias)))
        for view in _layers(model, tokens, segment_ids, router_bias, images)
        if isinstance(view.layer.ffn, LatentMoE)
    ]
    numbers, load, margin, bias = zip(*found)
    load = np.stack(load)
    violation = np.asarray(max_violation(jnp.asarray(load)))
    return Router(numbers, load, violation, np.stack(margin), np.stack(bias))


@jax.jit
def _margins(ffn: LatentMoE, x_BTD: jax.Array, tokens: Tokens, bias_E: jax.Array):
    moe = ffn.config.moe
    x_BTD, tokens, w_DE = place((x_BTD, tokens, ffn.router[...]))  # of a few statistics every device makes all
    routing = route(
        router_logits(x_BTD.reshape(-1, x_BTD.shape[-1]), w_DE),
        bias_E,
        tokens.positions.reshape(-1),
        experts_per_token=moe.experts_per_token,
        activation=moe.router_activation,
        num_groups=moe.num_groups,
        topk_groups=moe.topk_groups,
    )
    last = jnp.take_along_axis(routing.scores_NE + bias_E, routing.experts_NK[:, -1:], axis=1)[:, 0]
    margin_BT = (last - routing.threshold_N).reshape(tokens.valid.shape)
    picked = jax.nn.one_hot(routing.experts_NK, moe.num_experts, dtype=jnp.int32).sum(1)
    load_E = (picked * tokens.valid.reshape(-1, 1)).sum(0)
    return load_E, jnp.where(tokens.valid, margin_BT, jnp.nan), bias_E


@dataclass(frozen=True)
class Gates:
    """Decay and write gates of KDA over tokens (and channels); the leading axes of every array are KDA layers, heads.

    Quantiles are those of `QUANTILES`, ascending.
    """

    layers: tuple[int, ...]
    """Their numbers in the model."""
    log_decay: np.ndarray
    """float [L, H, Q], natural logarithm of what a token leaves of the state, by channel; at most 0."""
    half_life: np.ndarray
    """float [L, H, Q], tokens after which half is left, ln 2 / −`log_decay`; infinite where nothing is forgotten."""
    keeping: np.ndarray
    """float [L, H], share of gates within 1 % (`SATURATED`) of keeping everything: a log-decay above −0.05 with K3's
    bound of −5. Of the softplus gate, where its slope is below 1 %."""
    forgetting: np.ndarray
    """float [L, H], share within 1 % of the lower bound; 0 with the softplus gate, which has none."""
    beta: np.ndarray
    """float [L, H, Q], how much of a token is written, in (0, 1)."""


def gates(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    router_bias: jax.Array | None = None,
    images: Images | None = None,
) -> Gates:
    """Distribution of decay and write gates by KDA layer and head (report §2.1).

    Args:
        tokens, segment_ids, router_bias, images: as for the call of `K3`; padding does not count.

    Raises:
        ValueError: a model without KDA layers, or tokens that are all padding.
    """
    if all(spec.mixer != "kda" for spec in model.config.layers):
        raise ValueError("this model has no KDA layer")
    numbers, found = [], []
    for view in _layers(model, tokens, segment_ids, router_bias, images):
        if isinstance(view.layer.mixer, KDA):
            numbers.append(view.number)
            found.append(jax.device_get(_gate_statistics(view.layer.mixer, view.mixer_input, view.tokens.valid)))
    decay, keeping, forgetting, beta = (np.stack(parts) for parts in zip(*found))
    with np.errstate(divide="ignore"):
        half_life = math.log(2) / -np.asarray(decay, np.float64)
    return Gates(tuple(numbers), decay, half_life, keeping, forgetting, beta)


def gate_values(mixer: KDA, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-decay [B, T, H, K] and beta [B, T, H] of a KDA layer, in at least float32, from its normed input."""
    kda, dtype = mixer.config.kda, x_BTD.dtype
    g = jnp.einsum("btr,rhk->bthk", x_BTD @ mixer.f_a[...].astype(dtype), mixer.f_b[...].astype(dtype))
    beta = x_BTD @ mixer.b_proj[...].astype(dtype)
    g, beta = (a.astype(compute_dtype(g, beta)) for a in (g, beta))
    decay = log_decay(g, mixer.A_log[...], mixer.dt_bias[...], kda.gate, kda.gate_lower_bound)
    return decay, jax.nn.sigmoid(beta)


@jax.jit
def _gate_statistics(mixer: KDA, x_BTD: jax.Array, valid_BT: jax.Array):
    mixer, x_BTD, valid_BT = place((mixer, x_BTD, valid_BT))
    kda, (decay, beta) = mixer.config.kda, gate_values(mixer, x_BTD)
    decay = jnp.where(valid_BT[..., None, None], decay, jnp.nan)
    if kda.gate == "lower_bound":
        near, far = SATURATED * kda.gate_lower_bound, (1 - SATURATED) * kda.gate_lower_bound
    else:  # where the slope of softplus is below
        near, far = math.log1p(-SATURATED) * jnp.exp(mixer.A_log[...].astype(decay.dtype))[:, None], -jnp.inf
    total = valid_BT.sum() * kda.head_dim
    q, over = jnp.array(QUANTILES), (0, 1, 3)
    beta = jnp.where(valid_BT[..., None], beta, jnp.nan)
    return (
        jnp.nanquantile(decay, q, axis=over).T,
        (decay > near).sum(over) / total,
        (decay < far).sum(over) / total,
        jnp.nanquantile(beta, q, axis=(0, 1)).T,
    )


@dataclass(frozen=True)
class _Layer:
    """One layer on the way through a model."""

    layer: DecoderLayer
    mixer_input: jax.Array  # [B, T, D], normed; likewise below
    ffn_input: jax.Array
    tokens: Tokens
    bias: jax.Array  # [E]; [0] for a dense layer
    partial: jax.Array  # after the layer
    number: int


def _layers(
    model: K3,
    tokens: jax.Array,
    segment_ids: jax.Array | None,
    router_bias: jax.Array | None,
    images: Images | None,
) -> Iterator[_Layer]:
    """The forward pass of `model`, one layer at a time."""
    config = model.config
    _valid(tokens, segment_ids)
    if router_bias is None:
        router_bias = jnp.zeros((config.num_moe_layers, config.moe.num_experts), jnp.float32)
    told = describe(tokens, segment_ids, None)
    partial_BTD, bank = jax.jit(K3.embedded)(model, tokens, images), ()
    stacks = {
        number: (run, place)
        for segment, plan in zip(model.segments, model.plans)
        for run, (_, numbers) in zip(segment.runs, plan.run_layers())
        for place, number in enumerate(numbers)
    }
    for number, spec in enumerate(config.layers):
        begins = config.attn_res_block_size is not None and number % config.attn_res_block_size == 0
        if begins:
            bank, partial_BTD = (*bank, partial_BTD), jnp.zeros_like(partial_BTD)
        bias = jnp.zeros(0) if spec.ffn == "dense" else router_bias[number - config.num_dense_layers]
        layer = _unstacked(*stacks[number])
        mixer_input, ffn_input, partial_BTD = _step(layer, partial_BTD, bank, told, bias, begins)
        yield _Layer(layer, mixer_input, ffn_input, told, bias, partial_BTD, number)


@jax.jit
def _unstacked(run: DecoderLayer, index: int) -> DecoderLayer:
    return jax.tree.map(lambda stack: stack[index], run)


@partial(jax.jit, static_argnames="begins")
def _step(layer: DecoderLayer, partial_BTD, bank, tokens: Tokens, bias_E, begins: bool):
    """Normed inputs of the two halves and the new partial sum."""
    config, layer = layer.config, gathered(layer)

    def read(name: str, norm: nnx.Param, include: bool) -> jax.Array:
        if not bank:
            return rms_norm(partial_BTD, norm[...], config.norm_eps)
        query = getattr(layer, name).query()
        (logits,) = read_bank(bank, [query], config.norm_eps)
        return mix_norm(bank, logits, partial_BTD, query, norm[...], config.norm_eps, include)[0]

    x = read("attn_res", layer.input_norm, not begins)
    offset = () if isinstance(layer.mixer, KDA) else (0,)
    partial_BTD = partial_BTD + layer.mixer(x, tokens.segment_ids, None, *offset)[0]
    y = read("mlp_res", layer.post_norm, True)
    if isinstance(layer.ffn, LatentMoE):
        out, _ = layer.ffn(y, tokens.positions, tokens.valid, bias_E, False)
    else:
        out = layer.ffn(y)
    return x, y, partial_BTD + out


def _valid(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """[B, T] bool: tokens that count.

    Raises:
        ValueError: none does.
    """
    valid = jnp.ones(tokens.shape, bool) if segment_ids is None else segment_ids != 0
    if not valid.any():
        raise ValueError(f"no token of {tuple(tokens.shape)} counts: all segment_ids are 0, which is padding")
    return valid
