"""A model that compiles in seconds, and a run of it."""

import dataclasses

import jax
import numpy as np

from k3jax.config import (
    DataConfig,
    KDAConfig,
    MeshConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from k3jax.train.state import TrainState

TOKEN_BYTES = np.repeat(np.array([1, 0], np.int32), 256)


def micro_model(**overrides) -> ModelConfig:
    return ModelConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 32,
            "num_layers": 2,
            "mla_layers": (1,),
            "dense_size": 32,
            "attn_res_block_size": 2,
            "kda": KDAConfig(num_heads=2, head_dim=16, chunk_size=16),
            "mla": MLAConfig(
                num_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
            ),
            "moe": MoEConfig(num_experts=4, experts_per_token=2, expert_size=16, latent_size=16, qb_bins=100),
            **overrides,
        }
    )


def micro_config(text_folder, run_dir, model=None, train=None, data=None, optimizer=None, mesh=None) -> RunConfig:
    """A run of six steps that neither evaluates nor samples."""
    return RunConfig(
        model=model or micro_model(),
        data=DataConfig(
            **{"source": str(text_folder), "sequence_length": 32, "batch_size": 4, "min_bytes": 0}
            | {"virtual_shards": 8, "validation_percent": 20}
            | (data or {})
        ),
        optimizer=OptimizerConfig(**{"learning_rate": 1e-2, "warmup_ratio": 0.2} | (optimizer or {})),
        train=TrainConfig(
            **{"steps": 6, "log_interval": 1, "eval_interval": 0, "sample_interval": 0, "eval_batches": 2}
            | {"checkpoint_interval": 2, "keep_last": 3}
            | (train or {})
        ),
        mesh=mesh or MeshConfig(),
        run_dir=str(run_dir),
    )


def random_batch(rows: int = 8, length: int = 32) -> dict[str, np.ndarray]:
    """Rows of two documents, some padding, different numbers of targets."""
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(1, 3, (rows, length)), axis=1)
    segments[: rows // 2, length - 7 :] = 0
    same = np.concatenate([segments[:, 1:] == segments[:, :-1], np.zeros((rows, 1), bool)], axis=1)
    mask = same & (segments > 0)
    tokens = rng.integers(0, 254, (rows, length))
    targets = np.where(mask, np.roll(tokens, -1, axis=1), 0)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": targets.astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "loss_mask": mask,
    }


def border_batch(shards: int = 8, length: int = 64) -> dict[str, np.ndarray]:
    """Eight rows whose documents begin on, one before and one after every border between shards of time, shards that
    hold 0 to 3 tokens of a document, one document for all, and padding within and behind."""
    rng, size = np.random.default_rng(2), length // shards
    starts = [{0, *range(size + shift, length, size)} for shift in (0, -1, 1)]
    starts += [{0, *(size * i + i % 4 for i in range(1, shards))}, {0}, set(range(0, length, 3)), {0, length // 2 + 1}]
    segments = np.stack([np.cumsum([t in row for t in range(length)]) for row in starts])
    segments = np.concatenate([segments, np.sort(rng.integers(1, 9, (1, length)), axis=1)])
    segments[5, size - 2 : size + 2] = 0  # padding across a border
    segments[6, length - size - 1 :] = 0  # a shard of padding
    same = np.concatenate([segments[:, 1:] == segments[:, :-1], np.zeros((len(segments), 1), bool)], axis=1)
    mask, tokens = same & (segments > 0), rng.integers(0, 254, segments.shape)
    return {
        "tokens": tokens.astype(np.int32),
        "targets": np.where(mask, np.roll(tokens, -1, axis=1), 0).astype(np.int32),
        "segment_ids": segments.astype(np.int32),
        "loss_mask": mask,
    }


def spread(state: TrainState) -> TrainState:
    """Parameters and router biases away from their symmetric start."""
    rng = np.random.default_rng(1)

    def shake(x: jax.Array, by: float) -> jax.Array:  # NumPy: JAX would compile each shape
        return jax.device_put((np.asarray(x) + by * rng.standard_normal(x.shape)).astype(x.dtype), x.sharding)

    params = jax.tree.map(lambda x: shake(x, 0.05), state.params)
    return dataclasses.replace(state, params=params, router_bias=shake(state.router_bias, 0.02))
