"""Turns with a learner on the same devices: the server sleeps during a train step (`areal_rloo/turns.py`).

    learner's wish ─► gate closed, requests called back ─► server sleeps ─► turn given
    end of the step ─► turn taken ─► server wakes ─► an update that waits ─► gate open

A sleeping server has no cache, and computes nothing. Updates wait for the end of the step. Requests are back in the
queue with their tokens so far, so questions for these tokens are answered. A server is only started with the turn,
because it takes memory: until it answers, the learner has no turn. While no process of a server is left after a crash,
the learner gets a turn at once. A server that neither falls asleep nor wakes is given up and restarted.
"""

from __future__ import annotations

import asyncio

from areal_rloo.engines.server.api import Connection
from areal_rloo.engines.server.sending import Sending, ServerState
from areal_rloo.errors import EngineError
from areal_rloo.turns import LOOK_EVERY_S, EngineTurn

_TIMEOUT_S = 10.0  # of a call, below the learner's patience; vLLM copies weights of a large model in a second


class Turns:
    """Puts the server to sleep for each turn of the learner, on the engine's event loop."""

    def __init__(self, state: ServerState, sending: Sending, turn: EngineTurn) -> None:
        self._state = state
        self._sending = sending
        self._turn = turn
        self._sleeping: Connection | None = None

    async def begin(self) -> None:
        """Wait for the first turn."""
        while True:
            if self._turn.take():
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if not self._turn.held and self._turn.take():
                await self._wake()
            elif self._turn.held and self._turn.is_wanted() and await self._falls_asleep():
                self._turn.give()

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
                await self._sending.call_back(timeout_s=_TIMEOUT_S)
                await connection.api.sleep(timeout_s=_TIMEOUT_S)
            except EngineError as error:
                state.give_up(connection, f"the server does not fall asleep: {error}")
                state.awake.set()
                return False
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
            state.awake.set()
            state.changed.set()
