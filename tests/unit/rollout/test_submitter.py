"""Turns on their way to the engine: submitted together, seeded, and aborted."""

import asyncio
import gc
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_endpoint import Recorder
from support.episodes import engine_of, episode_config, watched_engine
from support.patience import PATIENCE_S

from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.errors import EngineError, EpisodeError, SampleError
from areal_rloo.rollout import partial
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


class _Stopped:
    """An engine whose `submit` raises, or gives too few futures."""

    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        if self._error is not None:
            raise self._error
        return []

    def abort(self, request_ids: Sequence[str]) -> None:
        """Know no request."""


@pytest.mark.parametrize("error", [EngineError("gone"), RuntimeError("a bug"), None])
def test_every_wait_ends_if_the_engine_fails_to_submit(error: BaseException | None) -> None:
    config = episode_config()

    async def scenario() -> None:
        submitter = Submitter(_Stopped(error), context_tokens=256)  # type: ignore[arg-type]
        waits = (engine_of(submitter, n, config).generate((5, 6)) for n in range(3))
        async with asyncio.timeout(PATIENCE_S):
            failures = await asyncio.gather(*waits, return_exceptions=True)
        assert [type(failure) for failure in failures] == [EngineError] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "bad",
    [(5, None), ("5",), (5.5,), (5, 10**6), (5, 10**30), (-1,), (), (5,) * 250],
    ids=["none", "text", "float", "vocabulary", "huge", "negative", "empty", "long"],
)
def test_bad_tokens_drop_their_sample_and_spare_the_others(folder: Path, bad: tuple[int, ...]) -> None:
    engine, config = watched_engine(folder), episode_config()

    async def scenario() -> None:
        submitter = Submitter(engine, context_tokens=1000)  # more than the engine's, which must refuse as well
        prompts = [(5, 6), bad, (7, 8)]
        turns = (engine_of(submitter, n, config).generate(prompt) for n, prompt in enumerate(prompts))
        async with asyncio.timeout(PATIENCE_S):
            first, refused, last = await asyncio.gather(*turns, return_exceptions=True)
        assert isinstance(first, Completion)
        assert isinstance(last, Completion)
        assert isinstance(refused, SampleError)
        assert refused.reason in ("wrong_tokens", "generation_failed")

    asyncio.run(scenario())
    engine.close()


@pytest.mark.parametrize("limit", ["5", 5.5])
def test_a_wrong_limit_of_tokens_drops_its_sample(folder: Path, limit: Any) -> None:
    engine, config = watched_engine(folder), episode_config()

    async def scenario() -> None:
        submitter = Submitter(engine, context_tokens=256)
        with pytest.raises(EpisodeError, match="wrong_tokens: max_new_tokens: expected integers"):
            await engine_of(submitter, 0, config).generate((5, 6), max_new_tokens=limit)

    asyncio.run(scenario())
    engine.close()


def test_tokens_of_numpy_are_submitted_as_integers(folder: Path) -> None:
    """A server gets them as JSON."""
    engine, config = watched_engine(folder), episode_config()

    async def scenario() -> None:
        await engine_of(Submitter(engine, context_tokens=256), 0, config).generate(np.array([5, 6]))  # type: ignore[arg-type]

    asyncio.run(scenario())
    engine.close()
    ((request, _),) = engine.calls
    assert [type(token) for token in request.prompt_tokens] == [int, int]


def test_the_journal_counts_the_tokens_of_a_turn_that_was_cut_short(folder: Path) -> None:
    """The engine tells the tokens of an aborted request after the episode has ended."""
    engine, config = watched_engine(folder), episode_config()

    async def scenario() -> int:
        sample = engine_of(Submitter(engine, context_tokens=256), 3, config)
        await sample.generate((5, 6), max_new_tokens=7)
        before = engine.statistics().generated_tokens
        cut = asyncio.create_task(sample.generate((5, 6)))
        while engine.statistics().generated_tokens <= before + 2:  # noqa: ASYNC110 - the engine is a thread
            await asyncio.sleep(0)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        return await sample.journal.num_tokens()

    counted = asyncio.run(scenario())
    engine.close()
    first, second = (future.result(timeout=PATIENCE_S) for _, future in engine.calls)
    assert len(second.tokens) > 0
    assert counted == len(first.tokens) + len(second.tokens)


def test_a_count_of_tokens_does_not_wait_for_an_engine_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "_ABORT_S", 0.05)
    journal = partial.Journal()

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        journal.aborted += [loop.create_future() for _ in range(3)]
        journal.aborted[1].set_exception(EngineError("gone"))
        made = Completion(*(np.zeros(5, dtype) for dtype in (np.int32, np.float32, np.int32)), "abort")
        loop.call_later(0.01, journal.aborted[2].set_result, made)
        return await journal.num_tokens()

    assert asyncio.run(scenario()) == 5
