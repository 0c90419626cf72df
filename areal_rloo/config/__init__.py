"""Every option of a run, as typed and frozen structs. Imports without torch and numpy.

- `schema`: the root `Config`, the small sections, and the checks across sections.
- `algorithm`, `data`, `launcher`, `learner`, `rollout`: one large section each, with the checks of that section.
- `episode`: the section `rollout.episode`, and the episodes of sources.
- `server`: the sections of servers, `rollout.sglang` and `rollout.vllm`.
- `section`: the base struct, bounded numbers, and checks of hosts, URLs and paths.
- `load`: reads a YAML file and overrides into a `Config`, and writes a `Config` as YAML.
- `overrides`: options on a command line, and the changes that they make.
- `reading`: reads YAML within limits, without a guess at types.
- `typed`: gives the tree of a file the types of the structs.
- `presets`: the values behind each name of `algorithm.preset`.
- `resume`: which keys may change on a resume, and the effects.
- `areal`: translates AReaL's spelling of norms and rejection sampling.
- `options`: every option as data, with the comments of the structs as meanings; `__main__` is `areal-rloo config`.
- `other_names`: names of options in other systems, for the hint of an unknown key.
- `filled`: gives evaluation sets the rewards and episodes of the train sources, and reads a chat template.
- `imports`: imports functions and classes of the user by path.
"""

from areal_rloo.config.algorithm import (
    AdaptiveKLConfig,
    AlgorithmConfig,
    BehaviourWeightConfig,
    KLConfig,
    LossConfig,
    NormConfig,
    PresetName,
    RewardsConfig,
)
from areal_rloo.config.data import (
    ConfiguredSource,
    DataConfig,
    EvalSourceConfig,
    FewShotConfig,
    RewardConfig,
    SourceConfig,
)
from areal_rloo.config.episode import EpisodeConfig, SourceEpisodeConfig
from areal_rloo.config.imports import ENTRY, import_entry, import_function, import_named
from areal_rloo.config.launcher import LauncherConfig
from areal_rloo.config.learner import MOST_BETA, LearnerConfig, LoraConfig, OptimizerConfig
from areal_rloo.config.load import check_launched, check_run, dump_config, load_config
from areal_rloo.config.overrides import EXPECTED, check_overrides, check_unique, is_override, override_of
from areal_rloo.config.presets import PRESETS
from areal_rloo.config.rollout import EmbeddedConfig, RolloutConfig, SamplingConfig
from areal_rloo.config.schema import (
    Config,
    ModelConfig,
    TelemetryConfig,
    TinyModelConfig,
    WarmStartConfig,
    WeightsConfig,
    WireConfig,
    validate,
)
from areal_rloo.config.section import MOST_RANKS, MOST_WORKERS, argument_name, is_loopback
from areal_rloo.config.server import ServerConfig, option_number

__all__ = [
    "ENTRY",
    "EXPECTED",
    "MOST_BETA",
    "MOST_RANKS",
    "MOST_WORKERS",
    "PRESETS",
    "AdaptiveKLConfig",
    "AlgorithmConfig",
    "BehaviourWeightConfig",
    "Config",
    "ConfiguredSource",
    "DataConfig",
    "EmbeddedConfig",
    "EpisodeConfig",
    "EvalSourceConfig",
    "FewShotConfig",
    "KLConfig",
    "LauncherConfig",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "NormConfig",
    "OptimizerConfig",
    "PresetName",
    "RewardConfig",
    "RewardsConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
    "SourceConfig",
    "SourceEpisodeConfig",
    "TelemetryConfig",
    "TinyModelConfig",
    "WarmStartConfig",
    "WeightsConfig",
    "WireConfig",
    "argument_name",
    "check_launched",
    "check_overrides",
    "check_run",
    "check_unique",
    "dump_config",
    "import_entry",
    "import_function",
    "import_named",
    "is_loopback",
    "is_override",
    "load_config",
    "option_number",
    "override_of",
    "validate",
]
