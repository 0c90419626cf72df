"""The reward parts of a config: their check, everything that runs them, and the scorer of a worker process.

    task, function      run in a RewardPool: worker processes, one reward at a time in each
    async function      runs in the AsyncRewardPool: one worker process, many rewards at a time
    url                 RewardServices
    model               a RewardModel for each path and device

Only those that a source of the config uses are started. All processes of a pool get the same settings; a job names the
source and the part.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypedDict

import msgspec

from areal_rloo.config import Config, ConfiguredSource, DataConfig, RewardConfig, import_function
from areal_rloo.config.filled import takes_rewards_of_train
from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import ConfigError, DataError, ModelError, RewardError
from areal_rloo.models.folder import check_model_folder
from areal_rloo.rewards.async_pool import AsyncRewardPool
from areal_rloo.rewards.functions import FunctionReward, is_async
from areal_rloo.rewards.pool import RewardPool
from areal_rloo.rewards.process import AnswerJob, Job
from areal_rloo.rewards.request import FinalAnswer, Returns, RewardRequest, SourceKey, read_worth
from areal_rloo.rewards.scoring import FindAnswer, Part, Runner, Score, Scoring, SourceRewards
from areal_rloo.rewards.service import RewardServices
from areal_rloo.tasks.base import Task
from areal_rloo.tasks.loading import Looked, eval_sources, make_task
from areal_rloo.trajectory import Item, Purpose

_FACTORY = "areal_rloo.rewards.parts:make_scorer"

PartKey = tuple[Purpose, str, str]
"""A split, the label of a source in it, and the label of a part of its reward."""


class RewardPart(msgspec.Struct, frozen=True):
    """One part of a source's reward, the source, and the keys of both in the config."""

    purpose: Purpose
    source: ConfiguredSource
    config: RewardConfig
    key: str
    key_of_source: str

    @property
    def source_key(self) -> SourceKey:
        return (self.purpose, self.source.label)

    @property
    def part_key(self) -> PartKey:
        return (*self.source_key, self.config.label)

    @property
    def is_async(self) -> bool:
        """True for an async function.

        Raises:
            ConfigError: the function cannot be imported.
        """
        path = self.config.function
        return path is not None and is_async(import_function(f"{self.key}.function", path))

    def make_task(self, seed: int) -> Task:
        """Make the task of this part: with the source's parameters if it is the source's own task.

        Raises:
            DataError: the task is unknown, or refuses the source.
        """
        assert self.config.task is not None, "only a part that is a task"
        if self.config.task == self.source.task:
            return make_task(self.key_of_source, self.source, seed=seed)
        alone = type(self.source)(task=self.config.task, parameters=self.config.parameters)
        return make_task(self.key, alone, seed=seed)


def reward_parts(data: DataConfig) -> Iterator[RewardPart]:
    """Yield every part of every source's reward. A source without `rewards` has one part: the reward of its task."""
    splits: dict[Purpose, Sequence[tuple[str, ConfiguredSource]]]
    splits = {"train": data.keyed_train_sources, "eval": eval_sources(data)}
    for purpose, sources in splits.items():
        for key, source in sources:
            for index, config in enumerate(source.rewards or (RewardConfig(task=source.task),)):
                yield RewardPart(purpose, source, config, f"{key}.rewards.{index}", key)


def check_rewards(data: DataConfig, looked: Looked) -> None:
    """Check before anything starts that every function can be called and every task and model exists.

    `looked` has items of some sources, as `check_data` returned them: a parameter of a function needs a value.

    Raises:
        DataError: a task.
        ConfigError: an import path, or a function.
        ModelError: the folder of a reward model.
    """
    for part in reward_parts(data):
        try:
            _check_part(part, looked.get(part.source_key, ()))
        except (DataError, ConfigError, ModelError) as error:
            if part.purpose == "train" or not takes_rewards_of_train(part.source, data):
                raise
            words = f"{part.key_of_source} has the rewards of data.train unless {part.key_of_source}.rewards is set"
            raise type(error)(f"{error}; {words}", absent=error.absent) from error


def _check_part(part: RewardPart, items: Sequence[Item]) -> None:
    config = part.config
    if config.function is not None:
        _check_function(f"{part.key}.function", config.function, part.purpose, items)
    if config.task is not None:
        _check_answers(part, items)
    if config.model is not None:
        check_model_folder(
            f"{part.key}.model",
            config.model,
            else_expected="a model folder or a hub name (org/name)",
            files="a sequence classification model",
        )


def _check_answers(part: RewardPart, items: Sequence[Item]) -> None:
    """Check that the task can read the answers of the items, unless the items are the task's own."""
    task = part.make_task(seed=0)
    if part.config.task == part.source.task:
        return
    for item in items:
        try:
            task.check_answer(item)
        except DataError as error:
            raise DataError(f"{part.key}.task: {part.config.task}: {error}") from error


def _check_function(key: str, path: str, purpose: Purpose, items: Sequence[Item]) -> None:
    """Look for an item with a value for every parameter; rows may have different fields."""
    function, unfilled = FunctionReward(key, path, returns="trajectory"), None
    for item in items:
        request = RewardRequest(
            purpose=purpose,
            item=item,
            completion="",
            turns=(),
            prompt_ids=(),
            completion_ids=(),
            finish_reason="stop",
        )
        if (unfilled := function.unfilled(request)) is None:
            return
    if unfilled is not None:
        raise ConfigError(f"{key}: {unfilled}")


async def make_scoring(config: Config) -> Scoring:
    """Start everything that scores.

    Raises:
        ConfigError: a function cannot be imported.
        DataError: a task refuses its source.
        ModelError: a reward model cannot be loaded; names the key.
    """
    async with contextlib.AsyncExitStack() as closing:  # if one runner cannot start, end those that have started
        starter = _Starter(config, closing)
        await starter.start_pools()
        starter.start_services()
        await starter.start_models()
        by_source: defaultdict[SourceKey, list[Part]] = defaultdict(list)
        for part in starter.parts:
            ready = Part(part.config.label, part.config.weight, starter.score[part.part_key])
            by_source[part.source_key].append(ready)
        sources = {key: SourceRewards(each, starter.final_answer.get(key)) for key, each in by_source.items()}
        return Scoring(sources, starter.runners, closing.pop_all().aclose)


class _Limits(TypedDict):
    """The limits of a reward in a worker process."""

    deadline_s: float
    memory_bytes: int


class _Starter:
    """Starts runners; collects how each part is scored and how final answers are found."""

    def __init__(self, config: Config, closing: contextlib.AsyncExitStack) -> None:
        self._config, self._closing = config, closing
        self.parts = list(reward_parts(config.data))
        self.runners: list[Runner] = []
        self.score: dict[PartKey, Score] = {}
        self.final_answer: dict[SourceKey, FindAnswer] = {}

    async def start_pools(self) -> None:
        config, rollout = self._config, self._config.rollout
        is_async = {part.part_key: part.is_async for part in self.parts if part.config.task or part.config.function}
        in_turn = tuple(key for key in is_async if not is_async[key])
        together = tuple(key for key in is_async if is_async[key])
        voting: tuple[SourceKey, ...] = tuple(
            ("eval", source.label) for source in config.data.eval_sources if source.num_samples > 1
        )
        limits: _Limits = {"deadline_s": rollout.reward_timeout_s, "memory_bytes": rollout.reward_memory_bytes}
        if in_turn or voting:
            argument, num_workers = scorer_argument(config, in_turn, voting), rollout.num_reward_workers
            pool = RewardPool(_FACTORY, argument, num_workers=num_workers, **limits)
            self._add(pool, {key: partial(pool.score, part=key[-1]) for key in in_turn})
            self.final_answer |= dict.fromkeys(voting, pool.final_answer)
            await pool.ready()
        if together:
            argument, num_at_once = scorer_argument(config, together), rollout.num_async_rewards
            waiting = AsyncRewardPool(_FACTORY, argument, num_at_once=num_at_once, **limits)
            self._add(waiting, {key: partial(waiting.score, part=key[-1]) for key in together})
            await waiting.ready()

    def start_services(self) -> None:
        urls = {part.part_key: part.config.url for part in self.parts if part.config.url is not None}
        if not urls:
            return
        rollout, returns = self._config.rollout, self._config.algorithm.returns
        services = RewardServices(
            num_at_once=rollout.num_async_rewards, deadline_s=rollout.reward_timeout_s, returns=returns
        )
        self._add(services, {key: partial(services.score, url=url) for key, url in urls.items()})

    async def start_models(self) -> None:
        by_place: defaultdict[tuple[str, str], list[RewardPart]] = defaultdict(list)
        for part in self.parts:
            if part.config.model is not None:
                by_place[part.config.model, part.config.device].append(part)
        for (path, device), sharing in by_place.items():
            from areal_rloo.rewards.model import RewardModel  # noqa: PLC0415 - most runs have no model

            batch_size = min(part.config.batch_size for part in sharing)  # a size that fits for all of them
            key = f"{sharing[0].key}.model"
            load = partial(RewardModel, path, key=key, device=device, batch_size=batch_size)
            model = await asyncio.to_thread(load, deadline_s=self._config.rollout.reward_timeout_s)
            self._add(model, {part.part_key: model.score for part in sharing})

    def _add(self, runner: Runner, score: dict[PartKey, Score]) -> None:
        self._closing.push_async_callback(runner.close)
        self.runners.append(runner)
        self.score |= score


class ScorerSettings(msgspec.Struct, frozen=True):
    """The settings of a worker process: the parts to score, and the sources whose final answers to find."""

    data: DataConfig
    seed: int
    returns: Returns
    parts: tuple[PartKey, ...]
    answers: tuple[SourceKey, ...]


def scorer_argument(config: Config, parts: tuple[PartKey, ...], answers: tuple[SourceKey, ...] = ()) -> bytes:
    """Encode the argument of `make_scorer` for these parts and final answers of a run."""
    settings = ScorerSettings(config.data, config.run.seed, config.algorithm.returns, parts, answers)
    return msgspec.msgpack.encode(settings)


def make_scorer(argument: bytes) -> Callable[[Job], Any]:
    """Make the scorer of a worker process from `ScorerSettings` as msgpack.

    The scorer returns a `Worth` or a `FinalAnswer`; for async functions, an awaitable.

    Raises:
        UserError: a task refuses its source, or a function cannot be imported.
    """
    settings = from_msgpack(argument, ScorerSettings)
    scorers: dict[PartKey, Callable[[RewardRequest], Any]] = {}
    answering: dict[SourceKey, Task] = {}
    for part in reward_parts(settings.data):
        if part.part_key in settings.parts:
            scorers[part.part_key] = _scorer(part, settings)
        if part.source_key in settings.answers:
            if part.config.task is not None:  # the user's own rows may be scored by a task that reads their answers
                answering[part.source_key] = part.make_task(settings.seed)
            elif part.source_key not in answering:
                answering[part.source_key] = make_task(part.key_of_source, part.source, seed=settings.seed)

    def score(job: Job) -> Any:
        purpose, source = job.request.purpose, job.request.item.source
        if isinstance(job, AnswerJob):
            return _final_answer(answering[purpose, source].final_answer(job.request.completion))
        return scorers[purpose, source, job.part](job.request)

    return score


def _final_answer(text: object) -> FinalAnswer:
    if text is not None and not isinstance(text, str):
        raise RewardError("reward_wrong_type", f"expected a text or None, got {type(text).__name__}")
    return FinalAnswer(text)


def _scorer(part: RewardPart, settings: ScorerSettings) -> Callable[[RewardRequest], Any]:
    if part.config.function is not None:
        function = FunctionReward(f"{part.key}.function", part.config.function, returns=settings.returns)
        return function.score_async if function.is_async else function.score
    task = part.make_task(settings.seed)
    return lambda request: read_worth(task.reward(request.completion, request.item), request, returns=settings.returns)
