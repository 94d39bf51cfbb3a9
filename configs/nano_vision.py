"""The nano model with eyes: learns to read lines of handwritten digits, and Python, from nothing on two CPU cores.

python train.py configs/nano_vision.py
python -m benchmarks.digits runs/nano_vision     # how well it reads digits that it has never seen
"""

from k3jax.config import DataConfig, ImagesConfig, OptimizerConfig, RunConfig, TrainConfig, VisionConfig, nano

config = RunConfig(
    model=nano(
        vision=VisionConfig(
            hidden_size=64, num_layers=2, num_heads=4, head_dim=16, mlp_size=128, patch_size=8, position_grid=(4, 8)
        )
    ),
    data=DataConfig(sequence_length=128, batch_size=16, images=ImagesConfig(source="digits", share=0.5, patches=96)),
    optimizer=OptimizerConfig(learning_rate=2e-3),
    train=TrainConfig(
        steps=200,
        eval_interval=100,
        eval_batches=8,
        sample_interval=100,
        checkpoint_interval=100,
    ),
    run_dir="runs/nano_vision",
)
