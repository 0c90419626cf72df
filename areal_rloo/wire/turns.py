"""The turns of the policy in an unfinished sample, as bytes: the content of a `Partial` and of a lease that continues.

The rollout worker makes and continues the turns (`rollout/partial.py`). The learner keeps the bytes, in checkpoints
too, and holds their versions and tokens against the lease (`intake/lies.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import DecodeError
from areal_rloo.trajectory import Completion, FinishReason
from areal_rloo.wire.columns import MOST_RUNS, MOST_TOKENS
from areal_rloo.wire.token_rules import (
    Broken,
    broken_by_logprobs,
    check_version_runs,
    first_wrong,
    highest_token,
    version_runs,
)

_MOST_TURNS = 2**10  # of a sample: a turn takes 20 us to check
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


class RecordedTurn(NamedTuple):
    """A turn of the policy; finish reason `abort` if the turn is unfinished."""

    prompt: bytes  # digest of the prompt's token ids
    completion: Completion


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    prompt: Annotated[bytes, Meta(max_length=16)]
    tokens: bytes
    logprobs: bytes
    # a version, and how many tokens in a row it sampled
    version_runs: Annotated[tuple[tuple[int, int], ...], Meta(max_length=MOST_RUNS)]
    finish_reason: FinishReason


EncodedTurns = Annotated[tuple[_Encoded, ...], Meta(max_length=_MOST_TURNS)]


def encode_turns(turns: Sequence[RecordedTurn], *, most_tokens: int = MOST_TOKENS) -> bytes:
    """Encode turns. No tokens, and too many turns, tokens or versions, are no bytes: the sample begins anew."""
    num_tokens = sum(len(turn.completion.tokens) for turn in turns)
    if len(turns) > _MOST_TURNS or not 0 < num_tokens <= most_tokens:
        return b""
    encoded = [_encoded(turn) for turn in turns]
    return msgspec.msgpack.encode(encoded) if _num_runs(encoded) <= MOST_RUNS else b""


def decode_turns(partial: bytes) -> tuple[RecordedTurn, ...]:
    """Decode turns.

    Raises:
        DecodeError: the bytes are not those of `encode_turns`, or the tokens of a turn break a rule of `token_rules`.
    """
    if not partial:
        return ()
    try:
        encoded = from_msgpack(partial, EncodedTurns)
        if (num_runs := _num_runs(encoded)) > MOST_RUNS:
            raise ValueError(f"expected at most {MOST_RUNS} runs of a version, got {num_runs}")
        return tuple(_decoded(each) for each in encoded)
    except (DecodeError, ValueError, OverflowError) as error:
        raise DecodeError(f"a partial rollout is not readable: {error}") from error


def num_written(completion: Completion) -> int:
    """Count the tokens of the policy; tools and users wrote the others."""
    return sum(completion.spans[::2]) or len(completion.tokens)


def num_tokens_of(partial: bytes) -> int:
    """Count the tokens of encoded turns; 0 if they are not readable."""
    with contextlib.suppress(DecodeError):
        return sum(len(turn.completion.tokens) for turn in decode_turns(partial))
    return 0


def oldest_version(partial: bytes, min_version: int) -> int:
    """Return the lowest version of an answer that continues encoded turns with tokens of `min_version` or later."""
    try:
        turns = decode_turns(partial)
    except DecodeError:
        return min_version  # the worker cannot read the partial rollout either, and begins anew
    return min([min_version, *(int(turn.completion.versions.min(initial=min_version)) for turn in turns)])


def _num_runs(encoded: Sequence[_Encoded]) -> int:
    return sum(len(each.version_runs) for each in encoded)


def _encoded(turn: RecordedTurn) -> _Encoded:
    completion = turn.completion
    runs = tuple(version_runs(completion.versions))
    tokens = completion.tokens.astype(_INT32).tobytes()
    logprobs = completion.behaviour_logprobs.astype(_FLOAT32).tobytes()
    return _Encoded(turn.prompt, tokens, logprobs, runs, completion.finish_reason)


def _decoded(each: _Encoded) -> RecordedTurn:
    tokens, logprobs = np.frombuffer(each.tokens, _INT32), np.frombuffer(each.logprobs, _FLOAT32)
    if len(tokens) != len(logprobs):
        raise ValueError(f"expected a logprob for each of {len(tokens)} tokens, got {len(logprobs)}")
    for found, values in ((highest_token(tokens), tokens), (broken_by_logprobs(logprobs), logprobs)):
        if isinstance(found, Broken):
            raise ValueError(first_wrong(found, values))
    check_version_runs(each.version_runs, len(tokens))
    versions, counts = [version for version, _ in each.version_runs], [count for _, count in each.version_runs]
    runs = np.repeat(np.array(versions, dtype=np.int32), counts)
    return RecordedTurn(each.prompt, Completion(tokens, logprobs, runs, each.finish_reason))
