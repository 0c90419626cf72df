"""What the worker processes of a reward pool score with: tasks and functions, the parts of a run's rewards.

One setting goes to all processes of a pool; a job says which source and which part of its reward is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from areal_rloo.config import Config, ConfiguredSource, DataConfig, RewardConfig, import_function, source_key
from areal_rloo.rewards.functions import FunctionReward, is_async
from areal_rloo.rewards.process import Job
from areal_rloo.rewards.request import Purpose, RewardRequest, Worth
from areal_rloo.rewards.values import Returns, read_worth
from areal_rloo.tasks.base import Task
from areal_rloo.tasks.loading import eval_sources
from areal_rloo.tasks.registry import make_task

PartKey = tuple[Purpose, str, str | None]
"""A split, the label of a source of it, and the label of a part of its reward; None for its final answers."""


class ScorerSettings(msgspec.Struct, frozen=True):
    """What a worker process has to know to score for a run: the parts that are its own, and what they are made of."""

    data: DataConfig
    seed: int
    returns: Returns
    parts: tuple[PartKey, ...]


class RewardPart(msgspec.Struct, frozen=True):
    """One part of a source's reward, where it stands in the config, and the source."""

    purpose: Purpose
    source: ConfiguredSource
    config: RewardConfig
    key: str

    @property
    def part_key(self) -> PartKey:
        return (self.purpose, self.source.label, self.config.label)

    @property
    def is_async(self) -> bool:
        """A function that waits for a network rather than computes.

        Raises:
            ConfigError: it cannot be imported.
        """
        path = self.config.function
        return path is not None and is_async(import_function(f"{self.key}.function", path))


def reward_parts(data: DataConfig) -> Iterator[RewardPart]:
    """Every part of every source's reward. A source that names none has one, its task's own."""
    splits: tuple[tuple[Purpose, tuple[ConfiguredSource, ...]], ...] = (
        ("train", data.train_sources),
        ("eval", tuple(eval_sources(data))),
    )
    for purpose, sources in splits:
        for source_index, source in enumerate(sources):
            key = source_key(purpose, source_index, len(sources))
            for index, config in enumerate(source.rewards or (RewardConfig(task=source.task),)):
                yield RewardPart(purpose, source, config, f"{key}.rewards.{index}")


def scorer_argument(config: Config, parts: tuple[PartKey, ...]) -> bytes:
    """What `make_scorer` is called with for these parts of a run's rewards."""
    return msgspec.msgpack.encode(ScorerSettings(config.data, config.run.seed, config.algorithm.returns, parts))


def make_scorer(argument: bytes) -> Callable[[Job], Any]:
    """The scorer of a worker process: gives a `Worth`, or where its parts are async functions an awaitable of one.

    Args:
        argument: `ScorerSettings` as msgpack.

    Raises:
        UserError: a task refuses its source, or a function cannot be imported.
    """
    settings = msgspec.msgpack.decode(argument, type=ScorerSettings)
    scorers: dict[PartKey, Callable[[RewardRequest], Any]] = {}
    for part in reward_parts(settings.data):
        if part.part_key in settings.parts:
            scorers[part.part_key] = _scorer(part, settings)
        answers: PartKey = (part.purpose, part.source.label, None)
        is_task = part.config.task is not None  # whose answers these are, where rows of one's own are scored by one
        if answers in settings.parts and (is_task or answers not in scorers):
            source = task_source(part) if is_task else part.source
            scorers[answers] = _final_answer(make_task(source, seed=settings.seed))
    return lambda job: scorers[job.request.purpose, job.request.item.source, job.part](job.request)


def _scorer(part: RewardPart, settings: ScorerSettings) -> Callable[[RewardRequest], Any]:
    config = part.config
    if config.function is not None:
        function = FunctionReward(f"{part.key}.function", config.function, returns=settings.returns)
        return function.score_async if function.is_async else function.score
    assert config.task is not None, "services and models are scored elsewhere"
    task = make_task(task_source(part), seed=settings.seed)
    return lambda request: read_worth(task.reward(request.completion, request.item), request, returns=settings.returns)


def task_source(part: RewardPart) -> ConfiguredSource:
    """The source that the task of a part is made with: its own where it is the source's task, with its parameters."""
    assert part.config.task is not None, "a part that is a task"
    if part.config.task == part.source.task:
        return part.source
    return type(part.source)(task=part.config.task, parameters=part.config.parameters)


def _final_answer(task: Task) -> Callable[[RewardRequest], Worth]:
    return lambda request: Worth(reward=0.0, answer=task.final_answer(request.completion))
