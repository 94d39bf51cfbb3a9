"""One decoder layer, and the scans that run stacks of them block by block.

The state between layers is (partial, bank): the running sum of the current AttnRes block's sublayer outputs, and the
block sources so far. A block first pushes the incoming partial into the bank, answers all its pseudo-queries in one
read of the bank, then runs its layers, each merging the growing partial.

Legend: N blocks (bank rows), B batch, T time, D hidden, E experts, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import LayerSpec, ModelConfig, Remat
from k3jax.model import init
from k3jax.model.attn_res import AttnResQuery
from k3jax.model.kda import KDA
from k3jax.model.mla import MLA
from k3jax.model.mlp import MLP
from k3jax.model.moe import LatentMoE
from k3jax.model.plan import Repeat, SegmentPlan
from k3jax.ops.attn_res import BankRead, depth_weights, merge, read_bank
from k3jax.ops.norms import rms_norm

Tree = Any


class DecoderLayer(nnx.Module):
    """Norms, mixer (KDA or MLA), feed-forward (MLP or LatentMoE) and the two AttnRes queries of one layer."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, key: jax.Array):
        make = init.Maker(config, key)
        self.config = config
        self.spec = spec
        if config.attn_res_block_size is not None:
            self.attn_res = AttnResQuery(config, make.key())
            self.mlp_res = AttnResQuery(config, make.key())
        self.input_norm = make("embed", config.hidden_size, init=init.ones)
        self.post_norm = make("embed", config.hidden_size, init=init.ones)
        self.mixer = (KDA if spec.mixer == "kda" else MLA)(config, make.key())
        self.ffn = MLP(config, config.dense_size, make.key()) if spec.ffn == "dense" else LatentMoE(config, make.key())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """What every layer needs to know of the tokens, besides the residual stream."""

    segment_ids: jax.Array | None  # [B, T] int32, 0 = padding
    positions: jax.Array  # [B, T] int32, position in the document
    valid: jax.Array  # [B, T] bool
    offset: jax.Array | int  # tokens already in the cache


@dataclass(frozen=True)
class Options:
    """Static choices of one forward pass."""

    remat: Remat = "none"
    histogram: bool = False
    depth: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInput:
    """Per-layer inputs of a scan besides the parameters."""

    reads: BankRead | None  # two of them on the first axis: attention, feed-forward
    first: jax.Array  # bool: first layer of its block, whose partial is still empty
    router_bias: jax.Array  # [E]; [0] for a dense layer
    cache: Tree


def _remat(fn: Callable, options: Options, level: Remat) -> Callable:
    return jax.checkpoint(fn, prevent_cse=False) if options.remat == level else fn


def _mix(config: ModelConfig, options: Options, query: AttnResQuery, partial_BTD, read: BankRead, include):
    """The input of a sublayer, and its depth-attention weights when asked for."""
    with jax.named_scope("attn_res"):
        mixed, logit = merge(read, partial_BTD, query.query(), config.norm_eps, include)
    return mixed, depth_weights(read.logits, logit) if options.depth else None


def _attention_half(layer: DecoderLayer, partial_BTD, inputs: LayerInput, tokens: Tokens, options: Options):
    config, out = layer.config, {}
    if inputs.reads is None:
        h = partial_BTD
    else:
        read = jax.tree.map(lambda a: a[0], inputs.reads)
        h, out["depth"] = _mix(config, options, layer.attn_res, partial_BTD, read, ~inputs.first)
    x = rms_norm(h, layer.input_norm[...], config.norm_eps)
    if isinstance(layer.mixer, KDA):
        a, out["cache"] = layer.mixer(x, tokens.segment_ids, inputs.cache)
    else:
        a, out["cache"], out["max_logit"] = layer.mixer(x, tokens.segment_ids, inputs.cache, tokens.offset)
    return partial_BTD + a, out


def _ffn_half(layer: DecoderLayer, partial_BTD, inputs: LayerInput, tokens: Tokens, options: Options):
    config, out = layer.config, {}
    if inputs.reads is None:
        h = partial_BTD
    else:
        read = jax.tree.map(lambda a: a[1], inputs.reads)
        h, out["depth"] = _mix(config, options, layer.mlp_res, partial_BTD, read, True)
    x = rms_norm(h, layer.post_norm[...], config.norm_eps)
    if isinstance(layer.ffn, MLP):
        f = layer.ffn(x)
    else:
        f, out["router"] = layer.ffn(x, tokens.positions, tokens.valid, inputs.router_bias, options.histogram)
    return partial_BTD + f, out


def _layer(layer: DecoderLayer, partial_BTD, inputs: LayerInput, tokens: Tokens, options: Options):
    """One decoder layer → new partial and {cache, max_logit, router, depth [2, N + 1, B, T]}."""
    attention = _remat(partial(_attention_half, options=options), options, "sublayer")
    ffn = _remat(partial(_ffn_half, options=options), options, "sublayer")
    with jax.named_scope(layer.spec.mixer):
        partial_BTD, first = attention(layer, partial_BTD, inputs, tokens)
    with jax.named_scope(layer.spec.ffn):
        partial_BTD, second = ffn(layer, partial_BTD, inputs, tokens)
    out = {**second, **first}
    if options.depth and inputs.reads is not None:
        out["depth"] = jnp.stack([first["depth"], second["depth"]])
    return partial_BTD, out


def _scan(body: Callable, carry: Tree, xs: Tree, length: int) -> tuple[Tree, Tree]:
    """`lax.scan`, without the loop when there is one step."""
    if length > 1:
        return jax.lax.scan(body, carry, xs)
    carry, y = body(carry, jax.tree.map(lambda a: a[0], xs))
    return carry, jax.tree.map(lambda a: a[None], y)


def _block_queries(repeats: tuple[Repeat, ...], runs: list[DecoderLayer]) -> jax.Array:
    """γ ⊙ w of a block's sublayers in layer order, [layers, 2, D]. Leaves of `runs` lead with (repeat, place)."""
    parts, i = [], 0
    for repeat in repeats:
        unit = []
        for run in runs[i : i + len(repeat.runs)]:
            unit.append(jnp.stack([run.attn_res.query(), run.mlp_res.query()], axis=2))
        i += len(repeat.runs)
        joined = jnp.concatenate(unit, axis=1)
        parts.append(joined.reshape(-1, *joined.shape[2:]))
    return jnp.concatenate(parts)


def _run_repeat(repeat: Repeat, runs: list[DecoderLayer], partial_BTD, per_layer: tuple, tokens, options: Options):
    """Scans one repeat. `per_layer` = (reads, first, [router_bias per run], [cache per run]), leading axis repeat."""
    reads, first, biases, caches = per_layer

    def unit_body(carry, xs):
        runs, reads, first, biases, caches = xs
        outs, start = [], 0
        for run, plan, bias, cache in zip(runs, repeat.runs, biases, caches):
            places = slice(start, start + plan.count)
            inputs = LayerInput(jax.tree.map(lambda a, p=places: a[p], reads), first[places], bias, cache)
            layer_body = _remat(partial(_layer, options=options), options, "layer")
            carry, out = _scan(lambda c, x, f=layer_body: f(x[0], c, x[1], tokens), carry, (run, inputs), plan.count)
            outs.append(out)
            start += plan.count
        return carry, outs

    return _scan(unit_body, partial_BTD, (runs, reads, first, biases, caches), repeat.count)


def _run_block(
    plan: SegmentPlan, options: Options, config: ModelConfig, state: tuple, block: tuple, tokens: Tokens
) -> tuple[tuple, list]:
    """One AttnRes block → (partial, bank) and a list of per-run outputs whose leaves lead with (repeat, place)."""
    partial_BTD, bank_NBTD = state
    index, runs, biases, caches = block
    reads = None
    if config.attn_res_block_size is not None:
        bank_NBTD = jax.lax.dynamic_update_index_in_dim(bank_NBTD, partial_BTD, index, 0)
        rows = plan.first_block + plan.num_blocks
        valid = None if plan.num_blocks == 1 else jnp.arange(rows) <= index
        queries = _block_queries(plan.repeats, runs)
        with jax.named_scope("attn_res"):
            flat = read_bank(bank_NBTD[:rows], queries.reshape(-1, queries.shape[-1]), config.norm_eps, valid)
        reads = jax.tree.map(lambda a: a.reshape(-1, 2, *a.shape[1:]), flat)
        partial_BTD = jnp.zeros_like(partial_BTD)
    outs, i, start = [], 0, 0
    for repeat in plan.repeats:
        n, stop = len(repeat.runs), start + repeat.count * repeat.unit

        def split(a: jax.Array, start=start, stop=stop, repeat=repeat) -> jax.Array:
            return a[start:stop].reshape(repeat.count, repeat.unit, *a.shape[1:])

        first = split(jnp.arange(plan.block_layers) == 0)
        per_layer = (jax.tree.map(split, reads), first, biases[i : i + n], caches[i : i + n])
        partial_BTD, out = _run_repeat(repeat, runs[i : i + n], partial_BTD, per_layer, tokens, options)
        outs += out
        i, start = i + n, stop
    return (partial_BTD, bank_NBTD), outs


def run_segment(
    plan: SegmentPlan,
    config: ModelConfig,
    options: Options,
    runs: list[DecoderLayer],
    state: tuple[jax.Array, jax.Array],
    tokens: Tokens,
    router_bias: list[jax.Array],
    caches: list[Tree],
) -> tuple[tuple[jax.Array, jax.Array], list[Tree]]:
    """Runs a segment of equal blocks.

    Args:
        runs: stacked layers, one per run of the plan, leading axis = layers of the run in layer order.
        state: (partial [B, T, D], bank [N, B, T, D]).
        router_bias: [layers, E] (or [layers, 0]) per run.
        caches: per run, leaves with the same leading axis; None trees without a cache.

    Returns:
        the new state, and per run the outputs of its layers, leading axis = layers of the run.
    """
    counts = [(repeat.count, run.count) for repeat in plan.repeats for run in repeat.runs]

    def unflatten(tree: Tree, count: tuple[int, int]) -> Tree:
        return jax.tree.map(lambda a: a.reshape(plan.num_blocks, *count, *a.shape[1:]), tree)

    def spread(trees: list) -> list:
        return [unflatten(tree, count) for tree, count in zip(trees, counts)]

    xs = (plan.first_block + jnp.arange(plan.num_blocks), spread(runs), spread(router_bias), spread(caches))
    body = _remat(partial(_run_block, plan, options, config), options, "block")
    state, outs = _scan(lambda s, x: body(s, x, tokens), state, xs, plan.num_blocks)
    return state, jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1] * a.shape[2], *a.shape[3:]), outs)
