"""SGLang's requests and answers: a flight as a body, and an answer as an output."""

import math
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from support.server_support import CAPABILITIES

from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.server.answers import Output
from areal_rloo.engines.server.flights import Flight
from areal_rloo.engines.sglang import Capabilities
from areal_rloo.engines.sglang.completions import body_of, read_output
from areal_rloo.errors import EngineError


def _span(version: object, start: object, end: object) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


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
        ({**_answer([1], [-1.0]), "output_ids": 1}, "expected token ids below 100"),
    ],
)
def test_an_invalid_answer_is_refused(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        _output(answer)


def _flight(**sampling: Any) -> Flight:
    parameters = SamplingParameters(**{"max_new_tokens": 10, **sampling})
    return Flight(GenerationRequest("a", (5, 6), parameters), Future(), 0)


def _next_body(flight: Flight, capabilities: Capabilities = CAPABILITIES) -> dict[str, Any]:
    flight.depart(capabilities.prompt_tokens)
    return body_of(flight, capabilities, "n-3")


def test_a_cut_flight_continues_from_its_segments() -> None:
    flight = _flight(min_new_tokens=4, seed=2**64 - 1)
    flight.add(Output([7, 8, 9], [-1.0] * 3, [2] * 3, "cut"))
    body = _next_body(flight, replace(CAPABILITIES, seeds=True))
    assert body["input_ids"] == [5, 6, 7, 8, 9]
    assert body["extra_key"] == "n-3"
    assert body["sampling_params"]["max_new_tokens"] == 7
    assert body["sampling_params"]["min_new_tokens"] == 1
    assert body["sampling_params"]["sampling_seed"] < 2**63
    assert _next_body(flight)["rid"] != body["rid"]


def test_a_flight_that_fills_the_context_restarts() -> None:
    flight = _flight()
    flight.add(Output([7, 8, 9], [-1.0] * 3, [2] * 3, "cut"))
    assert _next_body(flight, replace(CAPABILITIES, prompt_tokens=4))["input_ids"] == [5, 6]
    assert flight.versions == []


def test_only_requests_without_stop_tokens_ignore_the_eos_token() -> None:
    assert _next_body(_flight())["sampling_params"]["ignore_eos"]
    params = _next_body(_flight(stop_token_ids=(3,), top_k=5, top_p=0.5))["sampling_params"]
    assert "ignore_eos" not in params
    assert (params["stop_token_ids"], params["top_k"], params["top_p"]) == ([3], 5, 0.5)
    greedy = _next_body(_flight(greedy=True, temperature=0.7))["sampling_params"]
    assert (greedy["temperature"], greedy["top_k"]) == (0.0, -1)
