"""An episode of the user costs at most its own sample: hangs, exits, and cancellations that it ignores."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from areal_rloo.errors import EpisodeError
from areal_rloo.rollout import deadline
from areal_rloo.rollout.deadline import Deadlines, run_episode
from areal_rloo.rollout.episode import Sample
from areal_rloo.trajectory import Item, Trajectory

SAMPLE = Sample((7, 0), "train", Item("?"), (5, 6))


class _Mine:
    """A user's episode."""

    def __init__(self, body: Callable[[], Awaitable[Any]]) -> None:
        self._body = body

    async def run(self, *_: object) -> Sequence[Trajectory]:
        return await self._body()  # type: ignore[no-any-return]


async def _within(body: Callable[[], Awaitable[Any]], timeout_s: float = 60.0) -> Sequence[Trajectory]:
    nothing: Any = None
    return await run_episode(_Mine(body), SAMPLE, nothing, nothing, nothing, Deadlines(timeout_s))


async def _hang() -> None:
    await asyncio.Event().wait()


async def _ignore() -> None:
    while True:
        try:
            await _hang()
        except asyncio.CancelledError:
            continue


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "_CANCEL_S", 0.1)


def _run(main: Awaitable[Any]) -> Any:
    """Run on a loop of its own, and abandon tasks that ignore their cancellation."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()


@pytest.mark.parametrize("body", [_hang, _ignore])
def test_an_episode_that_hangs_is_dropped_at_its_deadline(body: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(EpisodeError, match=r"episode_timeout: .*rollout\.episode\.timeout_s=0\.1"):
        _run(_within(body, timeout_s=0.1))


class _Strange(BaseException):
    """An exception that is no `Exception`."""


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), _Strange("mine")])
def test_an_exit_of_an_episode_drops_its_sample(error: BaseException) -> None:
    async def body() -> None:
        raise error

    with pytest.raises(EpisodeError, match=f"episode_error: {type(error).__name__}"):
        _run(_within(body))


@pytest.mark.parametrize("error", [MemoryError(), EpisodeError("mine", "of my own"), asyncio.CancelledError()])
def test_other_exceptions_of_an_episode_pass(error: BaseException) -> None:
    async def body() -> None:
        raise error

    with pytest.raises(type(error)):
        _run(_within(body))


def test_an_episode_that_is_no_coroutine_drops_its_sample() -> None:
    class Plain:
        def run(self, *_: object) -> Any:
            sys.exit(0)

    nothing: Any = None
    with pytest.raises(EpisodeError, match="SystemExit"):
        _run(run_episode(Plain(), SAMPLE, nothing, nothing, nothing, Deadlines(60.0)))


@pytest.mark.parametrize("body", [_hang, _ignore])
def test_a_cancelled_episode_ends_even_if_it_does_not_obey(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(_within(body))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _run(main())


def test_episodes_wait_for_an_evaluation_as_long_as_its_samples_end() -> None:
    """They are leased all at once: a long evaluation would run out of time in its own queue."""

    async def main() -> None:
        nothing: Any = None
        deadlines, may_end = Deadlines(1.0), asyncio.Event()
        waiting = asyncio.create_task(run_episode(_Mine(may_end.wait), SAMPLE, nothing, nothing, nothing, deadlines))
        for _ in range(10):
            await asyncio.sleep(0.2)
            deadlines.ended("train")
            deadlines.ended("eval")
        may_end.set()
        assert await waiting is True
        hanging = run_episode(_Mine(_hang), SAMPLE, nothing, nothing, nothing, deadlines)
        with pytest.raises(EpisodeError, match="episode_timeout"):
            await hanging

    _run(main())
