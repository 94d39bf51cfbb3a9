"""What a run says about itself: at the start what will run on what, at the end what came of it."""

from __future__ import annotations

import threading
from importlib.metadata import version
from typing import Any, cast

import jax
import jax.numpy as jnp
from rich.table import Table

import k3jax
from k3jax.config import ConfigError, ModelConfig, RunConfig
from k3jax.data.bits import reference_bits_per_byte, sample_text
from k3jax.data.loader import TextData
from k3jax.model.kda import TAILS, beside_kda, kda_cache
from k3jax.model.moe import resolve_moe
from k3jax.ops import attention, attn_res_pallas, cross_entropy, kda, mosaic, newton_schulz, norms, short_conv
from k3jax.ops.kda.decode import resolve_decode
from k3jax.train import flops
from k3jax.train.metrics import count

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def implementations(config: RunConfig) -> dict[str, str]:
    """Which implementation of each op runs in training (decoding: in sampling) on the arrays of one device.

    Raises:
        ConfigError: the configuration names one that cannot run here; the message says why.
    """
    try:
        return {
            **_kda(config),
            **_attention(config.model),
            "experts": resolve_moe(config.model),
            "attention residuals": _attention_residuals(config),
            "newton-schulz": _newton_schulz(config),
            "cross-entropy": f"{cross_entropy.default_implementation()} ({config.train.loss_chunk} tokens)",
        }
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _tokens(config: RunConfig) -> tuple[int, int]:
    """Rows of a micro-batch on one device, and their length."""
    parts = config.train.accumulation * config.mesh.data * config.mesh.expert
    return config.data.batch_size // parts, config.data.sequence_length


def _like(shape: tuple[int, ...], dtype: str) -> jax.Array:
    return cast(jax.Array, jax.ShapeDtypeStruct(shape, dtype))


def _kda(config: RunConfig) -> dict[str, str]:
    layer, dtype = config.model.kda, config.model.dtype
    H, K, W = layer.num_heads, layer.head_dim, layer.conv_size
    rows, length = _tokens(config)
    x_BTHK = _like((rows, length, H, K), dtype)
    wide = str(jnp.promote_types(config.model.param_dtype, jnp.float32))
    taps, ids = _like((H, K, W), wide), _like((rows, length), "int32")
    recurrence = kda.resolve_for(layer.implementation, dtype, K)
    cache = jax.eval_shape(lambda: kda_cache(config.model, 1))
    beside = beside_kda(layer)
    return {
        "kda": recurrence if recurrence != "xla" else f"xla (chunks of {layer.chunk_size})",
        "kda, decoding": resolve_decode(cache["state"], tuple(cache[name] for name in TAILS), dtype, beside),
        "short convolution": short_conv.resolve_implementation(x_BTHK, taps, ids, beside),
        "gated norm": norms.resolve_gated_norm(x_BTHK, x_BTHK, beside),
    }


def _attention(model: ModelConfig) -> dict[str, str]:
    mla, dtype = model.mla, model.dtype
    widths = {"key_width": mla.qk_head_dim, "value_width": mla.v_head_dim}
    chosen = attention.resolve_implementation(mla.implementation, dtype=dtype, **widths)
    with_attention = "with attention" if chosen != "cudnn" else attention.max_logit_pass(dtype, mla.qk_head_dim)
    return {"attention": chosen, "largest logit": with_attention}


def _attention_residuals(config: RunConfig) -> str:
    model = config.model
    if model.attn_res_block_size is None:
        return "none (plain residuals)"
    shape = (*_tokens(config), model.hidden_size)
    reason = attn_res_pallas.why_not(shape, jnp.dtype(model.dtype)) or mosaic.why_not_here()
    return "xla" if reason else "xla forward, pallas backward"


def _newton_schulz(config: RunConfig) -> str:
    moe, muon = config.model.moe, config.optimizer
    block = (moe.latent_size or config.model.hidden_size, moe.expert_size)
    chosen = newton_schulz.resolve_implementation(muon.muon_ns_implementation, block, muon.muon_ns_dtype)
    return f"{chosen} ({muon.muon_ns_dtype}; of the experts, {block[0]} × {block[1]})"


def _memory(config: RunConfig) -> str:
    named = ", ".join(f"{name} {action}" for name, action in config.train.remat_policy.items())
    offload = "; optimizer state in pinned host memory" if config.optimizer.offload else ""
    return f"remat {config.train.remat}{f' ({named})' if named else ''}{offload}"


def _images(source: dict[str, str | int]) -> list[str]:
    if "image_source" not in source:
        return []
    return [
        f"images      {source['image_source']}: hash of the list {source['image_files_hash']}; "
        f"{source['image_train_documents']:,} documents to train on, {source['image_validation_documents']:,} held "
        f"out; {source['image_shards']} of {source['virtual_shards']} shards, an image "
        f"has at most {source['image_budget']} patches"
    ]


def start_report(config: RunConfig, mesh: jax.sharding.Mesh, data: TextData, peak: flops.Peak) -> list[str]:
    """Lines for the log: versions, devices, model, ops, data, tokens and operations a step."""
    parameters = flops.parameter_counts(config.model)
    operations = flops.flops_per_token(config.model, config.data.sequence_length)
    devices = mesh.devices.flatten()
    source = data.describe()
    tokens = config.data.batch_size * config.data.sequence_length
    kinds = [layer.mixer for layer in config.model.layers]
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    axes += f"; parameters {'cut' if config.mesh.fsdp else 'whole'}, optimizer state cut" if axes else "one device"
    processes = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return [
        f"software    k3jax {k3jax.__version__}  " + "  ".join(f"{name} {version(name)}" for name in PACKAGES),
        f"devices     {len(devices)} × {devices[0].device_kind} ({devices[0].platform}){processes}; mesh: {axes}",
        f"model       {count(parameters.total)} parameters, {count(parameters.active_without_embedding)} active "
        f"without the embedding; {len(kinds)} layers: {kinds.count('kda')} KDA, {kinds.count('mla')} gated MLA",
        *(f"            {n:>19,}  {name}" for name, n in parameters.by_mechanism.items() if n),
        f"numerics    compute {config.model.dtype}, parameters {config.model.param_dtype}; {_memory(config)}",
        *(f"operation   {op:19}  {name}" for op, name in implementations(config).items()),
        f"data        {source['source']}: {source['files']:,} files, {source['bytes']:,} bytes, "
        f"hash of the list {source['files_hash']}; {source['train_documents']:,} documents to train on, "
        f"{source['validation_documents']:,} held out; tokenizer {source['tokenizer']}",
        *_images(source),
        f"step        {config.data.batch_size} × {config.data.sequence_length} = {tokens:,} tokens in "
        f"{config.train.accumulation} micro-batch(es); {count(operations)} FLOPs a token",
        f"peak        {peak.describe()}",
    ]


class References:
    """Bits per byte of simple compressors on the held-out text, computed beside the start of the training."""

    def __init__(self, data: TextData) -> None:
        self._line: str | None = None
        self._told = False

        def compute() -> None:
            values = reference_bits_per_byte(sample_text(data.documents, data.validation))
            self._line = ", ".join(f"{name} {value:.2f}" for name, value in values.items())

        # a daemon: nobody waits for a compressor when the run ends first
        self._thread = threading.Thread(target=compute, daemon=True)
        self._thread.start()

    def news(self) -> str | None:
        """The values, once, as soon as they are there."""
        if self._told or self._line is None:
            return None
        self._told = True
        return self._line

    def wait(self, seconds: float) -> str:
        """The values, waiting for them at most this long."""
        self._thread.join(seconds)
        return self._line or "not ready"


def summary_table(rows: list[tuple[str, Any]]) -> Table:
    """The table at the end of a run."""
    table = Table(show_header=False, title="summary", title_justify="left", min_width=40)
    for name, value in rows:
        table.add_row(name, str(value))
    return table
