"""One agent's session: what it asks, as token ids that are trained on as they were generated.

    messages ─► do they go on from a turn that the session gave? ─┬─ yes: the ids of that turn, with what others said
                                                                  └─ no: the ids of a fresh prompt
             ─► engine ─► the completion is added to its conversation ─► message

A session keeps every place at which one of its turns ended: the messages that led there, the turn's own included, and
the ids. A request whose messages begin as those of such a place goes on from its ids; nothing is tokenized again. The
first to go on from a place makes its conversation longer; whoever comes second, at the same time or later, begins a
conversation whose prompt is those ids. So every token is trained on once, however an agent branches, and an agent that
rewrites its history has several conversations. All of them carry the session's reward.

Requests of one session may wait for the engine at the same time; nothing else waits. Used on one event loop.
"""

from __future__ import annotations

import asyncio
import json
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
    """Where a turn ended. `taken` once a request goes on from here, or is about to."""

    conversation: Conversation
    tokens: tuple[int, ...]
    taken: bool = False


@dataclass(slots=True)
class _Start:
    """What a request goes on from: a place and what others said after it, or a prompt."""

    tokens: tuple[int, ...]
    place: _Place | None = None
    said: tuple[int, ...] = ()


class Session:
    """The calls of one sample's agent."""

    def __init__(self, session_id: str, engine: TurnEngine, chat: ChatFormat, *, context_tokens: int) -> None:
        """
        Args:
            session_id: names it to the agent.
            engine: of the sample.
            chat: how messages are written.
            context_tokens: the most tokens a conversation may have, its prompt included.
        """
        self.session_id = session_id
        self.conversations: list[Conversation] = []
        self.last: Conversation | None = None  # that of the newest turn
        self.posted: Scored | None = None
        self.failure: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._chat = chat
        self._context_tokens = context_tokens
        self._places: dict[tuple[str, _Messages], list[_Place]] = {}
        self._under_way: set[asyncio.Future[Completion]] = set()
        self._ended: str | None = None

    async def complete(self, request: ChatRequest) -> Turn:
        """The policy's turn.

        Raises:
            ApiError: the session has ended, or the request's conversation is too long or cannot be written.
        """
        self.check_open()
        messages, tools = request.conversation, request.tools or []
        start = self._start(messages, tools)
        try:
            limit = self._limit(start, request.limit)
            completion = await self._generate(start.tokens, limit)
        except BaseException:
            if start.place is not None:
                start.place.taken = False
            raise
        conversation = self._grown(start, completion)
        text = self._chat.text(completion.tokens.tolist())
        message = assistant_message(text, parses_calls=request.parses_calls)
        place = _Place(conversation, (*start.tokens, *completion.tokens.tolist()))
        self._places.setdefault((_tools_key(tools), (*messages, message)), []).append(place)
        return Turn(len(start.tokens), completion, message, self._chat.pieces(completion.tokens.tolist()))

    def post(self, scored: Scored) -> None:
        """The agent's word on what the session is worth, which ends it.

        Raises:
            ApiError: it has ended.
        """
        self.check_open()
        self.posted = scored
        self.end("its reward was posted")

    def end(self, why: str) -> None:
        """Refuse what comes, and abort what is under way."""
        self._ended = self._ended or why
        for future in self._under_way:
            future.cancel()

    def check_open(self) -> None:
        """
        Raises:
            ApiError: the session has ended.
        """
        if self._ended is not None:
            raise ApiError(409, f"session {self.session_id} has ended: {self._ended}", code="session_ended")

    def _start(self, messages: _Messages, tools: Sequence[ToolSchema]) -> _Start:
        """Where the messages go on from: the place that most of them lead to. One that is free is taken."""
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
        except DataError as error:  # a template that refuses these messages is no fault of the run
            raise ApiError(400, f"messages: {error}", code="invalid_value") from error

    def _limit(self, start: _Start, wanted: int | None) -> int:
        if not start.tokens:
            raise ApiError(400, "messages: expected a text, got nothing to go on from", code="invalid_value")
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
        future = asyncio.ensure_future(self._engine.generate(tokens, max_new_tokens=limit))
        self._under_way.add(future)
        try:
            completion = await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._ended is not None and (task is None or not task.cancelling()):
                self.check_open()  # it was aborted by the session's end; the one who asks is still there
            raise
        except EpisodeError as error:
            raise ApiError(400, f"messages: {error.detail}", code="context_length_exceeded") from error
        except EngineError as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise ApiError(503, f"the engine is gone: {error}") from error
        finally:
            self._under_way.discard(future)
        self.check_open()
        if completion.finish_reason == "abort":
            raise ApiError(503, "the completion was aborted: the rollout worker ends")
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
