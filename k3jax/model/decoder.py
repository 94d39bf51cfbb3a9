"""One decoder layer, and the scans that run stacks of them block by block.

The state between layers is (partial, bank): the running sum of the current AttnRes block's sublayer outputs, and the
block sources so far, a tuple of arrays. A block first pushes the incoming partial into the bank, takes the logits of
all its pseudo-queries against it in one pass, then runs its layers, each mixing the bank with the growing partial.

Legend: N blocks (bank rows), B batch, T time, D hidden, E experts, H heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.config import LayerSpec, ModelConfig, Remat, RematAction
from k3jax.model import init
from k3jax.model.attn_res import AttnResQuery
from k3jax.model.kda import KDA
from k3jax.model.mla import MLA
from k3jax.model.mlp import MLP
from k3jax.model.moe import LatentMoE
from k3jax.model.plan import Repeat, SegmentPlan
from k3jax.ops.attn_res import BankRead, mix_norm, read_bank
from k3jax.ops.norms import rms_norm
from k3jax.ops.remat import checkpoint_name, policy
from k3jax.sharding import gathered, is_at_rest

Tree = Any
Bank = tuple[jax.Array, ...]


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
    remat_policy: tuple[tuple[str, RematAction], ...] = ()
    unroll: bool = False
    histogram: bool = False
    depth: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerInput:
    """Per-layer inputs of a scan besides the parameters."""

    reads: tuple[BankRead, BankRead] | None  # of attention and feed-forward
    first: jax.Array  # bool: first layer of its block, whose partial is still empty
    router_bias: jax.Array  # [E]; [0] for a dense layer
    cache: Tree


# What the largest kernels of a layer return, named where they are called. With these kept, a backward pass that forms a
# layer anew runs none of the forward kernels again.
KERNELS = ("kda", "attention", "experts")
OPERANDS = ("operand", "keys", "expert_weights")


def _remat(fn: Callable, options: Options, *levels: Remat) -> Callable:
    """`fn`, keeping less for the backward pass if the preset is one of `levels`; see `TrainConfig.remat`."""
    if options.remat not in levels:
        return fn
    saved = () if options.remat == "block" else KERNELS
    products = None
    if options.remat == "products":
        saved, products = (*KERNELS, *OPERANDS), jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    actions: dict[str, RematAction] = {**dict.fromkeys(saved, "save"), **dict(options.remat_policy)}
    # in a loop nothing can be shared between the passes; outside, XLA would keep what it is told to compute again
    return jax.checkpoint(fn, prevent_cse=options.unroll, policy=policy(actions, products))


def _attention_half(layer: DecoderLayer, partial_BTD, bank: Bank, inputs: LayerInput, tokens: Tokens, options: Options):
    config, out, layer = layer.config, {}, _gathered(layer)
    if inputs.reads is None:
        x = rms_norm(partial_BTD, layer.input_norm[...], config.norm_eps)
    else:
        with jax.named_scope("attn_res"):
            query, norm = layer.attn_res.query(), layer.input_norm[...]
            x, out["depth"], partial_BTD = mix_norm(
                bank, inputs.reads[0], partial_BTD, query, norm, config.norm_eps, ~inputs.first
            )
    x = checkpoint_name(x, "operand")
    if isinstance(layer.mixer, KDA):
        a, out["cache"] = layer.mixer(x, tokens.segment_ids, inputs.cache)
    else:
        a, out["cache"], out["max_logit"] = layer.mixer(x, tokens.segment_ids, inputs.cache, tokens.offset)
    return partial_BTD + a, out


def _ffn_half(layer: DecoderLayer, partial_BTD, bank: Bank, inputs: LayerInput, tokens: Tokens, options: Options):
    config, out, layer = layer.config, {}, _gathered(layer)
    if inputs.reads is None:
        x = rms_norm(partial_BTD, layer.post_norm[...], config.norm_eps)
    else:
        with jax.named_scope("attn_res"):
            query, norm = layer.mlp_res.query(), layer.post_norm[...]
            x, out["depth"], partial_BTD = mix_norm(bank, inputs.reads[1], partial_BTD, query, norm, config.norm_eps)
    x = checkpoint_name(x, "operand")
    if isinstance(layer.ffn, MLP):
        f = layer.ffn(x)
    else:
        f, out["router"] = layer.ffn(x, tokens.positions, tokens.valid, inputs.router_bias, options.histogram)
    return partial_BTD + f, out


def _layer(layer: DecoderLayer, partial_BTD, bank: Bank, inputs: LayerInput, tokens: Tokens, options: Options):
    """One decoder layer → new partial and {cache, max_logit, router, depth [2, N + 1, B, T]}."""
    attention = _remat(partial(_attention_half, options=options), options, "sublayer")
    ffn = _remat(partial(_ffn_half, options=options), options, "sublayer")
    with jax.named_scope(layer.spec.mixer):
        partial_BTD, first = attention(layer, partial_BTD, bank, inputs, tokens)
    with jax.named_scope(layer.spec.ffn):
        partial_BTD, second = ffn(layer, partial_BTD, bank, inputs, tokens)
    out = {**second, **first}
    if inputs.reads is not None:
        del out["depth"]
        if options.depth:
            out["depth"] = jnp.stack([first["depth"], second["depth"]])
    return partial_BTD, out


# Weights that are rounded to the compute dtype where they are used.
_ROUNDED = frozenset(
    "q_proj k_proj v_proj f_a f_b b_proj g_proj g_a g_b o_proj q_a q_b kv_a k_b v_b latent_down latent_up w1 w2 w3 "
    "gate up down".split()
)


def _rounded(layer: DecoderLayer) -> DecoderLayer:
    """`layer` with these weights rounded already: both passes then read one copy of half the size."""

    def one(path: tuple, w: jax.Array) -> jax.Array:
        names = {jax.tree_util.keystr((key,), simple=True) for key in path}
        return w.astype(layer.config.dtype) if names & _ROUNDED and w.dtype != jnp.uint8 else w  # not codes

    return jax.tree_util.tree_map_with_path(one, layer)


def _gathered(layer: DecoderLayer) -> DecoderLayer:
    """`layer` with whole weights; rounded before they travel."""
    return gathered(_rounded(layer)) if is_at_rest(layer) else layer


@partial(jax.jit, static_argnames="options")
def _unrolled_layer(layer: DecoderLayer, partial_BTD, bank: Bank, inputs: LayerInput, tokens: Tokens, options: Options):
    """A layer outside a loop; those of one kind are traced and lowered once."""
    return _remat(partial(_layer, options=options), options, "layer", "products")(
        layer, partial_BTD, bank, inputs, tokens
    )


def _unstack(tree: Tree, length: int) -> list[Tree]:
    """Slices of the leading axis, whose gradients are put together in one pass."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [jax.lax.split(a, (1,) * length) for a in leaves]
    return [jax.tree.unflatten(structure, [part[i][0] for part in parts]) for i in range(length)]


def _scan(body: Callable, carry: Tree, xs: Tree, length: int, unroll: bool) -> tuple[Tree, Tree]:
    """`lax.scan`, without the loop if `unroll` or when there is one step."""
    if length > 1 and not unroll:
        return jax.lax.scan(body, carry, xs)
    ys = []
    for x in _unstack(xs, length):
        carry, y = body(carry, x)
        ys.append(y)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *ys)


def _run_repeat(
    repeat: Repeat, runs: list[DecoderLayer], partial_BTD, bank: Bank, per_layer: tuple, tokens, options: Options
):
    """Scans one repeat. `per_layer` = (first, [reads per run], [router_bias per run], [cache per run]), leading axis
    repeat."""

    def unit_body(carry, xs):
        runs, first, reads, biases, caches = xs
        outs, start = [], 0
        for run, plan, read, bias, cache in zip(runs, repeat.runs, reads, biases, caches):
            inputs = LayerInput(read, first[start : start + plan.count], bias, cache)
            if options.unroll:
                run_layer = lambda c, x: _unrolled_layer(_rounded(x[0]), c, bank, x[1], tokens, options)  # noqa: E731
            else:
                layer_body = _remat(partial(_layer, options=options), options, "layer", "products")
                run_layer = lambda c, x, f=layer_body: f(x[0], c, bank, x[1], tokens)  # noqa: E731
            carry, out = _scan(run_layer, carry, (run, inputs), plan.count, options.unroll)
            outs.append(out)
            start += plan.count
        return carry, outs

    return _scan(unit_body, partial_BTD, (runs, *per_layer), repeat.count, options.unroll)


def _run_block(
    plan: SegmentPlan, options: Options, config: ModelConfig, earlier: Bank, state: tuple, block: tuple, tokens: Tokens
) -> tuple[tuple, list]:
    """One AttnRes block, or a piece of one → (partial, bank) and a list of per-run outputs whose leaves lead with
    (repeat, place).

    `earlier` are the bank rows that stand before the segment; those of `state` are its own.
    """
    partial_BTD, own = state
    index, runs, biases, caches = block
    reads, bank = [None] * len(runs), earlier
    if config.attn_res_block_size is not None:
        if plan.begins:
            own = tuple(jnp.where(index == i, partial_BTD, row) for i, row in enumerate(own))
        bank = (*earlier, *own)
        valid = None if plan.num_blocks == 1 else jnp.arange(len(bank)) <= len(earlier) + index
        queries = [query.query() for run in runs for query in (run.attn_res, run.mlp_res)]
        with jax.named_scope("attn_res"):
            flat = read_bank(bank, queries, config.norm_eps, valid)
        reads = list(zip(flat[::2], flat[1::2]))
        # its gradient comes through the reads; without this the scans would carry and add zeros of its size
        bank = jax.lax.stop_gradient(bank)
        if plan.begins:
            partial_BTD = jnp.zeros_like(partial_BTD)
    outs, i, start = [], 0, 0
    for repeat in plan.repeats:
        n, stop = len(repeat.runs), start + repeat.count * repeat.unit
        first = ((jnp.arange(start, stop) == 0) & plan.begins).reshape(repeat.count, repeat.unit)
        per_layer = (first, reads[i : i + n], biases[i : i + n], caches[i : i + n])
        partial_BTD, out = _run_repeat(repeat, runs[i : i + n], partial_BTD, bank, per_layer, tokens, options)
        outs += out
        i, start = i + n, stop
    return (partial_BTD, own), outs


def run_segment(
    plan: SegmentPlan,
    config: ModelConfig,
    options: Options,
    runs: list[DecoderLayer],
    state: tuple[jax.Array, Bank],
    tokens: Tokens,
    router_bias: list[jax.Array],
    caches: list[Tree],
) -> tuple[tuple[jax.Array, Bank], list[Tree]]:
    """Runs a segment of equal blocks.

    Args:
        runs: stacked layers, one per run of the plan, leading axis = layers of the run in layer order.
        state: (partial [B, T, D], the bank rows pushed so far).
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

    partial_BTD, earlier = state
    # a row that is not pushed yet needs finite values: it is read with weight 0
    pushes = config.attn_res_block_size is not None and plan.begins
    own = (partial_BTD,) * (plan.num_blocks if pushes else 0)
    xs = (jnp.arange(plan.num_blocks), spread(runs), spread(router_bias), spread(caches))
    if options.unroll:  # each block with as many bank rows as there are
        body = _remat(partial(_run_block, replace(plan, num_blocks=1), options, config), options, "block")
        blocks, own = [], ()
        for block in _unstack(xs[1:], plan.num_blocks):
            rows = (partial_BTD,) if pushes else ()
            (partial_BTD, pushed), out = body((*earlier, *own), (partial_BTD, rows), (0, *block), tokens)
            own, blocks = (*own, *pushed), [*blocks, out]
        outs = jax.tree.map(lambda *parts: jnp.stack(parts), *blocks)
    else:
        body = _remat(partial(_run_block, plan, options, config), options, "block")
        (partial_BTD, own), outs = _scan(
            lambda s, x: body(earlier, s, x, tokens), (partial_BTD, own), xs, plan.num_blocks, False
        )
    outs = jax.tree.map(lambda a: a.reshape(a.shape[0] * a.shape[1] * a.shape[2], *a.shape[3:]), outs)
    return (partial_BTD, (*earlier, *own)), outs
