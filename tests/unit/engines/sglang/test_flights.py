"""Flights: checking a server's answers, continuing a cut completion, and the queue."""

import math
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from support.sglang_support import CAPABILITIES

from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.sglang.flights import Flight, FlightQueue, Output, read_output, versions_of
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


def _answer(tokens: list[Any], logprobs: list[Any], reason: str = "length", **meta: Any) -> dict[str, Any]:
    triples = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    spans = [_span("1", 0, len(tokens))]
    return {
        "output_ids": tokens,
        "meta_info": {
            "output_token_logprobs": triples,
            "finish_reason": {"type": reason},
            "weight_versions": spans,
            **meta,
        },
    }


def _output(answer: dict[str, Any], *, spans: bool = True, late_tokens: bool = False, sent_version: int = 7) -> Output:
    return read_output(answer, sent_version=sent_version, spans=spans, late_tokens=late_tokens, vocab_size=100)


def test_an_answer_becomes_a_segment() -> None:
    stopped = _output(_answer([1, 2], [-0.5, -1], "stop"), sent_version=1)
    assert stopped == Output([1, 2], [-0.5, -1], [1, 1], "stop")
    assert _output(_answer([1, 2], [-0.5, -1], "abort"), spans=False) == Output([1, 2], [-0.5, -1], [7, 7], "cut")


def test_late_tokens_get_the_version_of_the_token_before() -> None:
    """The server tags the third token with the later version, but the former weights sampled this token."""
    answer = _answer([1, 2, 3, 4], [-1.0] * 4, weight_versions=[_span("7", 0, 2), _span("8", 2, 4)])
    assert _output(answer, late_tokens=True).versions == [7, 7, 7, 8]
    assert _output(answer).versions == [7, 7, 8, 8]
    first = _answer([1, 2], [-1.0] * 2, weight_versions=[_span("8", 0, 2)])
    assert _output(first, late_tokens=True).versions == [7, 8]
    assert _output(first, late_tokens=True, sent_version=8).versions == [8, 8]


def test_an_update_before_the_first_token_is_detected() -> None:
    answer = _answer([1, 2], [-1.0] * 2, weight_versions=[_span("8", 0, 2)])
    assert _output(answer).overtaken
    assert _output(answer, late_tokens=True).overtaken
    assert not _output(answer, sent_version=8).overtaken


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "expected output_ids"),
        (_answer([1], [None]), "not a finite number"),
        (_answer([1], [math.nan]), "not a finite number"),
        (_answer([1], [-math.inf]), "not a finite number"),
        (_answer([100], [-1.0]), "expected token ids below 100"),
        (_answer([-1], [-1.0]), "expected token ids below 100"),
        (_answer([1], [-1.0], "bored"), "expected finish_reason"),
        (_answer([1, 2], [-1.0, -1.0], output_token_logprobs=[[-1.0, 1, None]]), "expected the logprob of each"),
        (_answer([1], [-1.0], weight_versions=[_span("1", 0, 9)]), "expected weight_versions of all"),
        (_answer([1], [-1.0], weight_versions=[_span("1", 0, 10**14)]), "expected weight_versions of all"),
        ({**_answer([1], [-1.0]), "output_ids": 1}, "expected output_ids"),
    ],
)
def test_an_invalid_answer_is_refused(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        _output(answer)


def _flight(**sampling: Any) -> Flight:
    parameters = SamplingParameters(**{"max_new_tokens": 10, **sampling})
    return Flight(GenerationRequest("a", (5, 6), parameters), Future(), 0)


def test_a_cut_flight_continues_from_its_segments() -> None:
    flight = _flight(min_new_tokens=4, seed=2**64 - 1)
    flight.add(Output([7, 8, 9], [-1.0] * 3, [2] * 3, "cut"))
    body = flight.next_body(replace(CAPABILITIES, seeds=True), "n-3")
    assert body["input_ids"] == [5, 6, 7, 8, 9]
    assert body["extra_key"] == "n-3"
    assert body["sampling_params"]["max_new_tokens"] == 7
    assert body["sampling_params"]["min_new_tokens"] == 1
    assert body["sampling_params"]["sampling_seed"] < 2**63
    assert flight.next_body(CAPABILITIES, "n-3")["rid"] != body["rid"]


def test_a_flight_that_fills_the_context_restarts() -> None:
    flight = _flight()
    flight.add(Output([7, 8, 9], [-1.0] * 3, [2] * 3, "cut"))
    assert flight.next_body(replace(CAPABILITIES, prompt_tokens=4), "n-3")["input_ids"] == [5, 6]
    assert flight.versions == []


def test_only_requests_without_stop_tokens_ignore_the_eos_token() -> None:
    assert _flight().next_body(CAPABILITIES, "n-0")["sampling_params"]["ignore_eos"]
    params = _flight(stop_token_ids=(3,), top_k=5, top_p=0.5).next_body(CAPABILITIES, "n-0")["sampling_params"]
    assert "ignore_eos" not in params
    assert (params["stop_token_ids"], params["top_k"], params["top_p"]) == ([3], 5, 0.5)
    greedy = _flight(greedy=True, temperature=0.7).next_body(CAPABILITIES, "n-0")["sampling_params"]
    assert (greedy["temperature"], greedy["top_k"]) == (0.0, -1)


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
