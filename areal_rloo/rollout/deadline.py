"""Run the episode of a sample, which may be the user's code, so that it costs at most its own sample.

Input: an episode and its arguments. Output: the episode's trajectories, or an `EpisodeError`. Used on the worker's
event loop. Not covered: an episode that blocks the loop itself. Then the worker sends no heartbeats, and the learner
gives the samples to other workers.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, ClassVar

import msgspec

from areal_rloo.errors import DecodeError, EpisodeError, described
from areal_rloo.rollout.episode import Episode, Rewards, Sample, TurnEngine
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.telemetry.metric import Metric
from areal_rloo.trajectory import Purpose, Trajectory
from areal_rloo.wire.columns import Limits, check_trajectories

_CANCEL_S = 5.0  # for a cancelled episode to end; then the episode is abandoned


class EpisodeStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of this worker now, and counts since the start."""

    metrics_prefix: ClassVar[str] = "episode_"

    num_running: Annotated[int, Metric("Samples under way: decoded, scored, or in a tool or an agent")]
    ended: Annotated[int, Metric("Samples whose episode has ended well", kind="counter")]
    life_s: Annotated[float, Metric("Time from lease to result, summed over these samples", "s", "counter")]


class Deadlines:
    """When the episodes of a worker must have ended: `timeout_s` after their start. Counts them, too.

    The samples of an evaluation are leased all at once, wait for each other, and let train samples wait. So the time of
    all begins anew whenever one of them has ended; else a long evaluation would run out of time in the queue.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._eval_ended_s = -math.inf  # monotonic time
        self._num_running, self._num_ended, self._life_s = 0, 0, 0.0

    def ended(self, purpose: Purpose) -> None:
        """Record the end of an episode, with any outcome."""
        if purpose == "eval":
            self._eval_ended_s = time.monotonic()

    def statistics(self) -> EpisodeStatistics:
        return EpisodeStatistics(num_running=self._num_running, ended=self._num_ended, life_s=self._life_s)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count an episode, and its time if it ends without an exception."""
        self._num_running, began_s = self._num_running + 1, time.monotonic()
        try:
            yield
            self._num_ended, self._life_s = self._num_ended + 1, self._life_s + time.monotonic() - began_s
        finally:
            self._num_running -= 1

    def left_s(self, began_s: float) -> float:
        """Return the seconds left to an episode that began at this monotonic time."""
        return max(began_s, self._eval_ended_s) + self.timeout_s - time.monotonic()


async def run_episode(
    episode: Episode, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat, deadlines: Deadlines
) -> Sequence[Trajectory]:
    """Run an episode until the deadline. A cancellation ends the wait, even if the episode does not obey.

    Raises:
        EpisodeError: the episode took too long, or called `sys.exit`.
        Exception: the exception of the episode.
    """
    with deadlines.counted():
        return await _run_in_time(episode, sample, engine, rewards, chat, deadlines)


async def _run_in_time(
    episode: Episode, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat, deadlines: Deadlines
) -> Sequence[Trajectory]:
    running = asyncio.create_task(
        _run(episode, sample, engine, rewards, chat), name=f"code of the episode of sample {sample.sample_id}"
    )
    began_s = time.monotonic()
    running.add_done_callback(lambda done: done.cancelled() or done.exception())  # an abandoned episode's is read, too
    try:
        while not running.done() and (left_s := deadlines.left_s(began_s)) > 0.0:
            await asyncio.wait([running], timeout=left_s)
        if running.done():
            return running.result()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait([running], timeout=_CANCEL_S)
    detail = f"the episode took more than rollout.episode.timeout_s={deadlines.timeout_s:g}"
    raise EpisodeError("episode_timeout", detail)


async def _run(
    episode: Episode, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat
) -> Sequence[Trajectory]:
    try:
        return await episode.run(sample, engine, rewards, chat)
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # asyncio would end the worker for a SystemExit or a KeyboardInterrupt
        raise EpisodeError("episode_error", described(error)) from error


def checked_trajectories(
    sample: Sample, trajectories: Sequence[Trajectory], limits: Limits
) -> tuple[Sequence[Trajectory], int]:
    """Check the trajectories of an episode, which may be the user's code; rewards of any library become Python floats.

    Returns the trajectories, and their size in a message.

    Raises:
        EpisodeError: this is no list of trajectories, there is no trajectory, there are more than
            `limits.max_trajectories`, there is a trajectory of another sample, there are two different rewards, or a
            trajectory cannot be sent.
    """
    if not isinstance(trajectories, Collection) or isinstance(trajectories, str | bytes):
        got = type(trajectories).__name__
        raise EpisodeError("episode_error", f"expected a list of trajectories, got {got}")
    if not trajectories:
        raise EpisodeError("episode_error", "expected at least one trajectory, got none")
    if len(trajectories) > (most := limits.max_trajectories):
        expected = f"expected at most rollout.episode.max_trajectories={most} trajectories, got {len(trajectories)}"
        raise EpisodeError("episode_error", expected)
    for kind in {type(given).__name__ for given in trajectories if not isinstance(given, Trajectory)}:
        raise EpisodeError("episode_error", f"expected trajectories, got {kind}")
    plain = []
    try:
        for given in trajectories:
            parts = {name: float(value) for name, value in given.reward_parts.items()}
            plain.append(msgspec.structs.replace(given, reward=float(given.reward), reward_parts=parts))
        num_bytes = check_trajectories(plain, limits)
    except (DecodeError, TypeError, ValueError, AttributeError) as error:
        raise EpisodeError("episode_error", f"expected trajectories that can be sent: {error}") from error
    for other in {trajectory.sample_id for trajectory in plain} - {sample.sample_id}:
        raise EpisodeError("episode_error", f"expected trajectories of sample {sample.sample_id}, got one of {other}")
    rewards = [trajectory.reward for trajectory in plain]
    if len(set(rewards)) > 1:
        raise EpisodeError("episode_error", f"expected one reward for all trajectories, got {rewards}")
    return plain, num_bytes
