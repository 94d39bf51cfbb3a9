"""One optimizer step and one evaluation step, as pure functions of the state and a batch.

Micro-batches are scanned. Loss, gradients, token counts and router histograms are *sums* until the scan is done and
are divided once, so that a batch in n parts gives what it gives in one (to rounding; integers exactly).

A step whose loss or gradient norm is not finite leaves every array of the state as it was and says so; the host may
look at the flag later without any harm done.

Legend: M micro-batches, B sequences in one, T time, L MoE layers, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from k3jax.config import ModelConfig, RunConfig
from k3jax.model.k3 import K3, Aux, Stage
from k3jax.model.plan import plan_layers
from k3jax.model.quantize import quantized
from k3jax.model.vision import Images
from k3jax.ops.cross_entropy import linear_cross_entropy
from k3jax.ops.quantile_balancing import qb_update
from k3jax.sharding import all_sum, axes_of, gathered, island, layout, place_like, spec, to_rest, whole_sequence
from k3jax.train.batch import Batch
from k3jax.train.optimizer import Optimizer, qk_clip, update_rms
from k3jax.train.state import TrainState, moved

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What a micro-batch adds to a step; everything is a sum over tokens except `max_logit`."""

    loss: jax.Array
    cross_entropy: jax.Array
    z_loss: jax.Array
    tokens: jax.Array  # int32, targets that count
    bytes: jax.Array  # int32, bytes of text they stand for
    load: jax.Array  # [L, E] int32
    histogram: jax.Array  # [L, E, bins] int32
    max_logit: jax.Array  # [MLA layers, H]

    def add(self, other: Sums) -> Sums:
        total = jax.tree.map(jnp.add, self, other)
        return dataclasses.replace(total, max_logit=jnp.maximum(self.max_logit, other.max_logit))


def _forward(
    config: RunConfig, params: K3, batch: Batch, router_bias: jax.Array, token_bytes: jax.Array, *, train: bool
) -> tuple[jax.Array, Sums]:
    """Summed loss of one micro-batch [B, T]."""
    x_BTD, aux = params.features(
        batch["tokens"],
        batch["segment_ids"],
        images=Images.of(batch),
        router_bias=router_bias,
        remat=config.train.remat if train else "none",
        remat_policy=config.train.remat_policy,
        unroll=config.train.unroll and train,
        histogram=train,
    )
    loss, sums = head_sums(config, params, x_BTD, aux, batch, token_bytes, train=train)
    return loss, jax.lax.stop_gradient(sums)


def head_sums(
    config: RunConfig, params: Stage, x_BTD: jax.Array, aux: Aux, batch: Batch, token_bytes: jax.Array, *, train: bool
) -> tuple[jax.Array, Sums]:
    """Summed loss of a micro-batch [B, T] from its features, by the stage that holds the head."""
    with jax.named_scope("head"):
        x_BTD, lm_head = whole_sequence(x_BTD), gathered(params.lm_head)[...]
        tokens, vocabulary = axes_of(x_BTD), axes_of(lm_head)

        def shard(*args: jax.Array) -> tuple[jax.Array, ...]:
            total, aux = linear_cross_entropy(
                *args,
                chunk=config.train.loss_chunk,
                z_loss=config.train.z_loss if train else 0.0,
                vocab_axis=vocabulary[0] if vocabulary else None,
            )
            return all_sum(total, tokens), all_sum(aux.z_sum, tokens), aux.token_loss_BT

        out = (PartitionSpec(), PartitionSpec(), PartitionSpec(*layout(x_BTD)[:2]))
        loss, z_sum, nll_BT = island(shard, x_BTD, lm_head, batch["targets"], batch["loss_mask"], out=out)
    counts = batch["loss_mask"].astype(jnp.int32)
    return loss, Sums(
        loss=loss,
        cross_entropy=nll_BT.sum(),
        z_loss=z_sum,
        tokens=counts.sum(),
        bytes=(counts * _lookup(token_bytes, batch["targets"])).sum(),
        load=aux.load,
        histogram=aux.histogram,
        max_logit=aux.max_logit,
    )


def _lookup(table_V: jax.Array, ids_BT: jax.Array) -> jax.Array:
    return table_V.at[ids_BT].get(out_sharding=spec("batch", "time"))


def _accumulate(fn: Callable[[Batch], tuple[Any, Sums]], batches: Batch) -> tuple[Any, Sums]:
    """Sum of `fn(micro-batch) -> (tree, Sums)` over the leading axis."""
    count = batches["tokens"].shape[0]
    first = jax.tree.map(lambda x: x[0], batches)
    if count == 1:
        return fn(first)

    def body(carry: tuple[Any, Sums], batch: Batch) -> tuple[tuple[Any, Sums], None]:
        tree, sums = fn(batch)
        return (jax.tree.map(jnp.add, carry[0], tree), carry[1].add(sums)), None

    # `like` is traced for its types only; x * 0 would keep shardings too, but also NaN
    like = jax.eval_shape(fn, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding), like)
    start = (zeros[0], dataclasses.replace(zeros[1], max_logit=jnp.full_like(zeros[1].max_logit, -jnp.inf)))
    return jax.lax.scan(body, start, batches)[0]


def gradients(
    config: RunConfig, params: K3, router_bias: jax.Array, batch: Batch, token_bytes: np.ndarray
) -> tuple[K3, Sums]:
    """Gradients of the mean loss over all tokens of a batch [M, B, T], at rest, and the sums over it."""
    table = np.asarray(token_bytes, np.int32)
    seen = quantized(params, config.model)  # once for all micro-batches, outside of what is differentiated

    def one(micro: Batch) -> tuple[K3, Sums]:
        def loss(params: K3) -> tuple[jax.Array, Sums]:
            return _forward(config, params, micro, router_bias, jnp.asarray(table), train=True)

        grads, sums = jax.grad(loss, has_aux=True)(seen)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        return to_rest(grads), sums  # a device adds up its slice only

    grads, sums = _accumulate(one, batch)
    tokens = jnp.maximum(sums.tokens, 1)  # a batch of padding has gradients 0, not 0/0
    return jax.tree.map(lambda g: g / tokens.astype(g.dtype), grads), sums


def make_train_step(
    config: RunConfig, optimizer: Optimizer, token_bytes: np.ndarray
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The training step; jit it with the state donated.

    Args:
        token_bytes: int32 [V'], bytes of text behind each token id.

    Returns:
        `step(state, batch) -> (state, metrics)`. Metrics are scalars, see `_metrics`; `metrics["finite"]` False means
        that the update was dropped.
    """
    rows = mla_rows(config.model)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, sums = gradients(config, state.params, state.router_bias, batch, token_bytes)
        if config.optimizer.offload:
            state = dataclasses.replace(state, opt_state=moved(state.opt_state, jax.memory.Space.Device))
        new, updates = apply_gradients(config, optimizer, rows, state, grads, sums)
        with jax.named_scope("optimizer"):  # the norms of gradients and updates share its passes
            metrics = _metrics(sums, grads, updates, optimizer.groups)
        metrics["learning_rate"] = jnp.asarray(optimizer.schedule(state.step))
        if config.optimizer.qk_clip_threshold is not None:  # otherwise nobody reads it, and XLA drops the pass for it
            metrics["max_logit"] = jnp.max(sums.max_logit, initial=-jnp.inf)
        # known before the update is made, so that the selection below happens in place
        finite = jnp.isfinite(sums.loss) & jnp.isfinite(metrics["grad_norm"])
        kept = kept_if(finite, new, state)
        if config.optimizer.offload:
            kept = dataclasses.replace(kept, opt_state=moved(kept.opt_state, jax.memory.Space.Host))
        return kept, metrics | {"finite": finite}

    return train_step


def apply_gradients(
    config: RunConfig,
    optimizer: Optimizer,
    rows: Mapping[str, list[int]],
    state: TrainState,
    grads: Any,
    sums: Sums,
    **extra: jax.Array,
) -> tuple[TrainState, Any]:
    """The state after an update, QK-clip and balancing, and the update.

    Args:
        rows: of `mla_rows`.
        grads: of the mean loss, at rest, with the structure of `state.params`.
        extra: for the optimizer; `grad_norm` where the gradients are a part of all.
    """
    threshold = config.optimizer.qk_clip_threshold
    transform = optax.with_extra_args_support(optimizer.transform)
    with jax.named_scope("optimizer"):  # at rest: a device updates its slices, and new weights are gathered
        old: Any = to_rest(state.params)  # a module is a tree to optax, but not to its types
        updates, opt_state = transform.update(grads, state.opt_state, old, **extra)
        params = cast(K3, optax.apply_updates(old, updates))
        if threshold is not None:
            params = qk_clip(params, sums.max_logit, threshold, rows)
        params = jax.tree.map(place_like, params, state.params)
    with jax.named_scope("balancing"):
        k = config.model.moe.experts_per_token
        router_bias = qb_update(sums.histogram, state.router_bias, experts_per_token=k)
    return TrainState(state.step + 1, params, opt_state, router_bias, state.rng), updates


def kept_if(finite: jax.Array, new: TrainState, old: TrainState) -> TrainState:
    """`new`, or `old` after a step that is not finite."""
    with jax.named_scope("optimizer"):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, bool | str] | None:
    """XLA's options for the training step, for `jax.jit`.

    Triton products on GPUs take the factors of Newton-Schulz but leave its sums to passes of their own; cuBLAS's take
    both. CUDA graphs are off: the proxy's step takes 279 ms without and 310 ms with them on an H200 (jax 0.11.2).
    """
    gpu = mesh.devices.flat[0].platform == "gpu"
    return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_enable_command_buffer": ""} if gpu else None


def make_eval_step(config: RunConfig, token_bytes: np.ndarray) -> Callable[[K3, jax.Array, Batch], Metrics]:
    """The evaluation step: frozen router biases, no histogram, no z-loss.

    Returns:
        `step(params, router_bias, batch) -> {"nats", "tokens", "bytes"}`, sums over the targets that count.
    """
    table = np.asarray(token_bytes, np.int32)

    def eval_step(params: K3, router_bias: jax.Array, batch: Batch) -> Metrics:
        seen = quantized(params, config.model)

        def forward(micro: Batch) -> tuple[None, Sums]:
            return None, _forward(config, seen, micro, router_bias, jnp.asarray(table), train=False)[1]

        _, sums = _accumulate(forward, batch)
        return {"nats": sums.cross_entropy, "tokens": sums.tokens, "bytes": sums.bytes}

    return eval_step


def mla_rows(config: ModelConfig, stages: Mapping[str, tuple[int, int]] | None = None) -> dict[str, list[int]]:
    """Path of every stack of MLA layers → their rows in `Aux.max_logit`, in the order of the stack.

    Args:
        stages: path → (first layer, end) of stages whose `Aux.max_logit` are concatenated; None: the whole model.
    """
    stages = {"": (0, config.num_layers)} if stages is None else stages
    layers = [layer for start, stop in stages.values() for layer in config.mla_layers if start <= layer < stop]
    return {
        f"{path}segments/{i}/runs/{j}/mixer": [layers.index(number) for number in numbers]
        for path, (start, stop) in stages.items()
        for i, plan in enumerate(plan_layers(config, start, stop))
        for j, (layer, numbers) in enumerate(plan.run_layers())
        if layer.mixer == "mla"
    }


def _metrics(sums: Sums, grads: K3, updates: Any, groups: Any) -> Metrics:
    """Scalars of one step; losses in nats per token."""
    metrics = loss_metrics(sums) | {
        "grad_norm": optax.global_norm(grads),
        "max_violation": jnp.max(max_violation(sums.load), initial=0.0),
    }
    return metrics | {f"update_rms/{group}": rms for group, rms in update_rms(updates, groups).items()}


def loss_metrics(sums: Sums) -> Metrics:
    """What the sums of the head say of a step."""
    tokens = jnp.maximum(sums.tokens, 1)
    return {
        "loss": sums.loss / tokens,
        "cross_entropy": sums.cross_entropy / tokens,
        "z_loss": sums.z_loss / tokens,
        "bits_per_byte": sums.cross_entropy / jnp.log(2.0) / jnp.maximum(sums.bytes, 1),
        "tokens": sums.tokens,
        "bytes": sums.bytes,
    }


def max_violation(load_LE: jax.Array) -> jax.Array:
    """Load of the busiest expert over the mean, minus 1, by layer [L]; 0 is perfect balance."""
    mean_L = load_LE.mean(-1, dtype=jnp.float32)
    return jnp.where(mean_L > 0, load_LE.max(-1) / jnp.maximum(mean_L, 1e-9) - 1, 0.0)
