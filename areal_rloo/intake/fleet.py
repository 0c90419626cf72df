"""The rollout workers as the learner knows them: the duties of each, the last sign of life, the work done."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from areal_rloo.config import MOST_WORKERS, WireConfig
from areal_rloo.intake.work import added, grown
from areal_rloo.intake.worker import Standing, Worker
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.wire.messages import (
    Duty,
    Heartbeat,
    Hello,
    LearnerMessage,
    Work,
)
from areal_rloo.wire.peers import MOST_PEERS, Recent

logger = get_logger(__name__)

SET_ASIDE_S, _MOST_DOUBLINGS = 300.0, 4  # twice as long each time
_VOTES_S = 300.0  # of workers that departed, and at the start of those that are expected
_MOST_TICK_S = 1.0  # the rest of a longer time is the learner's own
_MARKS = 8  # the age of a lease is known to this part of the most
_COMPARED = 256  # duties of a worker in the time of a heartbeat: a tenth of a millisecond
_LEAST_APART, _MOST_APART = 0.25, 16.0  # heartbeats between two comparisons


class FleetStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The workers now, and counts since the start of the learner."""

    metrics_prefix: ClassVar[str] = "fleet_"

    num_workers: Annotated[int, Metric("Rollout workers alive", healthy=(1, math.inf))]
    silent_s: Annotated[dict[str, float], Metric("Time since the last word of a worker", "s", label="worker")]
    refused_workers: Annotated[
        dict[str, int],
        Metric("Hellos refused: too many workers, or a name of another process", kind="counter", label="reason"),
    ]
    set_aside: Annotated[
        int,
        Metric("Workers set aside: many failures, or samples held for too long", kind="counter", healthy=(0, 0)),
    ]


class Outgoing(NamedTuple):
    """A message to send, and the peer to send it to."""

    peer: str
    message: LearnerMessage


@dataclass(slots=True)
class _Met:
    """A process that has said Hello. The first counts are the start: an earlier learner counted them."""

    worker_id: str
    first: Work
    last: Work  # never below `first`, whatever the process sends

    def record(self, work: Work) -> bool:
        """Record the growth of the counts; return True if tokens were generated. Ignore an impossible jump."""
        before, self.last = self.last, grown(self.last, work)
        return self.last.generated_tokens > before.generated_tokens


class Fleet:
    """All workers heard of since their Hello; the work of departed workers, too."""

    def __init__(self, *, most_samples: int, num_expected: int = 0) -> None:
        """
        Args:
            most_samples: train samples of a worker, whatever capacity the worker claims.
            num_expected: workers that will come, under the names that the launchers give.
        """
        self._most_samples = most_samples
        self._expected = frozenset(f"rollout-{index}" for index in range(num_expected))
        self._first_tick_s = self._last_tick_s = math.inf
        self.alive: dict[str, Worker] = {}
        self._by_peer: dict[str, Worker] = {}
        self._may_have_room: dict[str, Worker] = {}  # by worker id
        self._met: dict[str, _Met] = {}  # by peer; of departed processes, the last `MOST_PEERS`
        self._forgotten = Work()  # of the other departed processes
        self._departed: dict[str, Worker] = {}  # not long ago, by worker id
        self._standings: Recent[Standing] = Recent()  # by worker id
        self._marks: deque[tuple[float, int]] = deque()  # monotonic time, and the highest lease id then
        self._refused: Counter[str] = Counter()
        self._num_set_aside = 0
        self.engines_wait = False  # the learner computes on their devices: no worker makes progress

    def at(self, peer: str) -> Worker | None:
        """Return the worker at a peer; None for a stranger, an earlier process, and a worker taken for dead."""
        return self._by_peer.get(peer)

    def name_of(self, peer: str) -> str | None:
        """Return the worker id of a peer, alive or not; None for a stranger, who never said Hello."""
        met = self._met.get(peer)
        return None if met is None else met.worker_id

    def welcome(self, hello: Hello, peer: str, *, now_s: float, policy_version: int) -> Worker:
        """Register a worker, or renew what is known. Remove another incarnation first."""
        worker = self._by_peer.get(peer)
        if worker is None:
            assert hello.worker_id not in self.alive, f"another {hello.worker_id} is there"
            standing = self._standings.get(hello.worker_id) or Standing()
            self._standings.put(hello.worker_id, standing)
            worker = Worker(
                worker_id=hello.worker_id,
                incarnation=hello.incarnation,
                peer=peer,
                capacity_samples=min(hello.capacity_samples, self._most_samples),
                standing=standing,
                last_heard_s=now_s,
                policy_version=hello.policy_version,
                joined_version=policy_version,
                progress_s=now_s,
            )
            self.alive[hello.worker_id] = self._by_peer[peer] = worker
            self._departed.pop(hello.worker_id, None)
        worker.last_heard_s, worker.policy_version = now_s, hello.policy_version
        self._may_have_room[worker.worker_id] = worker
        self._met.setdefault(peer, _Met(hello.worker_id, hello.work, hello.work)).record(hello.work)
        self._forget_departed()
        return worker

    def refuses(self, hello: Hello, peer: str, wire: WireConfig) -> str | None:
        """Return why the process at a peer cannot join, and count; None if the process can.

        A connected process keeps its name, and another gets none. If the host is gone without a sign, the process is
        taken for dead after `wire.heartbeat_timeout_s`.
        """
        if (name := self.name_of(peer)) not in (None, hello.worker_id):
            self._refused["another_name"] += 1
            return f"this process is {name}"
        if peer in self._by_peer:
            return None
        before = self.alive.get(hello.worker_id)
        if before is not None and before.is_connected(wire):
            self._refused["name_taken"] += 1
            return f"another process is {hello.worker_id}, and is connected"
        if before is None and len(self.alive) >= MOST_WORKERS:
            self._refused["too_many"] += 1
            return f"there are {len(self.alive)} workers already"
        return None

    def statistics(self, now_s: float) -> FleetStatistics:
        return FleetStatistics(
            num_workers=len(self.alive),
            silent_s={worker.worker_id: now_s - worker.last_heard_s for worker in self.alive.values()},
            refused_workers=dict(self._refused),
            set_aside=self._num_set_aside,
        )

    def release(self, worker: Worker, duty: Duty) -> None:
        """Remove a duty of a worker; ignore the duties of others."""
        if duty in worker.duties:
            worker.duties.discard(duty)
            worker.num_train -= duty.purpose == "train"
            self._may_have_room[worker.worker_id] = worker

    def with_room(self) -> list[Worker]:
        """List the workers with free room: of the last `try_again`, those new since, those with released duties."""
        self._may_have_room = {name: w for name, w in self._may_have_room.items() if w.free_samples > 0}
        return list(self._may_have_room.values())

    def remove(self, worker: Worker) -> None:
        del self.alive[worker.worker_id], self._by_peer[worker.peer]
        self._may_have_room.pop(worker.worker_id, None)
        self._departed[worker.worker_id] = worker
        if len(self._departed) > MOST_WORKERS:
            del self._departed[next(iter(self._departed))]

    def votes(self) -> Iterator[Collection[bool]]:
        """Yield the last completions of the workers, true if failed: of those on their way back or to come, too."""
        for worker in chain(self.alive.values(), self._departed.values()):
            if worker.standing.failed or worker.is_trusted:
                yield worker.standing.failed
        for _ in range(self._num_awaited()):
            yield ()

    def _num_awaited(self) -> int:
        """Count the expected workers not here: others that came first could end the run in place of them."""
        return len(self._expected - self.alive.keys() - self._departed.keys())

    def heard(self, worker: Worker, heartbeat: Heartbeat, now_s: float) -> None:
        """Record a heartbeat."""
        if self._met[worker.peer].record(heartbeat.work):
            worker.progress_s, worker.stalled = now_s, False
            self._may_have_room[worker.worker_id] = worker
        elif heartbeat.policy_version != worker.policy_version:  # the samples may have waited for this version
            worker.progress_s = now_s
        worker.last_heard_s, worker.policy_version = now_s, heartbeat.policy_version
        worker.num_decoding = heartbeat.num_decoding

    def differs(self, worker: Worker, heartbeat: Heartbeat, now_s: float, wire: WireConfig) -> bool:
        """Compare all duties, but not for every heartbeat of many duties, or of a flood. A later one tells the same."""
        num_heartbeats = min(max(_LEAST_APART, len(worker.duties) / _COMPARED), _MOST_APART)
        if now_s < worker.compared_s + wire.heartbeat_s * num_heartbeats:
            return False
        worker.compared_s = now_s
        return worker.differs(heartbeat)

    def silent(self, now_s: float, wire: WireConfig, late_s: float = 0.0) -> list[Worker]:
        """Return the workers taken for dead by now. While the learner was held up, for `late_s`, none was silent."""
        for worker in self.alive.values() if late_s > _MOST_TICK_S else ():
            worker.stand_still(now_s, late_s)
        silent = [worker for worker in self.alive.values() if now_s > worker.silent_until_s(wire)]
        for worker in silent:
            silent_s = now_s - worker.last_heard_s
            logger.warning("no heartbeat from %s for %.1f s: lease its samples again", worker.worker_id, silent_s)
        return silent

    def stalled(self, now_s: float, wire: WireConfig) -> list[Worker]:
        """Return the workers that have duties and made no progress for too long; they get no leases until they do."""
        stalled = []
        for worker in self.alive.values():
            if self.engines_wait or (not worker.duties and not worker.stalled):
                worker.progress_s = now_s
            elif worker.duties and now_s - worker.progress_s > wire.stall_timeout_s:
                logger.error(
                    "%s has %d samples and made no progress for %.0f s (wire.stall_timeout_s): lease its samples again",
                    *(worker.worker_id, len(worker.duties), now_s - worker.progress_s),
                )
                worker.progress_s, worker.stalled = now_s, True
                stalled.append(worker)
        return stalled

    def overdue(self, now_s: float, most_s: float, newest_lease: int) -> list[Worker]:
        """Return the workers with a lease older than `most_s`, or duties for so long without a result.

        The progress that they claim does not count, nor do new leases in place of lost ones.
        """
        tick_s = min(max(0.0, now_s - self._last_tick_s), _MOST_TICK_S)
        self._last_tick_s = now_s
        late = []
        for worker in self.alive.values():
            worker.standing.held_s += tick_s * bool(worker.duties)
            if worker.standing.held_s > most_s:
                worker.standing.held_s = 0.0
                late.append(worker)
        if self._marks and now_s - self._marks[-1][0] < most_s / _MARKS:
            return late
        self._marks.append((now_s, newest_lease))
        due = 0
        while now_s - self._marks[0][0] > most_s:
            due = self._marks.popleft()[1]
        aged = (worker for worker in self.alive.values() if any(duty.lease_id <= due for duty in worker.duties))
        return late + [worker for worker in aged if worker not in late and now_s - worker.eval_s > most_s]

    def set_aside(self, worker: Worker, now_s: float, why: str) -> None:
        """Give a worker no leases for a while, twice as long each time."""
        standing = worker.standing
        within_s = SET_ASIDE_S * 2 ** min(standing.num_set_aside, _MOST_DOUBLINGS)
        logger.error("%s gets no leases for %.0f s: %s", worker.worker_id, within_s, why)
        self._num_set_aside += 1
        standing.num_set_aside += 1
        standing.set_aside_until_s = now_s + within_s

    def try_again(self, now_s: float) -> None:
        """Let workers get leases after their time, or now if none gets any: do not stand still.

        Workers set aside do not get them while others are awaited: they would only use up prompts until then.
        """
        self._first_tick_s = min(self._first_tick_s, now_s)
        if now_s - self._first_tick_s >= _VOTES_S:
            self._expected = frozenset()
        self._departed = {w.worker_id: w for w in self._departed.values() if now_s - w.last_heard_s < _VOTES_S}
        self._may_have_room = dict(self.alive)
        workers = [worker for worker in self.alive.values() if worker.capacity_samples]
        for worker in workers:
            worker.standing.waits = False
            if worker.standing.set_aside_until_s is not None and now_s >= worker.standing.set_aside_until_s:
                worker.standing.set_aside_until_s = None
                worker.standing.failed.clear()
        if any(worker.gets_leases for worker in workers):
            return
        for worker in (stalled := [worker for worker in workers if worker.standing.set_aside_until_s is None]):
            worker.progress_s, worker.stalled = now_s, False
        if not stalled and not self._num_awaited() and not any(w.is_trusted for w in self._departed.values()):
            for worker in workers:
                worker.progress_s, worker.stalled, worker.standing.set_aside_until_s = now_s, False, None
                worker.standing.num_set_aside = max(0, worker.standing.num_set_aside - 1)
                worker.standing.failed.clear()

    def describe(self, now_s: float) -> str:
        """Describe the workers for a log line about a wait."""
        workers = [
            f"{w.worker_id} has {len(w.duties)} samples and decodes {w.num_decoding} at version {w.policy_version}"
            f"{' (all wait for rewards, tools, agents or weights)' * (w.num_decoding == 0 < len(w.duties))}, "
            f"last heard {now_s - w.last_heard_s:.1f} s ago, last progress {now_s - w.progress_s:.0f} s ago"
            for w in self.alive.values()
        ]
        return "; ".join(workers) or "no rollout worker is connected"

    def record_work(self, peer: str, work: Work) -> None:
        """Record the counts of a process; ignore those of a stranger."""
        if peer in self._met:
            self._met[peer].record(work)

    def work(self) -> Work:
        """Add up the work of all workers for this learner, departed workers included."""
        return added(self._forgotten, ((met.first, met.last) for met in self._met.values()))

    def _forget_departed(self) -> None:
        """Forget the process that departed first, except for its work, if there are too many."""
        if len(self._met) <= len(self.alive) + MOST_PEERS:
            return
        peer = next(peer for peer in self._met if peer not in self._by_peer)
        met = self._met.pop(peer)
        self._forgotten = added(self._forgotten, [(met.first, met.last)])
