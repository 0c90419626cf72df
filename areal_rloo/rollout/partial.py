"""Partial rollouts: the policy's turns of an unfinished sample, to continue under a later lease or after a resume.

    a call of the engine ─► Journal ─► encode ─► the learner keeps the bytes, in checkpoints too ─► the next lease
                               ▲                                                                         │
                               └────────────────────────────── decode ◄──────────────────────────────────┘

The next lease runs the episode from the beginning. Each call of the engine with a prompt of the journal gets the turn
of the journal instead of a new turn, or continues an unfinished turn. So every episode can be continued, a user's
agent too. Tools and agents run again; where these differ from before, the prompts differ, and new turns are sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.errors import DecodeError, GenerationError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Completion
from areal_rloo.wire.messages import MOST_PARTIALS, Duty, Lease, Partial
from areal_rloo.wire.turns import RecordedTurn, decode_turns

logger = get_logger(__name__)

_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_ABORT_S = 2.0  # for the engine to tell the tokens of an aborted request
_NOTHING = Completion(np.zeros(0, _INT32), np.zeros(0, _FLOAT32), np.zeros(0, _INT32), "abort")


class _Call:
    """A call of the engine: the prompt, and the turn so far."""

    def __init__(self, prompt: bytes, request_id: str, completion: Completion) -> None:
        self.prompt, self.request_id, self.completion = prompt, request_id, completion


class Journal:
    """The turns of one sample: those of an earlier lease, and those made or under way.

    Turns are in the order of their calls: the n-th call with a prompt gets the n-th turn, whichever ended first.
    """

    def __init__(self, turns: Sequence[RecordedTurn] = ()) -> None:
        self.aborted: list[asyncio.Future[Completion]] = []  # of the engine, of cancelled calls
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

    async def num_tokens(self) -> int:
        """Count the tokens so far, in all calls of this lease; wait some seconds for those of cancelled calls."""
        if self.aborted:
            await asyncio.wait(self.aborted, timeout=_ABORT_S)
        ended = (future for future in self.aborted if future.done() and not future.cancelled())
        told = [future.result() for future in ended if future.exception() is None]
        return sum(len(made.tokens) for made in (*told, *(call.completion for call in self._calls)))

    def _recall(self, prompt: bytes) -> Completion:
        """Take the earlier turn after this prompt out of the journal."""
        for number, turn in enumerate(self._earlier):
            if turn.prompt == prompt:
                return self._earlier.pop(number).completion
        return _NOTHING


def journal_of(lease: Lease) -> Journal:
    """Return the journal that a lease continues; an empty journal if the lease has none, or none that is readable."""
    try:
        turns = decode_turns(lease.partial)
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
        if num_bytes + len(turns) > max_bytes or len(messages[-1]) == MOST_PARTIALS:
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
