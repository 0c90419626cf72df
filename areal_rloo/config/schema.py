"""The root of the config, the small sections, and the checks across sections.

Larger sections have modules of their own. A comment behind a field gives meaning and unit. Facts that follow from
options are properties, not options. `validate` runs once, after loading; all other code trusts the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from areal_rloo.config.algorithm import AlgorithmConfig, algorithm_mistakes
from areal_rloo.config.data import DataConfig, data_mistakes, limit_mistakes
from areal_rloo.config.episode import EpisodeConfig
from areal_rloo.config.launcher import LauncherConfig, launcher_mistakes
from areal_rloo.config.learner import LearnerConfig, learner_mistakes
from areal_rloo.config.rollout import RolloutConfig, rollout_mistakes
from areal_rloo.config.section import (
    MOST_LEASED,
    Count,
    ManyCount,
    MessageBytes,
    Natural,
    Port,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Share,
    Tokens,
    host_mistakes,
    is_loopback,
    path_mistakes,
)
from areal_rloo.errors import ConfigError, shown

_NAME = re.compile(r"\w[\w.+=@-]*")
_MOST_NAME = 64
_TOKEN_BYTES = 20  # of a token in a message: the id, the logprob, a span and a reward, 4 bytes a number


class RunConfig(Section, frozen=True):
    name: str = "run"  # begins the name of the folder
    seed: Natural = 0  # of prompts, sampling and initial weights
    folder: str | None = None  # null: runs/<name>-<time>
    entry: str | None = None  # module or file.py that every process imports; `entry:name` refers to names in it


class WarmStartConfig(Section, frozen=True):
    """Supervised training of the built-in tiny model on noisy demonstrations, up to a partial accuracy.

    Accuracies are greedy, on validation prompts.
    """

    # Stop at this greedy accuracy on validation prompts.
    until_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7
    # Keep the last weights at or below this greedy accuracy.
    keep_accuracy: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    max_steps: Natural = 4000  # stop after so many steps in any case
    batch_size: ManyCount = 8  # demonstrations in a step; many small steps learn faster than few large steps
    learning_rate: PositiveFloat = 1e-3  # of AdamW, constant
    error_rate: Share = 0.1  # share of wrong steps in the demonstrations


class TinyModelConfig(Section, frozen=True):
    """Recipe of the built-in tiny model, used if `model.path` is `tiny`."""

    architecture: Literal["qwen2", "qwen3", "llama"] = "qwen2"  # the layers of this family of models
    hidden_size: Annotated[int, msgspec.Meta(ge=1, le=2**16)] = 96  # width of a layer; a multiple of num_heads
    num_layers: Count = 3  # transformer layers
    num_heads: Count = 6  # attention heads of a layer
    num_kv_heads: Count = 6  # heads of keys and values; a divisor of num_heads
    max_position: Tokens = 4096  # longest context in tokens
    seed: Natural = 0  # of the random weights
    # Supervised training before the run; null: keep the random weights.
    warm_start: WarmStartConfig | None = WarmStartConfig()


class ReferenceConfig(Section, frozen=True):
    """The frozen policy of the KL term; loaded only if `algorithm.kl.coefficient` is above 0."""

    path: str = "initial"  # a folder, a hub name, or `initial`: the policy's initial weights
    refresh_every_n_versions: PositiveInt | None = None  # copy the policy's weights this often; null: never
    offload: bool = False  # keep the weights in CPU memory between uses


class ModelConfig(Section, frozen=True):
    path: str = "tiny"  # a folder, a hub name, or `tiny`: the built-in model, made on first use
    reference: ReferenceConfig | None = ReferenceConfig()  # the frozen policy of the KL term; null: none
    dtype: Literal["float32", "bfloat16"] = "float32"  # of computation; master weights are always float32
    tiny: TinyModelConfig = TinyModelConfig()


class WeightsConfig(Section, frozen=True):
    # auto: shared memory on one host, unless servers load the weights; else collective (NCCL, Gloo).
    transport: Literal["auto", "collective", "shared_memory"] = "auto"
    # Weights are sent in pieces of this size.
    bucket_bytes: Annotated[int, msgspec.Meta(ge=2**16, le=2**40)] = 64 * 2**20
    timeout_s: Seconds = 60.0  # a worker that has not received a version after this time is left out
    # Publish the version after every so many train steps, and every evaluated version: less to send, staler tokens.
    publish_every_n_steps: PositiveInt = 1


class WireConfig(Section, frozen=True):
    # auto: under the local launcher a socket file for this user alone, unless `host` or `port` ask for TCP; else TCP.
    transport: Literal["auto", "tcp"] = "auto"
    host: str = "127.0.0.1"  # of TCP, whose messages are always encrypted, and of the weights' collectives
    port: Port = 0  # 0: a free port
    heartbeat_s: Seconds = 1.0  # interval between signs of life of a rollout worker
    # Without a sign of life for this long, a worker is lost, and others get the samples.
    heartbeat_timeout_s: Seconds = 15.0
    max_attempts: PositiveInt = 3  # leases of a sample before the sample is dropped
    # If a worker finishes no sample and generates no token for this time, other workers get its samples. Make it longer
    # than any call of a tool, an agent or a reward.
    stall_timeout_s: Seconds = 1800.0
    max_message_bytes: MessageBytes = 256 * 2**20  # longest message; a row of the data has at most a fifth
    # Keep each batch in the run folder, for `areal_rloo.replay`: 8 bytes a completion token, 4 a prompt token.
    record: bool = False

    @property
    def most_item_bytes(self) -> int:
        """The limit of an item in a lease, where the prompt has a quarter, and a partial rollout a half."""
        return self.max_message_bytes // 5


class CheckpointConfig(Section, frozen=True):
    every_n_steps: Natural = 50  # interval between checkpoints, the first after step 1; 0: only as at_end says
    at_end: bool = True  # also at the end and on a drain; false with every_n_steps=0: no checkpoint, and no resume
    keep: PositiveInt = 2  # number of the newest checkpoints that stay
    keep_best: bool = True  # also the checkpoint with the best held-out reward: a policy may collapse over night
    keep_every_n_steps: Natural = 0  # also those of every Kth step, a multiple of every_n_steps; 0: none
    # Save the tokens of unfinished samples, too, and continue these samples after a resume. For this, a server aborts
    # its requests at every checkpoint, and computes their cache again.
    partial_rollouts: bool = True


class EvaluationConfig(Section, frozen=True):
    every_n_versions: Natural = 10  # interval between evaluations; 0: only at the start and at the end
    max_new_tokens: Tokens | None = None  # of a completion; null: as in training


class TelemetryConfig(Section, frozen=True):
    metrics_port: Port = 0  # of the learner; workers use the next ports; 0: free ports, named in the logs
    metrics_host: str = "127.0.0.1"  # address of /metrics; 0.0.0.0 for a Prometheus on another machine
    targets_folder: str | None = "runs/targets"  # each process writes a file with the port for Prometheus here
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # least level of a line in the logs
    progress: bool = True  # print the state of the run on the terminal
    # Recorded in trajectories.jsonl (about 25 bytes a token), besides the last 256 dropped trajectories. 0: no record.
    trajectories_per_step: Natural = 16
    most_trajectories_bytes: PositiveInt = 2**29  # a longer trajectories.jsonl loses every second of the older steps
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()  # also get all numbers
    tracker_names: Literal["areal_rloo", "trl", "verl"] = "areal_rloo"  # some numbers also by another system's names
    # Each process records all work with times in traces/, a kilobyte a sample; the report makes a file for Perfetto.
    trace: bool = False


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
    def trajectory_tokens(self) -> int:
        """Longest prompt plus longest completion in training: a row must hold them."""
        return self.data.max_prompt_tokens + self.rollout.sampling.max_new_tokens

    @property
    def context_tokens(self) -> int:
        """Longest prompt plus longest completion, evaluation included."""
        return self.data.max_prompt_tokens + max(self.rollout.sampling.max_new_tokens, self.eval_max_new_tokens)

    @property
    def eval_max_new_tokens(self) -> int:
        return self.evaluation.max_new_tokens or self.rollout.sampling.max_new_tokens

    def max_new_tokens_of(self, purpose: Literal["train", "eval"], label: str) -> int:
        """Longest completion of a source, or of the whole run for an unknown source."""
        train = purpose == "train"
        most = self.rollout.sampling.max_new_tokens if train else self.eval_max_new_tokens
        sources = self.data.train_sources if train else self.data.eval_sources
        return next((source.max_new_tokens for source in sources if source.label == label), None) or most

    def episode_of(self, label: str) -> EpisodeConfig:
        """Return the episode of a source; a source and a set of the same name have the same."""
        sources = (*self.data.train_sources, *self.data.eval_sources)
        own = next((source.episode for source in sources if source.label == label), None)
        return self.rollout.episode.of_source(own)

    @property
    def episodes(self) -> dict[str, EpisodeConfig]:
        """The episode of each source, by label."""
        sources = (*self.data.train_sources, *self.data.eval_sources)
        return {source.label: self.episode_of(source.label) for source in sources}

    @property
    def publishes_adapters(self) -> bool:
        """True if a version is adapters alone: the embedded engine adds them, the worker of a server merges them."""
        lora = self.learner.lora
        wanted = "adapters" if self.rollout.engine == "embedded" else "merged"
        return lora is not None and (wanted if lora.publish == "auto" else lora.publish) == "adapters"

    @property
    def copies_of_weights(self) -> int:
        """Copies in an engine: the embedded engine evaluates with a copy of its own, a server in the running batch."""
        return 2 if self.rollout.engine == "embedded" and self.data.eval is not None else 1

    @property
    def lease_ahead_samples(self) -> int:
        """Samples that a worker may hold in addition to the samples in the slots."""
        if self.rollout.lease_ahead_samples is not None:
            return self.rollout.lease_ahead_samples
        return min(-(-self.samples_per_step // max(1, self.rollout.num_workers)), MOST_LEASED)

    @property
    def capacity_samples(self) -> int:
        """Train samples that a worker holds at most."""
        return self.rollout.num_slots + self.lease_ahead_samples

    @property
    def lease_timeout_s(self) -> float:
        """How long a worker can hold a sample at most: it waits, say for weights, then the episode runs."""
        return self.wire.stall_timeout_s + self.rollout.episode.timeout_s

    @property
    def partial_tokens(self) -> int:
        """Most tokens in all turns of a partial rollout. With more, the sample begins anew."""
        return self.context_tokens * self.rollout.episode.most_trajectories

    @property
    def partials_timeout_s(self) -> float:
        """How long a checkpoint waits for partial rollouts: an engine needs some seconds, and a drain the rest."""
        return min(10.0, self.launcher.drain_timeout_s / 4)

    def weights_transport(self, *, same_host: bool) -> Literal["collective", "shared_memory"]:
        """The transport of the weights, with `auto` resolved.

        Servers receive weights from the learner directly. Shared memory would add a copy, through files.
        """
        if self.weights.transport != "auto":
            return self.weights.transport
        files = self.rollout.engine == "embedded" or self.rollout.shares or self.publishes_adapters
        return "shared_memory" if same_host and files else "collective"

    @property
    def warm_starts(self) -> bool:
        """True if the tiny model trains on sums first: if a source has sums, or may have them (rows, user's tasks)."""
        sums = any(s.task in ("arithmetic", "rows") or ":" in s.task for s in self.data.train_sources)
        return self.model.tiny.warm_start is not None and sums

    @property
    def wire_asks_for_tcp(self) -> bool:
        return self.wire.transport == "tcp" or self.wire.port != 0 or not is_loopback(self.wire.host)


def validate(config: Config) -> None:
    """Check dependent options. The checks of a section stand beside the section.

    Raises:
        ConfigError: names the key, the expected value, the actual value and the remedy.
    """
    for message in _mistakes(config):
        raise ConfigError(message)


def _mistakes(config: Config) -> Iterator[str]:
    every, kept = config.checkpoint.every_n_steps, config.checkpoint.keep_every_n_steps
    if kept and (every == 0 or kept % every):
        yield (
            f"checkpoint.keep_every_n_steps: expected a multiple of checkpoint.every_n_steps={every}, got {kept}; "
            "other steps have no checkpoint"
        )
    if config.learner.num_train_steps == 0 and config.data.num_epochs is None:
        yield "learner.num_train_steps: expected a number without data.num_epochs, got auto; set either of the two"
    yield from _name_mistakes(config.run.name)
    yield from path_mistakes("run.folder", config.run.folder)
    yield from path_mistakes("model.path", config.model.path)
    yield from path_mistakes("model.reference.path", config.model.reference.path if config.model.reference else None)
    yield from host_mistakes("wire.host", config.wire.host)
    yield from host_mistakes("telemetry.metrics_host", config.telemetry.metrics_host)
    yield from algorithm_mistakes(config.algorithm, max_new_tokens=config.rollout.sampling.max_new_tokens)
    yield from data_mistakes(config.data)
    yield from limit_mistakes(
        config.data, config.rollout.sampling, config.evaluation.max_new_tokens, config.algorithm.rewards.overlong_tokens
    )
    yield from learner_mistakes(config.learner, config.algorithm.loss)
    yield from launcher_mistakes(config.launcher)
    yield from rollout_mistakes(config.rollout, config.context_tokens, config.wire.host, config.weights.transport)
    if config.algorithm.kl.coefficient > 0 and config.model.reference is None:
        yield (
            f"model.reference: expected a reference policy with algorithm.kl.coefficient="
            f"{config.algorithm.kl.coefficient}, got null; set model.reference.path=initial, or the coefficient to 0"
        )
    if config.publishes_adapters and config.rollout.server_urls:
        yield (
            "learner.lora.publish: expected auto or merged with running servers (urls), got adapters; merged weights "
            "are files of the worker, which a running server does not read; set it to merged"
        )
    longest = config.trajectory_tokens
    if 0 < config.learner.microbatch_tokens < longest:
        yield (
            f"learner.microbatch_tokens: expected at least data.max_prompt_tokens + rollout.sampling.max_new_tokens "
            f"= {longest}, got {config.learner.microbatch_tokens}; a microbatch must hold the longest trajectory"
        )
    every, most = config.weights.publish_every_n_steps, config.algorithm.max_staleness + 1
    if every > most:
        yield (
            f"weights.publish_every_n_steps: expected at most algorithm.max_staleness + 1 = {most}, got {every}; the "
            f"last step before a new version trains tokens of the one before; set algorithm.max_staleness={every - 1}"
        )
    yield from _wire_host_mistakes(config)
    yield from _wire_mistakes(config)
    if config.wire.heartbeat_timeout_s < 2 * config.wire.heartbeat_s:
        yield (
            f"wire.heartbeat_timeout_s: expected at least twice wire.heartbeat_s={config.wire.heartbeat_s}, "
            f"got {config.wire.heartbeat_timeout_s}"
        )
    yield from _tiny_mistakes(config.model.tiny)


def _tiny_mistakes(tiny: TinyModelConfig) -> Iterator[str]:
    if tiny.hidden_size % tiny.num_heads or tiny.num_heads % tiny.num_kv_heads:
        yield (
            f"model.tiny: expected hidden_size divisible by num_heads and num_heads by num_kv_heads, got "
            f"{tiny.hidden_size}, {tiny.num_heads}, {tiny.num_kv_heads}"
        )
    elif (tiny.hidden_size // tiny.num_heads) % 2:
        yield (
            f"model.tiny: expected an even hidden_size / num_heads, because rotary positions turn pairs, got "
            f"{tiny.hidden_size} / {tiny.num_heads} = {tiny.hidden_size // tiny.num_heads}"
        )


def _wire_host_mistakes(config: Config) -> Iterator[str]:
    host = config.wire.host
    if "%" in host:
        yield f"wire.host: expected an address without a zone, as in ::1 or fd00::1, got '{host}'"
    elif ":" in host and config.rollout.server is not None and config.weights.transport != "shared_memory":
        yield (
            f"wire.host: expected an IPv4 address with rollout.engine={config.rollout.engine}, whose servers cannot "
            f"meet the learner at {host}; name an IPv4 address, or set weights.transport=shared_memory"
        )


def _name_mistakes(name: str) -> Iterator[str]:
    if not _NAME.fullmatch(name) or len(name.encode()) > _MOST_NAME:
        yield (
            f"run.name: expected a name for a folder, of at most {_MOST_NAME} letters, digits and -_.+=@, beginning "
            f"with a letter or a digit, got '{shown(name)}'"
        )


def _wire_mistakes(config: Config) -> Iterator[str]:
    least = 2**20 + _TOKEN_BYTES * config.context_tokens
    if config.wire.max_message_bytes < least:
        yield (
            f"wire.max_message_bytes: expected at least {least}, for the longest sample of data.max_prompt_tokens and "
            f"the longest completion together = {config.context_tokens}, got {config.wire.max_message_bytes}"
        )
    metrics_port, num_workers = config.telemetry.metrics_port, config.rollout.num_workers
    if metrics_port and metrics_port + num_workers > 65535:
        yield (
            f"telemetry.metrics_port: expected at most {65535 - num_workers}, because rollout.num_workers="
            f"{num_workers} workers use the next ports, got {metrics_port}"
        )
