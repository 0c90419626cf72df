"""vLLM's requests and answers: a flight as a body, and an answer as an output."""

import math
from concurrent.futures import Future
from typing import Any

import pytest

from areal_rloo.engines.base import GenerationRequest, SamplingParameters
from areal_rloo.engines.server.answers import Output
from areal_rloo.engines.server.flights import Flight
from areal_rloo.engines.vllm.completions import body_of, read_output
from areal_rloo.errors import EngineError


def _span(version: object, start: object, end: object) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


def _answer(tokens: list[Any], values: list[Any], reason: str = "length", **changes: Any) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": logprob} for token, logprob in zip(tokens, values, strict=True)]
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": content},
        "finish_reason": reason,
        "weight_versions": [_span("1", 0, len(tokens))],
    }
    usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}
    return {"choices": [{**choice, **changes}], "usage": usage}


def _output(answer: dict[str, Any], *, spans: bool = True, sent_version: int = 1) -> Output:
    return read_output(answer, sent_version=sent_version, spans=spans, vocab_size=100)


def test_an_answer_becomes_a_segment() -> None:
    assert _output(_answer([1, 2], [-0.5, -1], "stop")) == Output([1, 2], [-0.5, -1], [1, 1], "stop", cached_tokens=3)
    cut = _output(_answer([1, 2], [-0.5, -1], "abort"), spans=False, sent_version=7)
    assert cut == Output([1, 2], [-0.5, -1], [7, 7], "cut", cached_tokens=3)
    assert _output(_answer([], [], "abort", weight_versions=[])).tokens == []


def test_every_token_has_the_version_of_its_span() -> None:
    """A pause waits for the step under way, so no token is late."""
    spans = [_span("7", 0, 2), _span("8", 2, 4)]
    assert _output(_answer([1, 2, 3, 4], [-1.0] * 4, weight_versions=spans), sent_version=7).versions == [7, 7, 8, 8]
    assert _output(_answer([1], [-1.0], weight_versions=[_span("8", 0, 1)]), sent_version=7).overtaken


def test_a_server_that_does_not_tell_cached_tokens_may_have_cached_all() -> None:
    answer = _answer([1], [-1.0])
    answer["usage"]["prompt_tokens_details"] = None
    assert _output(answer).cached_tokens == 5


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "expected token_ids"),
        ({"choices": [], "usage": {}}, "expected token_ids"),
        (_answer([1], [-1.0], logprobs=None), "expected token_ids"),
        (_answer([1], [None]), "not a finite number"),
        (_answer([1], [math.nan]), "not a finite number"),
        (_answer([1], [-9999.0]), "not a finite number"),
        (_answer([100], [-1.0]), "expected token ids below 100"),
        (_answer([1], [-1.0], "repetition"), "expected finish_reason"),
        (_answer([1, 2], [-1.0, -1.0], logprobs={"content": [{"token_id": 1, "logprob": -1}]}), "the logprob of each"),
        (_answer([1], [-1.0], weight_versions=None), "expected weight_versions"),
        (_answer([1], [-1.0], weight_versions=[_span("1", 0, 9)]), "expected weight_versions of all"),
    ],
)
def test_an_invalid_answer_is_refused(answer: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        _output(answer)


def _flight(**sampling: Any) -> Flight:
    parameters = SamplingParameters(**{"max_new_tokens": 10, **sampling})
    flight = Flight(GenerationRequest("a", (5, 6), parameters), Future(), 0)
    flight.depart(63)
    return flight


def test_a_cut_flight_continues_with_another_seed() -> None:
    flight = _flight(min_new_tokens=4, seed=2**64 - 1)
    first = body_of(flight, "n-3")["sampling_params"]
    flight.add(Output([7, 8, 9], [-1.0] * 3, [2] * 3, "cut"))
    flight.depart(63)
    body = body_of(flight, "n-3")
    assert body["token_ids"] == [5, 6, 7, 8, 9]
    assert body["cache_salt"] == "n-3"
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["min_tokens"]) == (7, 1)
    assert first["seed"] != sampling["seed"], "the random numbers of the first tokens would repeat"
    assert max(first["seed"], sampling["seed"]) < 2**63


def test_only_the_stop_tokens_of_the_request_end_a_completion() -> None:
    params = body_of(_flight(stop_token_ids=(3,), top_k=5, top_p=0.5), "n-0")["sampling_params"]
    assert params["ignore_eos"]
    assert (params["stop_token_ids"], params["top_k"], params["top_p"]) == ([3], 5, 0.5)
    assert "seed" not in params
    greedy = body_of(_flight(greedy=True, temperature=0.7), "n-0")["sampling_params"]
    assert (greedy["temperature"], greedy["top_k"]) == (0.0, 0)
