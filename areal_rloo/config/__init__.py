"""Every option: `schema.py` says what may be written, `load.py` reads it. Imports without torch, in milliseconds."""

from areal_rloo.config.load import dump_config, load_config
from areal_rloo.config.schema import (
    AlgorithmConfig,
    BehaviourWeightConfig,
    Config,
    DataConfig,
    LossConfig,
    NormConfig,
    NormLevel,
    OptimizerConfig,
    SamplingConfig,
    SourceConfig,
    TinyModelConfig,
    WarmStartConfig,
    WeightsConfig,
    WireConfig,
    is_loopback,
)

__all__ = [
    "AlgorithmConfig",
    "BehaviourWeightConfig",
    "Config",
    "DataConfig",
    "LossConfig",
    "NormConfig",
    "NormLevel",
    "OptimizerConfig",
    "SamplingConfig",
    "SourceConfig",
    "TinyModelConfig",
    "WarmStartConfig",
    "WeightsConfig",
    "WireConfig",
    "dump_config",
    "is_loopback",
    "load_config",
]
