"""The engine protocol: token ids in, completions out, new weights loaded in between.

A rollout worker submits requests, gets a future for each, and awaits the future with `asyncio.wrap_future`.
`load_weights` returns at once; the engine swaps the weights in between two decode steps. A cancelled wait cancels no
future of a request or an update (`uncancellable_future`): `abort` ends a request.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple, Protocol, SupportsIndex, TypeVar

import msgspec

from areal_rloo.errors import EpisodeError, GenerationError
from areal_rloo.telemetry.metric import Metric
from areal_rloo.trajectory import Completion

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
UNKNOWN = -1  # version of unknown weights; the learner then offers a version, and no token comes before


class SamplingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of a completion are chosen.

    `greedy` takes the most likely token; the logprobs are those of the distribution at temperature 1. `top_p` and
    `top_k` truncate the distribution; the logprobs are those of the truncated, renormalized distribution. Stop tokens
    have probability 0 until `min_new_tokens` are sampled. A `seed` makes the completion reproducible.
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
    """Asks for one completion.

    Attributes:
        request_id: unique among the engine's unfinished requests.
        prompt_tokens: token ids; requests that start together with equal prompts share a prefill.
        min_version: the request starts only under weights of this policy version or a newer version.
        pinned: keep the same weights from the first token to the last, whatever is loaded meanwhile (evaluation).
        begun: the first tokens of the completion, sampled earlier, perhaps by another process. `sampling` counts them.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParameters
    min_version: int = 0
    pinned: bool = False
    begun: Completion | None = None


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of an engine. Counts are since the engine's start, seconds are of a monotonic clock.

    `ready` is False while the engine starts and can take no weights.
    """

    metrics_prefix: ClassVar[str] = "engine_"

    policy_version: Annotated[int, Metric("Version of the weights this worker's engine runs", "versions")]
    ready: bool = True
    num_running: Annotated[int, Metric("Completions being decoded")]
    num_waiting: Annotated[int, Metric("Requests waiting for a slot or a version")]
    num_finished: Annotated[int, Metric("Completions finished", kind="counter")]
    num_preempted: Annotated[int, Metric("Completions preempted for cache memory, computed again", kind="counter")] = 0
    generated_tokens: Annotated[int, Metric("Completion tokens this worker generated", "tokens", "counter")]
    prefill_tokens: Annotated[int, Metric("Prompt tokens computed, again after a preemption", "tokens", "counter")]
    cached_tokens: Annotated[int, Metric("Prompt tokens found in the cache", "tokens", "counter")] = 0
    decode_steps: Annotated[int, Metric("Steps of the decode loop", kind="counter")]
    weight_updates: Annotated[int, Metric("Versions this worker took", kind="counter")]
    idle_s: Annotated[float, Metric("Time without a request to run", "s", "counter", healthy=(0, 0.5))]
    busy_s: Annotated[float, Metric("Time with a completion being decoded", "s", "counter")] = 0.0
    decoding_s: Annotated[float, Metric("Time in decoding, summed over completions", "s", "counter")] = 0.0
    swap_s: Annotated[float, Metric("Time decoding stood still to take weights", "s", "counter")]
    turns_given: Annotated[int, Metric("Turns given to the learner (share_devices: in_turns)", kind="counter")] = 0
    turn_wait_s: Annotated[float, Metric("Time the engine waited for its turn", "s", "counter")] = 0.0

    @property
    def ready_version(self) -> int | None:
        """The policy version, or None while the engine can take no weights."""
        return self.policy_version if self.ready else None


class Engine(Protocol):
    """Turns token ids into completions, for a worker's event loop; `statistics` may be called from any thread."""

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Queue requests, first come first served. All requests of a call are queued before the next decode step.

        The future of a request that cannot be served has a `GenerationError` (`check_request`); the others are queued.

        Raises:
            EngineError: the engine has stopped.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests early: each future gets the tokens made so far, with finish reason `abort`. Skip unknown ids."""

    def unfinished(self) -> Future[dict[str, Completion]]:
        """Return the tokens made so far of the unfinished requests that have any, by request id; the requests go on.

        The completions have the finish reason `abort`, and continue in another engine as `GenerationRequest.begun`. A
        cancelled future asks for nothing any more.

        Raises:
            EngineError: the engine has stopped; now, or through the future.
        """

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Future[int]:
        """Swap in weights by Hugging Face parameter name between two decode steps; keep the key/value cache.

        The tensors must stay unchanged until the future returns the policy version.

        Raises (through the future):
            EngineError: a parameter is unknown, missing, or of another shape. The present weights stay whole.
        """

    def statistics(self) -> EngineStatistics:
        """Return a snapshot."""


def uncancellable_future() -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def integers(field: str, values: Sequence[object]) -> tuple[int, ...]:
    """Return integers of any library, which an episode of the user may give, as Python's.

    Raises:
        EpisodeError: a value is no integer.
    """
    for value in values:
        if not isinstance(value, SupportsIndex):
            raise EpisodeError("wrong_tokens", f"{field}: expected integers, got {value!r:.100}")
    return tuple(map(operator.index, values))  # type: ignore[arg-type]


def check_request(request: GenerationRequest, *, in_use: Container[str], vocab_size: int, context_tokens: int) -> None:
    """Refuse a request that cannot be served: such a request may crash the engine, and with it all other requests.

    Raises:
        GenerationError: the id is in use, a token is no id of the vocabulary, the prompt is empty or does not fit the
            context together with `max_new_tokens`, no token could be sampled, or `begun` is of newer weights.
    """
    name, sampling = f"request {request.request_id}", request.sampling
    if not request.prompt_tokens:
        raise GenerationError(f"{name}: the prompt has no token")
    if not isinstance(sampling.max_new_tokens, int) or sampling.max_new_tokens < 1:
        raise GenerationError(f"{name}: expected max_new_tokens of at least 1, got {sampling.max_new_tokens}")
    if not sampling.temperature > 0 and not sampling.greedy:
        raise GenerationError(
            f"{name}: expected a temperature above 0, got {sampling.temperature}; set greedy for the most likely tokens"
        )
    begun = () if request.begun is None else request.begun.tokens.tolist()
    for field, tokens in (
        ("a prompt", request.prompt_tokens),
        ("stop_token_ids", sampling.stop_token_ids),
        ("begun", begun),
    ):
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise GenerationError(f"{name}: {field}: expected token ids from 0 to {vocab_size - 1}, got {token!r}")
    if len(begun) >= sampling.max_new_tokens:
        raise GenerationError(f"{name}: expected fewer than {sampling.max_new_tokens} tokens begun, got {len(begun)}")
    if request.begun is not None and max(request.begun.versions, default=0) > request.min_version:
        raise GenerationError(f"{name}: begun under later weights than min_version {request.min_version}")
    needed = len(request.prompt_tokens) + sampling.max_new_tokens
    if needed > context_tokens:
        raise GenerationError(f"{name}: needs {needed} tokens, the context holds {context_tokens}")
    if request.request_id in in_use:
        raise GenerationError(f"{name}: this id is in use")


class WorkTimes(NamedTuple):
    """Seconds since the start of an engine; the fields are those of EngineStatistics."""

    idle_s: float
    busy_s: float
    decoding_s: float

    def after(self, seconds: float, num_running: int) -> WorkTimes:
        """Return the times after so many seconds with this number of running requests."""
        idle_s, busy_s = (0.0, seconds) if num_running else (seconds, 0.0)
        return WorkTimes(self.idle_s + idle_s, self.busy_s + busy_s, self.decoding_s + num_running * seconds)


class WorkClock:
    """Adds up the seconds without and with running requests; starts idle. `times` may be called from any thread."""

    def __init__(self) -> None:
        self._state = (WorkTimes(0.0, 0.0, 0.0), time.monotonic(), 0)  # replaced as a whole

    def note(self, num_running: int) -> None:
        """Record the number of running requests from now on."""
        times, since_s, before = self._state
        now_s = time.monotonic()
        self._state = (times.after(now_s - since_s, before), now_s, num_running)

    def times(self) -> WorkTimes:
        times, since_s, num_running = self._state
        return times.after(max(0.0, time.monotonic() - since_s), num_running)
