"""Who has which memory: requests into rows, prompts computed beside decoding, rows taken away when memory is full.

    waiting ─► admitted, with a row ─► prefilled, a chunk between two decode steps ─► decoded ─► ended, its row kept
       ▲                                      │                          │
       └──────────────────────────────────────┴── its row taken away ◄───┘

All batches share one arena. When a row must grow and nothing is free, kept rows go first; then the request that was
submitted last loses its row, and waits again with all tokens it has. Rows are given in the order of submission,
whatever the batch: nobody younger gets memory that an earlier request waits for. So of those with a row the one
submitted first never loses it, and those that wait come next, one after the other.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from torch import Tensor

from areal_rloo.engines.embedded.batch import DecodeBatch
from areal_rloo.engines.embedded.cache import SPARE_SHARE, Cache, CacheRow, RowKind
from areal_rloo.engines.embedded.prefill import Segment, prefill
from areal_rloo.engines.embedded.prefixes import Prefixes
from areal_rloo.engines.embedded.running import Running
from areal_rloo.engines.embedded.waiting import Waiting
from areal_rloo.trajectory import FinishReason

_PREFILL_TOKENS = 8192  # of one pass while nothing is decoded
_TAKEN_SHARE = 7 / 8  # of a kept row's tokens, at least, that the request which takes it over goes on from

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

    def admit(self, waiting: Waiting, newest_version: int) -> None:
        """Give rows to waiting requests by their submission, whichever their batch, until one finds no memory.

        Those that wait for newer weights, or for a slot of their batch, hold up none of the other.
        """
        while True:
            heads = [
                (running, admitted)
                for kind, admitted in self.batches.items()
                if admitted.num_free
                and (running := waiting.first(kind, admitted.policy_version, newest_version)) is not None
            ]
            if not heads:
                return
            running, admitted = min(heads, key=lambda head: head[0].arrival)
            if not self._give_row(running, admitted.policy_version):
                return
            waiting.remove(running)
            admitted.prefilling.append(running)

    def prefill(self, admitted: Admitted) -> None:
        """Compute the next chunk of prompts, each known beginning once; those complete are decoded from now on."""
        decoding = any(other.batch.running for other in self.batches.values())
        left = self._chunk_tokens if decoding else _PREFILL_TOKENS
        while admitted.prefilling and left > 0:
            segments: dict[bytes, tuple[Running, Segment]] = {}
            for running in list(admitted.prefilling):
                if left <= 0:
                    break
                assert running.row is not None, "a request is prefilled in a row"
                wanted = running.known_tokens[:-1]
                self._start_from_cache(running, wanted, admitted.policy_version)
                start, key = running.num_prefilled, wanted.tobytes()
                if start == len(wanted):
                    self._begin(running, admitted)
                elif key not in segments:
                    # What follows a beginning is computed with a mask, and scores of every token with all before it.
                    most = left if start == 0 else min(left, self._chunk_tokens)
                    segments[key] = (running, Segment(running.row, start, wanted[start:][:most]))
                    left -= len(segments[key][1].tokens)
            if segments:
                chunk = [segment for _, segment in segments.values()]
                prefill(admitted.batch.parameters, self._cache, chunk, self._rope)
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

    def abort(self, aborted: Collection[Running]) -> Ended:
        """Take requests out; gives those, and what ended by itself meanwhile."""
        ended: Ended = []
        for admitted in self.batches.values():
            ended += self._released(admitted, admitted.batch.drain())
            for running in [running for running in admitted.all() if running in aborted]:
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
        spare = int(self._cache.num_tokens * SPARE_SHARE) if self.num_admitted else 0
        surplus = self._cache.free_tokens + self._prefixes.kept_tokens - needed - spare
        if surplus < 0:
            return False
        donor, num = self._prefixes.find(known[:-1], policy_version)
        if donor is not None and self._may_take(donor, num, needed, surplus):
            self._prefixes.take(donor)
            self._make_free(needed - donor.capacity + spare)
            if donor.capacity < needed:
                self._cache.resize(donor, needed, num)
            self._cache.turn_into(donor, RowKind.PREFILLED)
            self._cache.mark_written(donor, num)
            running.row, running.num_prefilled = donor, num
            self.cached_tokens += num
        else:
            if donor is not None:
                self._prefixes.used(donor)  # its prompt is copied when this one's turn comes
            self._make_free(needed + spare)
            running.row, running.num_prefilled = self._cache.add(needed, RowKind.PREFILLED), 0
        running.prefill_version = policy_version
        return True

    def _may_take(self, donor: CacheRow, num_used: int, needed: int, surplus: int) -> bool:
        """Whether a request goes on in a kept row; otherwise the row stays for others, and its beginning is copied.

        `surplus`: tokens that would be left over if every kept row made room for the request.
        """
        if not self._prefixes.kept(donor) or donor.capacity > needed:
            return False
        return num_used >= _TAKEN_SHARE * len(donor.tokens) or surplus < donor.capacity

    def _make_free(self, num_tokens: int) -> None:
        """Kept rows leave until as many tokens are free; together they hold enough."""
        while self._cache.free_tokens < num_tokens:
            evicted = self._prefixes.evict()
            assert evicted, "the room was counted before"

    def _start_from_cache(self, running: Running, wanted: np.ndarray, policy_version: int) -> None:
        if running.num_prefilled > 0:
            return
        donor, num = self._prefixes.find(wanted, policy_version)
        if donor is not None and donor is not running.row:
            assert running.row is not None, "a request is prefilled in a row"
            self._cache.copy_beginning(donor, running.row, num)
            self._prefixes.used(donor)
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
        self._cache.resize(row, capacity, admitted.batch.num_written(running))
        return preempted

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
