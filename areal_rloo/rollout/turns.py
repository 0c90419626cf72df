"""The turns of many episodes through one engine: what is asked for within a turn of the loop is submitted together.

Requests that start together share the prefill of equal prompts, so the samples of a group cost one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from areal_rloo.engines.base import Engine, GenerationRequest, SamplingParameters
from areal_rloo.errors import EngineError, EpisodeError, SampleError
from areal_rloo.trajectory import Completion

_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so the turns of a sample, and turns of others, draw other numbers

_Asked = tuple[GenerationRequest, asyncio.Future[Completion]]


class Turns:
    """Everything that episodes ask of an engine. Made and used on one event loop."""

    def __init__(self, engine: Engine, *, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._asked: list[_Asked] = []

    async def complete(self, request: GenerationRequest) -> Completion:
        """One completion; a cancelled wait aborts it.

        Raises:
            EngineError: the engine is gone.
            GenerationError: it goes on, without this one.
        """
        if not self._asked:
            self._loop.call_soon(self._submit)
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._asked.append((request, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._engine.abort([request.request_id])
            raise

    def _submit(self) -> None:
        asked, self._asked = [one for one in self._asked if not one[1].done()], []
        try:
            futures = self._engine.submit([request for request, _ in asked])
        except EngineError as error:
            for _, waiting in asked:
                waiting.set_exception(error)
            return
        for (_, waiting), future in zip(asked, futures, strict=True):
            future.add_done_callback(lambda done, waiting=waiting: self._done_soon(waiting, done))  # type: ignore[misc]

    def _done_soon(self, waiting: asyncio.Future[Completion], done: Future[Completion]) -> None:
        """On the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_hand_over, waiting, done)


class SampleEngine:
    """The engine as the episode of one sample sees it; implements `areal_rloo.rollout.episode.TurnEngine`."""

    def __init__(
        self,
        turns: Turns,
        name: str,
        sampling: SamplingParameters,
        *,
        min_version: int,
        pinned: bool,
        max_turn_tokens: int | None,
    ) -> None:
        self._turns = turns
        self._name = name  # of the episode, unlike those of the sample's other leases
        self._sampling = sampling
        self._min_version = min_version
        self._pinned = pinned
        self._max_turn_tokens = max_turn_tokens
        self._num_turns = 0

    @property
    def max_new_tokens(self) -> int:
        return self._sampling.max_new_tokens

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Completion:
        wanted = (self._sampling.max_new_tokens, self._max_turn_tokens, max_new_tokens)
        room = min(self._turns.context_tokens - len(tokens), *(num for num in wanted if num is not None))
        if room < 1:
            raise EpisodeError("context_full", f"{len(tokens)} tokens leave no room for another")
        turn = self._num_turns
        self._num_turns += 1
        sampling = self._sampling
        request = GenerationRequest(
            request_id=f"{self._name}/{turn}",
            prompt_tokens=tuple(tokens),
            sampling=_limited(sampling, room, turn),
            min_version=self._min_version,
            pinned=self._pinned,
        )
        return await self._turns.complete(request)


def _limited(sampling: SamplingParameters, room: int, turn: int) -> SamplingParameters:
    seed = None if sampling.seed is None else sampling.seed ^ (turn * _SEED_STEP)
    return msgspec.structs.replace(
        sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room), seed=seed
    )


def _hand_over(waiting: asyncio.Future[Completion], done: Future[Completion]) -> None:
    if waiting.done():  # nobody waits any more
        return
    error = done.exception()
    if error is not None:
        waiting.set_exception(error if isinstance(error, SampleError) else EngineError(str(error)))
    else:
        waiting.set_result(done.result())
