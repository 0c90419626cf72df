"""Send requests to the server and read the answers. A closed gate holds requests back; no server failure loses any."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from areal_rloo.config import ServerConfig
from areal_rloo.engines.base import UNKNOWN
from areal_rloo.engines.server.answers import Output
from areal_rloo.engines.server.api import Connection
from areal_rloo.engines.server.client import ServerGoneError, ServerRefusedError
from areal_rloo.engines.server.flights import Flight, FlightQueue
from areal_rloo.errors import EngineError, GenerationError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Completion
from areal_rloo.waiting import cancel, failed, fault_of

logger = get_logger(__name__)

_MAX_FUTILE = 5  # consecutive HTTP requests without a token; after as many, the request fails
_ABORT_AGAIN_S = 0.5  # the server ignores an abort before its request
_LOOK_EVERY_S = 5.0
_QUIET_S = 0.2  # after the first refusal of a gateway, twice as long after each further refusal
_MOST_QUIET_S = 5.0
_CALL_TIMEOUT_S = 10.0


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(slots=True)
class ServerState:
    """The state of the server behind the engine. All parts of the engine share this object.

    Attributes:
        connection: to the server; None while the server is away.
        policy_version: of the server's weights; UNKNOWN if no part of the engine can tell.
        required_version: send no request under earlier weights: versions never decrease along a completion.
        num_discards: counts how often all output under way became useless, and is discarded.
        exclusive: held by an update, and while flights are called back; both have deadlines, so health checks pause.
        occupied: a process of the server may take memory of the devices; False before the start, and after the end.
        awake: not set during a train step, in which the server sleeps or is not started (`turns.py`).
        catches_up: an update waits for the end of a train step; requests then meet the new weights.
        paused: the server is paused for new weights, or is about to be, or the flights are called back.
        suspicious: a connection broke, or the server or a gateway failed, and no health check has succeeded since.
        quiet_until_s: no health check before this time of `time.monotonic`, so no request of a suspicious server.
        num_refusals: of gateways, each after a health check, since the last answer with a token.
        hung: why the connection is given up.
        num_answers: number of answers with a token.
        overdue: number of requests that were aborted because they took too long.
        changed: set when the gate may have opened.
        landed: set after a request returned.
    """

    connection: Connection | None = None
    policy_version: int = UNKNOWN
    required_version: int = 0
    num_discards: int = 0
    exclusive: asyncio.Lock = field(default_factory=asyncio.Lock)
    occupied: bool = True
    awake: asyncio.Event = field(default_factory=_set_event)
    catches_up: bool = False
    paused: bool = False
    suspicious: bool = False
    quiet_until_s: float = 0.0
    num_refusals: int = 0
    hung: str | None = None
    weight_updates: int = 0
    swap_s: float = 0.0
    last_pause_s: float = 0.0
    restarts: int = 0
    health_failures: int = 0
    weights_lost: int = 0
    proven_updates: int = 0
    unproven_updates: int = 0
    weight_mismatches: int = 0
    retractions: int = 0
    num_answers: int = 0
    overdue: int = 0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    landed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def updating(self) -> bool:
        """True while the server may answer nothing, without any fault."""
        return self.exclusive.locked() or not self.awake.is_set()

    @asynccontextmanager
    async def exclusive_and_awake(self) -> AsyncIterator[None]:
        """Hold `exclusive`, with a server that does not sleep. After a sleep, the gate opens only afterwards."""
        try:
            while True:
                self.catches_up |= not self.awake.is_set()  # also if the server fell asleep before it could be held
                await self.awake.wait()
                async with self.exclusive:
                    if self.awake.is_set():
                        yield
                        return
        finally:
            self.catches_up = False

    @property
    def gate_is_open(self) -> bool:
        return (
            self.connection is not None
            and not self.paused
            and self.awake.is_set()
            and not self.catches_up
            and not self.suspicious
            and self.hung is None
            and self.policy_version >= self.required_version
        )

    def give_up(self, connection: Connection, why: str) -> None:
        """Have the server of a connection restarted, unless that has happened already."""
        if self.connection is connection:
            self.hung = why

    def forget_version(self, connection: Connection) -> None:
        """Mark the weights of this connection as unknown; `now_has` reports the weights later."""
        if self.connection in (connection, None):  # else the server has reconnected, and the weights are known
            self.required_version = max(self.required_version, self.policy_version)
            self.policy_version = UNKNOWN

    def now_has(self, policy_version: int) -> None:
        """Record the server's weights. If the server had later weights, count these as lost."""
        self.required_version = max(self.required_version, self.policy_version)
        self.policy_version = policy_version
        if policy_version < max(self.required_version, 0):
            self.weights_lost += 1
        self.changed.set()


class Sending:
    """Takes flights from the queue while the gate is open, and sends them."""

    def __init__(self, state: ServerState, queue: FlightQueue, *, vocab_size: int, config: ServerConfig) -> None:
        self._state = state
        self._queue = queue
        self._vocab_size = vocab_size
        self._config = config
        self._cache_of = secrets.token_hex(4)  # unique: a server may still cache prompts of another run
        self._tasks: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None

    async def run(self) -> None:
        """Send every flight that may be sent, after each change. An unexpected exception of a flight ends the loop."""
        while True:
            await self._state.changed.wait()
            self._state.changed.clear()
            if self._bug is not None:
                raise self._bug
            if self._state.gate_is_open:
                for flight in self._queue.take(self._state.policy_version):
                    self._begin(self._fly(flight), f"request {flight.request.request_id}")

    def abort(self, flight: Flight) -> None:
        """Abort a flight on the server, again and again until the flight is back."""
        self._begin(self._abort(flight), f"abort of {flight.request.request_id}")

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if failed(task) and (fault := fault_of(task)) is not None:
            self._bug = fault
            self._state.changed.set()

    async def take_back(self) -> None:
        """Requeue everything under way: the server is gone."""
        await cancel(self._tasks)
        self._queue.put_back(self._queue.under_way())

    async def call_back(self, *, timeout_s: float) -> None:
        """Abort everything under way on the server, and wait until all flights are back; they continue later.

        Raises:
            ServerGoneError: a flight did not return.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while flights := self._queue.under_way():
                    self._state.landed.clear()
                    await asyncio.gather(*(self._abort_once(flight) for flight in flights))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_AGAIN_S):  # `wait_for` of Python 3.11 can lose a cancellation
                            await self._state.landed.wait()
        except TimeoutError as error:
            raise ServerGoneError(f"requests did not come back within {timeout_s:g} s") from error

    async def unfinished(self, *, timeout_s: float) -> dict[str, Completion]:
        """Call everything under way back, and return the completions so far; they continue where they were.

        The caller holds `state.exclusive`.
        """
        state = self._state
        state.paused = True  # else the flights leave again while others come back
        try:
            with suppress(ServerGoneError):  # then without the tokens of the flights that are not back
                await self.call_back(timeout_s=timeout_s)
            return self._queue.unfinished()
        finally:
            state.paused = False
            state.changed.set()

    async def _abort(self, flight: Flight) -> None:
        while not flight.future.done():
            await self._abort_once(flight)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _abort_once(self, flight: Flight) -> None:
        connection = self._state.connection
        if connection is not None and flight.server_request_id:
            with suppress(EngineError):
                await connection.api.abort(flight.server_request_id, timeout_s=_CALL_TIMEOUT_S)

    async def _fly(self, flight: Flight) -> None:
        """Send an HTTP request, then end or requeue the flight."""
        before = self._state.num_discards
        try:
            output = await self._output(flight)
        except ServerRefusedError as error:
            self._fail(flight, str(error))
        except EngineError as error:
            self._retry(flight, str(error))
        else:
            if output is None or before != self._state.num_discards or (self._state.updating and not output.tokens):
                self._queue.put_back([flight])  # not the request's fault
            elif output.tokens or flight.end_of(output) is not None:
                self._queue.landed(flight, output)
            else:
                self._retry(flight, f"no token after {_MAX_FUTILE} tries in a row")
        self._state.landed.set()
        self._state.changed.set()

    def _retry(self, flight: Flight, why: str) -> None:
        """Requeue a flight without a token; fail the flight after too many tries."""
        flight.futile += 1
        if flight.futile < _MAX_FUTILE or flight.aborted:
            self._queue.put_back([flight])
        else:
            self._fail(flight, why)

    def _fail(self, flight: Flight, why: str) -> None:
        self._queue.end(flight, GenerationError(f"request {flight.request.request_id}: {why}"))

    async def _output(self, flight: Flight) -> Output | None:
        """Return the output of an HTTP request; None if there is no usable output and the flight must be sent again.

        Raises:
            ServerRefusedError: the server will never serve this request.
            EngineError: the answer is not a completion.
        """
        state = self._state
        connection, version = state.connection, state.policy_version
        if connection is None or flight.aborted or not state.gate_is_open:
            return None  # the state changed since the gate was open
        flight.depart(connection.api.capabilities.prompt_tokens)
        self._queue.prefill_tokens += len(flight.input_tokens)
        try:
            output = await self._answer(connection, flight, version)
        except ServerGoneError:
            state.suspicious = True
            return None
        except ServerRefusedError as error:
            if error.of_gateway:
                self._keep_quiet(error)
                return None
            if error.status < 500:
                raise
            state.suspicious = True  # an API server outlives its engine for a moment, and refuses every try
            raise EngineError(str(error)) from error
        state.num_answers += bool(output.tokens)
        state.num_refusals = 0 if output.tokens else state.num_refusals
        state.retractions += output.preempted
        # The update came between sending and the server's prefill, and the prompt was cached under the former version.
        # In the other modes the cache does not survive an update.
        if connection.update_mode == "in_place" and output.overtaken and output.cached_tokens:
            return None
        return output

    def _keep_quiet(self, error: ServerRefusedError) -> None:
        """Suspect the server, and wait before the next health check: for Retry-After, or longer after each refusal."""
        state = self._state
        if not state.suspicious:  # else it is the same refusal, of another request
            wait_s = error.retry_after_s
            if wait_s is None:
                wait_s = min(_QUIET_S * 2.0 ** min(state.num_refusals, 10), _MOST_QUIET_S)
            state.quiet_until_s = time.monotonic() + min(wait_s, self._config.health_timeout_s)
            state.num_refusals += 1
            logger.warning("a gateway or the server refuses requests, which wait: %s", error)
        state.suspicious = True

    async def _answer(self, connection: Connection, flight: Flight, version: int) -> Output:
        """Send a request. Abort an overdue request, so that the server returns the tokens so far.

        If no request got a token meanwhile, the server makes no progress, and is given up.

        Raises:
            ServerRefusedError, ServerGoneError: of the call.
            EngineError: the answer is no completion, or the server does not even return the aborted request.
        """
        state, config, before = self._state, self._config, self._state.num_answers
        generating = connection.api.generate(
            flight,
            cache_name=f"{self._cache_of}-{version}",
            sent_version=version,
            mode=connection.update_mode,
            vocab_size=self._vocab_size,
        )
        asking = asyncio.create_task(generating, name=f"answer to {flight.request.request_id}")
        try:
            if await self._returns(asking, config.request_timeout_s):
                return asking.result()
            state.overdue += 1
            logger.warning("request %s is overdue: abort it", flight.request.request_id)
            left_s = config.health_timeout_s
            while not asking.done() and left_s > 0:
                await self._abort_once(flight)
                await self._returns(asking, _ABORT_AGAIN_S)
                left_s -= _ABORT_AGAIN_S
            output = asking.result() if asking.done() else None
        finally:
            await cancel([asking])
        nothing = output is None or not output.tokens
        if nothing and state.num_answers == before and state.connection is connection:
            state.hung = f"the server gave no token within {config.request_timeout_s:g} s"
        if output is None:
            raise EngineError(f"no answer within {config.request_timeout_s:g} s, not even to an abort")
        return output

    async def _returns(self, asking: asyncio.Task[Output], timeout_s: float) -> bool:
        """Wait for an answer; the time of pauses does not count, because a paused server answers nothing."""
        while not asking.done() and timeout_s > 0:
            started_s = time.monotonic()
            await asyncio.wait([asking], timeout=min(timeout_s, _LOOK_EVERY_S))
            if not self._state.paused:
                timeout_s -= time.monotonic() - started_s
        return asking.done()
