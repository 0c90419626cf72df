"""A rollout worker: an event loop around an engine.

    leases ─► an episode for each duty: engine ─► completion ─► reward ─► trajectories ─► wire
    weight notices ─► receiver ─► engine, between two decode steps

`protocol.py` decides which messages to send and which duties to start or to cancel. This module connects the decisions
to the wire, the engine, the episodes and the receiver. Nothing blocks the loop: each episode is a task that awaits the
engine and the reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from functools import partial

from areal_rloo.config import Config
from areal_rloo.engines.base import Engine, SamplingParameters
from areal_rloo.errors import (
    ArealRlooError,
    EngineError,
    EpisodeError,
    SampleError,
    WeightsError,
    WentBackError,
    described,
    shortened,
)
from areal_rloo.rollout.deadline import Deadlines, EpisodeStatistics, checked_trajectories, run_episode
from areal_rloo.rollout.episode import Episode, Rewards, Sample, SampleEngine, Submitter
from areal_rloo.rollout.partial import Journal, journal_of
from areal_rloo.rollout.protocol import EngineState, ProtocolStatistics, WorkerProtocol
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trace import sample_span
from areal_rloo.trajectory import Completion
from areal_rloo.waiting import cancel, fault_of
from areal_rloo.weights.receive import Receiver
from areal_rloo.wire import messages as wire
from areal_rloo.wire.channels import WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Duty
from areal_rloo.wire.turns import encode_turns

logger = get_logger(__name__)

_REASON = re.compile("[a-z_]{1,40}")
_MOST_CHARACTERS = 4000  # of a completion reported to the learner
_CONNECT_S = 5.0
_ENGINE_SHARE = 0.8  # of the time that a checkpoint waits for partial rollouts
_BATCH_BYTES = 8 * 2**20  # soft limit of a message with several results
_BYTES_PER_CHARACTER = 4  # at most, in UTF-8


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
        self._config, self._channel, self._engine, self._receiver = config, channel, engine, receiver
        self._episode, self._rewards, self._chat, self._stop_token_ids = episode, rewards, chat, stop_token_ids
        self._limits = Limits(config.wire.max_message_bytes, config.rollout.episode.max_trajectories)
        self._protocol = WorkerProtocol(
            worker_id=worker_id,
            incarnation=incarnation,
            capacity_samples=config.capacity_samples,
            heartbeat_s=config.wire.heartbeat_s,
            heartbeat_timeout_s=config.wire.heartbeat_timeout_s,
            max_batch_bytes=min(_BATCH_BYTES, config.wire.max_message_bytes // 2),
        )
        self._submitter = Submitter(engine, context_tokens=config.context_tokens)
        self._episodes: dict[Duty, tuple[asyncio.Task[None], Journal]] = {}
        self._asked_for_partials = asyncio.Event()
        self._deadlines = Deadlines(config.rollout.episode.timeout_s)
        self._notice: wire.WeightsNotice | None = None  # the newest
        self._noticed, self._due = asyncio.Event(), asyncio.Event()  # due: there may be a message to send
        self._num_episodes, self._drained = 0, False
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Give running samples back, and end."""
        if not self._end.done():
            self._end.set_result(None)

    def statistics(self) -> ProtocolStatistics:
        return self._protocol.statistics()

    def episodes(self) -> EpisodeStatistics:
        return self._deadlines.statistics()

    async def run(self) -> None:
        """Serve until drained or stopped.

        Raises:
            WentBackError: the learner restarted from a version older than this worker's weights.
            PreflightError: the socket's folder is gone, or other users can enter.
            ArealRlooError: the engine is gone, or no reward can be computed any more.
        """
        await self._channel.connected(_CONNECT_S)
        works = {
            "the learner's messages": self._serve(),
            "messages to the learner": self._send_due(),
            "the receive of weights": self._receive_weights(),
            "partial rollouts": self._answer_for_partials(),
        }
        tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
        done, _ = await asyncio.wait([*tasks, self._end], return_when=asyncio.FIRST_COMPLETED)
        failed = bool(done - {self._end}) or self._end.exception() is not None
        if not failed and not self._drained:  # stopped: other workers go on with the samples
            await self._tell_partials()
            self._send_now()
        await cancel([*tasks, *(task for task, _ in self._episodes.values())])
        faults = [fault for task in tasks if task in done and (fault := fault_of(task)) is not None]
        went_back = any(isinstance(fault, WentBackError) for fault in faults)  # then no sample is why
        self._channel.send(self._protocol.goodbye(self._engine_state(), failed=failed and not went_back))
        for fault in faults:
            raise fault
        if self._end.done():
            self._end.result()  # an error of an episode ends this worker

    async def _serve(self) -> None:
        while True:
            orders = self._protocol.handle(await self._channel.receive(), self._engine_state())
            for duty in orders.cancel:
                self._episodes.pop(duty)[0].cancel()
            for lease in orders.start:  # together: they run as a batch
                for duty in lease.duties:
                    journal = journal_of(lease)
                    task = asyncio.create_task(
                        self._run_episode(lease, duty, journal), name=f"episode of sample {duty.sample_id}"
                    )
                    self._episodes[duty] = (task, journal)
                    task.add_done_callback(partial(self._ended, duty))
            if orders.receive is not None:  # replaces a notice not yet begun: that offer is over
                self._notice = orders.receive
                self._noticed.set()
            if orders.tell_partials is not None:
                self._asked_for_partials.set()
            if orders.drain:
                logger.info("the learner says drain")
                self._drained = True
                self.stop()
            self._due.set()

    async def _send_due(self) -> None:
        """Send the messages of the protocol when they are due. Results that are ready together share a message."""
        while True:
            await asyncio.sleep(0)  # let other tasks of this turn finish
            self._due.clear()
            self._send_now()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._protocol.due_s() - time.monotonic())):
                    await self._due.wait()

    def _send_now(self) -> None:
        if self._protocol.is_deaf():
            logger.warning(
                "no answer for wire.heartbeat_timeout_s=%g: connect anew", self._config.wire.heartbeat_timeout_s
            )
            self._channel.connect_anew()
        for message in self._protocol.poll(time.monotonic(), self._engine_state()):
            self._channel.send(message)

    async def _receive_weights(self) -> None:
        while True:
            await self._noticed.wait()
            self._noticed.clear()
            notice = self._notice
            assert notice is not None, "a notice was set before the event"
            try:
                checksum = await self._receiver.receive(notice.body)
            except WeightsError as error:
                self._protocol.weights_failed(notice, str(error)[:1000])
            else:
                if self._engine.statistics().policy_version >= notice.policy_version:
                    self._protocol.weights_received(notice, checksum, self._engine_state())
                else:
                    self._protocol.weights_failed(notice, "the engine restarted with older weights")
            self._due.set()

    async def _answer_for_partials(self) -> None:
        while True:
            await self._asked_for_partials.wait()
            self._asked_for_partials.clear()
            await self._tell_partials()
            self._due.set()

    async def _tell_partials(self) -> None:
        """Tell the turns of all unfinished train samples; without the engine's answer, only the finished turns."""
        so_far: dict[str, Completion] = {}
        with contextlib.suppress(TimeoutError, EngineError):  # the death of the engine ends the worker elsewhere
            async with asyncio.timeout(_ENGINE_SHARE * self._config.partials_timeout_s):
                so_far = await asyncio.wrap_future(self._engine.unfinished())
        train = [(duty, journal) for duty, (_, journal) in self._episodes.items() if duty.purpose == "train"]
        encode = partial(encode_turns, most_tokens=self._config.partial_tokens)
        self._protocol.tell_partials({duty: encode(journal.turns(so_far)) for duty, journal in train})

    def _engine_state(self) -> EngineState:
        statistics = self._engine.statistics()
        work = wire.Work(statistics.idle_s, statistics.generated_tokens, statistics.busy_s, statistics.decoding_s)
        return EngineState(statistics.policy_version, statistics.ready_version, work, statistics.num_running)

    async def _run_episode(self, lease: wire.Lease, duty: Duty, journal: Journal) -> None:
        """Run the episode of a duty, and record its trajectories or why there are none."""
        sample = Sample(duty.sample_id, lease.purpose, lease.item, lease.prompt_tokens)
        self._num_episodes += 1
        engine = SampleEngine(
            submitter=self._submitter,
            name=f"{lease.group_id}/{duty.sample_index}/{self._num_episodes}",
            sampling=sampling_of(self._config, sample, lease.seed + duty.sample_index, self._stop_token_ids),
            min_version=lease.min_version,
            pinned=lease.purpose == "eval",
            max_turn_tokens=self._config.episode_of(lease.item.source).max_turn_tokens,
            journal=journal,
        )
        try:
            of_learner = {"learner": self._protocol.learner_id or "", "purpose": duty.purpose}
            with sample_span("episode", engine.name, lease=duty.lease_id, **of_learner):
                given = await run_episode(self._episode, sample, engine, self._rewards, self._chat, self._deadlines)
            trajectories, num_bytes = checked_trajectories(sample, given, self._limits)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # by this worker: the duty was aborted
            failure: SampleError = EpisodeError("episode_error", "the episode cancelled itself")
        except SampleError as error:
            failure = error
        except ArealRlooError:
            raise  # not the fault of a sample: the engine is gone, or no reward can be computed any more
        except Exception as error:  # noqa: BLE001 - an episode may be the user's code; drop its sample alone
            failure = EpisodeError("episode_error", described(error))
        else:
            self._protocol.finish(duty, trajectories, num_bytes)
            return
        detail, completion = shortened(failure.detail), failure.completion[-_MOST_CHARACTERS:]
        logger.warning("sample %s: %s: %s", sample.sample_id, failure.reason, detail)
        reason = failure.reason if _REASON.fullmatch(failure.reason) else "episode_error"  # a user may write any
        failed = wire.Failed(*duty, reason, detail, completion, await journal.num_tokens())
        self._protocol.fail(failed, _BYTES_PER_CHARACTER * (len(detail) + len(completion)))

    def _ended(self, duty: Duty, task: asyncio.Task[None]) -> None:
        """Forget an ended episode. End this worker if the error is not the fault of the sample."""
        if duty in self._episodes and self._episodes[duty][0] is task:
            del self._episodes[duty]
        self._deadlines.ended(duty.purpose)
        self._due.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sample %s ends this worker: %s", duty.sample_id, error)
            if not self._end.done():
                self._end.set_exception(error)


def sampling_of(config: Config, sample: Sample, seed: int, stop_token_ids: tuple[int, ...]) -> SamplingParameters:
    """Return the sampling of the run, or of the evaluation set of the sample."""
    evaluates, sampling, sets = sample.purpose == "eval", config.rollout.sampling, config.data.eval_sources
    chosen = next(found for found in sets if found.label == sample.item.source) if evaluates else sampling
    return SamplingParameters(
        max_new_tokens=config.max_new_tokens_of(sample.purpose, sample.item.source),
        min_new_tokens=0 if evaluates else sampling.min_new_tokens,
        temperature=chosen.temperature or 1.0,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        greedy=chosen.temperature == 0,
        seed=seed,
        stop_token_ids=stop_token_ids,
    )
