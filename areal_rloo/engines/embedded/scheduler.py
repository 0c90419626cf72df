"""Assign cache rows: place waiting requests, prefill between decode steps, preempt requests when memory is full.

    waiting ─► placed in a row ─► prefilled, a chunk between two decode steps ─► decoded ─► ended; the row is kept
       ▲                                      │                          │
       └──────────────────────────────────────┴──────── preempted ◄──────┘

All batches share the cache's arena. When a row must grow and no memory is free, kept rows are evicted first; then the
latest submission is preempted, and waits with all tokens. Rows are given in the order of submission, across
batches: a later request never passes an earlier request without memory. So the earliest request with a row is never
preempted, and every waiting request eventually becomes the earliest.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from torch import Tensor

from areal_rloo.engines.embedded.batch import DecodeBatch, Ending
from areal_rloo.engines.embedded.cache import SPARE_SHARE, Cache, CacheRow, Prefixes, RowKind
from areal_rloo.engines.embedded.requests import PlacedRequest, Submission, WaitingQueue, WaitingRequest
from areal_rloo.engines.embedded.transformer import Segment, prefill
from areal_rloo.trajectory import Completion

_PREFILL_TOKENS = 8192  # of a prefill pass while no request is decoded
_TAKEN_SHARE = 7 / 8  # a request that reuses at least this share of a kept row's tokens takes the row

Ended = list[tuple[Submission, Completion]]


class Scheduler:
    """Owns the arena and knows which request has which row; counts tokens for `EngineStatistics`."""

    def __init__(self, cache: Cache, rope: Tensor, *, prefill_chunk_tokens: int) -> None:
        self.batches: dict[RowKind, DecodeBatch] = {}  # the batch of pinned requests exists only while needed
        self.prefill_tokens = self.cached_tokens = self.generated_tokens = self.num_preempted = 0
        self._cache = cache
        self._rope = rope
        self._chunk_tokens = prefill_chunk_tokens
        self._prefixes = Prefixes(cache)

    @property
    def num_placed(self) -> int:
        return sum(batch.num_requests for batch in self.batches.values())

    def admit(self, queue: WaitingQueue, newest_version: int) -> None:
        """Place waiting requests in the order of submission, across batches, until a request finds no memory.

        A request that waits for newer weights, or for a slot, does not block other requests.
        """
        while True:
            heads = [
                (waiting, batch)
                for kind, batch in self.batches.items()
                if batch.has_free_slot
                and (waiting := queue.first(kind, batch.policy_version, newest_version)) is not None
            ]
            if not heads:
                return
            waiting, batch = min(heads, key=lambda head: head[0].submission.arrival)
            placed = self._place(waiting, batch.policy_version)
            if placed is None:
                return
            queue.remove(waiting)
            batch.prefilling.append(placed)

    def prefill(self, batch: DecodeBatch) -> None:
        """Compute the next chunk of prompts, shared beginnings once; decode the requests with complete prompts."""
        decoding = any(other.running for other in self.batches.values())
        left = self._chunk_tokens if decoding else _PREFILL_TOKENS
        while batch.prefilling and left > 0:
            segments: dict[bytes, tuple[PlacedRequest, Segment]] = {}
            for placed in list(batch.prefilling):
                if left <= 0:
                    break
                wanted = placed.before.known_tokens[:-1]
                self._start_from_cache(placed, wanted, batch.policy_version)
                start, key = placed.num_prefilled, wanted.tobytes()
                if start == len(wanted):
                    self._begin(placed, batch)
                elif key not in segments:
                    # A segment after cached tokens needs a mask and scores with all of these tokens: keep it short.
                    most = left if start == 0 else min(left, self._chunk_tokens)
                    segments[key] = (placed, Segment(placed.row, start, wanted[start:][:most]))
                    left -= len(segments[key][1].tokens)
            if segments:
                chunk = [segment for _, segment in segments.values()]
                prefill(batch.parameters, self._cache, chunk, self._rope)
                for placed, segment in segments.values():
                    placed.num_prefilled = segment.end
                    self.prefill_tokens += len(segment.tokens)
        for placed in list(batch.prefilling):
            if placed.num_prefilled == len(placed.before.known_tokens) - 1:
                self._begin(placed, batch)

    def make_room(self) -> tuple[Ended, list[WaitingRequest]]:
        """Make room for a token in every row; return the ended requests and the preempted requests."""
        ended: Ended = []
        preempted: dict[PlacedRequest, WaitingRequest] = {}
        if not any(batch.full() for batch in self.batches.values()):
            return ended, []
        for batch in self.batches.values():
            ended += self._released(batch, batch.collect())
        full = [placed for batch in self.batches.values() for placed in batch.full()]
        for placed in sorted(full, key=lambda placed: placed.arrival):
            if placed not in preempted:
                self._grow(placed, preempted)
        return ended, list(preempted.values())

    def step(self, batch: DecodeBatch) -> Ended:
        """Decode a token for every row; return the ended requests."""
        return self._released(batch, batch.step())

    def abort(self, aborted: Collection[Submission]) -> Ended:
        """End these requests; return them, and the requests ended meanwhile."""
        ended: Ended = []
        for batch in self.batches.values():
            ended += self._released(batch, batch.collect())
            for placed in batch.requests():
                if placed.submission in aborted:
                    ended.append((placed.submission, self._preempt(placed).completion("abort")))
        return ended

    def so_far(self) -> tuple[Ended, list[WaitingRequest]]:
        """Return the requests ended meanwhile, and the placed requests with all their tokens."""
        ended: Ended = []
        for batch in self.batches.values():
            ended += self._released(batch, batch.collect())
        return ended, [batch.so_far(placed) for batch in self.batches.values() for placed in batch.requests()]

    def release_memory(self) -> tuple[Ended, list[WaitingRequest]]:
        """Free the memory of the cache; return the requests ended meanwhile and the preempted requests.

        Place no request until `Cache.allocate`.
        """
        ended, preempted = self.so_far()
        for batch in self.batches.values():
            for placed in batch.requests():
                batch.leave(placed)
            batch.release_memory()
        self._prefixes.clear()
        self._cache.release()
        return ended, preempted

    def new_version(self, policy_version: int) -> None:
        """Continue the running rows under swapped weights; reuse no row of earlier weights."""
        self.batches[RowKind.RUNNING].new_version(policy_version)
        self.forget_unused_versions()

    def forget_unused_versions(self) -> None:
        """Drop kept rows of versions without a batch."""
        self._prefixes.forget_other_versions([batch.policy_version for batch in self.batches.values()])

    def _place(self, waiting: WaitingRequest, policy_version: int) -> PlacedRequest | None:
        """Give the request a row, with the cached beginning of the tokens; None if memory is short."""
        known = waiting.known_tokens
        needed = self._cache.capacity_for(len(known))
        spare = int(self._cache.num_tokens * SPARE_SHARE) if self.num_placed else 0
        surplus = self._cache.free_tokens + self._prefixes.kept_tokens - needed - spare
        if surplus < 0:
            return None
        donor, num = self._prefixes.find(known[:-1], policy_version)
        if donor is not None and self._may_take(donor, num, needed, surplus):
            self._prefixes.take(donor)
            self._make_free(needed - donor.capacity + spare)
            if donor.capacity < needed:
                self._cache.resize(donor, needed, num)
            self._cache.turn_into(donor, RowKind.PREFILLED)
            self._cache.mark_written(donor, num)
            self.cached_tokens += num
            return PlacedRequest(waiting, donor, num, policy_version, list(waiting.spans))
        if donor is not None:
            self._prefixes.used(donor)  # prefill copies the donor's beginning later
        self._make_free(needed + spare)
        row = self._cache.add(needed, RowKind.PREFILLED)
        return PlacedRequest(waiting, row, 0, policy_version, list(waiting.spans))

    def _may_take(self, donor: CacheRow, num_used: int, needed: int, surplus: int) -> bool:
        """Return whether a request may take over a kept row. Otherwise the request copies the beginning.

        `surplus`: tokens left over if every kept row made room for the request.
        """
        if donor not in self._prefixes.kept or donor.capacity > needed:
            return False
        return num_used >= _TAKEN_SHARE * len(donor.tokens) or surplus < donor.capacity

    def _make_free(self, num_tokens: int) -> None:
        """Evict kept rows until as many tokens are free; together they must hold enough."""
        while self._cache.free_tokens < num_tokens:
            evicted = self._prefixes.evict()
            assert evicted, "the caller checked that kept rows hold enough"

    def _start_from_cache(self, placed: PlacedRequest, wanted: np.ndarray, policy_version: int) -> None:
        if placed.num_prefilled > 0:
            return
        donor, num = self._prefixes.find(wanted, policy_version)
        if donor is not None and donor is not placed.row:
            self._cache.copy_beginning(donor, placed.row, num)
            self._prefixes.used(donor)
            placed.num_prefilled, placed.prefill_version = num, policy_version
            self.cached_tokens += num

    def _begin(self, placed: PlacedRequest, batch: DecodeBatch) -> None:
        self._cache.turn_into(placed.row, batch.kind)
        batch.begin(placed)
        if placed.prefill_version == batch.policy_version:
            self._prefixes.offer(placed.row, placed.before.known_tokens[:-1], batch.policy_version)

    def _grow(self, placed: PlacedRequest, preempted: dict[PlacedRequest, WaitingRequest]) -> None:
        """Give a full row the next capacity. Add the requests preempted for it to `preempted`, perhaps this request."""
        row = placed.row
        capacity = self._cache.capacity_for(row.capacity + 1)
        while self._cache.free_tokens < capacity - row.capacity:
            if self._prefixes.evict():
                continue
            last = max((r for batch in self.batches.values() for r in batch.requests()), key=lambda r: r.arrival)
            preempted[last] = self._preempt(last)
            self.num_preempted += 1
            if last is placed:
                return
        self._cache.resize(row, capacity, self.batches[placed.submission.kind].num_written(placed))

    def _released(self, batch: DecodeBatch, ending: Ending) -> Ended:
        """Take ended requests out of their batch. Their rows are kept in the cache while there is room."""
        self.generated_tokens += batch.num_generated
        batch.num_generated = 0
        ended: Ended = []
        for placed, reason in ending:
            row, waiting = placed.row, batch.leave(placed)
            if row.policy_version == batch.policy_version:
                self._cache.turn_into(row, RowKind.KEPT)
                self._prefixes.offer(row, waiting.known_tokens[:-1], batch.policy_version)
                self._prefixes.kept[row] = None
            else:
                self._prefixes.withdraw(row)
                self._cache.remove(row)
            ended.append((placed.submission, waiting.completion(reason)))
        return ended

    def _preempt(self, placed: PlacedRequest) -> WaitingRequest:
        """Take the row away; return the request with all tokens."""
        waiting = self.batches[placed.submission.kind].leave(placed)
        self._prefixes.withdraw(placed.row)
        self._cache.remove(placed.row)
        return waiting
