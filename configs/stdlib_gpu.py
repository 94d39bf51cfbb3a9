"""A small K3 with every mechanism, made to learn the Python standard library in minutes on one GPU.

176M parameters, 70M of them active without the embedding. It is trained on under 30 MB of text, so it sees every
document several times; the measure is whether it predicts held-out files in fewer bits than `xz -9` needs for them.

python train.py configs/stdlib_gpu.py
"""

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

config = RunConfig(
    model=ModelConfig(
        vocab_size=8448,
        hidden_size=768,
        num_layers=9,
        mla_layers=(3, 7, 8),
        dense_size=2048,
        attn_res_block_size=4,
        kda=KDAConfig(num_heads=6, head_dim=128),
        mla=MLAConfig(
            num_heads=6, q_lora_rank=256, kv_lora_rank=192, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        moe=MoEConfig(num_experts=32, experts_per_token=4, expert_size=384, latent_size=384),
        dtype="bfloat16",
    ),
    data=DataConfig(tokenizer="python8k", sequence_length=2048, batch_size=16),
    optimizer=OptimizerConfig(learning_rate=2e-3, muon_ns_dtype="bfloat16"),
    train=TrainConfig(
        steps=1200,
        loss_chunk=2048,
        eval_interval=150,
        eval_batches=None,
        sample_interval=300,
        checkpoint_interval=600,
    ),
    run_dir="runs/stdlib_gpu",
)
