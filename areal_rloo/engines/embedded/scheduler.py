"""Who has which memory: requests into rows, prompts computed beside decoding, rows taken away when memory is full.

    waiting ─► admitted, with a row ─► prefilled, a chunk between two decode steps ─► decoded ─► ended, its row kept
       ▲                                      │                          │
       └──────────────────────────────────────┴── its row taken away ◄───┘

All batches share one arena. When a row must grow and nothing is free, kept rows go first; then the request that was
submitted last loses its row, and waits again with all tokens it has. The one submitted first never does, so that
something always comes to its end.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from torch import Tensor

from areal_rloo.engines.embedded.batch import DecodeBatch
from areal_rloo.engines.embedded.cache import Cache, CacheRow, RowKind
from areal_rloo.engines.embedded.prefill import Segment, prefill
from areal_rloo.engines.embedded.prefixes import Prefixes
from areal_rloo.engines.embedded.running import Running
from areal_rloo.trajectory import FinishReason

_PREFILL_TOKENS = 8192  # of one pass while nothing is decoded
_SPARE_SHARE = 1 / 16  # of the memory stays free when a request starts beside others, so that they can grow a while

Ended = list[tuple[Running, FinishReason]]


class Admitted:
    """A batch, and the requests that have a row and are on their way into it."""

    def __init__(self, batch: DecodeBatch, policy_version: int, *, num_slots: int) -> None:
        self.batch = batch
        self.policy_version = policy_version
        self.prefilling: list[Running] = []
        self._num_slots = num_slots

    @property
    def num(self) -> int:
        return len(self.prefilling) + len(self.batch.running)

    @property
    def num_free(self) -> int:
        return self._num_slots - self.num

    def all(self) -> list[Running]:
        return [*self.prefilling, *self.batch.running.values()]


class Scheduler:
    """The arena, and who is where in it.

    Attributes:
        batches: by kind; that of pinned requests comes and goes.
        prefill_tokens: computed for prompts, and again for rows that were taken away.
        cached_tokens: of prompts that were in the cache already.
        generated_tokens: that requests got.
        num_preempted: rows taken away.
    """

    def __init__(self, cache: Cache, rope: Tensor, *, prefill_chunk_tokens: int) -> None:
        self.batches: dict[RowKind, Admitted] = {}
        self.prefill_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.num_preempted = 0
        self._cache = cache
        self._rope = rope
        self._chunk_tokens = prefill_chunk_tokens
        self._prefixes = Prefixes(cache)

    @property
    def num_admitted(self) -> int:
        return sum(admitted.num for admitted in self.batches.values())

    def admit(self, admitted: Admitted, waiting: deque[Running]) -> None:
        """Give rows to the first waiting requests, as slots and memory allow; skips those for newer weights."""
        skipped = []
        while waiting and admitted.num_free:
            running = waiting.popleft()
            if running.request.min_version > admitted.policy_version:
                skipped.append(running)
            elif not self._give_row(running, admitted.policy_version):
                waiting.appendleft(running)
                break
            else:
                admitted.prefilling.append(running)
        waiting.extendleft(reversed(skipped))

    def prefill(self, admitted: Admitted) -> None:
        """Compute the next chunk of prompts, each known beginning once; those complete are decoded from now on."""
        decoding = any(other.batch.running for other in self.batches.values())
        left = self._chunk_tokens if decoding else _PREFILL_TOKENS
        while admitted.prefilling and left > 0:
            segments: dict[bytes, tuple[Running, Segment]] = {}
            for running in list(admitted.prefilling):
                assert running.row is not None, "a request is prefilled in a row"
                wanted = running.known_tokens[:-1]
                self._start_from_cache(running, wanted, admitted.policy_version)
                rest = wanted[running.num_prefilled :][:left]
                if running.num_prefilled == len(wanted):
                    self._begin(running, admitted)
                elif left > 0 and wanted.tobytes() not in segments:
                    segments[wanted.tobytes()] = (running, Segment(running.row, running.num_prefilled, rest))
                    left -= len(rest)
            if segments:
                prefill(
                    admitted.batch.parameters, self._cache, [segment for _, segment in segments.values()], self._rope
                )
                for running, segment in segments.values():
                    running.num_prefilled = segment.end
                    self.prefill_tokens += len(segment.tokens)
        self._begin_complete(admitted)

    def make_room(self) -> tuple[Ended, list[Running]]:
        """Let every row take one more token; gives the requests that ended meanwhile, and those that lost their row."""
        ended: Ended = []
        preempted: list[Running] = []
        if not any(admitted.batch.full() for admitted in self.batches.values()):
            return ended, preempted
        for admitted in self.batches.values():
            ended += self._released(admitted, admitted.batch.drain())
        full = [running for admitted in self.batches.values() for running in admitted.batch.full()]
        for running in sorted(full, key=lambda running: running.arrival):
            if running.row is not None:
                preempted += self._grow(running)
        return ended, preempted

    def step(self, admitted: Admitted) -> Ended:
        """One token for every row that is decoded; gives the requests that ended, with what they made."""
        return self._released(admitted, admitted.batch.step())

    def abort(self, request_ids: set[str]) -> Ended:
        """Take requests out; gives those, and what ended by itself meanwhile."""
        ended: Ended = []
        for admitted in self.batches.values():
            ended += self._released(admitted, admitted.batch.drain())
            for running in [r for r in admitted.all() if r.request.request_id in request_ids]:
                self._take_row(running, admitted)
                ended.append((running, "abort"))
        return ended

    def new_version(self, policy_version: int) -> None:
        """The running weights were exchanged: rows go on, and nothing starts from what the earlier ones computed."""
        running = self.batches[RowKind.RUNNING]
        running.policy_version = policy_version
        running.batch.new_version(policy_version)
        self.forget_unused_versions()

    def forget_unused_versions(self) -> None:
        """Nothing starts any more from rows of versions that no batch has."""
        self._prefixes.forget_other_versions([admitted.policy_version for admitted in self.batches.values()])

    def _give_row(self, running: Running, policy_version: int) -> bool:
        known = running.known_tokens
        needed = self._cache.capacity_for(len(known))
        donor, num = self._prefixes.find(known[:-1], policy_version)
        if donor is not None and donor.capacity <= needed and self._prefixes.take(donor):
            if not self._has_room(needed - donor.capacity):
                self._prefixes.keep(donor)
                return False
            self._prefixes.withdraw(donor)
            if donor.capacity < needed:
                self._resize(donor, needed, num)
            self._cache.turn_into(donor, RowKind.PREFILLED)
            self._cache.mark_written(donor, num)
            running.row, running.num_prefilled = donor, num
            self.cached_tokens += num
        else:
            if not self._has_room(needed):
                return False
            running.row, running.num_prefilled = self._cache.add(needed, RowKind.PREFILLED), 0
        running.prefill_version = policy_version
        return True

    def _has_room(self, num_tokens: int) -> bool:
        """Make it free without taking a row from anybody, if that can be."""
        spare = int(self._cache.num_tokens * _SPARE_SHARE) if self.num_admitted else 0
        if self._cache.free_tokens + self._prefixes.kept_tokens < num_tokens + spare:
            return False
        while self._cache.free_tokens < num_tokens + spare:
            self._prefixes.evict()
        return True

    def _start_from_cache(self, running: Running, wanted: np.ndarray, policy_version: int) -> None:
        if running.num_prefilled > 0:
            return
        donor, num = self._prefixes.find(wanted, policy_version)
        if donor is not None and donor is not running.row:
            assert running.row is not None, "a request is prefilled in a row"
            self._cache.copy_beginning(donor, running.row, num)
            running.num_prefilled, running.prefill_version = num, policy_version
            self.cached_tokens += num

    def _begin_complete(self, admitted: Admitted) -> None:
        for running in list(admitted.prefilling):
            if running.num_prefilled == len(running.known_tokens) - 1:
                self._begin(running, admitted)

    def _begin(self, running: Running, admitted: Admitted) -> None:
        row = running.row
        assert row is not None, "a request is prefilled in a row"
        admitted.prefilling.remove(running)
        self._cache.turn_into(row, admitted.batch.kind)
        admitted.batch.begin(running, admitted.policy_version)
        if running.prefill_version == admitted.policy_version:
            self._prefixes.offer(row, running.known_tokens[:-1], admitted.policy_version)

    def _grow(self, running: Running) -> list[Running]:
        """Move a full row to the next capacity; gives who lost their rows for it, which may be the request itself."""
        preempted: list[Running] = []
        row, admitted = running.row, self._admitted_of(running)
        assert row is not None, "only a request with a row grows"
        capacity = self._cache.capacity_for(row.capacity + 1)
        while self._cache.free_tokens < capacity - row.capacity:
            if self._prefixes.evict():
                continue
            last = max((r for a in self.batches.values() for r in a.all()), key=lambda r: r.arrival)
            self._take_row(last, self._admitted_of(last))
            self.num_preempted += 1
            preempted.append(last)
            if last is running:
                return preempted
        self._resize(row, capacity, admitted.batch.num_written(running))
        return preempted

    def _resize(self, row: CacheRow, capacity: int, num_written: int) -> None:
        self._cache.resize(row, capacity, num_written)

    def _released(self, admitted: Admitted, ended: Ended) -> Ended:
        """Take requests that ended out of their batch; what they computed stays in the cache while there is room."""
        self.generated_tokens += admitted.batch.num_generated
        admitted.batch.num_generated = 0
        for running, _ in ended:
            row = running.row
            assert row is not None, "a request ends in a row"
            admitted.batch.leave(running)
            running.row = None
            if row.policy_version == admitted.policy_version:
                self._cache.turn_into(row, RowKind.KEPT)
                self._prefixes.offer(row, running.known_tokens[:-1], admitted.policy_version)
                self._prefixes.keep(row)
            else:
                self._prefixes.withdraw(row)
                self._cache.remove(row)
        return ended

    def _take_row(self, running: Running, admitted: Admitted) -> None:
        row = running.row
        assert row is not None, "only a row that is there can be taken"
        if running in admitted.prefilling:
            admitted.prefilling.remove(running)
        else:
            admitted.batch.leave(running)
        self._prefixes.withdraw(row)
        self._cache.remove(row)
        running.row, running.num_prefilled = None, 0

    def _admitted_of(self, running: Running) -> Admitted:
        return next(admitted for admitted in self.batches.values() if running in admitted.all())
