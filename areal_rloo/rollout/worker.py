"""A rollout worker: an event loop around an engine.

    leases ─► an episode for each sample: engine ─► completion ─► reward ─► trajectories ─► wire
    weight notices ─► receiver ─► engine, between two decode steps

Nothing blocks the loop: each episode is a task that awaits its engine and its reward. An episode waits in
`push` while too many trajectories are unacknowledged. The sample then stays held, so leases stop: backpressure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from areal_rloo.config import Config
from areal_rloo.engines.base import Engine, SamplingParameters
from areal_rloo.errors import (
    ArealRlooError,
    DecodeError,
    EpisodeError,
    SampleError,
    WeightsError,
    WentBackError,
    described,
    shortened,
)
from areal_rloo.rollout.deadline import run_episode
from areal_rloo.rollout.episode import Episode, Rewards, Sample, SampleEngine, Submitter
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.waiting import cancel
from areal_rloo.weights.receive import Receiver
from areal_rloo.wire import messages as wire
from areal_rloo.wire.channels import WorkerChannel
from areal_rloo.wire.columns import Limits, check_trajectories

logger = get_logger(__name__)

_MOST_CHARACTERS = 4000  # of a completion reported to the learner


class RolloutWorker:
    """Runs until a Drain, or until `stop` is called. Used on a single event loop."""

    def __init__(
        self,
        config: Config,
        *,
        worker_id: str,
        incarnation: str,
        channel: WorkerChannel,
        engine: Engine,
        receiver: Receiver,
        episode: Episode,
        rewards: Rewards,
        chat: ChatFormat,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._config, self._worker_id, self._incarnation = config, worker_id, incarnation
        self._channel, self._engine, self._receiver = channel, engine, receiver
        self._episode, self._rewards, self._chat, self._stop_token_ids = episode, rewards, chat, stop_token_ids
        self._submitter = Submitter(engine, context_tokens=config.context_tokens)
        self._eval_sets = {source.label: source for source in config.data.eval_sources}
        self._held: dict[SampleId, asyncio.Task[None]] = {}
        self._num_episodes = 0
        self._limits = Limits(max_message_bytes=config.wire.max_message_bytes)
        self._lease_sequence = 0
        self._learner_id: str | None = None
        self._welcome_due_s = 0.0
        self._newest_version = 0  # of the engine, at the last heartbeat or update
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Give running samples back, and end."""
        if not self._end.done():
            self._end.set_result(None)

    async def run(self) -> None:
        """Serve until drained or stopped.

        Raises:
            WentBackError: the learner restarted from a version older than this worker's weights.
            ArealRlooError: the engine is gone, or no reward can be computed any more.
        """
        await self._hello()
        serving = asyncio.create_task(self._serve())
        others = [asyncio.create_task(work) for work in (self._beat(), self._receive_weights())]
        done, _ = await asyncio.wait([serving, *others, self._end], return_when=asyncio.FIRST_COMPLETED)
        await cancel([*others, *self._held.values()])
        await self._channel.send(wire.Goodbye(self._worker_id))
        await cancel([serving])
        for ended in (*done, self._end):
            if ended.done():
                ended.result()  # an error of a task or an episode ends this worker

    async def _serve(self) -> None:
        while True:
            message = await self._channel.receive()
            match message:
                case wire.Leases():
                    self._lease_sequence = message.sequence
                    self._take(message.leases)
                case wire.WeightsNotice():
                    self._receiver.offer(message.body)
                case wire.HeartbeatReply():
                    self._meet(message)
                    if message.lease_sequence != self._lease_sequence and time.monotonic() > self._welcome_due_s:
                        sent, came = message.lease_sequence, self._lease_sequence
                        logger.warning("leases were lost: %d of %d came (-1: unknown to the learner)", came, sent)
                        await self._hello()
                case wire.Welcome():
                    self._meet(message)
                    self._lease_sequence = 0
                    self._welcome_due_s = 0.0
                    await self._channel.resend_unacknowledged()
                case wire.Abort():
                    for sample_id in self._held.keys() & set(message.sample_ids):
                        self._held.pop(sample_id).cancel()  # the next message may lease the sample again
                case wire.Drain():
                    logger.info("the learner says drain")
                    self.stop()
                case wire.Refusal():
                    logger.error("the learner refuses a message: %s", message.detail)

    def _meet(self, message: wire.Welcome | wire.HeartbeatReply) -> None:
        """Compare the learner with the learner before; if it restarted, give up all samples, finished or not.

        A restarted learner knows nothing of the samples held here, and group ids may name other prompts.
        """
        before, self._learner_id = self._learner_id, message.learner_id
        if before in (None, message.learner_id):
            return
        version = self._engine.statistics().policy_version
        if version > message.policy_version:
            raise WentBackError(
                f"the learner went back to version {message.policy_version}, but this worker has version {version}; "
                "the two histories have diverged, so this worker restarts"
            )
        logger.info("the learner restarted: give up the %d samples that the learner before had leased", len(self._held))
        for episode in self._held.values():
            episode.cancel()
        self._held.clear()
        self._channel.forget()

    async def _hello(self) -> None:
        """List the samples held here. Repeat only if the Welcome is overdue: a Hello discards leases on their way."""
        self._welcome_due_s = time.monotonic() + self._config.wire.heartbeat_timeout_s
        await self._channel.send(
            wire.Hello(
                worker_id=self._worker_id,
                incarnation=self._incarnation,
                capacity_samples=self._config.rollout.num_slots + self._config.lease_ahead_samples,
                policy_version=self._engine.statistics().ready_version,
                held=tuple({*self._held, *self._channel.unacknowledged()}),
            )
        )

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._config.wire.heartbeat_s)
            statistics = self._engine.statistics()
            version = statistics.ready_version
            if version is not None:
                before, self._newest_version = self._newest_version, version
                if version < before:  # the engine restarted with older weights: have them offered again
                    await self._hello()
            idle_s, num_tokens = statistics.idle_s, statistics.generated_tokens
            await self._channel.send(wire.Heartbeat(self._worker_id, version, idle_s, num_tokens))

    async def _receive_weights(self) -> None:
        while True:
            notice = await self._receiver.offered()
            version = notice.policy_version
            try:
                await self._receiver.receive(notice)
            except WeightsError as error:
                await self._channel.send(wire.WeightsFailed(self._worker_id, version, str(error)[:1000]))
                continue
            self._newest_version = max(self._newest_version, version)
            if self._engine.statistics().policy_version >= version:  # else the engine restarted: see `_beat`
                await self._channel.send(wire.WeightsReceived(self._worker_id, version, notice.checksum))

    def _take(self, leases: tuple[wire.Lease, ...]) -> None:
        """Start all samples of a message together: they run as a batch."""
        for lease in leases:
            for index in lease.sample_indices:
                sample_id = (lease.group_id, index)
                if sample_id not in self._held:
                    task = self._held[sample_id] = asyncio.create_task(self._run_episode(lease, index))
                    task.add_done_callback(partial(self._ended, sample_id))

    async def _run_episode(self, lease: wire.Lease, index: int) -> None:
        """Run the episode of a sample, and push its trajectories or report why there are none."""
        sample = Sample((lease.group_id, index), lease.purpose, lease.item, lease.prompt_tokens)
        self._num_episodes += 1
        engine = SampleEngine(
            submitter=self._submitter,
            name=f"{lease.group_id}/{index}/{self._num_episodes}",
            sampling=self._sampling(lease, index),
            min_version=lease.min_version,
            pinned=lease.purpose == "eval",
            max_turn_tokens=self._config.rollout.episode.max_turn_tokens,
        )
        try:
            within_s = self._config.rollout.episode.timeout_s
            given = await run_episode(self._episode, sample, engine, self._rewards, self._chat, timeout_s=within_s)
            trajectories = checked_trajectories(sample, given, self._limits)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # by this worker: the sample was aborted
            failure: SampleError = EpisodeError("episode_error", "the episode cancelled itself")
        except SampleError as error:
            failure = error
        except ArealRlooError:
            raise  # not the fault of a sample: the engine is gone, or no reward can be computed any more
        except Exception as error:  # noqa: BLE001 - an episode may be the user's code; drop its sample alone
            failure = EpisodeError("episode_error", described(error))
        else:
            await self._channel.push(*trajectories)
            return
        detail = shortened(failure.detail)
        logger.warning("sample %s: %s: %s", sample.sample_id, failure.reason, detail)
        completion = failure.completion[-_MOST_CHARACTERS:]
        await self._channel.send(
            wire.SampleFailed(self._worker_id, *sample.sample_id, failure.reason, detail, completion)
        )

    def _ended(self, sample_id: SampleId, task: asyncio.Task[None]) -> None:
        """Forget a finished or aborted episode. End this worker if the error is not the fault of the sample."""
        if self._held.get(sample_id) is task:
            del self._held[sample_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sample %s ends this worker: %s", sample_id, error)
            if not self._end.done():
                self._end.set_exception(error)

    def _sampling(self, lease: wire.Lease, index: int) -> SamplingParameters:
        evaluates, sampling = lease.purpose == "eval", self._config.rollout.sampling
        chosen = self._eval_sets[lease.item.source] if evaluates else sampling
        return SamplingParameters(
            max_new_tokens=self._config.eval_max_new_tokens if evaluates else sampling.max_new_tokens,
            min_new_tokens=0 if evaluates else sampling.min_new_tokens,
            temperature=chosen.temperature or 1.0,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            greedy=chosen.temperature == 0,
            seed=lease.seed + index,
            stop_token_ids=self._stop_token_ids,
        )


def checked_trajectories(sample: Sample, trajectories: Sequence[Trajectory], limits: Limits) -> Sequence[Trajectory]:
    """Check the trajectories of an episode, which may be the user's code; rewards of any library become Python floats.

    Raises:
        EpisodeError: there is no trajectory, a trajectory of another sample, two different rewards, or a trajectory
            that cannot be sent.
    """
    if not trajectories:
        raise EpisodeError("episode_error", "expected at least one trajectory, got none")
    plain = []
    try:
        for given in trajectories:
            parts = {name: float(value) for name, value in given.reward_parts.items()}
            plain.append(msgspec.structs.replace(given, reward=float(given.reward), reward_parts=parts))
        check_trajectories(plain, limits)
    except (DecodeError, TypeError, ValueError, AttributeError) as error:
        raise EpisodeError("episode_error", f"expected trajectories that can be sent: {error}") from error
    for other in {trajectory.sample_id for trajectory in plain} - {sample.sample_id}:
        raise EpisodeError("episode_error", f"expected trajectories of sample {sample.sample_id}, got one of {other}")
    rewards = [trajectory.reward for trajectory in plain]
    if len(set(rewards)) > 1:
        raise EpisodeError("episode_error", f"expected one reward for all trajectories, got {rewards}")
    return plain
