"""Frozen configuration of a run: model, mesh, data, optimizer, training.

Every class validates where it is made, so a wrong value is refused at the line that wrote it. The whole
`RunConfig` is saved verbatim in every checkpoint (`to_dict`) and read back with `from_dict`, which refuses
unknown names and says the nearest valid one.

    >>> from k3jax.config import nano
    >>> nano().num_layers
    9
"""

from k3jax.config.checks import ConfigError
from k3jax.config.model import (
    DType,
    Ffn,
    KDAConfig,
    LayerSpec,
    Mixer,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ScaleRule,
    VisionConfig,
    k3,
    moonvit,
    nano,
    proxy,
)
from k3jax.config.plain import diff, diff_dicts, from_dict, to_dict
from k3jax.config.run import (
    REMAT_NAMES,
    DataConfig,
    ExpertFormat,
    ImagesConfig,
    LaunchConfig,
    MeshConfig,
    OptimizerConfig,
    PublishConfig,
    Remat,
    RematAction,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "ConfigError",
    "DType",
    "DataConfig",
    "ExpertFormat",
    "Ffn",
    "ImagesConfig",
    "KDAConfig",
    "LaunchConfig",
    "LayerSpec",
    "MLAConfig",
    "MeshConfig",
    "Mixer",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PublishConfig",
    "REMAT_NAMES",
    "Remat",
    "RematAction",
    "RunConfig",
    "ScaleRule",
    "TrainConfig",
    "VisionConfig",
    "diff",
    "diff_dicts",
    "from_dict",
    "k3",
    "moonvit",
    "nano",
    "proxy",
    "to_dict",
]
