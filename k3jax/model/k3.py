"""Kimi K3: the text model, and the tower that gives it images.

    p = Embed[ids], or what the tower makes of an image;  bank = []
    for each block:   push p;  for each layer:  p += Mixer(rms(mix(p, bank)));  p += FFN(rms(mix(p, bank)))
    logits = Head( rms( mix(p, bank) ) )

A `K3` is a pytree of parameters and its call is a pure function:

    >>> import jax.numpy as jnp
    >>> from k3jax.config import nano
    >>> model = create(nano())
    >>> model(jnp.zeros((1, 8), jnp.int32)).shape
    (1, 8, 512)

Legend: B batch, T time, S cache length, D hidden, V vocabulary, N blocks, E experts, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import ModelConfig, Remat, RematAction
from k3jax.model import init
from k3jax.model.attn_res import AttnResQuery
from k3jax.model.decoder import Bank, DecoderLayer, Options, Tokens, run_segment
from k3jax.model.kda import kda_cache
from k3jax.model.mla import mla_cache
from k3jax.model.plan import SegmentPlan, plan_layers
from k3jax.model.vision import Images, Vision, insert, require_tower
from k3jax.ops.attn_res import mix_norm, read_bank
from k3jax.ops.norms import rms_norm
from k3jax.sharding import embed_lookup, gathered, layout, place, whole_sequence


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Decode state of a batch: per segment and run a stack of layer caches, and how far each row is.

    A call with a cache continues the one document of each row; padding may only stand before it (left).
    """

    segments: list[list[dict[str, jax.Array]]]
    length: jax.Array  # int32, tokens written, padding included
    position: jax.Array  # [B] int32, real tokens seen


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Aux:
    """What a forward pass reports besides its result; layers in order."""

    load: jax.Array  # [MoE layers, E] int32: tokens sent to each expert
    histogram: jax.Array  # [MoE layers, E, bins] int32: quantile-balancing margins (bins 0 when not asked for)
    max_logit: jax.Array  # [MLA layers, H] float32: largest scaled attention logit, for QK-clip
    depth: jax.Array | None  # [2·layers + 1, N + 1, B, T]: depth-attention weights, the partial sum last
    cache: Cache | None


class Segment(nnx.Module):
    """Stacked layers of one segment of the plan, a `DecoderLayer` per run with a leading layer axis."""

    def __init__(self, config: ModelConfig, plan: SegmentPlan, keys: jax.Array):
        self.runs = nnx.List(
            [
                jax.vmap(partial(DecoderLayer, config, spec))(keys[np.array(numbers)])
                for spec, numbers in plan.run_layers()
            ]
        )


class Stage(nnx.Module):
    """Layers `start..stop - 1`, with the embedding where they begin the model and the head where they end it.

    What a stage of a pipeline holds; parameters are those that the whole model (`K3`) has under the same RNG.
    """

    def __init__(self, config: ModelConfig, start: int, stop: int, *, rngs: nnx.Rngs):
        make = init.Maker(config, rngs.params())
        D, V = config.hidden_size, config.vocab_size
        self.config, self.start, self.stop = config, start, stop
        embed = make("vocab embed", V, D)
        vision_key = make.key() if config.vision is not None else None
        if start == 0:
            self.embed = embed
            if vision_key is not None:
                self.vision = Vision(config, vision_key)
        keys = jax.random.split(make.key(), config.num_layers)
        self.segments = nnx.List([Segment(config, plan, keys) for plan in self.plans])
        if stop == config.num_layers:
            if config.attn_res_block_size is not None:
                self.output_res = AttnResQuery(config, make.key())
            self.final_norm = make("embed", D, init=init.ones)
            self.lm_head = make("embed vocab", D, V)

    @property
    def plans(self) -> tuple[SegmentPlan, ...]:
        """How the layers are stacked."""
        return plan_layers(self.config, self.start, self.stop)

    @property
    def moe_layers(self) -> range:
        """Layers of the stage that route, counted among those of the model: its rows of router biases and loads."""
        dense = self.config.num_dense_layers
        return range(max(self.start - dense, 0), max(self.stop - dense, 0))

    def embedded(
        self,
        tokens_BT: jax.Array,
        images: Images | None = None,
        *,
        split: bool = True,
        remat: bool = False,
    ) -> jax.Array:
        """What the first layer starts from, [B, T, D] in the compute dtype.

        Args:
            split: as of `embed_lookup`.
            remat: of the tower.

        Raises:
            ValueError: images for a model without a tower.
        """
        x = embed_lookup(gathered(self.embed)[...].astype(self.config.dtype), tokens_BT, split=split)
        if images is None:
            return x
        require_tower(self.config.vision)
        with jax.named_scope("vision"):
            features = self.vision(images, remat=remat)
        return insert(x, features, images.index)

    def run(
        self,
        state: tuple[jax.Array, Bank],
        tokens: Tokens,
        router_bias: jax.Array,
        options: Options,
        cache: list[list[dict[str, jax.Array]]] | None = None,
    ) -> tuple[tuple[jax.Array, Bank], list[list[Any]]]:
        """The layers.

        Args:
            state: (partial sum [B, T, D], bank rows [B, T, D] that earlier layers pushed).
            router_bias: [MoE layers of the stage, E] float32.
            cache: the `segments` of a `Cache`.

        Returns:
            the state after the last layer, and the outputs of `run_segment` per segment and run.
        """
        outs: list[list[Any]] = []
        for i, (plan, segment) in enumerate(zip(self.plans, self.segments)):
            bias = [self._run_bias(router_bias, numbers, spec.ffn) for spec, numbers in plan.run_layers()]
            caches = cache[i] if cache is not None else [None] * len(bias)
            state, out = run_segment(plan, self.config, options, list(segment.runs), state, tokens, bias, caches)
            outs.append(out)
        return state, outs

    def _run_bias(self, router_bias: jax.Array, numbers: tuple[int, ...], ffn: str) -> jax.Array:
        if ffn == "dense":
            return jnp.zeros((len(numbers), 0), jnp.float32)
        return router_bias[np.array(numbers) - self.config.num_dense_layers - self.moe_layers.start]

    def output(self, partial_BTD, bank: Bank, options: Options) -> tuple[jax.Array, jax.Array | None]:
        """The last mix and the final norm, and the mix's depth-attention weights when asked for."""
        config, norm = self.config, gathered(self.final_norm)[...]
        if config.attn_res_block_size is None:
            return rms_norm(partial_BTD, norm, config.norm_eps), None
        query = self.output_res.query()
        with jax.named_scope("attn_res"):
            (read,) = read_bank(bank, [query], config.norm_eps)
            x, weights, _ = mix_norm(bank, read, partial_BTD, query, norm, config.norm_eps)
        return x, weights if options.depth else None


class K3(Stage):
    """The model. Parameters only; router biases, caches and images are arguments."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, 0, config.num_layers, rngs=rngs)

    def __call__(
        self,
        tokens_BT: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        images: Images | None = None,
        router_bias: jax.Array | None = None,
        cache: Cache | None = None,
        return_aux: bool = False,
        depth: bool = False,
    ) -> jax.Array | tuple[jax.Array, Aux]:
        """Logits.

        Args:
            tokens_BT: int32 ids below `config.vocab_size`.
            segment_ids: [B, T] int32 document numbers, 0 = padding; documents do not see each other.
            images: what stands for the tokens that `images.index` names.
            router_bias: [MoE layers, E] float32 selection biases; None: zeros.
            cache: decode state to continue; the updated one is in the returned `Aux`.
            return_aux: also return the `Aux`; `depth=True` fills its depth-attention weights.

        Returns:
            [B, T, V] in at least float32, or (logits, aux).
        """
        x, aux = self.features(tokens_BT, segment_ids, images=images, router_bias=router_bias, cache=cache, depth=depth)
        logits = self.logits(x)
        return (logits, aux) if return_aux or cache is not None else logits

    def logits(self, x: jax.Array) -> jax.Array:
        """The head: `features` [..., D] → logits [..., V] in at least float32."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        x = whole_sequence(x)
        return jnp.einsum("...d,dv->...v", x, gathered(self.lm_head)[...].astype(x.dtype), preferred_element_type=wide)

    def features(
        self,
        tokens_BT: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        images: Images | None = None,
        router_bias: jax.Array | None = None,
        cache: Cache | None = None,
        remat: Remat = "none",
        remat_policy: Mapping[str, RematAction] | None = None,
        unroll: bool = False,
        histogram: bool = False,
        depth: bool = False,
    ) -> tuple[jax.Array, Aux]:
        """The final normed residual stream [B, T, D] (multiply by `lm_head` for logits) and the `Aux`.

        `remat`, `remat_policy` and `unroll` are those of `TrainConfig`.
        """
        config, named = self.config, tuple((remat_policy or {}).items())
        options = Options(remat, named, unroll and not depth, histogram, depth)  # depth comes in stacks of one shape
        if router_bias is None:
            router_bias = jnp.zeros((config.num_moe_layers, config.moe.num_experts), jnp.float32)
        tokens = describe(tokens_BT, segment_ids, cache)
        start = (self.embedded(tokens_BT, images, split=cache is None, remat=remat != "none"), ())
        state, outs = self.run(start, tokens, router_bias, options, None if cache is None else cache.segments)
        x, output_depth = self.output(*state, options)
        aux = collect(self, outs, output_depth)
        if cache is not None:
            updated = [[run["cache"] for run in segment] for segment in outs]
            length = cache.length + tokens_BT.shape[1]
            aux = replace(aux, cache=Cache(updated, length, tokens.positions[:, -1] + 1))
        return x, aux

    def layer(self, number: int) -> DecoderLayer:
        """The parameters of one decoder layer by its 0-based number.

        Raises:
            IndexError: no such layer.
        """
        for segment, plan in zip(self.segments, self.plans):
            for run, (_, numbers) in zip(segment.runs, plan.run_layers()):
                if number in numbers:
                    place = numbers.index(number)
                    return jax.tree.map(lambda a: a[place], run)  # noqa: B023 - used at once
        raise IndexError(f"layer {number} is outside 0..{self.config.num_layers - 1}")


def create(config: ModelConfig, seed: int = 0) -> K3:
    """A freshly initialised model, made by one compiled function (calling `K3` itself runs hundreds of small ones)."""
    # optimising code that runs once would take longer than running it
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(lambda: K3(config, rngs=nnx.Rngs(seed)), compiler_options=options)()


def init_cache(config: ModelConfig, batch: int, length: int) -> Cache:
    """An empty decode cache for `batch` rows of up to `length` tokens."""
    segments = []
    for plan in plan_layers(config):
        runs = []
        for spec, numbers in plan.run_layers():
            stack = (len(numbers),)
            runs.append(
                kda_cache(config, batch, stack) if spec.mixer == "kda" else mla_cache(config, batch, length, stack)
            )
        segments.append(runs)
    return Cache(segments, jnp.zeros((), jnp.int32), jnp.zeros((batch,), jnp.int32))


def describe(tokens_BT: jax.Array, segment_ids: jax.Array | None, cache: Cache | None) -> Tokens:
    """Positions in documents, validity and the cache offset of each token."""
    offset = 0 if cache is None else cache.length
    cut = layout(tokens_BT)
    # a few bytes a token, so every shard of a row sees all of it
    zeros = jnp.zeros_like(place(tokens_BT, cut[0]))
    index = zeros + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
    start = zeros[:, :1] if cache is None else cache.position[:, None]
    if segment_ids is None:
        return Tokens(None, place(index + start, *cut), jnp.ones_like(tokens_BT, dtype=bool), offset)
    ids = place(segment_ids, cut[0])
    previous = jnp.concatenate([jnp.zeros_like(ids[:, :1]), ids[:, :-1]], axis=1)
    begins = jax.lax.cummax(jnp.where(ids != previous, index, 0), axis=1)
    positions = place(jnp.where(ids != 0, index - begins + start, 0), *cut)
    return Tokens(segment_ids, positions, segment_ids != 0, offset)


def collect(stage: Stage, outs: list[list[Any]], output_depth: jax.Array | None = None) -> Aux:
    """Outputs of `Stage.run` as per-layer arrays in layer order."""
    config = stage.config

    def ordered(pick, kind) -> jax.Array | None:
        parts, numbers = [], []
        for plan, segment in zip(stage.plans, outs):
            for (spec, layers), out in zip(plan.run_layers(), segment):
                if kind in (spec.mixer, spec.ffn, "any"):
                    parts.append(pick(out))
                    numbers += layers
        return jnp.concatenate(parts)[np.argsort(numbers)] if parts else None

    moe, heads = config.moe, config.mla.num_heads
    load = ordered(lambda o: o["router"].load, "moe")
    bins = ordered(lambda o: o["router"].histogram, "moe")
    max_logit = ordered(lambda o: o["max_logit"], "mla")
    depth = None
    if output_depth is not None:
        rows = config.num_blocks + 1

        def widen(a: jax.Array) -> jax.Array:  # blocks to come get weight 0; the partial stays last
            missing = rows - a.shape[2]
            return jnp.concatenate([a[:, :, :-1], jnp.zeros_like(a[:, :, :1]).repeat(missing, 2), a[:, :, -1:]], 2)

        layers = ordered(lambda o: widen(o["depth"]), "any")
        assert layers is not None
        depth = jnp.concatenate([layers.reshape(-1, *layers.shape[2:]), output_depth[None]])
    return Aux(
        jnp.zeros((0, moe.num_experts), jnp.int32) if load is None else load,
        jnp.zeros((0, moe.num_experts, moe.qb_bins), jnp.int32) if bins is None else bins,
        jnp.zeros((0, heads), jnp.float32) if max_logit is None else max_logit,
        depth,
        None,
    )
