"""One completion on its way: what was asked, the segments there are already, and what to ask for next.

A completion is usually one HTTP request. Where that was cut short (an update in mode abort, a server that died) another
one goes on, whose prompt is the first prompt and every segment so far. The caller sees one completion.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.sglang.capabilities import Capabilities, versions_of
from areal_rloo.errors import ArealRlooError, EngineError
from areal_rloo.trajectory import Completion, FinishReason

_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Output:
    """What one HTTP request gave, checked; three lists of one length.

    Attributes:
        tokens: ids, the stop token included.
        logprobs: under the distribution they were sampled from.
        versions: policy version of each.
        end: why it ended; `cut` where it is to go on: it was aborted, or the weights of what came last are unknown.
        overtaken: an update began after it was sent and before its first token.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    end: Literal["stop", "length", "cut"]
    overtaken: bool = False


@dataclass(slots=True, eq=False)
class Flight:
    """A request, its future, and what came of it so far.

    Attributes:
        request: as it was submitted.
        future: of the caller.
        tokens: of all segments; `logprobs` and `versions` are as long.
        server_request_id: of the HTTP request under way. All have one length: the server aborts by prefix.
        aborted: the caller wants no more.
        sequence: place among those that wait.
        futile: HTTP requests in a row that brought no token.
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

    def next_body(self, capabilities: Capabilities, cache_name: str) -> dict[str, Any]:
        """The HTTP request that makes what is still to be made.

        The cache of a prompt belongs to the weights that read it. In mode in_place the server's cache outlives an
        update, so its name keeps requests of one version from going on with prompts that another version read.
        """
        if len(self.request.prompt_tokens) + len(self.tokens) > capabilities.prompt_tokens:
            self.forget()  # no prompt may be as long as the context; the few tokens left are not worth an exception
        self.server_request_id = uuid.uuid4().hex
        body: dict[str, Any] = {
            "rid": self.server_request_id,
            "input_ids": [*self.request.prompt_tokens, *self.tokens],
            "sampling_params": self._sampling_params(capabilities),
            "return_logprob": True,
            "stream": False,
        }
        if capabilities.cache_key is not None:
            body[capabilities.cache_key] = cache_name
        return body

    def add(self, output: Output) -> None:
        """Keep a segment."""
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.versions += output.versions
        self.futile = 0

    def forget(self) -> None:
        """Begin again."""
        self.tokens.clear()
        self.logprobs.clear()
        self.versions.clear()

    def end_of(self, output: Output) -> FinishReason | None:
        """Why the completion is over after this segment, the last one added; None where it goes on."""
        sampling = self.request.sampling
        if output.end != "cut":
            return output.end
        stopped = bool(self.tokens) and self.tokens[-1] in sampling.stop_token_ids
        if stopped and len(self.tokens) > sampling.min_new_tokens:
            return "stop"  # cut at the very token that ended it
        if len(self.tokens) >= sampling.max_new_tokens:
            return "length"
        return "abort" if self.aborted else None

    def finish(self, reason: FinishReason) -> None:
        """Give the caller the completion."""
        if self.future.done():
            return
        completion = Completion(
            tokens=np.asarray(self.tokens, dtype=np.int32),
            behaviour_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int32),
            finish_reason=reason,
        )
        self.future.set_result(completion)

    def fail(self, error: ArealRlooError) -> None:
        """Give the caller an error."""
        if not self.future.done():
            self.future.set_exception(error)

    def _sampling_params(self, capabilities: Capabilities) -> dict[str, Any]:
        """SGLang's words for how tokens are chosen.

        `ignore_eos` also switches `stop_token_ids` off, so it is for requests without stop tokens alone. With some, the
        model's own end-of-sequence tokens end a completion too. A seed has an effect where the server infers
        deterministically. With top_p or top_k, SGLang's logprobs are those of the whole distribution.
        """
        sampling = self.request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_new_tokens - len(self.tokens),
            "min_new_tokens": max(0, sampling.min_new_tokens - len(self.tokens)),
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
    """Check what a server answered.

    `late_tokens`: the server launches a step before it has the token of the last one, and does not wait for it when it
    is paused in place. That token comes after the update, and the server gives it the later version although the
    former weights sampled it. Which token it was cannot be seen, so each is tagged as the one before it: never newer
    than its weights, and one token a version older.

    Without spans every token is of the version the request was sent under. Proof: such a server is updated in mode
    abort alone; there no update begins before every request under way has come back, and none is sent before it ended;
    so from the moment a request is sent until it comes back the weights are one version, the one it was sent under.

    Raises:
        EngineError: tokens and logprobs do not match, a number is not finite, an id is not of the vocabulary, or the
            spans do not cover the tokens.
    """
    try:
        meta = answer["meta_info"]
        tokens, triples, reason = answer["output_ids"], meta["output_token_logprobs"], meta["finish_reason"]["type"]
        logprobs = [triple[0] for triple in triples]
        same = [triple[1] for triple in triples] == tokens
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(f"expected output_ids, output_token_logprobs and finish_reason, got none: {error}") from error
    if not same:
        raise EngineError(f"expected the logprob of each of {len(tokens)} tokens, got those of {len(logprobs)} others")
    for token, logprob in zip(tokens, logprobs, strict=True):
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise EngineError(f"expected token ids below {vocab_size}, got {token}")
        if not isinstance(logprob, int | float) or not math.isfinite(logprob):
            raise EngineError(
                f"the logprob of token {token} is not a finite number but {logprob}: the server's weights or logits "
                "are not finite"
            )
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"expected finish_reason stop, length or abort, got {reason}")
    versions = versions_of(meta.get("weight_versions"), len(tokens)) if spans else [sent_version] * len(tokens)
    known = len(versions)
    overtaken = bool(versions) and versions[0] > sent_version
    if spans and late_tokens and versions:
        versions = [min(sent_version, versions[0]), *versions[:-1]]
    if reason == "abort" or known < len(tokens):
        return Output(tokens[:known], logprobs[:known], versions, "cut", overtaken)
    return Output(tokens, logprobs, versions, reason, overtaken)
