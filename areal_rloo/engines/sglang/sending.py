"""Requests on their way to the server and back. The gate decides when; what the server does to them never loses one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from areal_rloo.engines.sglang.client import ServerGoneError, ServerRefusedError
from areal_rloo.engines.sglang.flight import Flight, Output, read_output
from areal_rloo.engines.sglang.flight_queue import FlightQueue
from areal_rloo.engines.sglang.state import ServerState
from areal_rloo.errors import EngineError
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_MOST_FUTILE = 5  # HTTP requests in a row without a token; then a request counts as one that cannot be served
_ABORT_AGAIN_S = 0.5  # an abort that overtakes its request is lost
_CALL_TIMEOUT_S = 10.0
_CUT = Output((), (), (), "cut")
_MIXED = Output((), (), (), "cut")  # see _reads_an_earlier_cache


class Sending:
    """Takes flights from the queue while the gate is open. Used on the engine's event loop."""

    def __init__(self, state: ServerState, queue: FlightQueue, *, vocab_size: int) -> None:
        self._state = state
        self._queue = queue
        self._vocab_size = vocab_size
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send whatever may be sent, whenever something changed."""
        while True:
            await self._state.changed.wait()
            self._state.changed.clear()
            if self._state.gate_is_open:
                for flight in self._queue.take(self._state.policy_version):
                    task = asyncio.create_task(self._fly(flight))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def take_back(self) -> None:
        """The server is gone: everything under way waits again, in its order."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._queue.put_back(self._queue.under_way())

    async def call_back(self, *, timeout_s: float | None = None) -> None:
        """Abort everything under way, until all of it is back, to go on later.

        Raises:
            TimeoutError: not all of it came.
        """
        async with asyncio.timeout(timeout_s):
            while flights := self._queue.under_way():
                self._state.landed.clear()
                await asyncio.gather(*(self._tell(flight) for flight in flights))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._state.landed.wait(), _ABORT_AGAIN_S)

    async def abort(self, flight: Flight) -> None:
        """Tell the server, until the flight is back."""
        while not flight.future.done():
            await self._tell(flight)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def _tell(self, flight: Flight) -> None:
        connection = self._state.connection
        if connection is not None and flight.server_request_id:
            with suppress(EngineError):
                body = {"rid": flight.server_request_id}
                await connection.client.post("/abort_request", body, timeout_s=_CALL_TIMEOUT_S)

    async def _fly(self, flight: Flight) -> None:
        """One HTTP request, and what becomes of the flight after it."""
        epoch = self._state.epoch
        try:
            output, trouble = await self._output(flight)
        except ServerRefusedError as error:
            self._queue.fail(flight, _of(flight, str(error)))
        else:
            if output is _MIXED or epoch != self._state.epoch or (self._state.updating and not output.tokens):
                self._queue.put_back([flight])  # no fault of this request
            elif self._queue.landed(flight, output) is None and flight.futile >= _MOST_FUTILE:
                self._queue.fail(flight, _of(flight, trouble))
        self._state.landed.set()
        self._state.changed.set()

    async def _output(self, flight: Flight) -> tuple[Output, str]:
        """What came, and what was wrong with it.

        Raises:
            ServerRefusedError: the server will never serve this request.
        """
        state = self._state
        connection, version = state.connection, state.policy_version
        if connection is None or flight.aborted or not state.gate_is_open:
            return _CUT, "it was not sent"  # something changed between the gate and here
        capabilities = connection.capabilities
        body = flight.next_body(capabilities, version)
        self._queue.count_prompt(len(body["input_ids"]))
        try:
            answer = await connection.client.generate(body)
            output = read_output(
                answer, sent_version=version, spans=capabilities.weight_versions, vocab_size=self._vocab_size
            )
        except ServerRefusedError as error:
            if error.status < 500:
                raise
            return _CUT, str(error)
        except ServerGoneError as error:
            state.suspect()
            return _CUT, str(error)
        except EngineError as error:
            logger.warning("%s", _of(flight, str(error)))
            return _CUT, str(error)
        state.retractions += int(answer["meta_info"].get("num_retractions") or 0)
        in_place = state.updates is not None and state.updates.mode == "in_place"  # else no cache outlives its weights
        cached_tokens = int(answer["meta_info"].get("cached_tokens") or 0)
        if in_place and _reads_an_earlier_cache(output, cached_tokens, sent_version=version):
            return _MIXED, "it was sent again"
        return output, "it came back without a token"


def _reads_an_earlier_cache(output: Output, cached_tokens: int, *, sent_version: int) -> bool:
    """Whether an update overtook the request, and its prompt came from a cache that earlier weights had filled.

    Between the moment we send and the moment the server takes it up, the server may be paused for an update. Then the
    key of the cache is that of the version before, and all tokens are of the version after.
    """
    return cached_tokens > 0 and bool(output.versions) and output.versions[0] > sent_version


def _of(flight: Flight, words: str) -> EngineError:
    return EngineError(f"request {flight.request.request_id}: {words}")
