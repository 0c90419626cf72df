"""The chat endpoint of a rollout worker: OpenAI's protocol on the loopback interface, for agents to be trained.

    agent ─► POST /v1/chat/completions, Bearer key ─► the key's session ─► engine ─► completion object or stream
          ─► POST /v1/reward, Bearer key           ─► the key's session ends with this reward

The endpoint runs on the worker's event loop. A request waits for its completion, and no request waits for another. A
client that disconnects aborts the completion, and nothing of the completion is trained on. Every session has a random
key, which identifies the agent. Errors are JSON in OpenAI's format and tell the client not to retry: a retry would get
the same error, and a client that retries a 409 only keeps its agent from ending. A client that does not finish a
request, or does not read an answer, is disconnected. If connections use up half of the descriptors, those that have
shown no key make room.
"""

from __future__ import annotations

import asyncio
import json
import resource
import secrets
import weakref
from collections import Counter, deque
from collections.abc import Awaitable
from typing import Annotated

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from areal_rloo.config import SamplingConfig
from areal_rloo.rewards.request import Scored
from areal_rloo.rollout.chat_api import (
    ApiError,
    ChatRequest,
    completion_chunks,
    completion_object,
    read_json,
    read_request,
)
from areal_rloo.rollout.sessions import Session
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import MOST_REWARD

logger = get_logger(__name__)

MODEL = "policy"
"""The model's name at the endpoint. A request may name any model: its key decides the session."""

_HOST = "127.0.0.1"
_MOST_BYTES = 64 * 2**20  # of a request's body: far more than a full context
_ENDED_KEYS = 10_000  # keys of ended sessions to remember: for a better error than "invalid key"
_CLIENT_S = 60.0  # for a client to send its whole request, and to read a chunk of the answer
_CLOSE_S = 1.0  # for connections to close, after all sessions have ended


_Reward = Annotated[float, msgspec.Meta(ge=-MOST_REWARD, le=MOST_REWARD)]


class _RewardBody(msgspec.Struct):
    """A posted reward. Numbers in JSON are finite; reading the body refuses numbers too large for a float."""

    reward: _Reward
    parts: dict[str, float] = {}


class ChatStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the endpoint; counts are since the start."""

    num_open_sessions: int
    num_sessions: int
    num_completions: int
    num_refused: int


class ChatServer:
    """The endpoint. Make, use and close it on one event loop."""

    def __init__(self, sampling: SamplingConfig) -> None:
        self._most_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        self._agents: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()  # connections that have shown a key
        self._asked: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()  # with the head of a request
        self._silent: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()  # without one at the last look
        self._sweep: asyncio.TimerHandle | None = None
        self._sampling = sampling  # of the run; requests that ask for other sampling get this one
        self._sessions: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=_ENDED_KEYS)
        self._warned: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._base_url: str | None = None

    async def start(self) -> None:
        """Serve on a free port."""
        app = web.Application(client_max_size=_MOST_BYTES, middlewares=[self._as_openai_says])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        for path in ("/v1/reward", "/v1/sessions/{session_id}/reward"):
            app.router.add_post(path, self._reward)
        self._runner = web.AppRunner(
            app, access_log=None, handle_signals=False, handler_cancellation=True, shutdown_timeout=_CLOSE_S
        )
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(self._connection, _HOST, 0)
        self._end_silent()
        self._base_url = f"http://{_HOST}:{self._listener.sockets[0].getsockname()[1]}/v1"
        logger.debug("the chat endpoint is at %s", self._base_url)

    async def close(self) -> None:
        """End all sessions, and stop serving."""
        for key in list(self._sessions):
            self.end_session(key, "the rollout worker is stopping")
        if self._sweep is not None:
            self._sweep.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        """The `base_url` for an OpenAI client."""
        assert self._base_url is not None, "`start` comes before `base_url`"
        return self._base_url

    def open_session(self, session: Session) -> str:
        """Open a session and return the key."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        self._counts["sessions"] += 1
        return key

    def end_session(self, key: str, why: str) -> None:
        """End a session: abort the running requests and refuse the key."""
        session = self._sessions.pop(key, None)
        if session is not None:  # None if `close` ended the session first
            session.end(why)
            self._ended.append(key)

    def statistics(self) -> ChatStatistics:
        return ChatStatistics(
            num_open_sessions=len(self._sessions),
            num_sessions=self._counts["sessions"],
            num_completions=self._counts["completions"],
            num_refused=self._counts["refused"],
        )

    def _connection(self) -> asyncio.BaseProtocol:
        """Make the protocol of a new connection. If there are too many, end the oldest that has shown no key."""
        assert self._runner is not None and self._runner.server is not None, "`start` has made both"
        open_now = self._runner.server.connections
        if len(open_now) >= self._most_connections:
            transports = (each.transport for each in open_now if each.transport is not None)
            stranger = next((each for each in transports if each not in self._agents and not each.is_closing()), None)
            if stranger is not None:
                self._counts["refused"] += 1
                stranger.close()
        return self._runner.server()

    def _end_silent(self) -> None:
        """End the connections without a whole head of a request since the last call; aiohttp waits for ever."""
        assert self._runner is not None and self._runner.server is not None, "`start` has made both"
        open_now = {each.transport for each in self._runner.server.connections if each.transport is not None}
        silent = {each for each in open_now if each not in self._asked and not each.is_closing()}
        for transport in silent.intersection(self._silent):
            self._counts["refused"] += 1
            transport.close()
        self._silent = weakref.WeakSet(silent)
        self._sweep = asyncio.get_running_loop().call_later(_CLIENT_S, self._end_silent)

    @web.middleware
    async def _as_openai_says(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.transport is not None:
            self._asked.add(request.transport)
        try:
            return await handler(request)
        except ApiError as error:
            return self._refused(error)
        except web.HTTPException as error:
            return self._refused(ApiError(error.status, f"{request.method} {request.path}: {error.reason}"))
        except ConnectionError:
            raise  # the client disconnected during a stream; aiohttp handles that
        except Exception as error:
            logger.exception("the chat endpoint failed to answer %s", request.path)
            return self._refused(ApiError(500, f"{type(error).__name__}: {error}"))

    def _refused(self, error: ApiError) -> web.Response:
        self._counts["refused"] += 1
        return web.json_response(error.body, status=error.status, headers={"x-should-retry": "false"})

    async def _health(self, request: web.Request) -> web.Response:
        del request
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "areal_rloo"}
        return web.json_response({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = read_request(await _body(request))
        self._warn(asked)
        turn = await session.complete(asked)
        self._counts["completions"] += 1
        if not asked.stream:
            return web.json_response(completion_object(turn, asked))
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        for chunk in completion_chunks(turn, asked):
            await _written(stream.write(f"data: {json.dumps(chunk)}\n\n".encode()))
        await _written(stream.write(b"data: [DONE]\n\n"))
        await _written(stream.write_eof())
        return stream

    async def _reward(self, request: web.Request) -> web.Response:
        session = self._session(request)
        named = request.match_info.get("session_id", session.session_id)
        if named != session.session_id:
            raise ApiError(404, f"session {named}: the key is of session {session.session_id}", code="not_found")
        body = read_json(await _body(request), _RewardBody)
        session.post(Scored(reward=body.reward, parts=body.parts or {"agent": body.reward}))
        return web.json_response({"session": session.session_id, "reward": body.reward})

    def _session(self, request: web.Request) -> Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if kind.lower() == "bearer" else None
        if session is not None:
            if request.transport is not None:  # else the client has just disconnected
                self._agents.add(request.transport)
            return session
        if key.strip() in self._ended:
            raise ApiError(409, "the key's session has ended", code="session_ended")
        raise ApiError(401, "Authorization: expected Bearer and the key of a session", code="invalid_api_key")

    def _warn(self, asked: ChatRequest) -> None:
        """Log each ignored option once: thousands of samples send the same options."""
        for key, value in asked.other_sampling(self._sampling).items():
            if key not in self._warned:
                self._warned.add(key)
                told = "an agent asks for %s=%s: ignored, sampling follows rollout.sampling and data.eval"
                logger.warning(told, key, value)


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(_CLIENT_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"{request.path}: the request did not arrive within {_CLIENT_S:g} s") from None


async def _written(writing: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(_CLIENT_S):
            await writing
    except TimeoutError:
        raise ConnectionResetError(f"the client did not read its answer within {_CLIENT_S:g} s") from None
