"""One rollout worker: an event loop around an engine.

    leases ─► an episode each sample: engine (its own thread) ─► completion ─► reward ─► trajectories ─► wire
    weight notices ─► receiver (its own thread) ─► engine, between two decode steps

The loop never waits for the engine, a reward or the weights; an episode waits for its own turns. It waits in `push`
when too much is unacknowledged, and then capacity is not given back, and leases stop: backpressure by construction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from areal_rloo.config import Config
from areal_rloo.engines.base import Engine, EngineStatistics, SamplingParameters
from areal_rloo.errors import (
    ArealRlooError,
    DecodeError,
    EpisodeError,
    SampleError,
    WentBackError,
    described,
    shortened,
)
from areal_rloo.rollout.episode import Episode, Rewards, Sample
from areal_rloo.rollout.turns import SampleEngine, Turns
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.weights.receive import Receiver
from areal_rloo.wire.channels import WorkerChannel
from areal_rloo.wire.codec import decode_worker, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import (
    Abort,
    Drain,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LearnerMessage,
    Lease,
    Leases,
    Refusal,
    SampleFailed,
    TrajectoryBatch,
    WeightsFailed,
    WeightsNotice,
    WeightsReceived,
    Welcome,
)

logger = get_logger(__name__)

_MOST_CHARACTERS = 4000  # of a completion told to the learner


class RolloutWorker:
    """Runs until a Drain, or until `stop` is called. Made and used on one event loop."""

    def __init__(
        self,
        config: Config,
        *,
        worker_id: str,
        incarnation: str,
        channel: WorkerChannel,
        engine: Engine,
        episode: Episode,
        rewards: Rewards,
        chat: ChatFormat,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._channel = channel
        self._engine = engine
        self._episode = episode
        self._chat = chat
        self._stop_token_ids = stop_token_ids
        self._turns = Turns(engine, context_tokens=config.context_tokens)
        self._eval_sets = {source.label: source for source in config.data.eval_sources}
        self._receiver: Receiver | None = None
        self._held: dict[SampleId, asyncio.Task[None]] = {}
        self._num_episodes = 0
        self._limits = Limits(max_message_bytes=config.wire.max_message_bytes)
        self._lease_sequence = 0
        self._learner_id: str | None = None
        self._welcome_due_s = 0.0
        self._rewards = rewards
        self._started_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None

    def attach(self, receiver: Receiver) -> None:
        """Take weights through this receiver."""
        self._receiver = receiver

    def on_weights_received(self, policy_version: int, checksum: int) -> None:
        """The receiver's word that the engine runs a version; callable from its thread."""
        self._soon(self._tell_received(WeightsReceived(self._worker_id, policy_version, checksum)))

    def on_weights_failed(self, policy_version: int, detail: str) -> None:
        """The receiver's word that a version did not arrive; callable from its thread."""
        self._soon(self._channel.send(WeightsFailed(self._worker_id, policy_version, detail[:1000])))

    def on_weights_lost(self) -> None:
        """The engine's word that it had to start anew, with older weights; callable from its thread."""
        self._soon(self._hello())

    def stop(self) -> None:
        """Give back what runs, and end."""
        self._stopped.set()

    async def run(self) -> None:
        """Serve until drained or stopped."""
        tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._beat())]
        waiter = asyncio.create_task(self._stopped.wait())
        await self._hello()
        done, _ = await asyncio.wait([*tasks, waiter], return_when=asyncio.FIRST_COMPLETED)
        tasks[1].cancel()
        episodes = list(self._held.values())
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        await self._channel.send(Goodbye(self._worker_id))
        tasks[0].cancel()
        waiter.cancel()
        await asyncio.gather(*tasks, waiter, return_exceptions=True)
        for ended in done:
            ended.result()  # an error of the loop is this worker's end
        if self._failure is not None:
            raise self._failure

    async def _serve(self) -> None:
        while True:
            await self._handle(await self._channel.receive())

    async def _handle(self, message: LearnerMessage) -> None:
        match message:
            case Leases():
                self._lease_sequence = message.sequence
                self._take(message.leases)
            case WeightsNotice() if self._receiver is not None:
                self._receiver.offer(message.body)
            case HeartbeatReply():
                self._meet(message)
                if message.lease_sequence != self._lease_sequence and time.monotonic() > self._welcome_due_s:
                    logger.warning("leases were lost (%d of %d came)", self._lease_sequence, message.lease_sequence)
                    await self._hello()
            case Welcome():
                self._meet(message)
                self._lease_sequence = 0
                self._welcome_due_s = 0.0
                await self._channel.resend_unacknowledged()
            case Abort():
                for sample_id in self._held.keys() & set(message.sample_ids):
                    self._held.pop(sample_id).cancel()  # the same message's neighbour may lease it again
            case Drain():
                logger.info("the learner says drain")
                self._stopped.set()
            case Refusal():
                logger.error("the learner refuses a message: %s", message.detail)

    def _meet(self, message: Welcome | HeartbeatReply) -> None:
        """A learner answers; it may be another than the last time, and then knows nothing of what we hold.

        Group ids after its checkpoint may name other prompts there, so what the one before had leased is given up,
        finished or not.

        Raises:
            WentBackError: it begins again at an earlier version, so ours, and what is tagged with it, are of no run.
        """
        before, self._learner_id = self._learner_id, message.learner_id
        if before in (None, message.learner_id):
            return
        version = self._engine.statistics().policy_version
        if version > message.policy_version:
            raise WentBackError(
                f"the learner went back to version {message.policy_version}, and its next ones will not be those that "
                f"led to our version {version}; this worker starts anew"
            )
        logger.info("the learner is another one: giving up %d samples of the one before", len(self._held))
        for episode in self._held.values():
            episode.cancel()
        self._held.clear()
        self._channel.forget()

    async def _hello(self) -> None:
        """Say what we hold. Again only when the Welcome is overdue: each Hello costs the leases on their way."""
        self._welcome_due_s = time.monotonic() + self._config.wire.heartbeat_timeout_s
        held = {*self._held, *self._channel.unacknowledged()}
        await self._channel.send(
            Hello(
                worker_id=self._worker_id,
                incarnation=self._incarnation,
                capacity_samples=self._config.rollout.num_slots + self._config.lease_ahead_samples,
                policy_version=_runs(self._engine.statistics()),
                held=tuple(held),
            )
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.wire.heartbeat_s)
            statistics = self._engine.statistics()
            await self._channel.send(
                Heartbeat(
                    worker_id=self._worker_id,
                    policy_version=_runs(statistics),
                    idle_s=statistics.idle_s,
                    elapsed_s=time.monotonic() - self._started_s,
                    generated_tokens=statistics.generated_tokens,
                    num_running=statistics.num_running,
                    num_waiting=statistics.num_waiting,
                )
            )

    def _take(self, leases: tuple[Lease, ...]) -> None:
        """Start everything one message brings together, so that it runs together."""
        for lease in leases:
            for index in lease.sample_indices:
                sample_id = (lease.group_id, index)
                if sample_id in self._held:
                    continue
                task = self._loop.create_task(self._run_episode(lease, index))
                self._held[sample_id] = task
                task.add_done_callback(lambda done, sample_id=sample_id: self._ended(sample_id, done))  # type: ignore[misc]

    async def _run_episode(self, lease: Lease, index: int) -> None:
        """Run the episode of a sample and push what it gives, or say why it gives nothing."""
        sample = Sample((lease.group_id, index), lease.purpose, lease.item, lease.prompt_tokens)
        self._num_episodes += 1
        engine = SampleEngine(
            self._turns,
            f"{lease.group_id}/{index}/{self._num_episodes}",
            self._sampling(lease, index),
            min_version=lease.min_version,
            pinned=lease.purpose == "eval",
            max_turn_tokens=self._config.rollout.episode.max_turn_tokens,
        )
        try:
            given = await self._episode.run(sample, engine, self._rewards, self._chat)
            trajectories = checked_trajectories(sample, given, self._limits)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # by this worker: nobody wants the sample
            await self._failed(sample.sample_id, EpisodeError("episode_error", "the episode cancelled itself"))
        except SampleError as failure:
            await self._failed(sample.sample_id, failure)
        except ArealRlooError:
            raise  # no fault of one sample: the engine is gone, or the rewards cannot be had any more
        except Exception as error:  # noqa: BLE001 - an episode may be the user's code; it drops its sample alone
            await self._failed(sample.sample_id, EpisodeError("episode_error", described(error)))
        else:
            await self._channel.push(*trajectories)

    def _ended(self, sample_id: SampleId, task: asyncio.Task[None]) -> None:
        """An episode is over, or was not wanted; what is no fault of its sample is this worker's end."""
        if self._held.get(sample_id) is task:
            del self._held[sample_id]
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._stopped.set()

    def _sampling(self, lease: Lease, index: int) -> SamplingParameters:
        if lease.purpose == "eval":
            chosen = self._eval_sets[lease.item.source]
            return SamplingParameters(
                max_new_tokens=self._config.eval_max_new_tokens,
                temperature=chosen.temperature or 1.0,
                top_p=chosen.top_p,
                top_k=chosen.top_k,
                greedy=chosen.temperature == 0,
                seed=lease.seed + index,
                stop_token_ids=self._stop_token_ids,
            )
        sampling = self._config.rollout.sampling
        return SamplingParameters(
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=lease.seed + index,
            stop_token_ids=self._stop_token_ids,
        )

    async def _failed(self, sample_id: SampleId, error: SampleError) -> None:
        detail = shortened(error.detail)
        logger.warning("sample %s: %s: %s", sample_id, error.reason, detail)
        completion = error.completion[-_MOST_CHARACTERS:]
        await self._channel.send(SampleFailed(self._worker_id, *sample_id, error.reason, detail, completion))

    async def _tell_received(self, message: WeightsReceived) -> None:
        """Unless they are lost again: then a Hello has said so, and this would take it back."""
        if self._engine.statistics().policy_version >= message.policy_version:
            await self._channel.send(message)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        if self._loop.is_closed():
            work.close()
        else:
            asyncio.run_coroutine_threadsafe(work, self._loop)


def _runs(statistics: EngineStatistics) -> int | None:
    """The version an engine runs; None where it is being started."""
    return statistics.policy_version if statistics.ready else None


def checked_trajectories(sample: Sample, trajectories: Sequence[Trajectory], limits: Limits) -> Sequence[Trajectory]:
    """An episode may be the user's code: what it gives is as the learner will read it, or its sample is dropped.

    Raises:
        EpisodeError: it gives nothing, something of another sample, rewards that differ, or what cannot be sent.
    """
    if not trajectories:
        raise EpisodeError("episode_error", "expected at least one trajectory, got none")
    try:
        plain = tuple(_with_plain_numbers(trajectory) for trajectory in trajectories)
        batch = decode_worker(encode(TrajectoryBatch("", 0, plain)), limits)
    except (DecodeError, TypeError, ValueError, AttributeError) as error:
        raise EpisodeError("episode_error", f"expected trajectories that can be sent: {error}") from error
    assert isinstance(batch, TrajectoryBatch), "what was encoded"
    for trajectory in batch.trajectories:
        if trajectory.sample_id != sample.sample_id:
            raise EpisodeError(
                "episode_error",
                f"expected trajectories of sample {sample.sample_id}, got one of {trajectory.sample_id}",
            )
        if trajectory.reward != plain[0].reward:
            rewards = [one.reward for one in plain]
            raise EpisodeError("episode_error", f"expected one reward for all trajectories, got {rewards}")
    return plain


def _with_plain_numbers(trajectory: Trajectory) -> Trajectory:
    """Rewards as floats of Python, whatever library computed them."""
    parts = {name: float(value) for name, value in trajectory.reward_parts.items()}
    return msgspec.structs.replace(trajectory, reward=float(trajectory.reward), reward_parts=parts)
