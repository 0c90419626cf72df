"""The learner's intake: a thread with its own event loop that talks to the rollout workers.

In: Hello, heartbeats, trajectories. Out: leases, acknowledgements, weight notices. It owns the ledger, the prompt
stream and the evaluation; the training thread calls `take_batch`, `settle_batch`, `advance` and `snapshot`, which run
on this loop. So leases, acks and heartbeats go on during a train step, and nothing here needs a lock.

Waiting: `take_batch` waits for complete groups; workers wait for leases where admission says so; nobody else waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_rloo.config import Config
from areal_rloo.learner.arrivals import Arrivals
from areal_rloo.learner.buffer import Buffer
from areal_rloo.learner.evaluation import Evaluation
from areal_rloo.learner.failures import RewardFailures
from areal_rloo.learner.leasing import Leasing
from areal_rloo.learner.ledger import Ledger
from areal_rloo.learner.prompts import PromptStream
from areal_rloo.learner.workers import Worker, Workers
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.records import LedgerCounts
from areal_rloo.trajectory import Group
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.wire.channels import ChannelStatistics, LearnerChannel
from areal_rloo.wire.messages import (
    Abort,
    Drain,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    SampleFailed,
    TrajectoryBatch,
    WeightsFailed,
    WeightsNotice,
    WeightsReceived,
    Welcome,
    WorkerMessage,
)

logger = get_logger(__name__)
T = TypeVar("T")

_WAIT_LOG_S = 30.0


@dataclass(frozen=True, slots=True)
class IntakeStatistics:
    """A moment of the intake. `rollout_idle_s` and `generated_tokens` are sums over workers since the start."""

    ledger: LedgerCounts
    num_workers: int
    rollout_idle_s: float
    generated_tokens: int
    filtered_prompts: int
    truncated_prompts: int


class Intake:
    """The intake thread. Everything it holds is touched on its own loop only, once it was started."""

    def __init__(
        self,
        config: Config,
        *,
        channel: Callable[[], LearnerChannel],
        ledger: Ledger,
        stream: PromptStream,
        evaluation: Evaluation,
        policy_version: int,
        group_filter: Callable[[Group], bool] | None = None,
        num_truncated: Callable[[], int] = lambda: 0,
    ) -> None:
        self._config = config
        self._num_truncated = num_truncated  # prompts cut to their end so far
        self._make_channel = channel
        self._ledger = ledger
        self._stream = stream
        self._evaluation = evaluation
        self._buffer = Buffer(
            ledger,
            algorithm=config.algorithm,
            groups_per_step=config.learner.groups_per_step,
            give_back=stream.give_back,
            group_filter=group_filter,
        )
        self._workers = Workers()
        self._policy_version = policy_version
        self._leasing = Leasing(
            config,
            ledger=ledger,
            buffer=self._buffer,
            stream=stream,
            evaluation=evaluation,
            last_version=config.learner.num_train_steps,
        )
        self._arrivals = Arrivals(
            ledger=ledger,
            buffer=self._buffer,
            leasing=self._leasing,
            evaluation=evaluation,
            workers=self._workers,
            failures=RewardFailures(config),
            most_tokens=config.learner.microbatch_tokens,
        )
        self._arrivals.refuse_too_long()
        self._learner_id = uuid.uuid4().hex
        self._draining = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._broadcaster: Broadcaster | None = None
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)
        self._started = threading.Event()
        self._channel: LearnerChannel

    # -- called by the training thread ---------------------------------------------------------------------------------

    def start(self) -> int:
        """Bind and serve; gives the port."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure
        return self._channel.port

    def attach(self, broadcaster: Broadcaster) -> None:
        """Tell this broadcaster who is there; those who were here before are told to it now."""
        self._call(self._attach(broadcaster))

    def take_batch(self) -> list[Group] | None:
        """Wait for the batch of the step at the current version; None when none is to come (drain, end of data)."""
        return self._call(self._take_batch())

    def settle_batch(self, *, refused: str | None) -> None:
        """The batch taken last was trained on, or refused for this reason."""
        self._call(self._settle_batch(refused))

    def advance(self, policy_version: int, *, evaluate: bool) -> None:
        """The learner publishes this version: admission moves on, and the version is evaluated where asked."""
        self._call(self._advance(policy_version, evaluate))

    def wait_for_evaluation(self) -> None:
        """Until no evaluation is due or under way, or a drain."""
        self._call(self._wait_until(lambda: self._evaluation.finished or self._draining, "the evaluation"))

    def snapshot(self, read: Callable[[Ledger, PromptStream], T]) -> T:
        """Run a reader on the intake's loop, where the ledger and the stream stand still; also after a failure."""
        return self._call(self._read(read), after_failure=True)

    def statistics(self) -> IntakeStatistics:
        return self._call(self._statistics(), after_failure=True)

    def wire_statistics(self) -> ChannelStatistics:
        """Of the learner's end of the wire; callable from any thread."""
        return self._channel.statistics()

    @property
    def draining(self) -> bool:
        """Whether a drain has begun; once true, it stays so."""
        return self._draining

    def begin_drain(self) -> None:
        """Grant nothing more; callable from a signal handler or any thread."""
        self._loop.call_soon_threadsafe(self._set_draining)

    def stop_workers(self, timeout_s: float) -> None:
        """Tell every worker to stop, and wait for their Goodbye or the timeout; after a failure nobody hears one."""
        self._call(self._stop_workers(timeout_s), after_failure=True)

    def send_notice(self, worker_id: str, policy_version: int, body: bytes) -> None:
        """Hand a weight notice to a worker; callable from any thread, returns at once."""
        self._loop.call_soon_threadsafe(self._send_notice, worker_id, WeightsNotice(policy_version, body))

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, work: Coroutine[Any, Any, T], *, after_failure: bool = False) -> T:
        if self._failure is not None and not after_failure:
            work.close()
            raise self._failure
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._channel = self._loop.run_until_complete(self._bind())
        except BaseException as error:  # noqa: BLE001 - start() raises it where it can be handled
            self._failure = error
            self._started.set()
            return
        tasks = [self._loop.create_task(self._serve()), self._loop.create_task(self._watch())]
        for task in tasks:
            task.add_done_callback(self._ended)
        self._started.set()
        self._loop.run_forever()
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._channel.close()
        self._loop.close()

    async def _bind(self) -> LearnerChannel:
        return self._make_channel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            logger.error("the intake stopped", exc_info=self._failure)
            self._changed.set()

    async def _serve(self) -> None:
        while True:
            peer, message = await self._channel.receive()
            self._handle(peer, message)

    async def _watch(self) -> None:
        """Workers not heard for too long are taken for dead, and their unfinished samples go elsewhere."""
        timeout_s = self._config.wire.heartbeat_timeout_s
        while True:
            await asyncio.sleep(self._config.wire.heartbeat_s)
            for worker_id in self._workers.silent(time.monotonic(), timeout_s):
                logger.warning("%s was not heard for %.1f s: its unfinished samples go elsewhere", worker_id, timeout_s)
                self._remove(worker_id)
            self._grant()

    def _handle(self, peer: str, message: WorkerMessage) -> None:
        match message:
            case TrajectoryBatch() | SampleFailed() if not self._workers.has_met(peer):
                pass  # leased by the learner before this one, whose groups may have been others; a Hello is to come
            case TrajectoryBatch():
                self._arrivals.finished(message)
                self._channel.acknowledge(peer, [message.batch_id])
                self._changed.set()
            case Heartbeat():
                self._answer(peer, message)
            case Hello():
                self._welcome(peer, message)
            case SampleFailed():
                self._changed.set()
                self._arrivals.failed(message)
            case WeightsReceived() if self._broadcaster is not None:
                self._broadcaster.acknowledge(message.worker_id, message.policy_version, message.checksum)
            case WeightsFailed() if self._broadcaster is not None:
                self._broadcaster.fail(message.worker_id, message.policy_version, message.detail)
            case Goodbye() if message.worker_id in self._workers.alive:
                logger.info("%s says goodbye", message.worker_id)
                self._remove(message.worker_id)
            case _:
                pass  # weights before the broadcaster is there, or a second goodbye
        self._grant()

    def _welcome(self, peer: str, hello: Hello) -> None:
        before = self._workers.alive.get(hello.worker_id)
        if self._broadcaster is not None and before is not None and before.incarnation != hello.incarnation:
            self._broadcaster.leave(hello.worker_id)  # what was offered to the process before it nobody will take
        worker, lost = self._workers.welcome(hello, peer, now_s=time.monotonic(), policy_version=self._policy_version)
        logger.info("%s is here with version %s (%d samples lost)", hello.worker_id, hello.policy_version, len(lost))
        self._leasing.lose(lost)
        self._channel.send(peer, Welcome(self._learner_id, self._policy_version))
        nobody_wants = tuple(sample_id for sample_id in hello.held if sample_id not in worker.held)
        if nobody_wants:
            self._channel.send(peer, Abort(nobody_wants))
        if self._broadcaster is not None:
            self._broadcaster.join(hello.worker_id, hello.policy_version)
        if self._stopping:
            self._channel.send(peer, Drain(abort_running=True))  # it came after the others were told

    def _answer(self, peer: str, heartbeat: Heartbeat) -> None:
        worker = self._workers.heard(heartbeat, time.monotonic())
        if worker is not None and self._broadcaster is not None:
            self._broadcaster.heard(heartbeat.worker_id, heartbeat.policy_version)
        sequence = -1 if worker is None else worker.lease_sequence  # -1: say Hello
        self._channel.send(peer, HeartbeatReply(self._learner_id, self._policy_version, sequence))

    def _remove(self, worker_id: str) -> None:
        self._leasing.lose(self._workers.bury(worker_id))
        if self._broadcaster is not None:
            self._broadcaster.leave(worker_id)
        self._changed.set()

    def _grant(self) -> None:
        """Send whatever may be leased to whoever has room."""
        if self._draining:
            return
        for worker, leases in self._leasing.grants(list(self._workers.alive.values()), self._policy_version):
            self._channel.send(worker.peer, leases)
        if self._leasing.exhausted:
            self._changed.set()

    async def _attach(self, broadcaster: Broadcaster) -> None:
        self._broadcaster = broadcaster
        for worker in self._workers.alive.values():
            broadcaster.join(worker.worker_id, worker.policy_version)

    async def _take_batch(self) -> list[Group] | None:
        batch: list[Group] | None = None

        def ready() -> bool:
            nonlocal batch
            batch = None if self._draining else self._buffer.take(self._policy_version, last=self._leasing.exhausted)
            if batch is not None or self._draining:
                return True
            self._grant()  # a group dropped as stale gave its place back
            return self._leasing.exhausted and not self._ledger.groups

        await self._wait_until(ready, f"the batch of version {self._policy_version}")
        return batch

    async def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        began_s = time.monotonic()
        warn_s = began_s + _WAIT_LOG_S
        while True:
            self._changed.clear()  # before the look, so that no change falls between look and wait
            if condition():
                return
            if self._failure is not None:
                raise self._failure
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.0, warn_s - time.monotonic()))
            now_s = time.monotonic()
            if now_s >= warn_s:  # also where much changes and nothing comes of it, as when every group is dropped
                warn_s = now_s + _WAIT_LOG_S
                logger.warning("%.0f s without progress on %s: %s", now_s - began_s, what, self._situation())

    def _situation(self) -> str:
        now_s = time.monotonic()
        workers = [
            f"{w.worker_id} holds {len(w.held)} samples at version {w.policy_version}, "
            f"heard {now_s - w.last_heard_s:.1f} s ago"
            for w in self._workers.alive.values()
        ]
        dropped = ", ".join(f"{n} {reason}" for reason, n in self._ledger.counts().dropped.items())
        there = "; ".join(workers) or "no rollout worker is here"
        return f"{self._buffer.num_ready()} groups ready; samples dropped so far: {dropped or 'none'}; {there}"

    async def _settle_batch(self, refused: str | None) -> None:
        if refused is None:
            self._buffer.trained()
        else:
            self._buffer.refused(refused)
        self._grant()

    async def _advance(self, policy_version: int, evaluate: bool) -> None:
        self._policy_version = policy_version
        if evaluate:
            self._evaluation.request(policy_version)
        self._grant()

    async def _read(self, read: Callable[[Ledger, PromptStream], T]) -> T:
        return read(self._ledger, self._stream)

    async def _statistics(self) -> IntakeStatistics:
        return IntakeStatistics(
            ledger=self._ledger.counts(),
            num_workers=len(self._workers.alive),
            rollout_idle_s=self._workers.idle_s,
            generated_tokens=self._workers.generated_tokens,
            filtered_prompts=self._stream.num_filtered,
            truncated_prompts=self._num_truncated(),
        )

    def _set_draining(self) -> None:
        self._draining = True
        self._changed.set()

    async def _stop_workers(self, timeout_s: float) -> None:
        self._draining = self._stopping = True
        for worker in self._workers.alive.values():
            self._channel.send(worker.peer, Drain(abort_running=True))
        ends_s = time.monotonic() + (timeout_s if self._failure is None else 0)
        while self._workers.alive and time.monotonic() < ends_s:  # noqa: ASYNC110 - nothing else needs an event for it
            await asyncio.sleep(0.02)
        if self._workers.alive and self._failure is None:
            logger.warning("no goodbye from %s within %.0f s", ", ".join(self._workers.alive), timeout_s)

    def _send_notice(self, worker_id: str, notice: WeightsNotice) -> None:
        worker: Worker | None = self._workers.alive.get(worker_id)
        if worker is not None:
            self._channel.send(worker.peer, notice)
