"""What every engine refuses before it starts: one request that cannot be served may end a server for all the others."""

from __future__ import annotations

from collections.abc import Container, Sequence

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.errors import EngineError


def check_requests(
    requests: Sequence[GenerationRequest], *, in_use: Container[str], vocab_size: int, context_tokens: int
) -> None:
    """Check the requests of one submission.

    Raises:
        EngineError: an id is in use, a token is not of the vocabulary, a prompt is empty or does not fit the context
            with what is to be made, or nothing could be sampled.
    """
    seen: set[str] = set()
    for request in requests:
        what, sampling = f"request {request.request_id}", request.sampling
        if not request.prompt_tokens:
            raise EngineError(f"{what}: the prompt has no token")
        if sampling.max_new_tokens < 1:
            raise EngineError(f"{what}: expected max_new_tokens of at least 1, got {sampling.max_new_tokens}")
        if not sampling.temperature > 0 and not sampling.greedy:
            raise EngineError(
                f"{what}: expected a temperature above 0, got {sampling.temperature}; "
                "set greedy for the most likely tokens"
            )
        _check_vocabulary(f"{what}: a prompt", request.prompt_tokens, vocab_size)
        _check_vocabulary(f"{what}: stop_token_ids", sampling.stop_token_ids, vocab_size)
        needed = len(request.prompt_tokens) + sampling.max_new_tokens
        if needed > context_tokens:
            raise EngineError(f"{what}: needs {needed} tokens, the context holds {context_tokens}")
        if request.request_id in in_use or request.request_id in seen:
            raise EngineError(f"{what}: this id is in use")
        seen.add(request.request_id)


def _check_vocabulary(what: str, tokens: Sequence[int], vocab_size: int) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = min(tokens) if min(tokens) < 0 else max(tokens)
        raise EngineError(f"{what}: expected token ids from 0 to {vocab_size - 1}, got {wrong}")
