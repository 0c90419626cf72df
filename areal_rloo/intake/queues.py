"""The order in which groups and workers get their turn: groups by deadline, workers by room.

Each operation costs the logarithm of the queue's length. So the cost of a message does not grow with what is in flight.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, pairwise

from areal_rloo.intake.fleet import Fleet
from areal_rloo.intake.ledger import LedgerGroup
from areal_rloo.intake.worker import Worker


class GroupQueue:
    """Groups, earliest deadline first. A group that is pushed again while in the queue stays in it once."""

    def __init__(self, groups: Iterable[LedgerGroup] = ()) -> None:
        self._groups = {group.group_id: group for group in groups}
        self._heap = sorted((group.deadline, group.group_id) for group in self._groups.values())
        self._num_due = Counter(due for due, _ in self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[LedgerGroup]:
        """Yield the groups in any order."""
        return iter(self._groups.values())

    @property
    def num_due(self) -> Mapping[int, int]:
        """The number of groups by deadline; possibly 0."""
        return self._num_due

    @property
    def first(self) -> LedgerGroup:
        return self._groups[self._heap[0][1]]

    def first_of(self, others: Iterable[LedgerGroup], number: int) -> list[LedgerGroup]:
        """Return the first groups of the queue and the others together; the queue stays as it is."""
        groups = chain(self._groups.values(), others)
        return heapq.nsmallest(number, groups, key=lambda group: (group.deadline, group.group_id))

    def push(self, group: LedgerGroup) -> None:
        if group.group_id not in self._groups:
            self._groups[group.group_id] = group
            self._num_due[group.deadline] += 1
            heapq.heappush(self._heap, (group.deadline, group.group_id))

    def pop(self) -> LedgerGroup:
        due, group_id = heapq.heappop(self._heap)
        self._num_due[due] -= 1
        if not self._num_due[due]:
            del self._num_due[due]
        return self._groups.pop(group_id)


class Waiting:
    """The groups with samples that wait for a lease, and some that no longer have any.

    A group that may not go to any worker with room is put aside, by the workers that may not have it. So a message
    looks at the first group of each such set of workers, and not at all groups. A group may be in several queues; once
    it is leased, the other queues skip it.
    """

    def __init__(self, groups: Iterable[LedgerGroup]) -> None:
        self._queue = GroupQueue(groups)
        self._aside: dict[frozenset[str], GroupQueue] = {}  # by worker ids

    def __bool__(self) -> bool:
        return bool(self._queue or self._aside)

    def __iter__(self) -> Iterator[LedgerGroup]:
        """Yield the groups in any order, some more than once."""
        return chain.from_iterable((self._queue, *self._aside.values()))

    def push(self, group: LedgerGroup) -> None:
        self._queue.push(group)

    def put_aside(self, group: LedgerGroup, last_holders: frozenset[str]) -> None:
        """Keep a group for other workers than these, or for any if no other gets leases."""
        self._aside.setdefault(last_holders, GroupQueue()).push(group)

    def pop(self, live: Mapping[int, LedgerGroup], room: Room) -> LedgerGroup | None:
        """Take out the first live group with waiting samples for a worker with room; None if there is none."""
        while queues := [queue for queue in (self._queue, *self._open_to(room)) if queue]:
            group = min(queues, key=lambda queue: (queue.first.deadline, queue.first.group_id)).pop()
            if group.waiting and group.group_id in live:
                return group
        return None

    def _open_to(self, room: Room) -> list[GroupQueue]:
        self._aside = {holders: queue for holders, queue in self._aside.items() if queue}
        return [queue for holders, queue in self._aside.items() if room.allows(holders)]


class Room:
    """The workers with free room now: those with the fewest refused answers first, then those with the most room.

    A worker has its share in one turn, so that all of it goes out in one message, or in two.
    """

    def __init__(self, fleet: Fleet, num_groups: int, group_size: int) -> None:
        """`num_groups`: new ones to share among the workers, or fewer: of too many, the first workers would get all.

        Groups with lost samples are not counted: some have a single one, and some no longer have any.
        """
        self._fleet = fleet
        self._heap = [_rank(worker) for worker in fleet.with_room()]
        heapq.heapify(self._heap)
        self._goes_on = _left([-rank[1] for rank in self._heap], num_groups * group_size) + group_size

    def __len__(self) -> int:
        return len(self._heap)

    def allows(self, last_holders: Collection[str]) -> bool:
        """Return True if `take` would give a worker."""
        return any(rank[-1] not in last_holders for rank in self._heap) or not self._others_get_leases(last_holders)

    def _others_get_leases(self, last_holders: Collection[str]) -> bool:
        return any(w.gets_leases for name, w in self._fleet.alive.items() if name not in last_holders)

    def take(self, last_holders: Collection[str]) -> Worker | None:
        """Take the first worker out, but none of `last_holders` if another worker gets leases; None if none is left."""
        alive = self._fleet.alive
        if not last_holders or not self._others_get_leases(last_holders):
            return alive[heapq.heappop(self._heap)[-1]]
        rank = min((rank for rank in self._heap if rank[-1] not in last_holders), default=None)
        if rank is None:
            return None
        self._heap.remove(rank)
        heapq.heapify(self._heap)
        return alive[rank[-1]]

    def put_back(self, worker: Worker) -> None:
        """Let a worker have another group if there is still room: the next one within the share, else by rank."""
        if worker.free_samples >= self._goes_on:
            heapq.heappush(self._heap, (worker.num_lies, -math.inf, worker.worker_id))
        elif worker.free_samples > 0:
            heapq.heappush(self._heap, _rank(worker))


def _left(rooms: Iterable[float], num_samples: int) -> float:
    """Return the room that each worker keeps at most, if samples go one by one to the worker with the most room."""
    for number, (room, smaller) in enumerate(pairwise([*sorted(rooms, reverse=True), 0]), 1):
        if num_samples <= number * (room - smaller):
            return room - num_samples / number
        num_samples -= int(number * (room - smaller))
    return 0


def _rank(worker: Worker) -> tuple[int, float, str]:
    return worker.num_lies, -worker.free_samples, worker.worker_id
