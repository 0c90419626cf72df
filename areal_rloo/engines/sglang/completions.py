"""A flight as the body of POST /generate, and the answer as an output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal_rloo.engines.server.answers import NO_SPANS, Count, Output, checked_output, typed
from areal_rloo.engines.server.flights import Flight
from areal_rloo.engines.sglang.capabilities import Capabilities
from areal_rloo.errors import EngineError, shortened

_LARGEST_SEED = 2**63 - 1


def body_of(flight: Flight, capabilities: Capabilities, cache_name: str) -> dict[str, Any]:
    """Return the body of the HTTP request for the remaining tokens.

    A cached prompt belongs to certain weights. In mode in_place the server's cache survives an update; the cache name
    keeps a request from continuing prompts of another version.
    """
    body: dict[str, Any] = {
        "rid": flight.server_request_id,
        "input_ids": flight.input_tokens,
        "sampling_params": _sampling_params(flight, capabilities),
        "return_logprob": True,
        "stream": False,
    }
    if capabilities.cache_key is not None:
        body[capabilities.cache_key] = cache_name
    return body


def _sampling_params(flight: Flight, capabilities: Capabilities) -> dict[str, Any]:
    """Return the sampling parameters in SGLang's names.

    `ignore_eos` also disables `stop_token_ids`, so it is set only for requests without stop tokens. Otherwise the
    model's own end-of-sequence tokens end a completion too. A seed has an effect only with deterministic inference.
    With top_p or top_k, SGLang's logprobs are those of the whole distribution.
    """
    sampling = flight.request.sampling
    fewest, most = flight.new_tokens
    params: dict[str, Any] = {
        "max_new_tokens": most,
        "min_new_tokens": fewest,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": 1.0 if sampling.greedy else sampling.top_p,
        "top_k": -1 if sampling.greedy or sampling.top_k == 0 else sampling.top_k,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    else:
        params["ignore_eos"] = True
    if sampling.seed is not None and capabilities.seeds:
        params["sampling_seed"] = sampling.seed & _LARGEST_SEED
    return params


def read_output(
    answer: dict[str, Any], *, sent_version: int, spans: bool, late_tokens: bool, vocab_size: int
) -> Output:
    """Check a server's answer; see `checked_output` for the versions.

    Raises:
        EngineError: tokens and logprobs do not match, a number is out of its bounds, or the spans do not cover the
            tokens.
    """
    try:
        meta = answer["meta_info"]
        tokens, triples, reason = answer["output_ids"], meta["output_token_logprobs"], meta["finish_reason"]["type"]
        logprobs = [triple[0] for triple in triples]
        logprobs_of = [triple[1] for triple in triples]
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(
            f"expected output_ids, output_token_logprobs and finish_reason, got {shortened(repr(answer))}"
        ) from error
    output = checked_output(
        tokens,
        logprobs,
        logprobs_of=logprobs_of,
        reason=reason,
        spans=meta.get("weight_versions") if spans else NO_SPANS,
        sent_version=sent_version,
        late_tokens=late_tokens,
        vocab_size=vocab_size,
    )
    cached = typed(meta.get("cached_tokens", 0), Count | None, name="cached_tokens") or 0
    preempted = typed(meta.get("num_retractions", 0), Count | None, name="num_retractions") or 0
    return replace(output, cached_tokens=cached, preempted=preempted)
