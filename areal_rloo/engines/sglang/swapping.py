"""Updates of the server's weights, one after the other, and what holds after each of them, well or badly ended.

    prepare ─► close the gate ─► pause ─► load ─► continue, always ─► open the gate

Prepared is what needs no pause: files are written. A new group is met then too, in which the server stands still of its
own accord until all are there.

| it failed                       | weights are    | under way                   | gate                              |
|---------------------------------|----------------|-----------------------------|-----------------------------------|
| before anything was loaded      | those of before| goes on                     | opens                             |
| when something may be loaded    | unknown        | aborted, its output not used| stays closed until an update ends |
| and the server does not answer  | unknown        | comes back                  | the server is started again       |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass

from areal_rloo.engines.sglang.client import ServerGoneError
from areal_rloo.engines.sglang.sending import Sending
from areal_rloo.engines.sglang.state import UNKNOWN, ServerState
from areal_rloo.engines.sglang.updates import ServerUpdates, WeightsUnknownError
from areal_rloo.errors import EngineError


@dataclass(frozen=True, slots=True)
class Staged:
    """An update to make.

    Attributes:
        policy_version: that it brings.
        future: of the caller.
        in_group: a sender waits for this server: the version it has is received again, and no other server can step in.
        prepare: what can be done while requests go on.
        load: what is done in the pause.
        timeout_s: of the pause to begin.
    """

    policy_version: int
    future: Future[int]
    in_group: bool
    prepare: Callable[[ServerUpdates], Awaitable[None]]
    load: Callable[[ServerUpdates], Awaitable[None]]
    timeout_s: float


class Swapping:
    """Makes staged updates. Used on the engine's event loop."""

    def __init__(self, state: ServerState, sending: Sending) -> None:
        self._state = state
        self._sending = sending
        self._staged: asyncio.Queue[Staged] = asyncio.Queue()

    def stage(self, staged: Staged) -> None:
        self._staged.put_nowait(staged)

    async def run(self) -> None:
        while True:
            staged = await self._staged.get()
            try:
                policy_version = await self._update(staged)
            except (EngineError, OSError) as error:  # of the files; there may be no room for them
                staged.future.set_exception(EngineError(str(error)))
            except asyncio.CancelledError:
                staged.future.set_exception(EngineError("the engine was closed"))
                raise
            except BaseException as error:
                staged.future.set_exception(EngineError(f"{type(error).__name__}: {error}"))
                raise
            else:
                staged.future.set_result(policy_version)
            finally:
                self._state.changed.set()

    def fail_all(self, error: EngineError) -> None:
        """Nothing more will be loaded."""
        while not self._staged.empty():
            self._staged.get_nowait().future.set_exception(error)

    async def _update(self, staged: Staged) -> int:
        state = self._state
        if not staged.in_group:
            await state.connected.wait()
        updates = state.updates
        if updates is None:
            raise EngineError(f"version {staged.policy_version} was not loaded: the server is being started again")
        if staged.policy_version < state.policy_version + (not staged.in_group):
            return state.policy_version
        state.updating = True
        began_s = time.monotonic()
        try:
            await staged.prepare(updates)
            self._check_is_there(updates, staged)
            await self._swap(updates, staged, began_s if staged.in_group else time.monotonic())
        except ServerGoneError as error:
            state.hang(updates, str(error))
            raise
        finally:
            state.updating = False
        state.weight_updates += 1
        state.now_has(staged.policy_version)
        return staged.policy_version

    async def _swap(self, updates: ServerUpdates, staged: Staged, still_since_s: float) -> None:
        """Load between a pause and a continue; what is under way stands still, or has come back in mode abort.

        A server stands still while it meets a group too, so that counts.
        """
        self._state.paused = True
        try:
            if updates.mode == "abort":
                await self._call_back_or_give_up(staged)
                self._check_is_there(updates, staged)
            await self._load_paused(updates, staged)
        except WeightsUnknownError:
            if self._state.updates is updates:
                self._state.now_has(UNKNOWN)
                await self._call_back_or_give_up(staged)
            raise
        finally:
            self._state.paused = False
            self._state.last_pause_s = time.monotonic() - still_since_s
            self._state.swap_s += self._state.last_pause_s

    def _check_is_there(self, updates: ServerUpdates, staged: Staged) -> None:
        """The server this update was begun with may have failed meanwhile."""
        if self._state.updates is not updates:
            raise EngineError(f"version {staged.policy_version} was not loaded: the server failed before")

    async def _call_back_or_give_up(self, staged: Staged) -> None:
        """Have everything back from a server whose weights are unknown; one that does not give it is started again."""
        try:
            await self._sending.call_back(timeout_s=staged.timeout_s)
        except TimeoutError as error:
            raise ServerGoneError(f"requests did not come back within {staged.timeout_s:g} s") from error

    async def _load_paused(self, updates: ServerUpdates, staged: Staged) -> None:
        try:
            await updates.pause(timeout_s=staged.timeout_s)
            await staged.load(updates)
        except ServerGoneError:
            self._state.forget_version(updates)
            raise  # it cannot be told to continue; when it is back, it is
        except WeightsUnknownError:
            self._state.epoch += 1  # what comes after the continue is not used
            self._state.forget_version(updates)  # also where it cannot be told to continue
            await updates.resume()
            raise
        except BaseException:
            await updates.resume()
            raise
        await updates.resume()
