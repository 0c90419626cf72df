"""What scores a run's completions, made from its config: a part of a reward goes to where its kind is run.

    task, function      ─►   RewardPool: processes, one reward each at a time
    async function      ─►   AsyncRewardPool: one process, many rewards at a time
    url                 ─►   RewardServices
    model               ─►   RewardModel, one for each path and device

Only what some source names is started.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from areal_rloo.config import Config
from areal_rloo.rewards.async_pool import AsyncRewardPool
from areal_rloo.rewards.pool import RewardPool
from areal_rloo.rewards.request import RewardRequest, Worth
from areal_rloo.rewards.scoring import Part, Scorer, Scoring, SourceKey
from areal_rloo.rewards.service import RewardServices
from areal_rloo.tasks import PartKey, RewardPart, reward_parts, scorer_argument

_FACTORY = "areal_rloo.tasks:make_scorer"

Score = Callable[[RewardRequest], Awaitable[Worth]]


async def make_scoring(config: Config) -> Scoring:
    """Start everything that scores.

    Raises:
        ConfigError: a function cannot be imported.
        DataError: a task refuses its source.
        ModelError: a reward model cannot be loaded; names its key.
    """
    parts = list(reward_parts(config.data))
    async with contextlib.AsyncExitStack() as closing:  # what was started is ended should the next thing fail
        scorers: list[Scorer] = []
        score = {
            **_in_processes(config, parts, scorers, closing),
            **_by_services(config, parts, scorers, closing),
            **_by_models(parts, scorers, closing),
        }
        sources: defaultdict[SourceKey, list[Part]] = defaultdict(list)
        for part in parts:
            label = part.config.label
            sources[part.purpose, part.source.label].append(Part(label, part.config.weight, score[part.part_key]))
        for purpose, source, _ in (key for key in score if key[2] is None):
            sources[purpose, source].append(Part(None, 0.0, score[purpose, source, None]))
        return Scoring(sources, scorers, closing.pop_all().aclose)


def _in_processes(
    config: Config, parts: Sequence[RewardPart], scorers: list[Scorer], closing: contextlib.AsyncExitStack
) -> dict[PartKey, Score]:
    rollout = config.rollout
    ours = [part for part in parts if part.config.task is not None or part.config.function is not None]
    together = [part.part_key for part in ours if part.is_async]
    in_turn = [part.part_key for part in ours if part.part_key not in together]
    in_turn += [("eval", source.label, None) for source in config.data.eval_sources if source.num_samples > 1]
    score: dict[PartKey, Score] = {}
    if in_turn:
        argument = scorer_argument(config, tuple(in_turn))
        pool = RewardPool(
            _FACTORY, argument, num_workers=rollout.num_reward_workers, deadline_s=rollout.reward_timeout_s
        )
        closing.callback(pool.close)
        scorers.append(pool)
        score |= {key: partial(pool.score, part=key[2]) for key in in_turn}
    if together:
        argument = scorer_argument(config, tuple(together))
        async_pool = AsyncRewardPool(
            _FACTORY, argument, num_at_once=rollout.num_async_rewards, deadline_s=rollout.reward_timeout_s
        )
        closing.callback(async_pool.close)
        scorers.append(async_pool)
        score |= {key: partial(async_pool.score, part=key[2]) for key in together}
    return score


def _by_services(
    config: Config, parts: Sequence[RewardPart], scorers: list[Scorer], closing: contextlib.AsyncExitStack
) -> dict[PartKey, Score]:
    urls = {part.part_key: part.config.url for part in parts if part.config.url is not None}
    if not urls:
        return {}
    services = RewardServices(
        num_at_once=config.rollout.num_async_rewards,
        deadline_s=config.rollout.reward_timeout_s,
        returns=config.algorithm.returns,
    )
    closing.push_async_callback(services.close)
    scorers.append(services)
    return {key: partial(services.score, url=url) for key, url in urls.items()}


def _by_models(
    parts: Sequence[RewardPart], scorers: list[Scorer], closing: contextlib.AsyncExitStack
) -> dict[PartKey, Score]:
    by_place: defaultdict[tuple[str, str], list[RewardPart]] = defaultdict(list)
    for part in parts:
        if part.config.model is not None:
            by_place[part.config.model, part.config.device].append(part)
    score: dict[PartKey, Score] = {}
    for (path, device), named in by_place.items():
        from areal_rloo.rewards.model import RewardModel  # noqa: PLC0415 - most runs have none

        batch_size = min(part.config.batch_size for part in named)  # what fits for all of them
        model = RewardModel(path, key=f"{named[0].key}.model", device=device, batch_size=batch_size)
        closing.callback(model.close)
        scorers.append(model)
        score |= {part.part_key: model.score for part in named}
    return score
