"""One rollout worker: an event loop around an engine.

    leases ─► engine (its own thread) ─► completion ─► reward (a pool of processes) ─► trajectory ─► wire
    weight notices ─► receiver (its own thread) ─► engine, between two decode steps

The loop never waits for the engine, a reward or the weights. It waits in `push` when too much is unacknowledged, and
then nothing new is scored, capacity is not given back, and leases stop: backpressure by construction.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from areal_rloo.config import Config
from areal_rloo.engines.base import Engine, GenerationRequest, SamplingParameters
from areal_rloo.errors import EngineError, RewardError
from areal_rloo.rewards.pool import RewardPool, RewardRequest
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Completion, SampleId, Trajectory
from areal_rloo.weights.receive import Receiver
from areal_rloo.wire.channels import WorkerChannel
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
    Purpose,
    Refusal,
    SampleFailed,
    WeightsFailed,
    WeightsNotice,
    WeightsReceived,
    Welcome,
)

logger = get_logger(__name__)


@dataclass(slots=True)
class _Held:
    """A sample this worker owes."""

    purpose: Purpose
    prompt_tokens: tuple[int, ...]
    answer: str


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
        rewards: RewardPool,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self._config = config
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._channel = channel
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._receiver: Receiver | None = None
        self._held: dict[SampleId, _Held] = {}
        self._unwanted: set[SampleId] = set()
        self._lease_sequence = 0
        self._learner_id: str | None = None
        self._rewards = rewards
        self._started_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._failure: BaseException | None = None
        self._finishing: set[asyncio.Task[None]] = set()

    def attach(self, receiver: Receiver) -> None:
        """Take weights through this receiver."""
        self._receiver = receiver

    def on_weights_received(self, policy_version: int, checksum: int) -> None:
        """The receiver's word that the engine runs a version; callable from its thread."""
        self._send_soon(WeightsReceived(self._worker_id, policy_version, checksum))

    def on_weights_failed(self, policy_version: int, detail: str) -> None:
        """The receiver's word that a version did not arrive; callable from its thread."""
        self._send_soon(WeightsFailed(self._worker_id, policy_version, detail[:1000]))

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
        self._engine.abort([_request_id(sample_id) for sample_id in self._held])
        self._unwanted |= self._held.keys()
        await self._channel.send(Goodbye(self._worker_id))
        for task in (*tasks, waiter, *self._finishing):
            task.cancel()
        await asyncio.gather(*tasks, waiter, *self._finishing, return_exceptions=True)
        for task in done:
            task.result()  # an error of the loop is this worker's end
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
                if message.lease_sequence != self._lease_sequence:
                    logger.warning("leases were lost (%d of %d came)", self._lease_sequence, message.lease_sequence)
                    await self._hello()
            case Welcome():
                if self._learner_id not in (None, message.learner_id):
                    logger.info("the learner is another one")
                self._learner_id = message.learner_id
                self._lease_sequence = 0
                await self._channel.resend_unacknowledged()
            case Abort():
                self._unwanted |= self._held.keys() & set(message.sample_ids)
                self._engine.abort([_request_id(sample_id) for sample_id in message.sample_ids])
            case Drain():
                logger.info("the learner says drain")
                self._stopped.set()
            case Refusal():
                logger.error("the learner refuses a message: %s", message.detail)

    async def _hello(self) -> None:
        held = {*self._held, *self._channel.unacknowledged()}
        await self._channel.send(
            Hello(
                worker_id=self._worker_id,
                incarnation=self._incarnation,
                capacity_samples=self._config.rollout.num_slots + self._config.lease_ahead_samples,
                policy_version=self._engine.statistics().policy_version,
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
                    policy_version=statistics.policy_version,
                    idle_s=statistics.idle_s,
                    elapsed_s=time.monotonic() - self._started_s,
                    generated_tokens=statistics.generated_tokens,
                    num_running=statistics.num_running,
                    num_waiting=statistics.num_waiting,
                )
            )

    def _take(self, leases: tuple[Lease, ...]) -> None:
        """Start everything one message brings together, so that it runs together."""
        requests, sample_ids = [], []
        for lease in leases:
            for index in lease.sample_indices:
                sample_id = (lease.group_id, index)
                if sample_id in self._held:
                    continue
                self._held[sample_id] = _Held(lease.purpose, lease.prompt_tokens, lease.answer)
                sample_ids.append(sample_id)
                requests.append(
                    GenerationRequest(
                        request_id=_request_id(sample_id),
                        prompt_tokens=lease.prompt_tokens,
                        sampling=self._sampling(lease, index),
                        min_version=lease.min_version,
                        pinned=lease.purpose == "eval",
                    )
                )
        for sample_id, future in zip(sample_ids, self._engine.submit(requests), strict=True):
            future.add_done_callback(lambda done, name=sample_id: self._completed_soon(name, done))  # type: ignore[misc]

    def _sampling(self, lease: Lease, index: int) -> SamplingParameters:
        sampling = self._config.rollout.sampling
        if lease.purpose == "eval":
            return SamplingParameters(
                max_new_tokens=self._config.eval_max_new_tokens, greedy=True, stop_token_ids=self._stop_token_ids
            )
        return SamplingParameters(
            max_new_tokens=sampling.max_new_tokens,
            min_new_tokens=sampling.min_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=lease.seed + index,
            stop_token_ids=self._stop_token_ids,
        )

    def _completed_soon(self, sample_id: SampleId, future: Future[Completion]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._completed, sample_id, future)

    def _completed(self, sample_id: SampleId, future: Future[Completion]) -> None:
        error = future.exception()
        if error is not None:
            logger.error("the engine failed: %s", error)
            self._stopped.set()
            raise EngineError(str(error)) from error
        if sample_id in self._unwanted or future.result().finish_reason == "abort":
            self._unwanted.discard(sample_id)
            self._held.pop(sample_id, None)
            return
        task = self._loop.create_task(self._finish(sample_id, future.result()))
        self._finishing.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        """What is no fault of one sample is this worker's end."""
        self._finishing.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._stopped.set()

    async def _finish(self, sample_id: SampleId, completion: Completion) -> None:
        """Score a completion and push it, or say why it cannot be."""
        held = self._held[sample_id]
        text = str(self._tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True))
        request = RewardRequest(held.purpose, text, held.answer, completion.finish_reason)
        try:
            reward = await self._rewards.score(request)
        except RewardError as failure:
            await self._failed(sample_id, failure.reason, failure.detail)
            return
        prompt = np.array(held.prompt_tokens, dtype=np.int32)
        await self._channel.push(Trajectory(*sample_id, prompt, completion, reward))
        self._held.pop(sample_id, None)

    async def _failed(self, sample_id: SampleId, reason: str, detail: str) -> None:
        logger.warning("sample %s: %s: %s", sample_id, reason, detail.strip())
        self._held.pop(sample_id, None)
        await self._channel.send(SampleFailed(self._worker_id, *sample_id, reason, detail.strip()[-4000:]))

    def _send_soon(self, message: WeightsReceived | WeightsFailed) -> None:
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._channel.send(message), self._loop)


def _request_id(sample_id: SampleId) -> str:
    return f"{sample_id[0]}/{sample_id[1]}"
