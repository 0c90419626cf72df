"""The intake at work: an event loop on a separate thread, which serves the wire, the intake and the broadcaster.

    training thread ── take_batch, commit, ... ──► event loop: wire ◄─► Intake, broadcaster, timer for silent workers

Everything on the loop is single-threaded, so no state needs a lock. Leases, acknowledgements and heartbeats go on
during a train step. The training thread waits in `take_batch`, `gather_partials`, `commit`, and at the end of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from areal_rloo.errors import WeightsError
from areal_rloo.intake.fleet import Fleet, Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.work import IntakeStatistics
from areal_rloo.loop_thread import LoopThread
from areal_rloo.telemetry.logs import TOLD, get_logger
from areal_rloo.telemetry.watchdog import Watchdog
from areal_rloo.trajectory import Group
from areal_rloo.waiting import fault_of
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.messages import Goodbye, Hello, History, LearnerMessage, Leases, WeightsCall, WeightsNotice

if TYPE_CHECKING:  # imports torch
    from torch import Tensor

    from areal_rloo.weights.broadcast import Broadcaster

logger = get_logger(__name__)
T = TypeVar("T")

_WAIT_LOG_S = 30.0
_DUTY_S = 8e-6  # of the loop for a duty in the first Hello of a process
_MOST_REPLIES = 32  # sent together: each alone would wake the sending thread
_REPLY_S = 20e-6  # of the loop, to send one
_BETWEEN_PARTS_S = 0.001  # of a large step: messages come first
_TICKS_PER_HEARTBEAT = 4
_LONGEST_TICK_S = 0.25  # a dead worker's samples go elsewhere two heartbeats and a second after the death


class IntakeService:
    """The intake for the training thread. Call the methods from any thread but the loop's own."""

    def __init__(
        self,
        intake: Intake,
        broadcaster: Broadcaster,
        bind: Callable[[], LearnerChannel],
        *,
        heartbeat_s: float,
    ) -> None:
        """Bind the channel with `bind`, on the event loop, and serve.

        `broadcaster` has the intake's `offers`; `heartbeat_s` is that of the workers.

        Raises:
            PreflightError: the channel cannot be bound.
        """
        self._intake, self._broadcaster, self._heartbeat_s = intake, broadcaster, heartbeat_s
        self._thread = LoopThread("intake")
        self._failure: BaseException | None = None
        self._changed, self._owed = asyncio.Event(), asyncio.Event()
        self.channel = self._thread.call(bind)
        works = {
            "the messages of the workers": self._serve(),
            "lost connections": self._notice_lost_connections(),
            "the timer for silent workers": self._watch(),
            "the leases of a large step": self._grant_on(),
            "the broadcaster": broadcaster.run(self._send_call, self._send_notice),
        }
        for name, work in works.items():
            self._thread.begin(work, self._ended, name=name)
        if self.channel.admission is not None:
            self._thread.call(self.channel.admission.task.add_done_callback, self._ended)

    def take_batch(self) -> list[Group] | None:
        """Wait for the batch of the step at the current version; None if there will be none (drain, end of data)."""
        return self._run(self._take_batch())

    def upcoming(self, policy_version: int) -> list[Group] | None:
        """Return the probable batch of this later version; None if it is not complete yet."""
        return self.call(lambda: self._intake.buffer.upcoming(policy_version))

    def commit(
        self, policy_version: int, fill: Callable[[Sequence[Tensor]], None], *, evaluate: bool, publish: bool = True
    ) -> None:
        """Publish a version, count the batch taken last as trained, and move admission on, all at one moment.

        `fill` gathers the weights into buckets, on the calling thread. A drain ends the wait for memory. `publish`:
        False leaves the version out; nothing can evaluate it.

        Raises:
            WeightsError: there is no memory for the weights. The version is not published, but the batch counts as
                trained, so that a checkpoint has the step.
        """
        try:
            buckets = self._run(self._broadcaster.stage(gives_up=lambda: self._intake.draining)) if publish else None
        except WeightsError:
            self._act(lambda: self._intake.commit(policy_version, evaluate=False, published=False))
            if self._intake.draining:
                return
            raise
        if buckets is not None:
            fill(buckets)

        def commit() -> list[Outgoing]:
            if buckets is not None:
                self._broadcaster.publish(policy_version, buckets)
            return self._intake.commit(policy_version, evaluate=evaluate, published=publish)

        self._act(commit)

    def refuse_batch(self, reason: str) -> None:
        """Drop the batch taken last, for this reason."""
        self._act(lambda: self._intake.refuse_batch(reason))

    def wait_for_evaluation(self) -> None:
        """Wait until no evaluation is due or running, or until a drain."""
        intake = self._intake
        self._run(self._wait_until(lambda: intake.evaluation.finished or intake.draining, "the evaluation"))

    def gather_partials(self, timeout_s: float) -> None:
        """Ask the workers for the partial rollouts of their samples, and wait for a timeout or a new drain."""
        with contextlib.suppress(TimeoutError):
            self._thread.run(self._gather_partials(timeout_s))

    def snapshot(self, read: Callable[[Ledger, PromptStream], T]) -> T:
        """Run a reader on the loop, where ledger and stream do not change meanwhile; works after a failure, too."""
        return self.call(lambda: read(self._intake.ledger, self._intake.stream))

    def statistics(self) -> IntakeStatistics:
        """Read the statistics of the intake; works after a failure, too."""
        return self.call(self._intake.statistics)

    def call(self, function: Callable[[], T], *, timeout_s: float | None = None) -> T:
        """Call a function on the loop, where all state of intake and broadcaster lives. Raises as `LoopThread.run`."""

        async def called() -> T:
            return function()

        return self._thread.run(called(), timeout_s)

    def watch(self, watchdog: Watchdog, deadline_s: float) -> None:
        """Let a watchdog watch the loop."""
        watchdog.watch_loop("the event loop of the intake", self.call(asyncio.get_running_loop), deadline_s)

    @property
    def lies(self) -> Lies:
        """The answers refused so far; they live on the loop."""
        return self._intake.lies

    @property
    def fleet(self) -> Fleet:
        """The workers; they live on the loop."""
        return self._intake.fleet

    @property
    def history(self) -> History:
        """The learners up to this one, each with the version it began with."""
        return self._intake.history

    @property
    def draining(self) -> bool:
        """True from the beginning of a drain on."""
        return self._intake.draining

    def begin_drain(self) -> None:
        """Grant nothing more; safe in a signal handler."""

        def drain() -> None:
            self._intake.draining = True
            self._changed.set()

        self._thread.soon(drain)

    def stop_workers(self, timeout_s: float) -> None:
        """Tell every worker to drain, and wait for their Goodbye until the timeout. Do not wait after a failure."""
        self._thread.run(self._stop_workers(timeout_s))

    def close(self) -> None:
        """End the loop and the broadcaster."""
        self._thread.close()
        self.channel.close()
        self._broadcaster.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._failure is not None:
            work.close()
            raise self._failure
        return self._thread.run(work)

    def _act(self, decide: Callable[[], list[Outgoing]]) -> None:
        """Apply a decision of the training thread, and send the resulting messages."""
        if self._failure is not None:
            raise self._failure
        self.call(lambda: self._apply(decide()))

    # -- on the loop ---------------------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Keep the error of a task: the training thread raises the error where it next waits or acts."""
        if (fault := fault_of(task)) is not None:
            self._failure = fault
            logger.error("the intake stopped", exc_info=self._failure)
            self._changed.set()

    async def _serve(self) -> None:
        replies: list[Outgoing] = []
        while True:
            peer, message = await self.channel.receive()
            for lost in self.channel.disconnected_by_now():  # before the Hello of the next process of a worker
                self._intake.disconnected(lost, time.monotonic())
            was_met = self.fleet.name_of(peer) is not None
            answers = self._intake.handle(peer, message, time.monotonic())
            work_s = self.channel.laps.lap_s() + _REPLY_S * len(answers)
            replies += answers
            is_goodbye = isinstance(message, Goodbye)  # a later Welcome would make the peer known again
            has_leases = any(isinstance(answer.message, Leases) for answer in answers)  # long to encode
            if len(replies) >= _MOST_REPLIES or is_goodbye or has_leases or not self.channel.has_more:
                self._apply(replies)
                replies.clear()
                work_s += self.channel.laps.lap_s() * has_leases
            if isinstance(message, Hello) and not was_met and self.fleet.name_of(peer) is not None:
                work_s = _DUTY_S * len(message.duties)  # the first leases are the learner's own wish
            self.channel.charge(peer, work_s)
            if is_goodbye:
                self.channel.departed(peer)

    async def _notice_lost_connections(self) -> None:
        while True:
            peer = await self.channel.disconnected()
            self._intake.disconnected(peer, time.monotonic())

    async def _watch(self) -> None:
        tick_s = min(_LONGEST_TICK_S, self._heartbeat_s / _TICKS_PER_HEARTBEAT)
        while True:
            due_s = time.monotonic() + tick_s
            await asyncio.sleep(tick_s)
            self._apply(self._intake.tick(time.monotonic(), late_s=time.monotonic() - due_s))

    async def _grant_on(self) -> None:
        while True:
            await self._owed.wait()
            self._owed.clear()
            await asyncio.sleep(_BETWEEN_PARTS_S)
            self._apply(self._intake.grants())

    def _apply(self, messages: Sequence[Outgoing], *, wakes: bool = True) -> None:
        """Send messages after an event; with `wakes`, wake all that wait for a change."""
        for peer, message in messages:
            self.channel.send(peer, message)
        if self._intake.owes_grants:
            self._owed.set()
        if wakes:
            self._changed.set()
            self._broadcaster.changed()

    def _send_call(self, worker_id: str, offer_id: int) -> None:
        self._send_to(worker_id, WeightsCall(self._intake.learner_id, offer_id))

    def _send_notice(self, worker_id: str, offer_id: int, policy_version: int, body: bytes) -> None:
        self._send_to(worker_id, WeightsNotice(self._intake.learner_id, offer_id, policy_version, body))

    def _send_to(self, worker_id: str, message: LearnerMessage) -> None:
        if (worker := self._intake.fleet.alive.get(worker_id)) is not None:
            self.channel.send(worker.peer, message)

    async def _take_batch(self) -> list[Group] | None:
        batch: list[Group] | None = None

        def is_settled() -> bool:
            nonlocal batch
            batch = self._intake.take_batch()
            if batch is None and not self._intake.owes_grants:
                self._apply(self._intake.grants(), wakes=False)  # a group dropped as stale gave a place back
            return batch is not None or self._intake.no_more_batches

        await self._wait_until(is_settled, "the next batch")
        return batch

    async def _gather_partials(self, timeout_s: float) -> None:
        self._apply(self._intake.call_for_partials())
        intake, drained = self._intake, self._intake.draining
        ends = lambda: intake.has_partials or self._failure is not None or intake.draining != drained  # noqa: E731
        async with asyncio.timeout(timeout_s):
            await self._wait_until(ends, "partial rollouts")

    async def _wait_until(self, condition: Callable[[], bool], name: str) -> None:
        began_s = time.monotonic()
        warn_s = began_s + _WAIT_LOG_S
        while True:
            self._changed.clear()  # before the check, so that no change falls between check and wait
            if condition():
                return
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()  # every tick is a change
            now_s = time.monotonic()
            if now_s >= warn_s:  # by time alone: messages may arrive although no group survives
                warn_s = now_s + _WAIT_LOG_S
                state = self._intake.describe(now_s)
                logger.log(TOLD, "waits for %s, %.0f s so far: %s", name, now_s - began_s, state)

    async def _stop_workers(self, timeout_s: float) -> None:
        self._apply(self._intake.stop())
        if self._failure is not None:
            return
        alive = self._intake.fleet.alive
        ends_s = time.monotonic() + timeout_s
        while alive and time.monotonic() < ends_s:  # noqa: ASYNC110 - nothing else needs an event for this
            await asyncio.sleep(0.02)
        if alive:
            logger.warning("no Goodbye from %s within %.0f s", ", ".join(alive), timeout_s)
