"""The proxy with a tower of 12 blocks, for throughput: 10 % of the rows have images.

python -m benchmarks.vision configs/proxy_vision.py
"""

import dataclasses

from configs.proxy import config as text
from k3jax.config import VisionConfig

config = dataclasses.replace(
    text,
    model=dataclasses.replace(
        text.model, vision=VisionConfig(hidden_size=512, num_layers=12, num_heads=8, head_dim=64, mlp_size=2048)
    ),
    run_dir="runs/proxy_vision",
)
