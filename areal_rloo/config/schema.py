"""Every option, as typed structs: what may be written, its default, and the checks that need more than one option.

A field's comment says what it means and in which unit. Facts that follow from options are properties, not options.
`validate` is called once, after loading; everybody after it trusts the values.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from areal_rloo.config.algorithm import AlgorithmConfig, validate_algorithm
from areal_rloo.config.data import DataConfig, validate_data
from areal_rloo.config.engines import EmbeddedConfig, SGLangConfig, is_loopback, validate_engines
from areal_rloo.config.episode import EpisodeConfig, validate_episode
from areal_rloo.config.launcher import LauncherConfig, validate_launcher
from areal_rloo.config.learner import LearnerConfig, validate_learner
from areal_rloo.config.section import (
    AutoInt,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
    Share,
)
from areal_rloo.errors import ConfigError


class RunConfig(Section, frozen=True):
    name: str = "run"
    seed: NonNegativeInt = 0
    folder: str | None = None  # default: runs/<name>-<time>
    entry: str | None = None  # module, or file.py, imported by every process; `entry:name` names what is in it


class WarmStartConfig(Section, frozen=True):
    """Supervised start of the built-in tiny model on noisy demonstrations, until it is right only sometimes.

    Accuracies are greedy, on validation prompts.
    """

    until_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7  # it trains until it was right this often,
    keep_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5  # and keeps the last weights that were at most this
    max_steps: NonNegativeInt = 4000
    batch_size: PositiveInt = 8  # many small steps learn sooner than few large ones
    learning_rate: PositiveFloat = 1e-3
    error_rate: Share = 0.1  # share of wrong steps in the demonstrations


class TinyModelConfig(Section, frozen=True):
    """Recipe of the built-in tiny model, used where `model.path` is `tiny`."""

    architecture: Literal["qwen2", "qwen3", "llama"] = "qwen2"
    hidden_size: PositiveInt = 96
    num_layers: PositiveInt = 3
    num_heads: PositiveInt = 6
    num_kv_heads: PositiveInt = 6
    max_position: PositiveInt = 4096
    seed: NonNegativeInt = 0
    warm_start: WarmStartConfig | None = WarmStartConfig()  # null leaves the random weights


class ReferenceConfig(Section, frozen=True):
    """The frozen policy of the KL term; loaded only where `algorithm.kl.coefficient` is above 0."""

    path: str = "initial"  # a folder, a hub name, or `initial`: the policy's first weights
    refresh_every_n_versions: PositiveInt | None = None  # take the policy's weights now and then; null: never
    offload: bool = False  # keep it in CPU memory between uses


class ModelConfig(Section, frozen=True):
    path: str = "tiny"  # a folder, a hub name, or `tiny`: the built-in model, made on first use
    reference: ReferenceConfig | None = ReferenceConfig()  # null: none
    dtype: Literal["float32", "bfloat16"] = "float32"  # of computation; master weights are always float32
    tiny: TinyModelConfig = TinyModelConfig()


class SamplingConfig(Section, frozen=True):
    temperature: PositiveFloat = 1.0
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0
    max_new_tokens: PositiveInt = 512
    min_new_tokens: NonNegativeInt = 0
    allow_truncated: bool = (
        False  # train on top_p < 1, top_k > 0 or min_new_tokens > 0, although the learner's logprobs
    )
    # are those of the whole distribution


class RolloutConfig(Section, frozen=True):
    engine: Literal["embedded", "sglang"] = "embedded"
    num_workers: AutoInt = 1  # auto: one for each GPU that the learner leaves, or for each host
    device: str = "auto"  # auto | cpu | cuda
    num_threads: NonNegativeInt = 0  # CPU threads of a worker; 0: its share of the cores
    num_slots: PositiveInt = 64  # completions decoded together
    lease_ahead_samples: PositiveInt | None = None  # held beside the slots; null: the worker's share of one batch
    episode: EpisodeConfig = EpisodeConfig()
    num_reward_workers: PositiveInt = 2  # processes that score completions
    num_async_rewards: PositiveInt = 64  # rewards that wait for a network, under way at a time
    reward_timeout_s: PositiveFloat = 30.0  # of one reward, from when it begins
    max_reward_failure_share: Share = 0.5  # of the last completions; with more the run ends with the first traceback
    sampling: SamplingConfig = SamplingConfig()
    tensor_parallel: PositiveInt = 1  # devices that share one copy of the model
    embedded: EmbeddedConfig = EmbeddedConfig()
    sglang: SGLangConfig = SGLangConfig()

    @property
    def server_urls(self) -> tuple[str, ...]:
        """SGLang servers that run already, one for each worker; none where the workers have engines of their own."""
        return self.sglang.urls if self.engine == "sglang" else ()


class WeightsConfig(Section, frozen=True):
    transport: Literal["auto", "collective", "shared_memory"] = "auto"
    bucket_bytes: PositiveInt = 64 * 2**20
    timeout_s: PositiveFloat = 60.0  # after which a worker that has not taken a version is left out


class WireConfig(Section, frozen=True):
    host: str = "127.0.0.1"
    port: Port = 0  # 0: a free one
    curve: bool = False  # always on where host is not loopback
    heartbeat_s: PositiveFloat = 1.0
    heartbeat_timeout_s: PositiveFloat = 15.0
    max_attempts: PositiveInt = 3  # leases of one sample before it is dropped
    max_unacked: PositiveInt = 1024  # trajectories a worker keeps before generation waits
    max_message_bytes: PositiveInt = 256 * 2**20


class CheckpointConfig(Section, frozen=True):
    every_n_steps: NonNegativeInt = 50  # 0: only at the end and on drain
    keep: PositiveInt = 2


class EvaluationConfig(Section, frozen=True):
    every_n_versions: NonNegativeInt = 10  # 0: only at the start and at the end
    max_new_tokens: PositiveInt | None = None  # null: as in training


class TelemetryConfig(Section, frozen=True):
    metrics_port: Port = 0  # of the learner; the workers take the next ones; 0: free ones, which the logs name
    metrics_host: str = "127.0.0.1"  # where /metrics is served; 0.0.0.0 for a Prometheus elsewhere
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    progress: bool = True
    # Written to trajectories.jsonl, some 25 bytes a token, and beside them the last 256 dropped ones; 0: none at all.
    trajectories_per_step: NonNegativeInt = 16


class Config(Section, frozen=True):
    """The whole config file."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    learner: LearnerConfig = LearnerConfig()
    weights: WeightsConfig = WeightsConfig()
    wire: WireConfig = WireConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    launcher: LauncherConfig = LauncherConfig()

    @property
    def samples_per_step(self) -> int:
        return self.learner.groups_per_step * self.algorithm.group_size

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus longest completion, evaluation included."""
        return self.data.max_prompt_tokens + max(self.rollout.sampling.max_new_tokens, self.eval_max_new_tokens)

    @property
    def eval_max_new_tokens(self) -> int:
        return self.evaluation.max_new_tokens or self.rollout.sampling.max_new_tokens

    @property
    def lease_ahead_samples(self) -> int:
        """Samples a worker may hold beside those in its slots."""
        if self.rollout.lease_ahead_samples is not None:
            return self.rollout.lease_ahead_samples
        return -(-self.samples_per_step // max(1, self.rollout.num_workers))

    def weights_transport(self, *, same_host: bool) -> Literal["collective", "shared_memory"]:
        """The way the weights take, where `weights.transport` leaves it open.

        SGLang servers take them from the learner directly: shared memory would be a copy more, through files.
        """
        if self.weights.transport != "auto":
            return self.weights.transport
        return "shared_memory" if same_host and self.rollout.engine == "embedded" else "collective"

    @property
    def warm_starts(self) -> bool:
        """Whether the tiny model is shown sums before it is trained: where a source is of sums, or may well be, as rows
        and tasks of the user's own."""
        sums = any(s.task in ("arithmetic", "rows") or ":" in s.task for s in self.data.train_sources)
        return self.model.tiny.warm_start is not None and sums

    @property
    def curve(self) -> bool:
        return self.wire.curve or not is_loopback(self.wire.host)


def validate(config: Config) -> None:
    """Check what no single field can check.

    Raises:
        ConfigError: names the key, what came, what was expected and what to do.
    """
    sampling, learner = config.rollout.sampling, config.learner
    validate_algorithm(config.algorithm, max_new_tokens=sampling.max_new_tokens)
    validate_data(config.data)
    validate_episode(config.rollout.episode)
    validate_learner(learner)
    validate_launcher(config.launcher)
    validate_engines(
        config.rollout,
        context_tokens=config.context_tokens,
        wire_host=config.wire.host,
        transport=config.weights.transport,
    )
    if config.algorithm.kl.coefficient > 0 and config.model.reference is None:
        raise ConfigError(
            f"model.reference: expected a reference policy with algorithm.kl.coefficient="
            f"{config.algorithm.kl.coefficient}, got null; set model.reference.path=initial, or the coefficient to 0"
        )
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise ConfigError(
            f"rollout.sampling.min_new_tokens: expected at most max_new_tokens={sampling.max_new_tokens}, "
            f"got {sampling.min_new_tokens}"
        )
    if (sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_new_tokens > 0) and not sampling.allow_truncated:
        raise ConfigError(
            f"rollout.sampling: top_p={sampling.top_p}, top_k={sampling.top_k} and min_new_tokens="
            f"{sampling.min_new_tokens} truncate the distribution, and the learner's logprobs no longer match the "
            "behaviour's; expected 1, 0 and 0, or set rollout.sampling.allow_truncated=true"
        )
    longest = config.data.max_prompt_tokens + sampling.max_new_tokens
    if learner.microbatch_tokens < longest:
        raise ConfigError(
            f"learner.microbatch_tokens: expected at least data.max_prompt_tokens + "
            f"rollout.sampling.max_new_tokens = {longest}, got {learner.microbatch_tokens}; one trajectory must fit"
        )
    if config.wire.heartbeat_timeout_s < 2 * config.wire.heartbeat_s:
        raise ConfigError(
            f"wire.heartbeat_timeout_s: expected at least twice wire.heartbeat_s={config.wire.heartbeat_s}, "
            f"got {config.wire.heartbeat_timeout_s}"
        )
    tiny = config.model.tiny
    if tiny.hidden_size % tiny.num_heads or tiny.num_heads % tiny.num_kv_heads:
        raise ConfigError(
            f"model.tiny: expected hidden_size divisible by num_heads and num_heads by num_kv_heads, got "
            f"{tiny.hidden_size}, {tiny.num_heads}, {tiny.num_kv_heads}"
        )
