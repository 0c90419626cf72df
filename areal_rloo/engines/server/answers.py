"""The boundary for answers of servers: each number passes a typed conversion with bounds, and an output its checks.

A server, or a gateway before it, may answer any JSON. In: decoded JSON. Out: typed values, and the tokens, logprobs
and versions of an HTTP request; or an EngineError, which fails the request and leaves the engine alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from areal_rloo.errors import EngineError, shortened

_HIGHEST_INT32 = 2**31 - 1
_MOST_DIGITS = 10  # of an int32
_MOST_CHARACTERS = 300  # of an answer in a message

Count = Annotated[int, msgspec.Meta(ge=0, le=_HIGHEST_INT32)]
Logprob = Annotated[float, msgspec.Meta(ge=-1e6, le=1e-3)]
"""What the learner accepts (`wire/token_rules.py`): at most 0 up to the rounding of a log-softmax."""

NO_SPANS: Final = object()
"""Stands for the missing `weight_versions` of a server without this feature; None is an invalid answer."""


End = Literal["stop", "length", "cut"]


@dataclass(frozen=True, slots=True)
class Output:
    """The checked output of an HTTP request; three lists of the same length.

    Attributes:
        tokens: ids, with the stop token.
        logprobs: under the sampling distribution.
        end: why the output ended; `cut` if the flight continues (aborted, or unknown weights).
        overtaken: an update started after the request was sent and before the first token.
        cached_tokens: of the prompt, found in the server's cache.
        preempted: how often the server took the request's cache, and computed the cache again.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    end: End
    overtaken: bool = False
    cached_tokens: int = 0
    preempted: int = 0


class _Span(msgspec.Struct):
    version: Any
    start: Count
    end: Count


def typed(value: object, kind: Any, *, name: str) -> Any:
    """Convert decoded JSON to a type, without coercion; an error calls the value `name`.

    Raises:
        EngineError: the value has another type, or is out of the bounds.
    """
    try:
        return msgspec.convert(value, kind)
    except (ValueError, RecursionError) as error:  # msgspec's own exceptions are ValueErrors
        raise EngineError(f"{name}: {error}, got {shortened(repr(value))[:_MOST_CHARACTERS]}") from error


def checked_output(
    tokens: object,
    logprobs: Sequence[object],
    *,
    logprobs_of: Sequence[object],
    reason: object,
    spans: object,
    sent_version: int,
    late_tokens: bool,
    vocab_size: int,
) -> Output:
    """Check the tokens of an answer, and tell the version of each.

    `late_tokens`: the server launches a step before the token of the last step arrives, and a pause in place does not
    wait for this token. The token arrives after the update, and the server tags it with the later version although the
    former weights sampled it. The answer does not show which token this was. So every token gets the tag of the token
    before: a tag is never newer than the token's weights, and a single token is tagged a version too old.

    Without `spans` every token has the version of sending. Proof: such a server is only updated in mode abort. There an
    update starts after every request under way has returned, and no request is sent before the update ends. So the
    weights are the same from sending to return.

    Args:
        tokens: ids.
        logprobs: as many as ids.
        logprobs_of: the ids beside the logprobs in the answer.
        reason: the answer's finish_reason; after an abort, the output is cut.
        spans: the answer's `weight_versions`, or NO_SPANS if the server gives none.
        sent_version: the server's version when the request was sent.
        late_tokens: see above.
        vocab_size: token ids are smaller.

    Raises:
        EngineError: tokens and logprobs do not match, the reason is unknown, a number is not finite, an id is outside
            the vocabulary, or the spans do not cover the tokens.
    """
    ids: list[int] = typed(tokens, list[Count], name=f"expected token ids below {vocab_size}")
    if typed(logprobs_of, list[Any], name="ids") != ids:
        raise EngineError(f"expected the logprob of each of {len(ids)} tokens, got {len(logprobs)} of other tokens")
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"expected finish_reason stop, length or abort, got {reason!r:.{_MOST_CHARACTERS}}")
    if ids and max(ids) >= vocab_size:
        raise EngineError(f"expected token ids below {vocab_size}, got {max(ids)}")
    values: list[float] = typed(
        logprobs,
        list[Logprob],
        name="a logprob is not a finite number of at most 0: the server's weights or logits are not finite",
    )
    versions = [sent_version] * len(ids) if spans is NO_SPANS else versions_of(spans, len(ids))
    if versions and versions[0] < sent_version:
        raise EngineError(f"expected tokens of version {sent_version} or later, got version {versions[0]}")
    known = len(versions)
    overtaken = bool(versions) and versions[0] > sent_version
    if spans is not NO_SPANS and late_tokens and versions:
        versions = [min(sent_version, versions[0]), *versions[:-1]]
    end: End = "stop" if reason == "stop" else "length"
    cut = known < len(ids) or reason == "abort"
    return Output(ids[:known], values[:known], versions, "cut" if cut else end, overtaken)


def versions_of(spans: object, num_tokens: int) -> list[int]:
    """Return the policy version of each token, from a completion's `weight_versions`.

    The list ends before the first label other than a policy version: the weights are unknown.

    Raises:
        EngineError: the spans do not cover all tokens in order, a version is no int32, or the versions decrease.
    """
    versions: list[int] = []
    known, covered = True, 0
    for span in typed(spans, list[_Span], name=f"expected weight_versions of all {num_tokens} tokens"):
        if not span.start == covered <= span.end <= num_tokens:
            break
        covered = span.end
        known = known and isinstance(span.version, str) and span.version.isascii() and span.version.isdecimal()
        if known:
            versions += [_version(span.version)] * (span.end - span.start)
    else:
        if covered == num_tokens and versions == sorted(versions):
            return versions
    words = shortened(repr(spans))[:_MOST_CHARACTERS]
    raise EngineError(f"expected weight_versions of all {num_tokens} tokens, in order, never decreasing, got {words}")


def _version(label: str) -> int:
    if len(label) > _MOST_DIGITS or int(label) > _HIGHEST_INT32:
        raise EngineError(f"expected versions up to {_HIGHEST_INT32}, got {label[:_MOST_CHARACTERS]}")
    return int(label)
