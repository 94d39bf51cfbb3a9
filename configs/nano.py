"""Nine layers, bytes, the Python standard library: from nothing to a sample in minutes on two CPU cores.

python train.py configs/nano.py
"""

from k3jax.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig, nano

config = RunConfig(
    model=nano(),
    data=DataConfig(sequence_length=256, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=2e-3),
    train=TrainConfig(
        steps=100,
        eval_interval=50,
        eval_batches=8,
        sample_interval=50,
        checkpoint_interval=50,
    ),
    run_dir="runs/nano",
)
