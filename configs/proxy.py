"""1.74B parameters (0.50B active) on one GPU: the size at which kernels and throughput are measured.

python train.py configs/proxy.py --data.source DIR
"""

from k3jax.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig, proxy

config = RunConfig(
    model=proxy(),
    data=DataConfig(tokenizer="python8k", sequence_length=4096, batch_size=4),
    optimizer=OptimizerConfig(learning_rate=6e-4, muon_ns_dtype="bfloat16"),
    train=TrainConfig(
        steps=200,
        remat="none",  # 39.5 GiB of an H200, and the fastest there
        unroll=True,
        loss_chunk=4096,
        eval_interval=100,
        eval_batches=16,
        sample_interval=100,
        checkpoint_interval=200,
    ),
    run_dir="runs/proxy",
)
