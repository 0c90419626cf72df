"""Requests on their way to the server and back. The gate decides when; what the server does to them never loses one."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

from areal_rloo.engines.sglang.client import ServerGoneError, ServerRefusedError
from areal_rloo.engines.sglang.flight import Flight, Output, read_output
from areal_rloo.engines.sglang.flight_queue import FlightQueue
from areal_rloo.engines.sglang.state import ServerState
from areal_rloo.errors import EngineError, GenerationError

_MOST_FUTILE = 5  # HTTP requests in a row without a token; then a request counts as one that cannot be served
_ABORT_AGAIN_S = 0.5  # an abort that overtakes its request is lost
_CALL_TIMEOUT_S = 10.0


class Sending:
    """Takes flights from the queue while the gate is open. Used on the engine's event loop."""

    def __init__(self, state: ServerState, queue: FlightQueue, *, vocab_size: int) -> None:
        self._state = state
        self._queue = queue
        self._vocab_size = vocab_size
        self._cache_of = secrets.token_hex(4)  # this engine: a server may have served another run's versions
        self._tasks: set[asyncio.Task[None]] = set()
        self._mistake: BaseException | None = None

    async def run(self) -> None:
        """Send whatever may be sent, whenever something changed. A mistake of ours in one of them ends it."""
        while True:
            await self._state.changed.wait()
            self._state.changed.clear()
            if self._mistake is not None:
                raise self._mistake
            if self._state.gate_is_open:
                for flight in self._queue.take(self._state.policy_version):
                    task = asyncio.create_task(self._fly(flight))
                    self._tasks.add(task)
                    task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._mistake = task.exception()
            self._state.changed.set()

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
            output = await self._output(flight)
        except ServerRefusedError as error:
            self._queue.fail(flight, _of(flight, str(error)))
        except EngineError as error:
            self._ask_again(flight, str(error))
        else:
            if output is None or epoch != self._state.epoch or (self._state.updating and not output.tokens):
                self._queue.put_back([flight])  # no fault of this request
            elif output.tokens or flight.end_of(output) is not None:
                self._queue.landed(flight, output)
            else:
                self._ask_again(flight, "it comes back without a token, again and again")
        self._state.landed.set()
        self._state.changed.set()

    def _ask_again(self, flight: Flight, words: str) -> None:
        """Nothing came of it; often enough in a row, it fails with these words."""
        flight.futile += 1
        if flight.futile < _MOST_FUTILE or flight.aborted:
            self._queue.put_back([flight])
        else:
            self._queue.fail(flight, _of(flight, words))

    async def _output(self, flight: Flight) -> Output | None:
        """What came; None where nothing did that can be used, and the request is to be sent again.

        Raises:
            ServerRefusedError: the server will never serve this request.
            EngineError: what came is no completion.
        """
        state = self._state
        connection, version = state.connection, state.policy_version
        if connection is None or flight.aborted or not state.gate_is_open:
            return None  # something changed between the gate and here
        capabilities = connection.capabilities
        in_place = state.updates is not None and state.updates.mode == "in_place"
        body = flight.next_body(capabilities, f"{self._cache_of}-{version}")
        self._queue.count_prompt(len(body["input_ids"]))
        try:
            answer = await connection.client.generate(body)
        except ServerGoneError:
            state.suspect()
            return None
        except ServerRefusedError as error:
            if error.status < 500:
                raise
            raise EngineError(str(error)) from error
        output = read_output(
            answer,
            sent_version=version,
            spans=capabilities.weight_versions,
            late_tokens=in_place and capabilities.overlap,
            vocab_size=self._vocab_size,
        )
        state.retractions += int(answer["meta_info"].get("num_retractions") or 0)
        # An update overtook the request between our sending it and the server's taking it up, and its prompt came from
        # a cache under the former version's name. Where the cache does not outlive its weights, there is no such thing.
        if in_place and output.overtaken and answer["meta_info"].get("cached_tokens"):
            return None
        return output


def _of(flight: Flight, words: str) -> GenerationError:
    return GenerationError(f"request {flight.request.request_id}: {words}")
