"""Turns with a learner on the same devices: the server sleeps during a train step (`areal_rloo/turns.py`).

    learner's wish ─► gate closed, requests called back ─► server sleeps ─► turn given
    end of the step ─► turn taken ─► server wakes ─► an update that waits ─► gate open

A sleeping server has no cache, and computes nothing. Updates wait for the end of the step. Requests are back in the
queue with their tokens so far, so questions for these tokens are answered. A server is only started with the turn,
because it takes memory: until it answers, the learner has no turn, and waits. While no process of a server is left
after a crash, the learner gets a turn at once. A server that neither falls asleep nor wakes is given up and restarted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from areal_rloo.engines.server.api import Connection
from areal_rloo.engines.server.client import ServerGoneError
from areal_rloo.engines.server.sending import Sending, ServerState
from areal_rloo.errors import EngineError
from areal_rloo.turns import LOOK_EVERY_S, EngineTurn

# To fall asleep, and of each call to wake. vLLM copies the weights of a large model in a second, but the requests come
# back only after a long prefill; less time costs a healthy server.
_TIMEOUT_S = 25.0
_CALL_BACK_S = 15.0


class Turns:
    """Puts the server to sleep for each turn of the learner, on the engine's event loop."""

    def __init__(
        self, state: ServerState, sending: Sending, turn: EngineTurn, has_requests: Callable[[], bool]
    ) -> None:
        self._has_requests = has_requests
        self._state = state
        self._sending = sending
        self._turn = turn
        self._sleeping: Connection | None = None

    async def begin(self) -> None:
        """Wait for the first turn."""
        while True:
            if self._turn.take(has_requests=False):
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def say_busy(self) -> None:
        """Tell the learner, without an end, while the server starts, ends, or does work with a time limit."""
        while True:
            if self._turn.held and (self._changes or self._state.exclusive.locked()):
                self._turn.says_busy()
            await asyncio.sleep(LOOK_EVERY_S)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not self._turn.held:
                if self._turn.take(has_requests=self._has_requests()):
                    await self._wake()
            elif not self._turn.is_wanted():
                self._open_gate()
            elif self._changes:
                self._state.awake.clear()  # the server falls asleep before a request is sent again
            elif await self._falls_asleep():
                self._turn.give()

    @property
    def _changes(self) -> bool:
        """True while the server starts or ends; both have time limits."""
        return self._state.connection is None and self._state.occupied

    async def _falls_asleep(self) -> bool:
        """Put the server to sleep, or hold back its start; return False if it starts, ends, or does not fall asleep."""
        state = self._state
        async with state.exclusive:
            connection = state.connection
            if connection is None and not state.occupied:
                state.awake.clear()
                return True
            if connection is None or state.hung is not None:
                return False
            state.awake.clear()  # closes the gate
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    try:
                        await self._sending.call_back(timeout_s=_CALL_BACK_S)
                    except ServerGoneError:  # or the server lost a request, which must not cost the server
                        await self._sending.take_back()
                    await connection.api.sleep(timeout_s=_TIMEOUT_S)
            except (EngineError, TimeoutError) as error:
                state.give_up(connection, f"the server does not fall asleep: {error}")
                return False  # not awake: the next server starts after the learner's turn
            self._sleeping = connection
            return True

    async def _wake(self) -> None:
        state, connection = self._state, self._sleeping
        async with state.exclusive:
            if connection is not None and state.connection is connection:  # else the server died in its sleep
                try:
                    await connection.api.wake(timeout_s=_TIMEOUT_S)
                except EngineError as error:
                    state.give_up(connection, f"the server does not wake: {error}")
            self._sleeping = None
            self._open_gate()

    def _open_gate(self) -> None:
        if not self._state.awake.is_set():
            self._state.awake.set()
            self._state.changed.set()
