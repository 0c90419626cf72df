"""What every engine does: token ids in, completions out, new weights taken in between.

A rollout worker submits requests and gets a future for each; it never waits for the engine's own loop. Weights are
handed over by `load_weights`, which returns at once; the engine swaps them in between two decode steps. Futures cannot
be cancelled: `abort` ends a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from areal_rloo.trajectory import Completion

if TYPE_CHECKING:
    import torch


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of a completion are chosen.

    `greedy` takes the most likely token; its logprobs are those of the untempered distribution. `top_p` and `top_k`
    truncate the distribution; logprobs are then those of the truncated, renormalized one. Stop tokens have
    probability 0 until `min_new_tokens` were sampled. `seed` makes a completion reproducible by itself.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to make.

    Attributes:
        request_id: unique among the requests of this engine that are not finished.
        prompt_tokens: token ids; requests with equal prompts that start together share one prefill.
        sampling: how tokens are chosen.
        min_version: the engine starts it only when its weights have this policy version or a newer one.
        pinned: keep the weights it starts with until it ends, whatever is loaded meanwhile (evaluation).
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParameters
    min_version: int = 0
    pinned: bool = False


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of an engine; counts are since its start, times in seconds of a monotonic clock.

    `idle_s` is time without any request running; `swap_s` the time the decode loop stood still to take weights.
    `prefill_tokens` were computed of prompts, and again for those of `num_preempted`, whose memory went to others for a
    while; `cached_tokens` of prompts did not have to be. `ready` is False while the engine can take no weights, because
    it is being started.
    """

    policy_version: int
    ready: bool = True
    num_running: int
    num_waiting: int
    num_finished: int
    num_preempted: int = 0
    generated_tokens: int
    prefill_tokens: int
    cached_tokens: int = 0
    decode_steps: int
    weight_updates: int
    idle_s: float
    swap_s: float


class Engine(Protocol):
    """Turns token ids into completions. All methods may be called from any thread."""

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Queue requests, first come first served, all of one call before the next decode step.

        Raises:
            EngineError: a prompt and its `max_new_tokens` do not fit the context, or a request id is in use.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests early: each future gets what was made so far, with finish reason `abort`. Unknown ids pass."""

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Future[int]:
        """Swap in weights by Hugging Face parameter name between two decode steps, keeping the key/value cache.

        The tensors must stay unchanged until the future gives back the policy version.

        Raises (through the future):
            EngineError: a parameter is unknown, missing, or of another shape; the old weights stay whole.
        """

    def statistics(self) -> EngineStatistics:
        """A consistent snapshot."""

    def close(self) -> None:
        """Stop the loop; unfinished requests are aborted."""
