"""A flight is a completion in progress. The queue knows which flights wait and which are under way.

A flight usually takes a single HTTP request. If this request is cut short (an update in mode abort, a crashed server),
another HTTP request continues the flight with the original prompt and every segment so far as the prompt.
"""

from __future__ import annotations

import bisect
import itertools
import uuid
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from areal_rloo.engines.base import EngineStatistics, GenerationRequest, WorkClock, check_request, uncancellable_future
from areal_rloo.engines.server.answers import Output
from areal_rloo.errors import ArealRlooError, EngineError, GenerationError
from areal_rloo.trajectory import Completion, FinishReason


@dataclass(slots=True, eq=False)
class Flight:
    """A request, the caller's future, and the completion so far.

    Attributes:
        sequence: position in the order of submissions.
        tokens: of all segments; `logprobs` and `versions` have the same length.
        server_request_id: of the current HTTP request. All ids have the same length: the server aborts by prefix.
        aborted: the caller aborted the request.
        futile: consecutive HTTP requests without a token.
    """

    request: GenerationRequest
    future: Future[Completion]
    sequence: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    server_request_id: str = ""
    aborted: bool = False
    futile: int = 0

    @property
    def input_tokens(self) -> list[int]:
        """Return the prompt of the next HTTP request: the prompt and every segment so far."""
        return [*self.request.prompt_tokens, *self.tokens]

    @property
    def new_tokens(self) -> tuple[int, int]:
        """Return the fewest and the most tokens of the next HTTP request."""
        sampling, done = self.request.sampling, len(self.tokens)
        return max(0, sampling.min_new_tokens - done), sampling.max_new_tokens - done

    def depart(self, most_prompt_tokens: int) -> None:
        """Prepare the next HTTP request. Tokens so far that no longer fit a prompt are discarded."""
        if len(self.request.prompt_tokens) + len(self.tokens) > most_prompt_tokens:
            self.tokens, self.logprobs, self.versions = [], [], []  # servers refuse a prompt as long as the context
        self.server_request_id = uuid.uuid4().hex

    def add(self, output: Output) -> None:
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.versions += output.versions
        self.futile = 0

    def end_of(self, output: Output) -> FinishReason | None:
        """Return the finish reason after this last segment; None if the flight continues."""
        if output.end != "cut":
            return output.end
        sampling = self.request.sampling
        stopped = bool(self.tokens) and self.tokens[-1] in sampling.stop_token_ids
        if stopped and len(self.tokens) > sampling.min_new_tokens:
            return "stop"  # the cut came right after the stop token
        if len(self.tokens) >= sampling.max_new_tokens:
            return "length"
        return "abort" if self.aborted else None

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            tokens=np.asarray(self.tokens, dtype=np.int32),
            behaviour_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int32),
            finish_reason=reason,
        )


class FlightQueue:
    """First come, first served; at most `num_slots` flights are under way.

    Every flight is either waiting or under way from submission until the future is done. `prefill_tokens` counts the
    prompt tokens sent, and `resumed` counts how often flights were requeued.
    """

    def __init__(self, *, num_slots: int, context_tokens: int, vocab_size: int) -> None:
        self._num_slots = num_slots
        self._check = partial(check_request, vocab_size=vocab_size, context_tokens=context_tokens)
        self._sequence = itertools.count()
        self._waiting: deque[Flight] = deque()  # in the order of submission, requeued flights too
        self._under_way: dict[str, Flight] = {}  # by request id, in the order of sending
        self._live: dict[str, Flight] = {}
        self._finished = 0
        self._generated_tokens = 0
        self._clock = WorkClock()
        self.prefill_tokens = 0
        self.resumed = 0
        self.death: EngineError | None = None

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Append requests; the future of a request that cannot be served has a `GenerationError`.

        Raises:
            EngineError: the engine has stopped.
        """
        if self.death is not None:
            raise self.death
        return [self._queued(request) for request in requests]

    def abort(self, request_ids: Iterable[str]) -> list[Flight]:
        """End waiting flights; return the flights under way, which the server must abort."""
        flights = [self._live[request_id] for request_id in request_ids if request_id in self._live]
        for flight in flights:
            flight.aborted = True
            if flight.request.request_id not in self._under_way:
                self._waiting.remove(flight)
                self.end(flight, "abort")
        return [flight for flight in flights if flight.request.request_id in self._under_way]

    def take(self, policy_version: int) -> list[Flight]:
        """Return the flights that may start now. Flights that need newer weights keep their places."""
        taken, kept = list[Flight](), list[Flight]()
        while self._waiting and len(self._under_way) + len(taken) < self._num_slots:
            flight = self._waiting.popleft()
            (taken if flight.request.min_version <= policy_version else kept).append(flight)
        self._waiting.extendleft(reversed(kept))
        self._under_way |= {flight.request.request_id: flight for flight in taken}
        self._clock.note(len(self._under_way))
        return taken

    def landed(self, flight: Flight, output: Output) -> None:
        """Add a segment; end the flight, or requeue the flight in the same place."""
        flight.add(output)
        self._generated_tokens += len(output.tokens)
        reason = flight.end_of(output)
        if reason is None:
            self.put_back([flight])
        else:
            self.end(flight, reason)

    def end(self, flight: Flight, how: FinishReason | ArealRlooError) -> None:
        """End a flight that does not wait: with the completion so far, or with an error."""
        self._under_way.pop(flight.request.request_id, None)
        self._clock.note(len(self._under_way))
        del self._live[flight.request.request_id]
        self._finished += 1
        if isinstance(how, ArealRlooError):
            flight.future.set_exception(how)
        else:
            flight.future.set_result(flight.completion(how))

    def put_back(self, flights: Iterable[Flight]) -> None:
        """Requeue flights under way, in the order of submission."""
        for flight in flights:
            if flight.aborted:
                self.end(flight, "abort")
            else:
                del self._under_way[flight.request.request_id]
                bisect.insort(self._waiting, flight, key=lambda other: other.sequence)
                self.resumed += 1
        self._clock.note(len(self._under_way))

    def unfinished(self) -> dict[str, Completion]:
        """Return the completions so far, without the tokens that the server has not returned."""
        return {name: flight.completion("abort") for name, flight in self._live.items() if flight.tokens}

    def has_requests(self) -> bool:
        return bool(self._live)

    def under_way(self) -> list[Flight]:
        return list(self._under_way.values())

    def close(self, death: EngineError, *, failed: bool) -> None:
        """Refuse new requests and end all flights: with the error if `failed`, else with the tokens so far."""
        self.death = death
        self._waiting.clear()
        for flight in list(self._live.values()):
            self.end(flight, death if failed else "abort")

    def _queued(self, request: GenerationRequest) -> Future[Completion]:
        future: Future[Completion] = uncancellable_future()
        try:
            self._check(request, in_use=self._live)
        except GenerationError as error:
            future.set_exception(error)
            return future
        flight = self._live[request.request_id] = Flight(request, future, next(self._sequence))
        if (begun := request.begun) is not None:
            flight.tokens = begun.tokens.tolist()
            flight.logprobs = begun.behaviour_logprobs.tolist()
            flight.versions = begun.versions.tolist()
        self._waiting.append(flight)
        return future

    def statistics(self, *, ready: bool, policy_version: int, weight_updates: int, swap_s: float) -> EngineStatistics:
        """Return a snapshot; the arguments are the server's part."""
        return EngineStatistics(
            ready=ready,
            policy_version=policy_version,
            num_running=len(self._under_way),
            num_waiting=len(self._waiting),
            num_finished=self._finished,
            generated_tokens=self._generated_tokens,
            prefill_tokens=self.prefill_tokens,
            decode_steps=0,  # only the server knows
            weight_updates=weight_updates,
            **self._clock.times()._asdict(),
            swap_s=swap_s,
        )
