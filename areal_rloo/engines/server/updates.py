"""Load new weights into a server that generates: the order of the calls, and the state after success or failure.

    prepare ─► close the gate ─► pause ─► load ─► prove ─► continue, always ─► open the gate

`prepare` does the work outside of the pause: writing files, or joining a group. A server joining a new group stands
still anyway until all members are there. `prove` compares a sample of the server's parameters with the published ones.
A call without an answer, or past the deadline, raises ServerGoneError: the server is restarted (managed) or opened
again (external), because the call may have had an effect.

| the update failed               | weights      | flights under way            | gate                             |
|---------------------------------|--------------|------------------------------|----------------------------------|
| before anything was loaded      | unchanged    | continue                     | opens                            |
| when something may be loaded    | unknown      | aborted, output discarded    | closed until an update succeeds  |
| the sample differs              | unknown      | aborted, output discarded    | so; the second time: restarted   |
| and the server does not answer  | unknown      | requeued                     | the server is restarted          |
| and does not continue           | unknown      | requeued                     | the server is restarted          |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from areal_rloo.engines.base import UNKNOWN, uncancellable_future
from areal_rloo.engines.server.api import Connection, WeightsUnknownError
from areal_rloo.engines.server.client import ServerGoneError, ServerRefusedError
from areal_rloo.engines.server.sending import Sending, ServerState
from areal_rloo.errors import EngineError
from areal_rloo.models.fingerprint import Sample
from areal_rloo.telemetry import trace
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_CALL_TIMEOUT_S = 30.0  # of calls without weights
_CONTINUE_TRIES = 3
_CONTINUE_AGAIN_S = 0.5
_MAX_MISMATCHES = 2  # in a row; after as many, the server is restarted


class WeightsDifferError(WeightsUnknownError):
    """The server reports a successful update, but holds other parameters than the learner published."""


Load = Callable[[], Awaitable[bool]]
"""Loads the weights while the server is paused; returns True if the weights were also proven."""


@dataclass(frozen=True, slots=True)
class Update:
    """A requested update.

    Attributes:
        in_group: a sender waits for this server. The present version is received again, and no other connection can
            take this server's place.
        timeout_s: of the pause call.
        prepare: does the work before the pause; returns the work of the pause.
    """

    policy_version: int
    in_group: bool
    timeout_s: float
    prepare: Callable[[Connection], Awaitable[Load]]


async def prove(connection: Connection, policy_version: int, samples: Iterable[Sample], names: Iterable[str]) -> bool:
    """Compare the server's parameters with the sample of the server's digest; return False if there is none.

    Raises:
        WeightsDifferError: a parameter differs.
        WeightsUnknownError: the server refuses the call.
    """
    sample = next((sample for sample in samples if sample.digest == connection.digest), None)
    if sample is None:
        return False
    try:
        difference = await connection.api.weights.first_difference(sample, names, timeout_s=_CALL_TIMEOUT_S)
    except ServerRefusedError as error:
        raise WeightsUnknownError(f"version {policy_version} could not be compared: {error}") from error
    if difference is not None:
        raise WeightsDifferError(f"the server does not hold version {policy_version}: {difference}")
    return True


class Swapping:
    """Makes updates, one after the other, and keeps the shared state right after each."""

    def __init__(self, state: ServerState, sending: Sending) -> None:
        self._state = state
        self._sending = sending
        self._staged: asyncio.Queue[tuple[Update, Future[int]]] = asyncio.Queue()
        self._latest: Connection | None = None
        self._mismatches = 0  # in a row on the latest connection
        self._death: EngineError | None = None

    def stage(self, update: Update) -> Future[int]:
        """Request an update; return the future of the server's version.

        Raises:
            EngineError: the engine has stopped.
        """
        if self._death is not None:
            raise self._death
        future: Future[int] = uncancellable_future()
        self._staged.put_nowait((update, future))
        return future

    async def run(self) -> None:
        while True:
            update, future = await self._staged.get()
            try:
                future.set_result(await self._update(update))
            except (EngineError, OSError) as error:  # OSError: of the weight files, for example a full disk
                future.set_exception(EngineError(str(error)))
            except asyncio.CancelledError:
                future.set_exception(EngineError("the engine was closed"))
                raise
            except BaseException as error:
                future.set_exception(EngineError(f"{type(error).__name__}: {error}"))
                raise
            finally:
                self._state.changed.set()

    def close(self, death: EngineError) -> None:
        """Refuse new updates, and fail the waiting ones."""
        self._death = death
        while not self._staged.empty():
            _, future = self._staged.get_nowait()
            future.set_exception(death)

    async def _update(self, update: Update) -> int:
        state = self._state
        if not update.in_group:
            await state.connected.wait()
        async with state.exclusive_and_awake():
            connection = state.connection
            if connection is None or state.hung is not None:  # for example, the server did not wake
                raise EngineError(f"version {update.policy_version} was not loaded: the server is restarting")
            if update.policy_version < state.policy_version + (not update.in_group):
                return state.policy_version
            proven = await self._exchange(connection, update, time.monotonic())
        self._mismatches = 0
        state.proven_updates += proven
        state.unproven_updates += not proven
        state.weight_updates += 1
        state.now_has(update.policy_version)
        return update.policy_version

    async def _exchange(self, connection: Connection, update: Update, started_s: float) -> bool:
        """Prepare and swap the weights; returns True if they were proven. After a failure, judge the server."""
        if self._latest is not connection:
            self._latest, self._mismatches = connection, 0
        try:
            load = await update.prepare(connection)
            # A server joining a group stands still already.
            proven = await self._swap(connection, update, load, started_s if update.in_group else time.monotonic())
            self._check_still_connected(connection, update)
            return proven
        except ServerGoneError as error:
            self._state.give_up(connection, str(error))
            raise
        except WeightsDifferError as error:
            logger.error("%s", error)
            self._state.weight_mismatches += 1
            self._mismatches += 1
            if self._mismatches >= _MAX_MISMATCHES:
                self._state.give_up(connection, str(error))
            raise

    async def _swap(self, connection: Connection, update: Update, load: Load, still_since_s: float) -> bool:
        """Close the gate, load, and open the gate. In mode abort all flights return before the pause.

        Returns: True if the weights were proven.
        """
        state = self._state
        self._check_still_connected(connection, update)
        state.paused = True
        try:
            if connection.update_mode == "abort":
                await self._sending.call_back(timeout_s=update.timeout_s)
                self._check_still_connected(connection, update)
            return await self._load_paused(connection, update, load)
        except WeightsUnknownError:
            if state.connection is connection:
                state.now_has(UNKNOWN)
                await self._sending.call_back(timeout_s=update.timeout_s)
            raise
        finally:
            state.paused = False
            state.last_pause_s = time.monotonic() - still_since_s
            state.swap_s += state.last_pause_s
            trace.record("engine", f"pause for version {update.policy_version}", still_since_s)

    def _check_still_connected(self, connection: Connection, update: Update) -> None:
        if self._state.connection is not connection:
            raise EngineError(f"version {update.policy_version} was not loaded: the server failed before")

    async def _load_paused(self, connection: Connection, update: Update, load: Load) -> bool:
        try:
            await connection.api.pause(connection.update_mode, timeout_s=update.timeout_s)
            proven = await load()
        except ServerGoneError:
            self._state.forget_version(connection)
            raise  # the server cannot be told to continue; opening it again does that
        except asyncio.CancelledError:
            with suppress(EngineError):  # otherwise the cancelled task would go on
                await connection.api.resume(timeout_s=_CALL_TIMEOUT_S)
            raise
        except BaseException as error:
            if isinstance(error, WeightsUnknownError):
                self._state.num_discards += 1  # discard the output of all requests under way
                self._state.forget_version(connection)  # also if the continue fails
            await self._continue(connection)
            raise
        await self._continue(connection)
        return proven

    async def _continue(self, connection: Connection) -> None:
        """End the pause. If this fails, the server is given up: it may stay paused, or generate on the new weights.

        Raises:
            ServerGoneError: the server does not continue.
        """
        try:
            for _ in range(_CONTINUE_TRIES - 1):
                with suppress(ServerRefusedError):
                    return await connection.api.resume(timeout_s=_CALL_TIMEOUT_S)
                await asyncio.sleep(_CONTINUE_AGAIN_S)
            await connection.api.resume(timeout_s=_CALL_TIMEOUT_S)
        except EngineError as error:
            self._state.forget_version(connection)
            raise ServerGoneError(f"the server does not continue: {error}") from error
