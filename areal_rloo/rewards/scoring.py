"""Scores the completions of a rollout worker. Runs on the worker's event loop, which it never blocks.

    request ─► every part of its source's reward, in parallel ─► weighted sum

`parts.make_scoring` starts everything that a `Scoring` needs.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from areal_rloo.errors import RewardError
from areal_rloo.rewards.request import (
    FinalAnswer,
    RewardRequest,
    RewardStatistics,
    Scored,
    SourceKey,
    WorkStatistics,
    Worth,
    by_runner,
)
from areal_rloo.telemetry.trace import sample_span
from areal_rloo.trajectory import MOST_REWARD, is_reward
from areal_rloo.waiting import cancel

Score = Callable[[RewardRequest], Awaitable[Worth]]
FindAnswer = Callable[[RewardRequest], Awaitable[FinalAnswer]]
Result = TypeVar("Result", Worth, FinalAnswer)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a source's reward, ready to score."""

    label: str
    weight: float
    score: Score


@dataclass(frozen=True, slots=True)
class SourceRewards:
    """The reward of one source: the parts, and how final answers are found if majority votes need them."""

    parts: Sequence[Part]
    final_answer: FindAnswer | None = None


class Runner(Protocol):
    """A pool, a model, or the services: runs parts."""

    def statistics(self) -> WorkStatistics:
        """Return counts since the start."""

    async def close(self) -> None:
        """End processes, threads and connections; discard running rewards."""


class Scoring:
    """Scores completions; implements `areal_rloo.rollout.episode.Rewards`."""

    def __init__(
        self,
        sources: Mapping[SourceKey, SourceRewards],
        runners: Sequence[Runner],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """`runners` run the parts of `sources`; `close` ends the runners and discards running rewards."""
        self._sources, self._runners, self.close = sources, runners, close
        self._scored = self._waiting = 0
        self._dropped: Counter[str] = Counter()

    async def score(self, request: RewardRequest) -> Scored:
        """Compute the reward of a completion.

        Raises:
            RewardError: a part failed; says which part and why.
            ConfigError: the rewards cannot be computed any more.
        """
        source = self._sources[request.purpose, request.item.source]
        self._waiting += 1
        try:
            with sample_span("reward"):
                scored = _summed(source.parts, *await _run_parts(source, request))
        except RewardError as error:
            self._dropped[error.reason] += 1
            raise RewardError(error.reason, error.detail, completion=request.completion) from error
        finally:
            self._waiting -= 1
        self._scored += 1
        return scored

    def statistics(self) -> RewardStatistics:
        work = by_runner(runner.statistics() for runner in self._runners)
        return RewardStatistics(waiting=self._waiting, scored=self._scored, dropped=dict(self._dropped), **work)


async def _run_parts(source: SourceRewards, request: RewardRequest) -> tuple[list[Worth], str | None]:
    """Run all parts and the search for the final answer in parallel. The first failure cancels the others."""
    parts = [
        asyncio.create_task(_named(part.label, part.score(request)), name=f"reward part {part.label}")
        for part in source.parts
    ]
    answers = [
        asyncio.create_task(_named("final answer", find(request)), name="the final answer")
        for find in (source.final_answer,)
        if find
    ]
    try:
        await asyncio.gather(*parts, *answers)
    finally:
        await cancel([*parts, *answers])
    return [task.result() for task in parts], answers[0].result().text if answers else None


async def _named(label: str, running: Awaitable[Result]) -> Result:
    try:
        return await running
    except RewardError as error:
        raise RewardError(error.reason, f"{label}: {error.detail}") from error


def _summed(parts: Sequence[Part], worths: Sequence[Worth], answer: str | None) -> Scored:
    pairs = list(zip(parts, worths, strict=True))
    reward = math.fsum(part.weight * worth.reward for part, worth in pairs)  # fsum: weights that add up to 1 give 1
    tokens = _added([(part.weight, worth.token_rewards) for part, worth in pairs])
    turns = _added([(part.weight, worth.turn_rewards) for part, worth in pairs])
    for number in (reward, *(tokens or ()), *(turns or ())):
        if not is_reward(number):
            detail = f"a weighted sum of the parts is {number}, expected at most {MOST_REWARD:g} in size"
            raise RewardError("reward_out_of_range", detail)
    values = {part.label: worth.reward for part, worth in pairs}
    return Scored(reward=reward, parts=values, token_rewards=tokens, turn_rewards=turns, answer=answer)


def _added(weighted: Sequence[tuple[float, tuple[float, ...] | None]]) -> tuple[float, ...] | None:
    """Return the weighted sum of all that are not None; None if all are None."""
    given = [[weight * number for number in numbers] for weight, numbers in weighted if numbers is not None]
    return tuple(sum(column) for column in zip(*given, strict=True)) if given else None
