"""Flights: the versions of tokens, a cut completion, and the queue."""

from concurrent.futures import Future
from typing import Any

import pytest

from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.server.answers import Output, versions_of
from areal_rloo.engines.server.flights import Flight, FlightQueue
from areal_rloo.errors import EngineError


def _span(version: object, start: object, end: object) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


def test_spans_become_a_version_for_each_token() -> None:
    assert versions_of([_span("3", 0, 2), _span("5", 2, 5)], 5) == [3, 3, 5, 5, 5]
    assert versions_of([_span("3", 0, 0)], 0) == []


def test_tokens_from_the_first_unknown_version_on_are_cut() -> None:
    assert versions_of([_span("3", 0, 2), _span("default", 2, 4), _span("4", 4, 5)], 5) == [3, 3]


@pytest.mark.parametrize(
    "spans",
    [
        None,
        "3",
        [],
        [{"version": "3"}],
        [_span("3", 0, 4)],
        [_span("3", 1, 5)],
        [_span("3", 0, 2), _span("4", 3, 5)],
        [_span("3", 0, 3), _span("4", 2, 5)],
        [_span("3", 0, 6)],
        [_span("3", 0, 3), _span("4", 3, 1)],
        [_span("3", "0", 5)],
    ],
)
def test_spans_that_do_not_cover_all_tokens_are_refused(spans: object) -> None:
    with pytest.raises(EngineError, match="expected"):
        versions_of(spans, 5)


def _flight(**sampling: Any) -> Flight:
    parameters = SamplingParameters(**{"max_new_tokens": 10, **sampling})
    return Flight(GenerationRequest("a", (5, 6), parameters), Future(), 0)


@pytest.mark.parametrize(
    ("sampling", "tokens", "end"),
    [
        ({"stop_token_ids": (9,)}, [7, 9], "stop"),
        ({"stop_token_ids": (9,), "min_new_tokens": 5}, [7, 9], None),
        ({"max_new_tokens": 2}, [7, 8], "length"),
        ({}, [7, 8], None),
        ({}, [], None),
    ],
)
def test_a_cut_at_the_very_end_ends_the_flight(sampling: dict[str, Any], tokens: list[int], end: str | None) -> None:
    flight = _flight(**sampling)
    output = Output(tokens, [-1.0] * len(tokens), [0] * len(tokens), "cut")
    flight.add(output)
    assert flight.end_of(output) == end


def _queue(num_slots: int = 2) -> FlightQueue:
    return FlightQueue(num_slots=num_slots, context_tokens=64, vocab_size=100)


def _requests(*names: str, min_version: int = 0) -> list[GenerationRequest]:
    return [GenerationRequest(name, (5,), SamplingParameters(max_new_tokens=4), min_version) for name in names]


def _names(flights: list[Flight]) -> list[str]:
    return [flight.request.request_id for flight in flights]


def test_a_requeued_flight_keeps_its_place() -> None:
    queue = _queue()
    queue.submit(_requests("a", "b", "c", "d"))
    taken = queue.take(0)
    assert _names(taken) == ["a", "b"]
    assert queue.take(0) == []
    queue.put_back(reversed(taken))
    assert _names(queue.take(0)) == ["a", "b"]
    assert queue.resumed == 2


def test_a_flight_for_later_weights_does_not_block_others() -> None:
    queue = _queue()
    queue.submit(_requests("later", min_version=2))
    queue.submit(_requests("a", "b"))
    assert _names(queue.take(1)) == ["a", "b"]
    queue.put_back(queue.under_way())
    assert _names(queue.take(2)) == ["later", "a"]


def test_every_future_is_done_exactly_once() -> None:
    queue = _queue()
    futures = queue.submit(_requests("a", "b", "c"))
    (first, _) = queue.take(0)
    queue.landed(first, Output([1, 2, 3, 4], [-1.0] * 4, [0] * 4, "length"))
    assert queue.abort(["c"]) == []
    assert queue.abort(["b", "a"]) == queue.under_way()
    queue.close(EngineError("gone"), failed=True)
    assert futures[0].result(timeout=0).finish_reason == "length"
    assert futures[2].result(timeout=0).finish_reason == "abort"
    assert isinstance(futures[1].exception(timeout=0), EngineError)
    with pytest.raises(EngineError, match="gone"):
        queue.submit(_requests("d"))
