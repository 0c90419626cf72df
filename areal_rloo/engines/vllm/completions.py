"""A flight as the body of POST /inference/v1/generate, and the answer as an output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal_rloo.engines.server.answers import NO_SPANS, Count, Output, checked_output, typed
from areal_rloo.engines.server.flights import Flight
from areal_rloo.errors import EngineError, shortened

_LARGEST_SEED = 2**63 - 1
_STEP = 0x9E3779B97F4A7C15  # odd: distinct seeds for distinct lengths
_CLAMPED = -9999.0  # vLLM's value for a logprob that is not finite


def body_of(flight: Flight, cache_name: str) -> dict[str, Any]:
    """Return the body of the HTTP request for the remaining tokens; the salt separates cached prompts by version."""
    return {
        "request_id": flight.server_request_id,
        "token_ids": flight.input_tokens,
        "sampling_params": _sampling_params(flight),
        "cache_salt": cache_name,
        "stream": False,
    }


def _sampling_params(flight: Flight) -> dict[str, Any]:
    """Return the sampling parameters in vLLM's names.

    `ignore_eos` leaves the stop tokens to the request. A segment after the first has a seed of its own; with the seed
    of the request it would repeat the random numbers of the first tokens.
    """
    sampling = flight.request.sampling
    fewest, most = flight.new_tokens
    params: dict[str, Any] = {
        "max_tokens": most,
        "min_tokens": fewest,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "logprobs": 0,  # of the sampled token alone
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "detokenize": False,
    }
    if sampling.seed is not None:
        params["seed"] = (sampling.seed + len(flight.tokens) * _STEP) & _LARGEST_SEED
    return params


def read_output(answer: dict[str, Any], *, sent_version: int, spans: bool, vocab_size: int) -> Output:
    """Check a server's answer; see `checked_output` for the versions.

    Raises:
        EngineError: tokens and logprobs do not match, a number is out of its bounds, or the spans do not cover the
            tokens.
    """
    try:
        (choice,), usage = answer["choices"], answer["usage"]
        tokens, content, reason = choice["token_ids"], choice["logprobs"]["content"], choice["finish_reason"]
        logprobs = [entry["logprob"] for entry in content]
        logprobs_of = [entry["token_id"] for entry in content]
        details = usage.get("prompt_tokens_details")
        cached = details["cached_tokens"] if details else usage["prompt_tokens"]  # unknown: perhaps all
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(
            f"expected token_ids, logprobs and finish_reason of a choice, got {shortened(repr(answer))}"
        ) from error
    if _CLAMPED in logprobs:
        raise EngineError("a logprob is not a finite number: the server's weights or logits are not finite")
    output = checked_output(
        tokens,
        logprobs,
        logprobs_of=logprobs_of,
        reason=reason,
        spans=choice.get("weight_versions") if spans and tokens else NO_SPANS,
        sent_version=sent_version,
        late_tokens=False,
        vocab_size=vocab_size,
    )
    return replace(output, cached_tokens=typed(cached, Count | None, name="cached_tokens") or 0)
