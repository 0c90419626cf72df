"""Every option: `schema.py` and `algorithm.py` say what may be written, `load.py` reads it. Imports without torch."""

from areal_rloo.config.algorithm import (
    AdaptiveKLConfig,
    AlgorithmConfig,
    BehaviourWeightConfig,
    KLConfig,
    LossConfig,
    NormConfig,
    NormLevel,
    RewardsConfig,
)
from areal_rloo.config.data import (
    ConfiguredSource,
    DataConfig,
    EvalSourceConfig,
    FewShotConfig,
    RewardConfig,
    SourceConfig,
    source_key,
)
from areal_rloo.config.engines import EmbeddedConfig, SGLangConfig, argument_name, is_loopback
from areal_rloo.config.episode import EpisodeConfig
from areal_rloo.config.imports import ENTRY, import_entry, import_function
from areal_rloo.config.launcher import ContainerConfig, LauncherConfig, SlurmConfig
from areal_rloo.config.learner import LearnerConfig, LoraConfig, OptimizerConfig
from areal_rloo.config.load import dump_config, load_config
from areal_rloo.config.presets import PRESETS, PresetName
from areal_rloo.config.schema import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    ModelConfig,
    ReferenceConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TelemetryConfig,
    TinyModelConfig,
    WarmStartConfig,
    WeightsConfig,
    WireConfig,
    validate,
)

__all__ = [
    "ENTRY",
    "PRESETS",
    "AdaptiveKLConfig",
    "AlgorithmConfig",
    "BehaviourWeightConfig",
    "CheckpointConfig",
    "Config",
    "ConfiguredSource",
    "ContainerConfig",
    "DataConfig",
    "EmbeddedConfig",
    "EpisodeConfig",
    "EvalSourceConfig",
    "EvaluationConfig",
    "FewShotConfig",
    "KLConfig",
    "LauncherConfig",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "NormConfig",
    "NormLevel",
    "OptimizerConfig",
    "PresetName",
    "ReferenceConfig",
    "RewardConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "SGLangConfig",
    "SamplingConfig",
    "SlurmConfig",
    "SourceConfig",
    "TelemetryConfig",
    "TinyModelConfig",
    "WarmStartConfig",
    "WeightsConfig",
    "WireConfig",
    "argument_name",
    "dump_config",
    "import_entry",
    "import_function",
    "is_loopback",
    "load_config",
    "source_key",
    "validate",
]
