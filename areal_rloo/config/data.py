"""Options of the data, and of what a completion is worth: sources, their rewards, and how each evaluation samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from areal_rloo.config.section import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)
from areal_rloo.errors import ConfigError


class RewardConfig(Section, frozen=True):
    """One part of a source's reward. Exactly one of `task`, `function`, `url` and `model` says where it comes from."""

    task: str | None = None  # the reward of a task
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)  # of `task`, where it is not the source's own
    function: str | None = None  # module:function or path/to/file.py:function, sync or async
    url: str | None = None  # a service that is POSTed the completion as JSON and answers {"reward": number}
    model: str | None = None  # a sequence classification model: a folder or a hub name
    name: str | None = None  # what its numbers are called; null: the word after the key
    weight: FiniteFloat = 1.0  # of this part in the sum
    device: str = "auto"  # of `model`: auto | cpu | cuda | cuda:1
    batch_size: PositiveInt = 16  # of `model`: completions in one forward pass

    @property
    def label(self) -> str:
        """What the part's numbers are called."""
        return self.name or (self.task or self.function or self.url or self.model or "").rpartition(":")[2]


class FewShotConfig(Section, frozen=True):
    """Worked examples before every prompt, the same ones for all; they are left out of the prompts themselves."""

    num: PositiveInt = 4
    path: str | None = None  # a file of the same task and fields; null: the train split
    seed: NonNegativeInt = 0  # which ones


class ConfiguredSource(Section, frozen=True):
    """Where prompts come from, and what their completions are worth."""

    task: str = "arithmetic"  # a built-in task, or module:Class or path/to/file.py:Class of a Task of your own
    name: str | None = None  # in metrics and records; null: the task's
    path: str | None = None  # jsonl, json, csv or parquet; null: what the task makes itself, or the hub
    hub: str | None = None  # a dataset of the hub, as org/name or org/name:config; null: the task's own
    hub_split: str | None = None  # null: train for training, test for evaluation
    fields: dict[str, str] = msgspec.field(default_factory=dict)  # field of the task: what the file calls it
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)  # of the task; its documentation names them
    num_prompts: PositiveInt | None = None  # the first so many; null: all
    few_shot: FewShotConfig | None = None
    rewards: tuple[RewardConfig, ...] = ()  # their weighted sum; empty: the task's own

    @property
    def label(self) -> str:
        """What the source is called in metrics, records and errors."""
        return self.name or self.task.rpartition(":")[2]


class SourceConfig(ConfiguredSource, frozen=True):
    """A source of the train split."""

    weight: PositiveFloat | None = None  # share of prompts, against the other weights; null for all: by size


class EvalSourceConfig(ConfiguredSource, frozen=True):
    """An evaluation set, with its own sampling."""

    num_samples: PositiveInt = 1  # of each prompt; above 1: also pass@k and maj@k of so many
    temperature: NonNegativeFloat = 0.0  # 0: greedy
    top_p: Probability = 1.0
    top_k: NonNegativeInt = 0


class DataConfig(Section, frozen=True):
    train: SourceConfig | tuple[SourceConfig, ...] = SourceConfig()  # one, or a mixture
    eval: EvalSourceConfig | tuple[EvalSourceConfig, ...] | None = None  # null: no evaluation
    num_epochs: PositiveInt | None = None  # null: as many as `learner.num_train_steps` needs
    deduplicate: bool = False  # leave out train prompts that came before, and those of an evaluation set
    max_prompt_tokens: PositiveInt = 512
    overlong_prompts: Literal["error", "filter", "truncate"] = "error"  # truncate keeps the last tokens, the question
    system_prompt: str | None = None
    chat_template: bool | None = None  # null: where the tokenizer has one

    @property
    def train_sources(self) -> tuple[SourceConfig, ...]:
        return (self.train,) if isinstance(self.train, SourceConfig) else self.train

    @property
    def eval_sources(self) -> tuple[EvalSourceConfig, ...]:
        if self.eval is None:
            return ()
        return (self.eval,) if isinstance(self.eval, EvalSourceConfig) else self.eval


def source_key(split: str, index: int, num_sources: int) -> str:
    """Where a source stands in the config, for errors."""
    return f"data.{split}" if num_sources == 1 else f"data.{split}.{index}"


def validate_data(data: DataConfig) -> None:
    """Check what no single field can check.

    Raises:
        ConfigError: names the key, what came, what was expected and what to do.
    """
    for key, sources in (("data.train", data.train_sources), ("data.eval", data.eval_sources)):
        if not sources and (key == "data.train" or data.eval is not None):
            raise ConfigError(f"{key}: expected at least one source, got an empty list")
        _check_names(key, sources)
        for index, source in enumerate(sources):
            _check_source(source_key(key.removeprefix("data."), index, len(sources)), source)
    weights = [source.weight for source in data.train_sources]
    if None in weights and any(weight is not None for weight in weights):
        raise ConfigError(
            f"data.train: expected a weight for every source or for none, got {weights}; without weights a prompt of "
            "any source is as likely as another"
        )
    for source in data.eval_sources:
        if source.num_samples > 1 and source.temperature == 0:
            raise ConfigError(
                f"data.eval: {source.label}: num_samples={source.num_samples} greedy samples would all be the same; "
                "expected temperature above 0, or num_samples=1"
            )


def _check_names(key: str, sources: Sequence[ConfiguredSource]) -> None:
    labels = [source.label for source in sources]
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise ConfigError(f"{key}.{index}.name: two sources are called '{label}'; give one of them another name")


def _check_source(key: str, source: ConfiguredSource) -> None:
    if source.path is not None and source.hub is not None:
        raise ConfigError(f"{key}.hub: expected a path or a hub dataset, got both ({source.path}, {source.hub})")
    if source.hub_split is not None and source.path is not None:
        raise ConfigError(f"{key}.hub_split: nothing reads it with a path ({source.path}); leave it out")
    labels = [reward.label for reward in source.rewards]
    for index, reward in enumerate(source.rewards):
        given = [name for name in ("task", "function", "url", "model") if getattr(reward, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"{key}.rewards.{index}: expected exactly one of task, function, url, model, got "
                f"{', '.join(given) or 'none'}"
            )
        if reward.label in labels[:index]:
            raise ConfigError(
                f"{key}.rewards.{index}.name: two rewards are called '{reward.label}'; give one of them another name"
            )
        defaults = RewardConfig()
        for name, reader in (("parameters", "task"), ("device", "model"), ("batch_size", "model")):
            if getattr(reward, reader) is None and getattr(reward, name) != getattr(defaults, name):
                raise ConfigError(f"{key}.rewards.{index}.{name}: nothing reads it without {reader}; leave it out")
        if reward.url is not None and not reward.url.startswith(("http://", "https://")):
            raise ConfigError(f"{key}.rewards.{index}.url: expected http://... or https://..., got '{reward.url}'")
