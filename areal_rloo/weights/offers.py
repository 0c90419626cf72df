"""Decides which worker is offered which version of the weights, and when again; a state machine without I/O.

In: versions, workers joining, leaving, answering and sending heartbeats, errors of the transport, time. Out: commands
for `broadcast.py`, from `poll`. The intake reports the workers; tests drive any schedule.

    behind ─► (called ─► ready) ─► offered ─► received                    up to date
                  │         │         └─► failed, or no answer in time    behind again, after a backoff
                  └─────────┴─► no answer in time

Over shared memory, every worker takes a version alone: an offer is for a single worker, and a slow worker delays no
other. A collective needs all ranks, so a slow worker delays all: the workers are called first, and the offer is for
those that answer at once. If a broadcast to several workers fails, any of them can be why: each is in groups of half
the size next, down to itself alone, and in groups of twice the size after each success. A worker that fails alone,
leaves an offer, or whose version falls again and again, gets the next call after a backoff, which doubles; each new
version taken undoes one doubling.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from areal_rloo.telemetry.logs import get_logger
from areal_rloo.weights.commands import Answered, Begin, Call, Command, Over, Repeat

logger = get_logger(__name__)

_MOST_DOUBLINGS = 6  # of the backoff of a worker with repeated failures
_MOST_DEPARTED = 1024  # workers whose backoff is remembered
_MOST_TOGETHER = 2**20  # far above any number of workers
_MOST_PASSED = 16  # offers without a worker; then the worker is called with the others again


@dataclass(slots=True)
class Member:
    """A worker whose engine takes weights."""

    worker_id: str
    policy_version: int
    highest_version: int  # so far
    since_version: int = -1  # the newest when the worker came, or fell back
    offer_id: int | None = None  # of the offer without an answer yet, also after the deadline of the offer
    answer_number: int = 0  # number of the message with the last answer
    num_doublings: int = 0  # of the backoff after the next failure
    again_s: float = 0.0  # no offer before this time
    most_together: int = _MOST_TOGETHER  # workers in the next collective, this one included
    newest_call: int = 0  # id of the offer
    left_call: bool = False  # departed before the call had become an offer


@dataclass(slots=True)
class _Offer:
    """An offer under way. A call becomes an offer when `called` is empty or its deadline has passed."""

    offer_id: int
    policy_version: int
    deadline_s: float  # of the call, then of the offer
    begun_s: float
    workers: set[str]  # taking part
    num_begun: int = 0  # workers at the beginning
    checksum: int | None = None
    has_begun: bool = False
    sent: bool = False  # the transport has finished
    has_failed: bool = False  # the transport, with an error
    called: set[str] = field(default_factory=set)  # without an answer to the call
    pending: set[str] = field(default_factory=set)  # without an answer to the offer
    left: set[str] = field(default_factory=set)  # departed without an answer to the offer
    took: dict[str, bool] = field(default_factory=dict)  # in time; true if the version was new to the worker

    @property
    def is_answered_call(self) -> bool:
        return not self.has_begun and not self.called


class Offers:
    """The members and the open offers."""

    def __init__(self, *, together: bool, timeout_s: float, call_timeout_s: float) -> None:
        """
        Args:
            together: True if all workers take part in every broadcast (a collective).
            timeout_s: of an offer.
            call_timeout_s: of a call.
        """
        self.members: dict[str, Member] = {}
        self.newest_version = -1  # nothing is published yet
        self.num_failures = self.num_left_out = 0
        self._together, self._timeout_s, self._call_timeout_s = together, timeout_s, call_timeout_s
        self._departed: dict[str, Member] = {}
        self._offers: dict[int, _Offer] = {}  # in the order of their deadlines
        # When each worker behind is due, as a heap. An entry can be out of date: `_next_behind` removes it.
        self._queue: list[tuple[float, str]] = []
        self._queued: set[tuple[float, str]] = set()
        self._commands: list[Command] = []
        self._num_offers = 0

    def publish(self, policy_version: int) -> None:
        """Make this the version to offer."""
        self.newest_version = policy_version
        for member in self.members.values():
            self._enqueue(member)

    def join(self, worker_id: str, policy_version: int | None, *, number: int = 0, now_s: float) -> None:
        """Record the version of a worker's engine; None: the engine takes no weights now, e.g. while it starts.

        `number` orders the messages of a worker: a version told before the last answer to an offer is out of date.
        """
        if policy_version is None:
            self.leave(worker_id)
            return
        member = self.members.get(worker_id)
        if member is None:
            member = self._departed.pop(worker_id, None) or Member(worker_id, policy_version, policy_version)
            member.since_version = self.newest_version
            self.members[worker_id] = member
        if number < member.answer_number:
            return
        if member.left_call or policy_version < member.policy_version:
            self._back_off(member, now_s, first_s=0.0)  # an engine that restarts, or a lie
            member.since_version = self.newest_version
        member.left_call = False
        member.policy_version = policy_version
        member.highest_version = max(member.highest_version, policy_version)
        self._enqueue(member)

    def heard(
        self,
        worker_id: str,
        policy_version: int | None,
        *,
        number: int,
        newest_offer: int,
        receiving: bool,
        now_s: float,
    ) -> None:
        """Record a heartbeat: the version of the engine, and the newest offer seen by the worker."""
        self.join(worker_id, policy_version, number=number, now_s=now_s)
        member = self.members.get(worker_id)
        if member is None or member.offer_id is None:
            return
        offer = self._offers.get(member.offer_id)
        if offer is None:  # past its deadline
            member.offer_id = member.offer_id if receiving else None
            self._enqueue(member)
        elif newest_offer < offer.offer_id and now_s - offer.begun_s > self._call_timeout_s:
            self._commands.append(Repeat(offer.offer_id, worker_id))

    def leave(self, worker_id: str) -> None:
        """Forget a departed worker, except for its backoff: to come anew would keep the weights from all workers."""
        if (member := self.members.pop(worker_id, None)) is not None:
            left = any(
                worker_id in offer.called | offer.workers for offer in self._offers.values() if not offer.has_begun
            )
            self._departed[worker_id] = replace(member, offer_id=None, answer_number=0, left_call=left)
            if len(self._departed) > _MOST_DEPARTED:
                del self._departed[next(iter(self._departed))]
            self._give_up(worker_id)

    def ready(self, worker_id: str, offer_id: int) -> None:
        """Record the answer to a call; ignore a late answer."""
        offer = self._offers.get(offer_id)
        if offer is not None and worker_id in offer.called:
            offer.called.discard(worker_id)
            offer.workers.add(worker_id)

    def begun(self, offer_id: int, checksum: int) -> None:
        """Record the checksum of an offer with notices on their way: the workers must find the same."""
        if (offer := self._offers.get(offer_id)) is not None:
            offer.checksum = checksum

    def received(self, worker_id: str, offer_id: int, checksum: int, *, number: int, now_s: float) -> None:
        """Record the success of an offer: the worker runs the version; with the checksum of the received bytes."""
        member, offer = self.members.get(worker_id), self._offers.get(offer_id)
        if member is None or member.offer_id != offer_id:
            return
        if offer is not None and checksum != offer.checksum:
            detail = f"expected the checksum {offer.checksum}, got {checksum}"
            self.failed(worker_id, offer_id, detail, number=number, now_s=now_s)
            return
        if offer is not None:
            member.policy_version = max(member.policy_version, offer.policy_version)
            if worker_id in offer.pending:
                offer.took[worker_id] = member.policy_version > member.highest_version
        elif not self._together:  # late, which delays no other: do not let a slow worker wait ever longer
            member.num_doublings = max(0, member.num_doublings - 1)
        member.highest_version = max(member.highest_version, member.policy_version)
        self._answered(member, worker_id, number, taken=True)

    def failed(self, worker_id: str, offer_id: int, detail: str, *, number: int, now_s: float) -> None:
        """Record the failure of an offer: the worker does not run the version. Offer again after a backoff."""
        member = self.members.get(worker_id)
        if member is None or member.offer_id != offer_id:
            return
        logger.warning("%s could not take offer %d of the weights: %s", worker_id, offer_id, detail)
        self.num_failures += 1
        offer = self._offers.get(offer_id)
        if offer is not None and worker_id in offer.pending:  # else the timeout has counted
            # The cause may take a moment to go away, and in a collective a retry costs all workers.
            self._blame(offer, member, now_s, first_s=0.0)
        self._answered(member, worker_id, number, taken=False)

    def broken(self, offer_id: int, detail: str, now_s: float) -> None:
        """Record an error of the transport: the offer fails for all its workers."""
        if (offer := self._offers.get(offer_id)) is None:
            return
        offer.has_failed = True
        for worker_id in sorted(offer.pending):
            self.failed(worker_id, offer_id, detail, number=0, now_s=now_s)
        for name in (*offer.took, *offer.left):  # success was a lie, or luck
            if (member := self.members.get(name) or self._departed.get(name)) is not None:
                self._blame(offer, member, now_s, first_s=0.0)

    def sent(self, offer_id: int) -> None:
        """Record the end of the transport of an offer, with or without success."""
        offer = self._offers[offer_id]
        offer.sent = True
        self._end_if_over(offer)

    def poll(self, now_s: float) -> list[Command]:
        """End overdue offers, begin the offers due, and return the commands since the last call."""
        while (offer := self._next_to_end()) is not None and (now_s >= offer.deadline_s or offer.is_answered_call):
            self._look_at(offer, now_s)
        while (member := self._next_behind()) is not None and now_s >= member.again_s:
            if self._together:
                self._call(now_s)
            else:
                self._begin(self._made({member.worker_id}, now_s), now_s)
        commands, self._commands = self._commands, []
        return commands

    @property
    def num_behind(self) -> int:
        """Most versions missed by a member since it came: a new worker has none of the past."""
        last = [max(member.policy_version, member.since_version) for member in self.members.values()]
        return self.newest_version - min(last, default=self.newest_version)

    def due_s(self) -> float:
        """Return the time of the next change without an event."""
        offer, member = self._next_to_end(), self._next_behind()
        return min(
            math.inf if offer is None else offer.deadline_s,
            math.inf if member is None else member.again_s,
        )

    def _next_to_end(self) -> _Offer | None:
        """Return the offer with the next deadline."""
        return next((offer for offer in self._offers.values() if offer.deadline_s < math.inf), None)

    def _next_behind(self) -> Member | None:
        """Return the worker that gets the next offer, at `again_s`; None while a collective is under way."""
        if self._together and self._offers:
            return None
        while self._queue:
            again_s, worker_id = self._queue[0]
            member = self.members.get(worker_id)
            if member is not None and member.again_s == again_s and self._waits(member):
                return member
            self._queued.discard(heapq.heappop(self._queue))
        return None

    def _look_at(self, offer: _Offer, now_s: float) -> None:
        if offer.has_begun:
            self._time_out(offer, offer.pending, now_s)
            offer.pending.clear()
            offer.deadline_s = math.inf  # the transport may still be busy
            self._end_if_over(offer)
            return
        self._time_out(offer, offer.called, now_s)
        if offer.workers:
            self._begin(offer, now_s)
        else:
            del self._offers[offer.offer_id]

    def _call(self, now_s: float) -> None:
        offer = self._made(set(), now_s)
        offer.called, offer.deadline_s = self._group(now_s), now_s + self._call_timeout_s
        for worker_id in offer.called:
            self.members[worker_id].newest_call = offer.offer_id
        self._offers[offer.offer_id] = offer
        self._commands.append(Call(offer.offer_id, tuple(sorted(offer.called))))

    def _group(self, now_s: float) -> set[str]:
        """Choose the workers of the next collective: those behind first, in groups as large as allowed."""
        most = {name: member.most_together for name, member in self.members.items()}
        for name, member in self.members.items():
            if self._num_offers - member.newest_call > _MOST_PASSED:
                most[name] = _MOST_TOGETHER  # else the others, always behind, would keep the weights from this worker
        free = [n for n, member in self.members.items() if member.offer_id is None and now_s >= member.again_s]
        free.sort(key=lambda n: (not self._is_behind(self.members[n]), -most[n], self.members[n].newest_call))
        group, fewest = set[str](), _MOST_TOGETHER
        for name in free:
            if len(group) < min(fewest, most[name]):
                group.add(name)
                fewest = min(fewest, most[name])
        return group

    def _begin(self, offer: _Offer, now_s: float) -> None:
        self._offers[offer.offer_id] = offer
        offer.has_begun, offer.called = True, set()
        offer.policy_version, offer.begun_s, offer.deadline_s = self.newest_version, now_s, now_s + self._timeout_s
        offer.pending, offer.num_begun = set(offer.workers), len(offer.workers)
        for worker_id in offer.workers:
            self.members[worker_id].offer_id = offer.offer_id
        self._commands.append(Begin(offer.offer_id, offer.policy_version, tuple(sorted(offer.workers))))

    def _made(self, workers: set[str], now_s: float) -> _Offer:
        self._num_offers += 1
        return _Offer(self._num_offers, self.newest_version, now_s + self._timeout_s, now_s, workers)

    def _time_out(self, offer: _Offer, workers: Iterable[str], now_s: float) -> None:
        for worker_id in sorted(workers):
            logger.warning("no answer from %s to offer %d of the weights in time", worker_id, offer.offer_id)
            self.num_left_out += 1
            member = self.members.get(worker_id)
            if member is not None:
                self._blame(offer, member, now_s, first_s=self._call_timeout_s)
            if offer.has_begun:
                self._commands.append(Answered(offer.offer_id, worker_id, taken=False))

    def _answered(self, member: Member, worker_id: str, number: int, *, taken: bool) -> None:
        assert member.offer_id is not None, "only an offer is answered"
        member.answer_number = max(member.answer_number, number)
        offer_id, member.offer_id = member.offer_id, None
        self._enqueue(member)
        self._settle(offer_id, worker_id, taken=taken)

    def _give_up(self, worker_id: str) -> None:
        for offer in list(self._offers.values()):
            offer.called.discard(worker_id)
            offer.workers.discard(worker_id)
            if worker_id in offer.pending:
                offer.left.add(worker_id)
            self._settle(offer.offer_id, worker_id, taken=False)

    def _settle(self, offer_id: int, worker_id: str, *, taken: bool) -> None:
        offer = self._offers.get(offer_id)
        if offer is None or worker_id not in offer.pending:
            return
        offer.pending.discard(worker_id)
        self._commands.append(Answered(offer_id, worker_id, taken=taken))
        self._end_if_over(offer)

    def _end_if_over(self, offer: _Offer) -> None:
        if offer.sent and not offer.pending:
            del self._offers[offer.offer_id]
            self._commands.append(Over(offer.offer_id))
            for name in () if offer.has_failed else offer.took:
                if offer.took[name] and (member := self.members.get(name)) is not None:
                    member.num_doublings = max(0, member.num_doublings - 1)
                    member.most_together = min(_MOST_TOGETHER, 2 * member.most_together)

    def _blame(self, offer: _Offer, member: Member, now_s: float, *, first_s: float) -> None:
        """Back off after a failed offer. If others took part, separate them: any may be why, and may keep it up."""
        if 1 < offer.num_begun <= member.most_together:
            member.most_together, member.again_s = offer.num_begun // 2, now_s + first_s
            self._enqueue(member)
        else:
            self._back_off(member, now_s, first_s=first_s)

    def _back_off(self, member: Member, now_s: float, *, first_s: float) -> None:
        member.again_s = now_s + first_s + self._call_timeout_s * (2.0**member.num_doublings - 1)
        member.num_doublings = min(member.num_doublings + 1, _MOST_DOUBLINGS)
        self._enqueue(member)

    def _enqueue(self, member: Member) -> None:
        """Queue a worker that may be due later; call this after each change of a member."""
        entry = (member.again_s, member.worker_id)
        if self._waits(member) and entry not in self._queued:
            self._queued.add(entry)
            heapq.heappush(self._queue, entry)

    def _is_behind(self, member: Member) -> bool:
        return member.policy_version < self.newest_version

    def _waits(self, member: Member) -> bool:
        """Return True if a worker is behind and has no offer."""
        return member.offer_id is None and self._is_behind(member)
