"""Who waits and who is under way: first come, first served, at most `num_slots` at a time. Callable from any thread."""

from __future__ import annotations

import bisect
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from areal_rloo.engines.base import EngineStatistics, GenerationRequest
from areal_rloo.engines.requests import check_requests
from areal_rloo.engines.sglang.flight import Flight, Output
from areal_rloo.errors import ArealRlooError, EngineError
from areal_rloo.trajectory import Completion


class FlightQueue:
    """Every flight is in one of two places, waiting or under way, from its submission until its future is done."""

    def __init__(self, *, num_slots: int, context_tokens: int, vocab_size: int) -> None:
        self._num_slots = num_slots
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._sequence = itertools.count()
        self._waiting: deque[Flight] = deque()  # in the order of their submission, those that came back as well
        self._under_way: dict[str, Flight] = {}  # by request id, in the order they were sent
        self._live: dict[str, Flight] = {}
        self._death: EngineError | None = None
        self._finished = 0
        self._generated_tokens = 0
        self._prefill_tokens = 0
        self._resumed = 0
        self._idle_s = 0.0
        self._idle_since_s: float | None = time.monotonic()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Put requests at the end.

        Raises:
            EngineError: one cannot be served, or the engine is no more; then none of them is taken.
        """
        with self._lock:
            if self._death is not None:
                raise self._death
            check_requests(
                requests, in_use=self._live, vocab_size=self._vocab_size, context_tokens=self._context_tokens
            )
            flights = [Flight(request, Future(), next(self._sequence)) for request in requests]
            self._waiting += flights
            self._live |= {flight.request.request_id: flight for flight in flights}
        return [flight.future for flight in flights]

    def abort(self, request_ids: Iterable[str]) -> list[Flight]:
        """End those that wait; gives those under way, which the server must be told of."""
        told = []
        with self._lock:
            flights = [self._live[request_id] for request_id in request_ids if request_id in self._live]
            for flight in flights:
                flight.aborted = True
                if flight.request.request_id in self._under_way:
                    told.append(flight)
                else:
                    self._waiting.remove(flight)
                    self._forget(flight)
        for flight in flights:
            if flight not in told:
                flight.finish("abort")
        return told

    def take(self, policy_version: int) -> list[Flight]:
        """Those that may start now; the ones that need newer weights keep their places."""
        with self._lock:
            taken: list[Flight] = []
            kept: list[Flight] = []
            while self._waiting and len(self._under_way) + len(taken) < self._num_slots:
                flight = self._waiting.popleft()
                (taken if flight.request.min_version <= policy_version else kept).append(flight)
            self._waiting.extendleft(reversed(kept))
            self._under_way |= {flight.request.request_id: flight for flight in taken}
            self._note_idle()
        return taken

    def count_prompt(self, num_tokens: int) -> None:
        """A prompt was sent."""
        with self._lock:
            self._prefill_tokens += num_tokens

    def landed(self, flight: Flight, output: Output) -> None:
        """A segment came; the flight ends, or waits to go on, in its place."""
        with self._lock:
            flight.add(output)
            self._generated_tokens += len(output.tokens)
        reason = flight.end_of(output)
        if reason is None:
            self.put_back([flight])
        else:
            self._end(flight)
            flight.finish(reason)

    def put_back(self, flights: Iterable[Flight]) -> None:
        """What was under way waits again, in its place."""
        ended = []
        with self._lock:
            for flight in flights:
                del self._under_way[flight.request.request_id]
                if flight.aborted:
                    self._forget(flight)
                    ended.append(flight)
                else:
                    bisect.insort(self._waiting, flight, key=lambda one: one.sequence)
                    self._resumed += 1
            self._note_idle()
        for flight in ended:
            flight.finish("abort")

    def fail(self, flight: Flight, error: ArealRlooError) -> None:
        """A flight under way ends with an error."""
        self._end(flight)
        flight.fail(error)

    def under_way(self) -> list[Flight]:
        """A copy."""
        with self._lock:
            return list(self._under_way.values())

    def close(self, death: EngineError, *, failed: bool) -> None:
        """Take nothing more. Everything ends: with the error, or, at a wanted end, with what there is of it."""
        with self._lock:
            if self._death is None:
                self._death = death
            flights = list(self._live.values())
            self._waiting.clear()
            self._under_way.clear()
            self._live.clear()
            self._note_idle()
        for flight in flights:
            if failed:
                flight.fail(death)
            else:
                flight.finish("abort")

    @property
    def resumed(self) -> int:
        """Times that a flight went back to wait."""
        return self._resumed

    def statistics(self, *, ready: bool, policy_version: int, weight_updates: int, swap_s: float) -> EngineStatistics:
        """A consistent snapshot; the arguments are what others know."""
        with self._lock:
            idle_s = self._idle_s
            if self._idle_since_s is not None:
                idle_s += time.monotonic() - self._idle_since_s
            return EngineStatistics(
                ready=ready,
                policy_version=policy_version,
                num_running=len(self._under_way),
                num_waiting=len(self._waiting),
                num_finished=self._finished,
                generated_tokens=self._generated_tokens,
                prefill_tokens=self._prefill_tokens,
                decode_steps=0,  # the server's own affair
                weight_updates=weight_updates,
                idle_s=idle_s,
                swap_s=swap_s,
            )

    def _end(self, flight: Flight) -> None:
        with self._lock:
            self._under_way.pop(flight.request.request_id, None)
            self._forget(flight)
            self._note_idle()

    def _forget(self, flight: Flight) -> None:
        self._live.pop(flight.request.request_id, None)
        self._finished += 1

    def _note_idle(self) -> None:
        now_s = time.monotonic()
        if self._under_way and self._idle_since_s is not None:
            self._idle_s += now_s - self._idle_since_s
            self._idle_since_s = None
        elif not self._under_way and self._idle_since_s is None:
            self._idle_since_s = now_s
