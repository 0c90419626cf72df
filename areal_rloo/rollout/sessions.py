"""The session of one agent: chat requests as token ids, so training uses exactly the generated ids.

    messages ─► do they continue a turn of this session? ─┬─ yes: the ids up to that turn, then the ids of new messages
                                                          └─ no: the ids of a new prompt
             ─► engine ─► the completion is appended to the conversation ─► message

A session remembers the place where each turn ended: all messages up to and including the turn, and their ids. The first
request whose messages begin with those of a place extends the place's conversation. Every further request, parallel or
later, starts a new conversation with these ids as the prompt, so every token is trained on once. All conversations get
the session's reward. Parallel requests wait for the engine; nothing else waits. Use a session on one event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from areal_rloo.errors import DataError, EngineError, EpisodeError
from areal_rloo.rewards.request import Scored
from areal_rloo.rollout.chat_api import ApiError, ChatRequest, Turn, assistant_message
from areal_rloo.rollout.episode import Conversation, TurnEngine
from areal_rloo.tasks.chat import ChatFormat, ToolSchema
from areal_rloo.trajectory import Completion, Message

_Messages = tuple[Message, ...]


@dataclass(slots=True)
class _Place:
    """The end of a turn. `taken`: a request continues this place, or is about to."""

    conversation: Conversation
    tokens: tuple[int, ...]
    taken: bool = False


@dataclass(slots=True)
class _Start:
    """The start of a generation: a place and the ids `said` by others after it, or a new prompt."""

    tokens: tuple[int, ...]
    place: _Place | None = None
    said: tuple[int, ...] = ()


class Session:
    """The calls of the agent of one sample."""

    def __init__(self, session_id: str, engine: TurnEngine, chat: ChatFormat, *, context_tokens: int) -> None:
        self.session_id = session_id  # shown to the agent
        self.conversations: list[Conversation] = []
        self.last: Conversation | None = None  # the conversation of the newest turn
        self.posted: Scored | None = None
        self.failure: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._engine, self._chat = engine, chat
        self._context_tokens = context_tokens  # limit of a conversation, with the prompt
        self._places: defaultdict[tuple[str, _Messages], list[_Place]] = defaultdict(list)
        self._under_way: set[asyncio.Future[Completion]] = set()
        self._ended: str | None = None

    async def complete(self, request: ChatRequest) -> Turn:
        """Generate the policy's turn.

        Raises:
            ApiError: the session has ended, or the request's conversation is too long or cannot be encoded.
        """
        self._check_open()
        messages, tools = request.conversation, request.tools or []
        start = self._start(messages, tools)
        try:
            completion = await self._generate(start.tokens, self._limit(start, request.limit))
        except BaseException:
            if start.place is not None:
                start.place.taken = False
            raise
        said: list[int] = completion.tokens.tolist()
        message = assistant_message(self._chat.text(said), request)
        place = _Place(self._grown(start, completion), (*start.tokens, *said))
        self._places[_tools_key(tools), (*messages, message)].append(place)
        return Turn(len(start.tokens), completion, message, self._chat.pieces(said))

    def post(self, scored: Scored) -> None:
        """Take the reward that the agent posts; this ends the session.

        Raises:
            ApiError: the session has already ended.
        """
        self._check_open()
        self.posted = scored
        self.end("its reward was posted")

    def end(self, why: str) -> None:
        """Refuse further requests, and abort running ones."""
        self._ended = self._ended or why
        for future in self._under_way:
            future.cancel()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise ApiError(409, f"session {self.session_id} has ended: {self._ended}", code="session_ended")

    def _start(self, messages: _Messages, tools: Sequence[ToolSchema]) -> _Start:
        """Find the place that shares most messages, and take the place if it is free; else start a new prompt."""
        key = _tools_key(tools)
        try:
            for num in range(len(messages) - 1, 0, -1):
                places = self._places.get((key, messages[:num]))
                if places is None:
                    continue
                place = next((place for place in places if not place.taken), places[-1])
                said = self._chat.between(messages[num:], last_token=place.tokens[-1])
                tokens = (*place.tokens, *said)
                if place.taken:
                    return _Start(tokens)
                place.taken = True
                return _Start(tokens, place, said)
            return _Start(self._chat.conversation(messages, tools))
        except DataError as error:  # the agent sent messages that the chat template refuses
            raise ApiError(400, f"messages: {error}", code="invalid_value") from error

    def _limit(self, start: _Start, wanted: int | None) -> int:
        if not start.tokens:
            raise ApiError(400, "messages: expected a text, got an empty prompt", code="invalid_value")
        most = self._engine.max_new_tokens
        after_prompt = len(start.said) + (0 if start.place is None else start.place.conversation.num_completion_tokens)
        left = min(self._context_tokens - len(start.tokens), most - after_prompt)
        if left < 1:
            raise ApiError(
                400,
                f"messages: the conversation has {len(start.tokens)} tokens, {after_prompt} of them after its prompt; "
                f"expected less than {self._context_tokens} (data.max_prompt_tokens + max_new_tokens), and less than "
                f"{most} after its prompt (max_new_tokens)",
                code="context_length_exceeded",
            )
        return left if wanted is None else min(left, wanted)

    async def _generate(self, tokens: Sequence[int], limit: int) -> Completion:
        future = asyncio.create_task(self._engine.generate(tokens, max_new_tokens=limit), name="turn of a session")
        self._under_way.add(future)
        try:
            completion = await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._ended is not None and (task is None or not task.cancelling()):
                self._check_open()  # the session's end aborted the generation, but the client still waits
            raise
        except EpisodeError as error:
            raise ApiError(400, f"messages: {error.detail}", code="context_length_exceeded") from error
        except EngineError as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise ApiError(503, f"the engine is gone: {error}") from error
        finally:
            self._under_way.discard(future)
        self._check_open()
        if completion.finish_reason == "abort":
            raise ApiError(503, "the completion was aborted: the rollout worker is stopping")
        return completion

    def _grown(self, start: _Start, completion: Completion) -> Conversation:
        if start.place is None:
            conversation = Conversation(start.tokens)
            self.conversations.append(conversation)
        else:
            conversation = start.place.conversation
            conversation.add_others(start.said)
        conversation.add(completion)
        self.last = conversation
        return conversation


def _tools_key(tools: Sequence[ToolSchema]) -> str:
    return json.dumps(tools, sort_keys=True) if tools else ""
