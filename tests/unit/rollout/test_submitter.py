"""Turns on their way to the engine: submitted together, seeded, and aborted."""

import asyncio
import gc
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
from support.chat_endpoint import Recorder
from support.episodes import engine_of, episode_config, watched_engine

from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.errors import EngineError
from areal_rloo.rollout.episode import SampleEngine, Submitter
from areal_rloo.trajectory import Completion


def test_samples_that_start_together_are_submitted_together(folder: Path) -> None:
    """The samples of a group then share a prefill."""
    sizes: list[int] = []

    class Counting(Recorder):
        def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
            sizes.append(len(requests))
            return super().submit(requests)

    engine, config = Counting(watched_engine(folder)), episode_config()

    async def scenario() -> None:
        submitter = Submitter(engine, context_tokens=256)
        await asyncio.gather(*(engine_of(submitter, n, config).generate((5, 6)) for n in range(8)))

    asyncio.run(scenario())
    engine.close()
    assert sizes == [8]
    assert engine.statistics().prefill_tokens == 1


def test_turns_have_different_seeds_and_are_reproducible(folder: Path) -> None:
    engine, config = watched_engine(folder), episode_config()

    async def drawn(number: int) -> list[list[int]]:
        submitter = Submitter(engine, context_tokens=256)
        sample = engine_of(submitter, number, config)
        return [(await sample.generate((5, 6), max_new_tokens=12)).tokens.tolist() for _ in range(3)]

    async def scenario() -> list[list[list[int]]]:
        return [await drawn(number) for number in (1, 1, 2)]

    one, again, other = asyncio.run(scenario())
    engine.close()
    assert one == again != other
    assert len({tuple(tokens) for tokens in (*one, *other)}) == 6


def test_cancelling_an_episode_aborts_its_requests(folder: Path) -> None:
    engine, config = watched_engine(folder), episode_config()

    async def scenario() -> None:
        submitter = Submitter(engine, context_tokens=256)
        sampling = SamplingParameters(max_new_tokens=200, seed=0)
        sample = SampleEngine(submitter=submitter, name="1/0", sampling=sampling, min_version=99)
        task = asyncio.create_task(sample.generate((5, 6)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    ((_, future),) = engine.calls
    assert future.result(timeout=120).finish_reason == "abort"
    engine.close()
    assert config.rollout.episode.type == "single_turn"


def test_an_error_after_an_abort_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    class _Engine:
        def __init__(self) -> None:
            self.futures: list[Future[Completion]] = []
            self.aborted: list[str] = []

        def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
            self.futures = [Future() for _ in requests]
            return self.futures

        def abort(self, request_ids: Sequence[str]) -> None:
            self.aborted += request_ids

    async def scenario() -> None:
        submitter = Submitter(engine, context_tokens=256)  # type: ignore[arg-type]
        sample = SampleEngine(submitter=submitter, name="1/0", sampling=SamplingParameters(max_new_tokens=2))
        task = asyncio.create_task(sample.generate((5, 6)))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        engine.futures.pop().set_exception(EngineError("gone"))  # raises if the abort cancelled this future
        await asyncio.sleep(0.01)

    engine = _Engine()
    asyncio.run(scenario())
    gc.collect()  # asyncio logs an error of a collected future
    assert engine.aborted == ["1/0/0"]
    assert caplog.messages == []
