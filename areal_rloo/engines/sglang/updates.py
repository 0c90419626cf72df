"""Load new weights into a server that generates: the HTTP calls, and the state after a success or a failure.

    prepare ─► close the gate ─► pause ─► begin ─► each bucket ─► end ─► prove ─► continue, always ─► open the gate

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
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_rloo.engines.base import uncancellable_future
from areal_rloo.engines.sglang.client import Connection, ServerGoneError, ServerRefusedError
from areal_rloo.engines.sglang.readback import first_difference
from areal_rloo.engines.sglang.sending import UNKNOWN, Sending, ServerState
from areal_rloo.errors import EngineError
from areal_rloo.models.fingerprint import Sample
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_CALL_TIMEOUT_S = 30.0  # of calls without weights
_CONTINUE_TRIES = 3
_CONTINUE_AGAIN_S = 0.5
_MAX_MISMATCHES = 2  # in a row; after as many, the server is restarted
_NOTHING_LOADED = "Failed to receive weights"  # SGLang's message if a bucket did not arrive at all


class WeightsUnknownError(EngineError):
    """The server reports a failed update, and part of it may have been loaded."""


class WeightsDifferError(WeightsUnknownError):
    """The server reports a successful update, but holds other parameters than the learner published."""


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """A process group of the sender (rank 0) and servers. A server joins again whenever the name changes.

    Attributes:
        host, port: of the sender's TCP store.
        name: unique among all groups.
        rank_offset: rank of this server's first device.
        world_size: the sender and every device of every server.
        timeout_s: of each call with the sender.
    """

    host: str
    port: int
    name: str
    rank_offset: int
    world_size: int
    backend: Literal["gloo", "nccl"]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """A broadcast: a uint8 tensor of these tensors, adjacent without gaps.

    Attributes:
        names: Hugging Face parameter names.
        dtypes: torch's names without the prefix: bfloat16.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


class ServerUpdates:
    """The update calls of a connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._in_place = connection.update_mode == "in_place"
        self._session = connection.capabilities.update_session
        self._group: str | None = None
        self._group_is_whole = False

    async def join(self, group: UpdateGroup) -> None:
        """Join the sender's group, unless the server has joined already and no call in the group failed since."""
        if self._group == group.name and self._group_is_whole:
            return
        if self._group is not None:
            former, self._group = self._group, None
            with suppress(ServerRefusedError):  # the server does not have this group
                await self._post("/destroy_weights_update_group", {"group_name": former})
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.rank_offset,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._post("/init_weights_update_group", body, group.timeout_s)
        self._group = group.name
        self._group_is_whole = True

    async def pause(self, *, timeout_s: float) -> None:
        """Stop generation. In mode abort no request is under way afterwards."""
        await self._post("/pause_generation", {"mode": self.connection.update_mode}, timeout_s)

    async def resume(self) -> None:
        await self._post("/continue_generation")

    async def load_buckets(self, policy_version: int, group: UpdateGroup, buckets: Sequence[BucketLayout]) -> None:
        """Receive every bucket from the sender.

        Raises:
            WeightsUnknownError: part of the weights may have been loaded.
            EngineError: nothing was loaded; the weights are unchanged.
        """
        self._group_is_whole = False  # until the update succeeds
        if self._session:
            try:
                await self._post("/begin_weight_update")
            except ServerRefusedError:  # an interrupted update left a session open
                await self._end_if_open()
                await self._post("/begin_weight_update")
        try:
            for index, bucket in enumerate(buckets):
                last = index == len(buckets) - 1
                await self._load(bucket, group, version=policy_version if last else None, first=index == 0)
        except ServerGoneError:
            raise
        except EngineError:
            if self._session:
                await self._end_if_open()
            raise
        if self._session:
            try:
                await self._post("/end_weight_update")
            except ServerRefusedError as error:
                raise WeightsUnknownError(f"the update did not end: {error}") from error
        self._group_is_whole = True

    async def load_folder(self, policy_version: int, folder: Path, *, timeout_s: float) -> None:
        """Read the safetensors files of a folder. After a failed load, SGLang "rolls back" to the failed folder.

        Raises:
            WeightsUnknownError: part of the weights may have been loaded.
        """
        body = {
            "model_path": str(folder),
            "weight_version": str(policy_version),
            "flush_cache": not self._in_place,
            "abort_all_requests": False,
        }
        try:
            await self._post("/update_weights_from_disk", body, timeout_s)
        except ServerRefusedError as error:
            raise WeightsUnknownError(f"version {policy_version} was not loaded: {error.words}") from error

    async def prove(self, policy_version: int, samples: Iterable[Sample], names: Iterable[str]) -> bool:
        """Compare the server's parameters with the sample of the server's digest; return False if there is none.

        Raises:
            WeightsDifferError: a parameter differs.
            WeightsUnknownError: the server refuses the call.
        """
        connection = self.connection
        sample = next((sample for sample in samples if sample.digest == connection.digest), None)
        if sample is None:
            return False
        try:
            difference = await first_difference(connection.client, sample, names, timeout_s=_CALL_TIMEOUT_S)
        except ServerRefusedError as error:
            raise WeightsUnknownError(f"version {policy_version} could not be compared: {error}") from error
        if difference is not None:
            raise WeightsDifferError(f"the server does not hold version {policy_version}: {difference}")
        return True

    async def _post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> None:
        await self.connection.client.post(path, body, timeout_s=timeout_s or _CALL_TIMEOUT_S)

    async def _end_if_open(self) -> None:
        with suppress(ServerRefusedError):  # no session is open
            await self._post("/end_weight_update")

    async def _load(self, bucket: BucketLayout, group: UpdateGroup, *, version: int | None, first: bool) -> None:
        body: dict[str, Any] = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            # In place, requests under way and later requests keep using the cache; otherwise the cache is flushed.
            "flush_cache": version is not None and not self._in_place,
            "abort_all_requests": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        try:
            await self._post("/update_weights_from_distributed", body, group.timeout_s)
        except ServerRefusedError as error:
            # Only the first of several ranks reports; another rank may have loaded the bucket.
            alone = self.connection.capabilities.tensor_parallel == 1
            if first and alone and error.words.partition(": ")[2].startswith(_NOTHING_LOADED):
                raise EngineError(f"the sender's weights did not arrive: {error.words}") from error
            raise WeightsUnknownError(f"the update failed halfway: {error.words}") from error


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
    prepare: Callable[[ServerUpdates], Awaitable[Load]]


class Swapping:
    """Makes updates, one after the other, and keeps the shared state right after each."""

    def __init__(self, state: ServerState, sending: Sending) -> None:
        self._state = state
        self._sending = sending
        self._staged: asyncio.Queue[tuple[Update, Future[int]]] = asyncio.Queue()
        self._updates: ServerUpdates | None = None  # of the latest connection
        self._mismatches = 0  # in a row on this connection
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
        connection = state.connection
        if connection is None or state.hung is not None:
            raise EngineError(f"version {update.policy_version} was not loaded: the server is restarting")
        if update.policy_version < state.policy_version + (not update.in_group):
            return state.policy_version
        started_s = time.monotonic()
        async with state.exclusive:
            proven = await self._exchange(connection, update, started_s)
        self._mismatches = 0
        state.proven_updates += proven
        state.unproven_updates += not proven
        state.weight_updates += 1
        state.now_has(update.policy_version)
        return update.policy_version

    async def _exchange(self, connection: Connection, update: Update, started_s: float) -> bool:
        """Prepare and swap the weights; returns True if they were proven. After a failure, judge the server."""
        if self._updates is None or self._updates.connection is not connection:
            self._updates, self._mismatches = ServerUpdates(connection), 0
        try:
            load = await update.prepare(self._updates)
            # A server joining a group stands still already.
            proven = await self._swap(self._updates, update, load, started_s if update.in_group else time.monotonic())
            self._check_still_connected(connection, update)
            return proven
        except ServerGoneError as error:
            self._give_up(connection, error)
            raise
        except WeightsDifferError as error:
            logger.error("%s", error)
            self._state.weight_mismatches += 1
            self._mismatches += 1
            if self._mismatches >= _MAX_MISMATCHES:
                self._give_up(connection, error)
            raise

    async def _swap(self, updates: ServerUpdates, update: Update, load: Load, still_since_s: float) -> bool:
        """Close the gate, load, and open the gate. In mode abort all flights return before the pause.

        Returns: True if the weights were proven.
        """
        state = self._state
        self._check_still_connected(updates.connection, update)
        state.paused = True
        try:
            if updates.connection.update_mode == "abort":
                await self._sending.call_back(timeout_s=update.timeout_s)
                self._check_still_connected(updates.connection, update)
            return await self._load_paused(updates, update, load)
        except WeightsUnknownError:
            if state.connection is updates.connection:
                state.now_has(UNKNOWN)
                await self._sending.call_back(timeout_s=update.timeout_s)
            raise
        finally:
            state.paused = False
            state.last_pause_s = time.monotonic() - still_since_s
            state.swap_s += state.last_pause_s

    def _give_up(self, connection: Connection, why: EngineError) -> None:
        """Have the server restarted, unless that has happened already."""
        if self._state.connection is connection:
            self._state.hung = str(why)

    def _check_still_connected(self, connection: Connection, update: Update) -> None:
        if self._state.connection is not connection:
            raise EngineError(f"version {update.policy_version} was not loaded: the server failed before")

    async def _load_paused(self, updates: ServerUpdates, update: Update, load: Load) -> bool:
        try:
            await updates.pause(timeout_s=update.timeout_s)
            proven = await load()
        except ServerGoneError:
            self._state.forget_version(updates.connection)
            raise  # the server cannot be told to continue; opening it again does that
        except asyncio.CancelledError:
            with suppress(EngineError):  # otherwise the cancelled task would go on
                await updates.resume()
            raise
        except BaseException as error:
            if isinstance(error, WeightsUnknownError):
                self._state.num_discards += 1  # discard the output of all requests under way
                self._state.forget_version(updates.connection)  # also if the continue fails
            await self._continue(updates)
            raise
        await self._continue(updates)
        return proven

    async def _continue(self, updates: ServerUpdates) -> None:
        """End the pause. If this fails, the server is given up: it may stay paused, or generate on the new weights.

        Raises:
            ServerGoneError: the server does not continue.
        """
        try:
            for _ in range(_CONTINUE_TRIES - 1):
                with suppress(ServerRefusedError):
                    return await updates.resume()
                await asyncio.sleep(_CONTINUE_AGAIN_S)
            await updates.resume()
        except EngineError as error:
            self._state.forget_version(updates.connection)
            raise ServerGoneError(f"the server does not continue: {error}") from error
