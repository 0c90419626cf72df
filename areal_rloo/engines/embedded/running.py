"""A request from its submission to its completion, through as many rows as it takes."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded.cache import CacheRow, RowKind
from areal_rloo.trajectory import Completion, FinishReason


def _no_tokens() -> npt.NDArray[np.int32]:
    return np.zeros(0, dtype=np.int32)


def _no_logprobs() -> npt.NDArray[np.float32]:
    return np.zeros(0, dtype=np.float32)


@dataclass(slots=True, eq=False)
class Running:
    """A request, and what was made of it before it lost its row.

    Attributes:
        seed: of its random numbers; the request's, or one drawn at its submission.
        arrival: its place in the order of submissions; the latest loses its row first.
        tokens: int32, made before the present row.
        logprobs: float32, theirs.
        spans: (policy version, first token made by it), in order.
        row: where its keys and values are; None while it waits.
        num_prefilled: tokens of its beginning that are in the row, until it is decoded.
        prefill_version: of the weights that began to compute the row.
        known_tokens: int32, prompt and completion so far; all but the last are in the cache before it is decoded.
    """

    request: GenerationRequest
    future: Future[Completion]
    seed: int
    arrival: int
    tokens: npt.NDArray[np.int32] = field(default_factory=_no_tokens)
    logprobs: npt.NDArray[np.float32] = field(default_factory=_no_logprobs)
    spans: list[tuple[int, int]] = field(default_factory=list)
    row: CacheRow | None = None
    num_prefilled: int = 0
    prefill_version: int = 0
    known_tokens: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.known_tokens = np.array(self.request.prompt_tokens, dtype=np.int32)

    @property
    def kind(self) -> RowKind:
        """Of the batch that decodes it."""
        return RowKind.PINNED if self.request.pinned else RowKind.RUNNING

    def keep_made(self, tokens: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
        """Everything made so far, [num_tokens] each."""
        self.tokens, self.logprobs = tokens.copy(), logprobs.copy()
        prompt = self.known_tokens[: len(self.request.prompt_tokens)]
        self.known_tokens = np.concatenate([prompt, self.tokens])

    def completion(self, reason: FinishReason) -> Completion:
        """What `tokens` hold."""
        # A span may begin behind the last token: the weights changed after it, and none came any more.
        starts = np.array([start for _, start in self.spans], dtype=np.int64).clip(max=len(self.tokens))
        counts = np.diff(starts, append=len(self.tokens))
        versions = np.repeat(np.array([version for version, _ in self.spans], dtype=np.int32), counts)
        return Completion(tokens=self.tokens, behaviour_logprobs=self.logprobs, versions=versions, finish_reason=reason)
