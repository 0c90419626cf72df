"""A rollout worker's end of the protocol: a state machine without sockets, clocks, threads and tasks.

In: messages of the learner, results of duties, answers to offers of weights, time. Out: the duties to start and to
cancel (from `handle`), and the messages to send (from `poll`). `worker.py` connects the machine to the wire and to the
engine; tests drive it through any schedule. wire/messages.py describes the protocol.

    lease ─► running ─► ready ─► sent ─► acknowledged: forgotten
                │                  └── no answer before the reply to a later heartbeat: sent again
                └─► aborted: forgotten

The learner grants no more than the capacity, and counts a sample until its result arrives. So the outbox is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import msgspec

from areal_rloo.errors import CutOffError, WentBackError
from areal_rloo.rollout.partial import in_messages
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.trajectory import Trajectory
from areal_rloo.wire import messages as wire
from areal_rloo.wire.messages import Duty

logger = get_logger(__name__)

_BATCH_TRAJECTORIES = 64  # per message: more gain nothing and delay the first
RESULTS_IN_FLIGHT = 2  # messages not acknowledged, the second only if it is full: the busier the learner, the fuller
_HELLO_EVERY = 2  # heartbeats


class EngineState(msgspec.Struct, frozen=True):
    """The engine, as the learner hears of it."""

    running_version: int  # of the weights, also while the engine starts
    ready_version: int | None  # None while the engine can take no weights
    work: wire.Work
    num_decoding: int = 0


class ProtocolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The outbox now, and counts since the start."""

    metrics_prefix: ClassVar[str] = "wire_"

    unacknowledged: Annotated[int, Metric("Samples finished and not acknowledged yet")]
    resent: Annotated[int, Metric("Messages sent again because no acknowledgement came", kind="counter")]


@dataclass(slots=True)
class Orders:
    """Follows from a message of the learner."""

    start: list[wire.Lease] = field(default_factory=list)
    cancel: list[Duty] = field(default_factory=list)
    receive: wire.WeightsNotice | None = None
    tell_partials: int | None = None  # the id of the call
    drain: bool = False


@dataclass(slots=True)
class _Sent:
    """A message that must arrive. `mark` is the newest number when it was sent last; None: not sent yet."""

    message: wire.NumberedMessage
    duties: tuple[Duty, ...] = ()
    mark: int | None = None


class WorkerProtocol:
    """The duties of a worker, its outbox, and what it knows of the learner."""

    def __init__(
        self,
        *,
        worker_id: str,
        incarnation: str,
        capacity_samples: int,
        heartbeat_s: float,
        heartbeat_timeout_s: float,
        max_batch_bytes: int,
    ) -> None:
        """`max_batch_bytes`: soft limit of a message with several results."""
        self._worker_id, self._incarnation, self._capacity_samples = worker_id, incarnation, capacity_samples
        self._heartbeat_s, self._max_batch_bytes = heartbeat_s, max_batch_bytes
        self._most_unanswered = math.ceil(heartbeat_timeout_s / heartbeat_s)
        self._num_unanswered = 0  # heartbeats since the learner's last message; a stopped process sends none
        self.learner_id: str | None = None
        self._history: wire.History = ()
        self._weights: tuple[str | None, int] = (None, 0)  # of the engine: publisher and version
        self._newest_lease = self._newest_offer = 0  # of this learner
        self._running: set[Duty] = set()
        self._ready: deque[tuple[int, Duty, wire.Finished | wire.Failed]] = deque()  # with the size in bytes
        self._outbox: dict[int, _Sent] = {}  # by number
        self._num_results = 0  # messages with results in the outbox
        self._receiving: wire.WeightsNotice | None = None  # the receiver works on this offer
        self._call: int | None = None  # for weights, not answered yet
        self._partials_call: int | None = None  # not answered yet
        self._partials: list[wire.Partials] = []  # to send once: a lost message only costs tokens
        self._number = 0  # the last number used
        self._heartbeat_due_s = 0.0
        self._wants_hello, self._hello_number, self._hello_due_s = True, 0, 0.0
        self._num_resent = 0

    @property
    def duties(self) -> list[Duty]:
        """All duties without an acknowledged result."""
        sent = [duty for kept in self._outbox.values() for duty in kept.duties]
        return [*self._running, *(duty for _, duty, _ in self._ready), *sent]

    def statistics(self) -> ProtocolStatistics:
        unacknowledged = len(self._ready) + sum(len(kept.duties) for kept in self._outbox.values())
        return ProtocolStatistics(unacknowledged=unacknowledged, resent=self._num_resent)

    # -- events of this worker -----------------------------------------------------------------------------------------

    def finish(self, duty: Duty, trajectories: Sequence[Trajectory], num_bytes: int) -> None:
        """Record all trajectories of a duty, and their size in a message; ignore a cancelled duty."""
        self._end(duty, wire.Finished(duty.lease_id, tuple(trajectories)), num_bytes)

    def fail(self, failed: wire.Failed, num_bytes: int) -> None:
        """Record the failure of a duty; ignore a cancelled duty."""
        self._end(Duty(failed.lease_id, failed.group_id, failed.sample_index), failed, num_bytes)

    def weights_received(self, notice: wire.WeightsNotice, checksum: int, engine: EngineState) -> None:
        """Record the success of an offer: the engine runs the version.

        Raises:
            WentBackError: the offer is of an earlier learner, and the version is not of the history of the learner now.
        """
        self._note_weights(engine)
        if notice.policy_version > self._weights[1]:  # else the engine had the version already
            self._weights = (notice.learner_id, notice.policy_version)
        self._check_history(engine)
        self._answer(notice, lambda number: wire.WeightsReceived(notice.learner_id, number, notice.offer_id, checksum))

    def weights_failed(self, notice: wire.WeightsNotice, detail: str) -> None:
        """Record the failure of an offer: the engine does not run the version."""
        self._answer(notice, lambda number: wire.WeightsFailed(notice.learner_id, number, notice.offer_id, detail))

    def tell_partials(self, partials: Mapping[Duty, bytes]) -> None:
        """Tell the learner what the running duties have so far: as the answer to its call, or before a Goodbye."""
        if self.learner_id is None:
            return
        call, self._partials_call = self._partials_call or 0, None
        running = ((duty, turns) for duty, turns in partials.items() if duty in self._running)
        messages = in_messages(running, max_bytes=self._max_batch_bytes)
        for number, message in enumerate(messages, 1):
            self._partials.append(wire.Partials(self.learner_id, call, message, last=number == len(messages)))

    # -- messages of the learner ---------------------------------------------------------------------------------------

    def handle(self, message: wire.LearnerMessage, engine: EngineState) -> Orders:
        """Apply a message; return what to start and to cancel.

        Raises:
            WentBackError: the learner restarted from a version older than this worker's weights.
            CutOffError: the learner reads no message of this process any more.
        """
        orders = Orders()
        self._num_unanswered = 0
        match message:
            case wire.Welcome():
                self._meet(message, engine, orders)
                self._wants_hello &= message.number != self._hello_number
            case wire.HeartbeatReply():
                self._compare(message, orders)
            case wire.Drain():
                orders.drain = True
            case wire.Refusal():
                _hear_refusal(message)
            case wire.Ack():
                kept = self._outbox.pop(message.number, None)
                self._num_results -= kept is not None and isinstance(kept.message, wire.Results)
            case _ if message.learner_id != self.learner_id:
                pass  # the ids are those of another learner
            case wire.Leases():
                orders.start = [lease for lease in message.leases if lease.lease_id > self._newest_lease]
                for lease in orders.start:
                    self._running.update(lease.duties)
                    self._newest_lease = lease.lease_id
            case wire.Abort():
                orders.cancel = [duty for duty in message.duties if duty in self._running]
                self._running.difference_update(orders.cancel)
            case wire.PartialsCall():
                self._partials_call = orders.tell_partials = message.call_id
            case wire.WeightsCall() if message.offer_id > self._newest_offer:
                self._call = message.offer_id
            case wire.WeightsNotice() if message.offer_id > self._newest_offer:
                self._newest_offer = message.offer_id
                self._receiving = orders.receive = message
        return orders

    def _meet(self, message: wire.Welcome, engine: EngineState, orders: Orders) -> None:
        """Compare the learner and its history with this worker's weights, and with the learner before."""
        if message.learner_id != self.learner_id:
            self._forget_learner(orders)
            self.learner_id, self._history = message.learner_id, message.history
            self._check_history(engine)

    def _forget_learner(self, orders: Orders) -> None:
        """Give up all duties, finished or not: another learner does not know them, and means others by their ids.

        Nothing of the other learner counts before its Welcome, which tells if this worker's weights are of use.
        """
        if self.learner_id is not None:
            logger.info("the learner restarted: give up %d duties of the learner before", len(self.duties))
        orders.cancel += self._running
        self._running.clear()
        self._ready.clear()
        self._outbox.clear()
        self._partials.clear()
        self.learner_id, self._call, self._partials_call, self._wants_hello = None, None, None, True
        self._num_results = self._newest_lease = self._newest_offer = 0

    def _check_history(self, engine: EngineState) -> None:
        self._note_weights(engine)
        publisher, version = self._weights
        if self.learner_id is not None and not wire.is_of(self._history, publisher, version):
            raise WentBackError(
                f"the learner began with version {self._history[-1][1]}; this worker has version {version} of learner "
                f"{publisher}; the two histories have diverged, so this worker restarts"
            )

    def _note_weights(self, engine: EngineState) -> None:
        if engine.running_version < self._weights[1]:  # the engine restarted
            self._weights = (None, engine.running_version)

    def _compare(self, reply: wire.HeartbeatReply, orders: Orders) -> None:
        """Notice what was lost: everything sent before the heartbeat has an answer before the reply."""
        if reply.learner_id != self.learner_id:
            self._forget_learner(orders)
            return
        for kept in self._outbox.values():
            if kept.mark is not None and kept.mark < reply.number:
                kept.mark = None
                self._num_resent += 1
        if reply.newest_lease > self._newest_lease:
            logger.warning("leases up to %d were lost, %d was the last to come", reply.newest_lease, self._newest_lease)
            self._newest_lease = reply.newest_lease  # a late lease is void: the Hello gives it back
            self._wants_hello = True
        self._wants_hello |= reply.say_hello

    # -- messages to the learner ---------------------------------------------------------------------------------------

    def poll(self, now_s: float, engine: EngineState) -> list[wire.WorkerMessage]:
        """Return the messages due."""
        messages: list[wire.WorkerMessage] = []
        if self._wants_hello and now_s >= self._hello_due_s:
            messages.append(self._hello(now_s, engine))
        if self.learner_id is not None:
            if self._call is not None and self._receiving is None:
                messages.append(wire.WeightsReady(self.learner_id, self._call))
                self._call = None
            self._collect_results(self.learner_id, at_once=bool(self._partials))
            for kept in self._outbox.values():
                if kept.mark is None:
                    kept.mark = self._number
                    messages.append(kept.message)
            messages += self._partials  # after all results: a sample has either
            self._partials.clear()
        if now_s >= self._heartbeat_due_s:
            self._heartbeat_due_s = now_s + self._heartbeat_s
            self._num_unanswered += 1
            messages.append(self._heartbeat(engine))
        return messages

    def is_deaf(self) -> bool:
        """Return True, once, if the heartbeats of `heartbeat_timeout_s` have no answer: connect anew.

        A connection can be dead for ever without a sign: libzmq gives up after a violation of the ZeroMQ protocol.
        """
        if self._num_unanswered <= self._most_unanswered:
            return False
        self._num_unanswered = 0
        return True

    def due_s(self) -> float:
        """Return when to poll next if nothing happens."""
        return min(self._heartbeat_due_s, self._hello_due_s) if self._wants_hello else self._heartbeat_due_s

    def goodbye(self, engine: EngineState, *, failed: bool) -> wire.Goodbye:
        """Return the last message; `failed`: an error ends the worker, and a sample may be why."""
        return wire.Goodbye(self.learner_id, engine.work, failed)

    def _hello(self, now_s: float, engine: EngineState) -> wire.Hello:
        self._hello_due_s = now_s + _HELLO_EVERY * self._heartbeat_s  # a Hello may be lost, or its Welcome
        self._hello_number = self._next_number()
        return wire.Hello(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            capacity_samples=self._capacity_samples,
            policy_version=engine.ready_version,
            learner_id=self.learner_id,
            number=self._hello_number,
            newest_lease=self._newest_lease,
            duties=tuple(self.duties),
            work=engine.work,
        )

    def _heartbeat(self, engine: EngineState) -> wire.Heartbeat:
        return wire.Heartbeat(
            learner_id=self.learner_id,
            number=self._next_number(),
            newest_lease=self._newest_lease,
            # Results on the way are left out: the learner has them before this heartbeat, unless they are lost.
            duties=wire.digest([*self._running, *(duty for _, duty, _ in self._ready)]),
            policy_version=engine.ready_version,
            newest_offer=self._newest_offer,
            receiving=self._receiving is not None,
            work=engine.work,
            num_decoding=engine.num_decoding,
        )

    def _end(self, duty: Duty, result: wire.Finished | wire.Failed, num_bytes: int) -> None:
        if duty in self._running:
            self._running.discard(duty)
            self._ready.append((num_bytes, duty, result))

    def _answer(self, notice: wire.WeightsNotice, made: Callable[[int], wire.NumberedMessage]) -> None:
        if notice is self._receiving:
            self._receiving = None
        if notice.learner_id != self.learner_id:
            return  # no offer of this learner
        number = self._next_number()
        self._outbox[number] = _Sent(made(number))

    def _collect_results(self, learner_id: str, *, at_once: bool) -> None:
        """Put ready results into the outbox, as many as fit into each message: those allowed now, or all `at_once`.

        As in Nagle's algorithm (RFC 896), results too few for a full message wait for the acknowledgement of the last.
        """
        while self._ready and (at_once or not self._num_results or self._may_send_another()):
            finished: list[wire.Finished] = []
            failed: list[wire.Failed] = []
            duties: list[Duty] = []
            num_bytes = num_trajectories = 0
            while self._ready:
                size, duty, result = self._ready[0]
                num = len(result.trajectories) if isinstance(result, wire.Finished) else 0
                num_bytes, num_trajectories = num_bytes + size, num_trajectories + num
                if duties and (num_bytes > self._max_batch_bytes or num_trajectories > _BATCH_TRAJECTORIES):
                    break
                self._ready.popleft()
                duties.append(duty)
                if isinstance(result, wire.Finished):
                    finished.append(result)
                else:
                    failed.append(result)
            number = self._next_number()
            self._outbox[number] = _Sent(
                wire.Results(learner_id, number, tuple(finished), tuple(failed)), tuple(duties)
            )
            self._num_results += 1

    def _may_send_another(self) -> bool:
        """Return True if few messages are in flight, and the ready results fill one: later ones could not leave too."""
        if self._num_results >= RESULTS_IN_FLIGHT:
            return False
        num_bytes = num_trajectories = 0
        for size, _, result in self._ready:  # up to the first message: many may wait, and each new one asks
            num_bytes += size
            num_trajectories += len(result.trajectories) if isinstance(result, wire.Finished) else 0
            if num_bytes >= self._max_batch_bytes or num_trajectories >= _BATCH_TRAJECTORIES:
                return True
        return len(self._ready) >= _BATCH_TRAJECTORIES  # failures, too

    def _next_number(self) -> int:
        self._number += 1
        return self._number


def _hear_refusal(refusal: wire.Refusal) -> None:
    if refusal.final:
        raise CutOffError(f"the learner reads no more messages of this process: {refusal.detail}")
    logger.error("the learner refuses a message: %s", refusal.detail)
