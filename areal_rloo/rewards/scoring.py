"""What a rollout worker scores completions with: the parts of each source's reward, side by side, and their sum.

request ─► its source's parts, all at once (processes, an event loop, services, models) ─► weighted sum
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from areal_rloo.errors import RewardError
from areal_rloo.rewards.request import Purpose, RewardRequest, Scored, WorkStatistics, Worth

SourceKey = tuple[Purpose, str]
"""The split and the label of a source."""


class RewardStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Since the start. `dropped` counts completions without a reward by reason; `restarts` and `busy_s` are those of
    `WorkStatistics`, of everything that scores."""

    scored: int
    dropped: dict[str, int]
    restarts: int
    busy_s: float

    @property
    def failed(self) -> int:
        """Completions without a reward."""
        return sum(self.dropped.values())


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a source's reward. With `label` None it gives the final answer and adds nothing."""

    label: str | None
    weight: float
    score: Callable[[RewardRequest], Awaitable[Worth]]


class Scorer(Protocol):
    """What parts run in: a pool, a model, the services."""

    def statistics(self) -> WorkStatistics:
        """Since the start."""


class Scoring:
    """Implements `areal_rloo.rollout.episode.Rewards`."""

    def __init__(
        self,
        sources: Mapping[SourceKey, Sequence[Part]],
        scorers: Sequence[Scorer],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """
        Args:
            sources: the parts of each source's reward.
            scorers: what they run in.
            close: ends what they run in.
        """
        self._sources = sources
        self._scorers = scorers
        self._close = close
        self._scored = 0
        self._dropped: Counter[str] = Counter()

    async def score(self, request: RewardRequest) -> Scored:
        """The reward of one completion.

        Raises:
            RewardError: a part has none; says which and why.
            ConfigError: no reward can be had any more.
        """
        parts = self._sources[request.purpose, request.item.source]
        try:
            worths = await _all([_labelled(part, request) for part in parts])
            scored = _summed(parts, worths)
        except RewardError as error:
            self._dropped[error.reason] += 1
            raise RewardError(error.reason, error.detail, completion=request.completion) from error
        self._scored += 1
        return scored

    def statistics(self) -> RewardStatistics:
        each = [scorer.statistics() for scorer in self._scorers]
        return RewardStatistics(
            scored=self._scored,
            dropped=dict(self._dropped),
            restarts=sum(statistics.restarts for statistics in each),
            busy_s=sum(statistics.busy_s for statistics in each),
        )

    async def close(self) -> None:
        """End processes, threads and connections; what is being scored is lost."""
        await self._close()


async def _labelled(part: Part, request: RewardRequest) -> Worth:
    try:
        return await part.score(request)
    except RewardError as error:
        raise RewardError(error.reason, f"{part.label or 'final answer'}: {error.detail}") from error


async def _all(parts: Sequence[Awaitable[Worth]]) -> list[Worth]:
    """Every worth, in order; the first failure ends the wait, and nobody waits for the others any more."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _summed(parts: Sequence[Part], worths: Sequence[Worth]) -> Scored:
    adding = [(part, worth) for part, worth in zip(parts, worths, strict=True) if part.label is not None]
    reward = math.fsum(part.weight * worth.reward for part, worth in adding)  # weights that add up to 1 give 1
    tokens = _added([(part.weight, worth.token_rewards) for part, worth in adding])
    turns = _added([(part.weight, worth.turn_rewards) for part, worth in adding])
    for number in (reward, *(tokens or ()), *(turns or ())):
        if not math.isfinite(number):  # finite numbers of which a sum is not
            raise RewardError("reward_not_finite", f"a weighted sum of the parts is {number}")
    return Scored(
        reward=reward,
        parts={part.label: worth.reward for part, worth in adding if part.label is not None},
        token_rewards=tokens,
        turn_rewards=turns,
        answer=next((worth.answer for worth in worths if worth.answer is not None), None),
    )


def _added(weighted: Sequence[tuple[float, tuple[float, ...] | None]]) -> tuple[float, ...] | None:
    """The weighted sum of what there is; None where there is nothing."""
    given = [[weight * number for number in numbers] for weight, numbers in weighted if numbers is not None]
    return tuple(sum(column) for column in zip(*given, strict=True)) if given else None
