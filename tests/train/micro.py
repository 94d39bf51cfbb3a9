"""A model that compiles in seconds, and a run of it."""

from k3jax.config import (
    DataConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)


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


def micro_config(text_folder, run_dir, model=None, train=None, data=None, optimizer=None) -> RunConfig:
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
        run_dir=str(run_dir),
    )
