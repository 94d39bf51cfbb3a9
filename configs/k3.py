"""The released geometry: 2.78 trillion parameters. Not for one machine; `jax.eval_shape` of it takes seconds.

Batch, length and learning rate are placeholders: the report does not give those of K3's training.
"""

from k3jax.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig, k3

config = RunConfig(
    model=k3(),
    data=DataConfig(tokenizer="tiktoken.model", sequence_length=8192, batch_size=1024),
    optimizer=OptimizerConfig(learning_rate=2e-4, muon_ns_dtype="bfloat16"),
    train=TrainConfig(steps=100_000, remat="block", checkpoint_interval=1000, eval_interval=1000, sample_interval=0),
    run_dir="runs/k3",
)
