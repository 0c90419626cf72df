"""The episode of a user's agent: a function that talks to a chat endpoint, trained without changes to the code.

    sample ─► a session of the chat endpoint ─► function(base_url=..., api_key=..., ...) ─► turns and a reward
           ─► a trajectory for each conversation of the session, all with this reward

Plain functions run in a thread for each session, async functions on an event loop of another thread, so an agent that
blocks delays neither heartbeats nor the engine. A thread cannot be killed: after `rollout.episode.agent_timeout_s` the
session's key is refused, so the agent's next call fails. Agents share the worker's interpreter lock, so at most
`rollout.episode.num_agents` run at a time; the timeout of the others has not started.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import msgspec

from areal_rloo.config import Config, import_function
from areal_rloo.errors import ConfigError, EpisodeError, described
from areal_rloo.rewards.request import Scored
from areal_rloo.rollout.chat_server import MODEL, ChatServer, ChatStatistics
from areal_rloo.rollout.episode import Rewards, Sample, TurnEngine
from areal_rloo.rollout.sessions import Session
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import MOST_REWARD, Item, Trajectory, is_reward
from areal_rloo.waiting import on_daemon_thread, run_beside_user_code

_JOIN_S = 1.0  # for the agents' event loop to stop; a blocked loop ends with the process


def check_agent(path: str, items: Sequence[Item]) -> None:
    """Look for an item with a value for every argument of the agent; rows may have different fields.

    Raises:
        ConfigError: the agent cannot be imported, or there is no such item.
    """
    parameters, unfilled = _parameters(path), None
    for item in items:
        if (unfilled := _unfilled(parameters, _offered(item, "", "", ""))) is None:
            return
    if unfilled is not None:
        raise ConfigError(f"rollout.episode.agent: {path}: {unfilled}")


def _parameters(path: str) -> list[inspect.Parameter]:
    key = "rollout.episode.agent"
    try:
        return list(inspect.signature(import_function(key, path)).parameters.values())
    except ValueError as error:
        words = f"the parameters of {path} cannot be read: {error}; wrap it in a function"
        raise ConfigError(f"{key}: {words}") from error


def _offered(item: Item, base_url: str, api_key: str, session_id: str) -> dict[str, object]:
    """Return the values that an agent may have, by name; the endpoint's hide fields of the item with the same name."""
    return {
        **item.fields,
        "base_url": base_url,
        "api_key": api_key,
        "model": MODEL,
        "session_id": session_id,
        "item": item,
        "prompt": item.prompt if isinstance(item.prompt, str) else item.plain_messages,
        "messages": item.plain_messages,
        "answer": item.answer,
    }


def _unfilled(parameters: Sequence[inspect.Parameter], offered: Mapping[str, object]) -> str | None:
    """Say that a parameter gets no value; None if every parameter has a value."""
    for parameter in parameters:
        if parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name not in offered:
            return f"there is no value for its argument '{parameter.name}'; there are, by name, {', '.join(offered)}"
    return None


@dataclass(frozen=True, slots=True)
class _Crash:
    """Takes the place of the value of an agent that raised."""

    detail: str


class Agent:
    """The episode `agent`; serves the chat endpoint between `__aenter__` and `__aexit__`."""

    def __init__(self, config: Config) -> None:
        path = config.rollout.episode.agent
        assert path is not None, "validate_episode wants an agent"
        self._path = path
        self._function = import_function("rollout.episode.agent", path)
        self._parameters = _parameters(path)
        self._timeout_s = config.rollout.episode.agent_timeout_s
        self._max_prompt_tokens = config.data.max_prompt_tokens
        self._server = ChatServer(config.rollout.sampling)
        self._loop = _AgentLoop()
        self._slots = asyncio.Semaphore(config.rollout.episode.num_agents or 2 * config.rollout.num_slots)

    async def __aenter__(self) -> Agent:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()
        self._loop.close()

    def statistics(self) -> ChatStatistics:
        return self._server.statistics()

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        async with self._slots:
            session, value = await self._session(sample, engine, chat)
        scored = await self._scored(value, session, sample, rewards, chat)
        # Only the last conversation was scored, so only it has rewards of single tokens or turns.
        shared = msgspec.structs.replace(scored, token_rewards=None, turn_rewards=None)
        return [
            conversation.trajectory(sample, scored if conversation is session.last else shared)
            for conversation in session.conversations
        ]

    async def _session(self, sample: Sample, engine: TurnEngine, chat: ChatFormat) -> tuple[Session, object]:
        group_id, sample_index = sample.sample_id
        context_tokens = self._max_prompt_tokens + engine.max_new_tokens
        session = Session(f"{group_id}-{sample_index}", engine, chat, context_tokens=context_tokens)
        key = self._server.open_session(session)
        try:
            return session, await self._value(self._call(session, key, sample.item), session)
        finally:
            self._server.end_session(key, "the agent has returned, or took too long")

    async def _value(self, call: asyncio.Future[object], session: Session) -> object:
        try:
            either: set[asyncio.Future[Any]] = {call, session.failure}
            await asyncio.wait(either, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if session.failure.done():
                raise session.failure.result()
            if not call.done():
                raise EpisodeError("agent_timeout", f"the agent took more than {self._timeout_s:g} s")
            value = _Crash("the agent cancelled itself") if call.cancelled() else call.result()
        finally:
            call.cancel()
        if isinstance(value, _Crash):
            raise EpisodeError("episode_error", value.detail)
        return value

    async def _scored(
        self, value: object, session: Session, sample: Sample, rewards: Rewards, chat: ChatFormat
    ) -> Scored:
        """Find the session's reward: the returned number, or the posted reward, or else the source's rewards."""
        if session.last is None:
            raise EpisodeError("episode_error", f"{self._path} made no call, or none of its calls was answered")
        if value is None:
            return session.posted or await rewards.score(session.last.request(sample, chat))
        if session.posted is not None:
            raise EpisodeError("episode_error", f"{self._path} posted a reward and gave back {value!r}; expected one")
        if not isinstance(value, Real) or not is_reward(value):  # type: ignore[arg-type]
            detail = f"{self._path}: expected None or a number up to {MOST_REWARD:g} in size back, got {value!r:.100}"
            raise EpisodeError("episode_error", detail)
        return Scored(reward=float(value), parts={"agent": float(value)})

    def _call(self, session: Session, key: str, item: Item) -> asyncio.Future[object]:
        arguments = self._arguments(_offered(item, self._server.base_url, key, session.session_id))
        if inspect.iscoroutinefunction(self._function):
            return self._loop.run(_value_of_coroutine(self._function, arguments))
        return _in_thread(self._function, arguments)

    def _arguments(self, offered: Mapping[str, object]) -> dict[str, object]:
        """Select the arguments that the function's parameters name; all of them if it has `**` parameters."""
        if (unfilled := _unfilled(self._parameters, offered)) is not None:
            raise EpisodeError("episode_error", f"{self._path}: {unfilled}")
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters):
            return dict(offered)
        named = [p for p in self._parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        return {p.name: offered[p.name] for p in named if p.name in offered}


class _AgentLoop:
    """A thread with the event loop of async agents; starts with the first agent.

    A `sys.exit` in a task of an agent does not stop the loop. `asyncio.to_thread` has a thread for each call, so
    a hanging call delays no other agent.
    """

    def __init__(self) -> None:
        self._end = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, call: Coroutine[Any, Any, object]) -> asyncio.Future[object]:
        """Run a call; return a future on the caller's loop. Cancelling the future cancels the call."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            serve = partial(run_beside_user_code, self._end.wait(), self._loop)  # the end cancels all agents
            self._thread = threading.Thread(target=serve, name="agents", daemon=True)
            self._thread.start()
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def close(self) -> None:
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(_JOIN_S)


def _in_thread(function: Callable[..., object], arguments: dict[str, object]) -> asyncio.Future[object]:
    def call() -> object:
        try:
            return function(**arguments)
        except BaseException as error:  # noqa: BLE001 - the user's code; its `sys.exit` drops only this sample
            return _Crash(described(error))

    return asyncio.wrap_future(on_daemon_thread(call, name="agent"))


async def _value_of_coroutine(function: Callable[..., Any], arguments: dict[str, object]) -> object:
    try:
        return await function(**arguments)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - as in `_in_thread`
        return _Crash(described(error))
