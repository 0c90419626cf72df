"""Partial rollouts: the policy's turns of an unfinished sample, to continue under a later lease or after a resume.

    a call of the engine ─► Journal ─► encode ─► the learner keeps the bytes, in checkpoints too ─► the next lease
                               ▲                                                                         │
                               └────────────────────────────── decode ◄──────────────────────────────────┘

The next lease runs the episode from the beginning. Each call of the engine with a prompt of the journal gets the turn
of the journal instead of a new turn, or continues an unfinished turn. So every episode can be continued, a user's
agent too. Tools and agents run again; where these differ from before, the prompts differ, and new turns are sampled.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from areal_rloo.decoding import from_msgpack
from areal_rloo.engines.base import GenerationRequest
from areal_rloo.errors import DecodeError, GenerationError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Completion, FinishReason
from areal_rloo.wire.columns import version_runs
from areal_rloo.wire.messages import Duty, Lease, Partial

logger = get_logger(__name__)

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_NOTHING = Completion(np.zeros(0, _INT32), np.zeros(0, _FLOAT32), np.zeros(0, _INT32), "abort")


class RecordedTurn(NamedTuple):
    """A turn of the policy; finish reason `abort` if the turn is unfinished."""

    prompt: bytes  # digest of the prompt's token ids
    completion: Completion


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    prompt: bytes
    tokens: bytes
    logprobs: bytes
    version_runs: tuple[tuple[int, int], ...]  # a version, and how many tokens in a row it sampled
    finish_reason: FinishReason


def encode(turns: Sequence[RecordedTurn]) -> bytes:
    """Encode turns; turns without any token are no bytes."""
    if not any(len(turn.completion.tokens) for turn in turns):
        return b""
    return msgspec.msgpack.encode([_encoded(turn) for turn in turns])


def decode(partial: bytes) -> tuple[RecordedTurn, ...]:
    """Decode turns.

    Raises:
        DecodeError: the bytes are not those of `encode`, or the arrays of a turn do not fit together.
    """
    if not partial:
        return ()
    try:
        return tuple(_decoded(each) for each in from_msgpack(partial, tuple[_Encoded, ...]))
    except (DecodeError, ValueError, OverflowError) as error:
        raise DecodeError(f"a partial rollout is not readable: {error}") from error


def _encoded(turn: RecordedTurn) -> _Encoded:
    completion = turn.completion
    runs = tuple(version_runs(completion.versions))
    tokens = completion.tokens.astype(_INT32).tobytes()
    logprobs = completion.behaviour_logprobs.astype(_FLOAT32).tobytes()
    return _Encoded(turn.prompt, tokens, logprobs, runs, completion.finish_reason)


def _decoded(each: _Encoded) -> RecordedTurn:
    tokens, logprobs = np.frombuffer(each.tokens, _INT32), np.frombuffer(each.logprobs, _FLOAT32)
    versions, counts = [version for version, _ in each.version_runs], [count for _, count in each.version_runs]
    if not len(tokens) == len(logprobs) == sum(counts) or min([*counts, 1]) < 1 or versions != sorted(versions):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} logprobs, and versions {each.version_runs}")
    if not np.isfinite(logprobs).all() or min(tokens, default=0) < 0:
        raise ValueError("a logprob is not finite, or a token is negative")
    runs = np.repeat(np.array(versions, dtype=np.int32), counts)
    return RecordedTurn(each.prompt, Completion(tokens, logprobs, runs, each.finish_reason))


class _Call:
    """A call of the engine: the prompt, and the turn so far."""

    def __init__(self, prompt: bytes, request_id: str, completion: Completion) -> None:
        self.prompt, self.request_id, self.completion = prompt, request_id, completion


class Journal:
    """The turns of one sample: those of an earlier lease, and those made or under way.

    Turns are in the order of their calls: the n-th call with a prompt gets the n-th turn, whichever ended first.
    """

    def __init__(self, turns: Sequence[RecordedTurn] = ()) -> None:
        self._earlier = list(turns)  # not asked for again yet
        self._calls: list[_Call] = []
        # Versions never decrease along a trajectory: no turn begins under earlier weights than a turn before.
        self._min_version = max((int(turn.completion.versions.max(initial=0)) for turn in turns), default=0)

    async def continued(
        self, request: GenerationRequest, complete: Callable[[GenerationRequest], Awaitable[Completion]]
    ) -> Completion:
        """Complete a request from where the earlier lease came: perhaps without the engine."""
        prompt, room = digest_of(request.prompt_tokens), request.sampling.max_new_tokens
        begun = self._recall(prompt)
        if not _is_whole(begun, room) and (len(begun.tokens) >= room or begun.finish_reason == "stop"):
            begun = _NOTHING  # of other limits
        call = _Call(prompt, request.request_id, begun)
        self._calls.append(call)
        if _is_whole(begun, room):
            return begun
        request = replace(request, min_version=max(request.min_version, self._min_version))
        try:
            if len(begun.tokens):
                with contextlib.suppress(GenerationError):  # the engine refuses these tokens: begin anew
                    call.completion = await complete(replace(request, begun=begun))
                    return call.completion
            call.completion = await complete(request)
            return call.completion
        except BaseException:
            self._calls.remove(call)
            raise

    def turns(self, so_far: Mapping[str, Completion]) -> list[RecordedTurn]:
        """Return all turns, given the engine's completions so far by request id."""
        for call in self._calls:
            call.completion = so_far.get(call.request_id, call.completion)
        return [*(RecordedTurn(call.prompt, call.completion) for call in self._calls), *self._earlier]

    def _recall(self, prompt: bytes) -> Completion:
        """Take the earlier turn after this prompt out of the journal."""
        for number, turn in enumerate(self._earlier):
            if turn.prompt == prompt:
                return self._earlier.pop(number).completion
        return _NOTHING


def journal_of(lease: Lease) -> Journal:
    """Return the journal that a lease continues; an empty journal if the lease has none, or none that is readable."""
    try:
        turns = decode(lease.partial)
    except DecodeError as error:
        logger.warning("sample %s begins anew: %s", lease.duties[0].sample_id, error)
        return Journal()
    if turns:
        num_tokens = sum(len(turn.completion.tokens) for turn in turns)
        logger.info("continues sample %s from %d tokens", lease.duties[0].sample_id, num_tokens)
    return Journal(turns)


def in_messages(partials: Iterable[tuple[Duty, bytes]], *, max_bytes: int) -> list[tuple[Partial, ...]]:
    """Return the partial rollouts of each message, at least one message; leave out those that fit into none."""
    messages: list[list[Partial]] = [[]]
    num_bytes = 0
    for duty, turns in partials:
        if not 0 < len(turns) <= max_bytes:
            continue
        if num_bytes + len(turns) > max_bytes:
            messages.append([])
            num_bytes = 0
        messages[-1].append(Partial(*duty, turns))
        num_bytes += len(turns)
    return [tuple(message) for message in messages]


def _is_whole(completion: Completion, room: int) -> bool:
    """Return True if a completion ended, and not at another limit of tokens."""
    num = len(completion.tokens)
    return (completion.finish_reason == "stop" and num <= room) or (
        completion.finish_reason == "length" and num == room
    )


def digest_of(tokens: Sequence[int]) -> bytes:
    """Return the digest of a prompt, equal on every machine."""
    words = " ".join(map(str, tokens))  # also of numbers that are no token ids, which the engine will refuse
    return hashlib.blake2b(words.encode(), digest_size=16).digest()
