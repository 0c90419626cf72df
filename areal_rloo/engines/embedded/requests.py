"""The states of a request, as types, and the queue of waiting requests.

    Submission ─► WaitingRequest ─► PlacedRequest ─► completion
                        ▲                 │
                        └── preempted ◄───┘

Only a `PlacedRequest` has a cache row. A preempted request keeps the tokens and waits for a row again.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded.cache import CacheRow, RowKind
from areal_rloo.trajectory import Completion, FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Submission:
    """A request as submitted."""

    request: GenerationRequest
    future: Future[Completion]
    seed: int  # of the random numbers; the request's seed, or a random seed drawn at submission
    arrival: int  # position in the order of submissions; the latest request is preempted first

    @property
    def kind(self) -> RowKind:
        return RowKind.PINNED if self.request.pinned else RowKind.RUNNING


@dataclass(frozen=True, slots=True, eq=False)
class WaitingRequest:
    """A request without a row: new, begun elsewhere, preempted, or just ended."""

    submission: Submission
    known_tokens: npt.NDArray[np.int32]  # the prompt and the completion so far
    logprobs: npt.NDArray[np.float32]  # [num_made], of the completion so far
    spans: tuple[tuple[int, int], ...]  # (policy version, index of the first token sampled under it), in order

    @classmethod
    def of(cls, submission: Submission) -> WaitingRequest:
        prompt, begun = np.array(submission.request.prompt_tokens, dtype=np.int32), submission.request.begun
        if begun is None:
            return cls(submission, prompt, np.zeros(0, dtype=np.float32), ())
        starts = np.flatnonzero(np.diff(begun.versions, prepend=-1))
        spans = tuple((int(begun.versions[start]), int(start)) for start in starts)
        return cls(submission, np.concatenate([prompt, begun.tokens]), begun.behaviour_logprobs, spans)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Return the completion so far, int32 [num_made]."""
        return self.known_tokens[len(self.submission.request.prompt_tokens) :]

    def completion(self, reason: FinishReason) -> Completion:
        # A span may start after the last token: the weights changed, and no token followed.
        starts = np.array([start for _, start in self.spans], dtype=np.int64).clip(max=len(self.tokens))
        counts = np.diff(starts, append=len(self.tokens))
        versions = np.repeat(np.array([version for version, _ in self.spans], dtype=np.int32), counts)
        return Completion(
            tokens=self.tokens.copy(), behaviour_logprobs=self.logprobs, versions=versions, finish_reason=reason
        )


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """A request with a row, in prefill or decoded."""

    before: WaitingRequest  # the state when the request got the row; decoding computes the last token
    row: CacheRow  # where the keys and values are
    num_prefilled: int  # tokens in the row; only up to date during prefill
    prefill_version: int  # policy version at the start of the prefill
    spans: list[tuple[int, int]]  # as in WaitingRequest

    @property
    def submission(self) -> Submission:
        return self.before.submission

    @property
    def arrival(self) -> int:
        return self.before.submission.arrival

    def without_row(self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> WaitingRequest:
        """Return the state after the row is gone; copies the completion so far, [num_made] each."""
        prompt = self.before.known_tokens[: len(self.submission.request.prompt_tokens)]
        return WaitingRequest(self.submission, np.concatenate([prompt, tokens]), logprobs.copy(), tuple(self.spans))


class WaitingQueue:
    """Waiting requests, one queue for each batch. The earliest submission is first, preempted or not."""

    def __init__(self) -> None:
        self._by_kind: dict[RowKind, list[WaitingRequest]] = {RowKind.RUNNING: [], RowKind.PINNED: []}

    def __iter__(self) -> Iterator[WaitingRequest]:
        return chain(*self._by_kind.values())

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))

    def add(self, waiting: WaitingRequest) -> None:
        insort(self._by_kind[waiting.submission.kind], waiting, key=lambda other: other.submission.arrival)

    def remove(self, waiting: WaitingRequest) -> None:
        self._by_kind[waiting.submission.kind].remove(waiting)

    def take(self, submissions: Collection[Submission]) -> list[WaitingRequest]:
        found = [waiting for waiting in self if waiting.submission in submissions]
        for waiting in found:
            self.remove(waiting)
        return found

    def first(self, kind: RowKind, policy_version: int, newest_version: int) -> WaitingRequest | None:
        """Return the first request that may start under weights of this version.

        A request that needs newer weights does not block the queue. Exception: when such weights are loaded and the
        pinned batch still has older weights, no new request starts under the older weights. Otherwise the batch would
        never become empty and never get the newer weights.
        """
        exchange = False
        for waiting in self._by_kind[kind]:
            wanted = waiting.submission.request.min_version
            if wanted <= policy_version and (waiting.spans or not exchange):
                return waiting
            exchange = exchange or policy_version < wanted <= newest_version
        return None

    def any_for(self, policy_version: int) -> bool:
        """Return whether a request may start under weights of this version."""
        return any(waiting.submission.request.min_version <= policy_version for waiting in self)

    @property
    def holds_weights(self) -> bool:
        """Return whether a preempted pinned request waits. Such a request must continue under the same weights."""
        return any(waiting.spans for waiting in self._by_kind[RowKind.PINNED])
