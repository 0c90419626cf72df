"""Drive an SGLang server as an engine: submit requests, load weights in between, survive a server crash or hang.

    submit ─► queue ─► gate ─► POST /generate, at most num_slots ─► segment ─► completion, or back to the queue
                        ▲
    open while the server is healthy and not paused, with known weights not older than before

A thread with a separate event loop does all the work; callers wait only for their futures. Every flight leaves the
queue exactly once, so a server failure neither loses nor doubles a completion. SGLang holds a single set of weights, so
`pinned` has no effect; the versions of a completion tell which weights made each token.

With `pause: in_place` a token is tagged with the version that sampled it, over a cache that earlier versions filled. If
an update came between a prompt and its first token, the token is tagged with the later version.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from torch import Tensor

from areal_rloo.config import SGLangConfig
from areal_rloo.engines.base import EngineStatistics, GenerationRequest
from areal_rloo.engines.sglang.client import Capabilities
from areal_rloo.engines.sglang.flights import FlightQueue
from areal_rloo.engines.sglang.model_folder import WeightsFolder, check_shapes, read_model
from areal_rloo.engines.sglang.process import ServerPlan
from areal_rloo.engines.sglang.sending import Sending, ServerState
from areal_rloo.engines.sglang.server import ExternalServer, ManagedServer, Server, Supervision
from areal_rloo.engines.sglang.updates import BucketLayout, Load, ServerUpdates, Staged, Swapping, UpdateGroup
from areal_rloo.errors import EngineError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.trajectory import Completion

logger = get_logger(__name__)

_METRICS_TIMEOUT_S = 5.0
_LAST_CALLS_TIMEOUT_S = 2.0


class SGLangStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the server behind the engine; counts are since the engine's start."""

    metrics_prefix: ClassVar[str] = "engine_server_"

    restarts: Annotated[int, Metric("Times a failed server was started or found again", kind="counter", healthy=(0, 2))]
    health_failures: Annotated[int, Metric("Times the server missed its health timeout", kind="counter")]
    resumed: Annotated[int, Metric("Requests that came back unfinished and were sent again", kind="counter")]
    retractions: Annotated[int, Metric("Requests the server preempted because its cache was full", kind="counter")]
    weights_lost: Annotated[int, Metric("Times the server was found with earlier or unknown weights", kind="counter")]
    last_pause_s: Annotated[float, Metric("Time that the last update of the weights paused the server", "s")]


class SGLangEngine:
    """Implements `areal_rloo.engines.base.Engine`, which documents the methods."""

    def __init__(
        self,
        plan: ServerPlan,
        *,
        config: SGLangConfig,
        url: str | None,
        update_timeout_s: float,
        log: Path,
        capabilities: Capabilities | None = None,
    ) -> None:
        """Start a managed server, or connect to the server at `url`, in the background; return at once.

        Args:
            plan: settings of a managed server; an external server must fit them.
            config: rollout.sglang.
            url: of an external server; None for a managed server.
            update_timeout_s: of loading weights through files.
            log: file for the output of a managed server.
        """
        self.ready: Future[None] = Future()  # done when the server answers; fails with a UserError
        self._facts = facts = read_model(plan.model_path)
        self._update_timeout_s = update_timeout_s
        plan = replace(plan, model_context_tokens=facts.context_tokens)
        self._server: Server = (
            ManagedServer(config, plan, capabilities, log)
            if url is None
            else ExternalServer(config, plan, capabilities, url)
        )
        self._queue = FlightQueue(
            num_slots=plan.num_slots, context_tokens=plan.context_tokens, vocab_size=facts.vocab_size
        )
        self._folder: WeightsFolder | None = None
        self._death: EngineError | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._state = ServerState()
        self._sending = Sending(self._state, self._queue, vocab_size=facts.vocab_size)
        self._swapping = Swapping(self._state, self._sending)
        self._supervision = Supervision(self._state, self._server, self._sending, config)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        futures = self._queue.submit(requests)
        self._call_soon(self._state.changed.set)
        return futures

    def abort(self, request_ids: Iterable[str]) -> None:
        for flight in self._queue.abort(request_ids):
            with suppress(RuntimeError):  # the loop is closed: all requests have ended
                asyncio.run_coroutine_threadsafe(self._sending.abort(flight), self._loop)

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, Tensor]]) -> Future[int]:
        """Load weights through files, written while generation continues and read by the server in the pause."""

        async def prepare(updates: ServerUpdates) -> Load:
            folder = self._folder
            if folder is None:
                folder = self._folder = await asyncio.to_thread(WeightsFolder, self._facts)
            written = await asyncio.to_thread(folder.write, policy_version, weights)

            async def load() -> None:
                try:
                    await updates.load_folder(policy_version, written, timeout_s=self._update_timeout_s)
                finally:
                    await asyncio.to_thread(folder.remove, written)

            return load

        return self._stage(policy_version, prepare, in_group=False, timeout_s=self._update_timeout_s)

    def update_from_group(
        self, policy_version: int, group: UpdateGroup, buckets: Sequence[BucketLayout]
    ) -> Future[int]:
        """Load weights through a process group: the server receives each bucket from the sender.

        The server's present version is received again, because all members of a group must take part. An earlier
        version is not received.

        Raises (through the future):
            EngineError: a parameter does not fit the model, the sender did not come, or the update failed.
        """
        shapes = {n: shape for bucket in buckets for n, shape in zip(bucket.names, bucket.shapes, strict=True)}

        async def prepare(updates: ServerUpdates) -> Load:
            check_shapes(self._facts, shapes)
            await updates.join(group)
            return lambda: updates.load_buckets(policy_version, group, buckets)

        return self._stage(policy_version, prepare, in_group=True, timeout_s=group.timeout_s)

    def statistics(self) -> EngineStatistics:
        state = self._state
        return self._queue.statistics(
            ready=state.connection is not None,
            policy_version=state.policy_version,
            weight_updates=state.weight_updates,
            swap_s=state.swap_s,
        )

    def server_statistics(self) -> SGLangStatistics:
        state = self._state
        return SGLangStatistics(
            restarts=state.restarts,
            health_failures=state.health_failures,
            resumed=self._queue.resumed,
            retractions=state.retractions,
            weights_lost=state.weights_lost,
            last_pause_s=state.last_pause_s,
        )

    def metrics_text(self) -> str:
        """Return the server's /metrics; empty if the server does not answer in time. Waits for the engine's thread."""
        connection = self._state.connection
        if connection is not None:
            asked = connection.client.text("/metrics", timeout_s=_METRICS_TIMEOUT_S)
            with suppress(RuntimeError, EngineError, TimeoutError):  # RuntimeError: the loop is closed
                return asyncio.run_coroutine_threadsafe(asked, self._loop).result(2 * _METRICS_TIMEOUT_S)
        return ""

    def close(self) -> None:
        self._call_soon(self._closing.set)
        self._thread.join()

    def _stage(
        self,
        policy_version: int,
        prepare: Callable[[ServerUpdates], Awaitable[Load]],
        *,
        in_group: bool,
        timeout_s: float,
    ) -> Future[int]:
        if self._death is not None:
            raise self._death
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()  # a cancelled wait must not cancel the update
        staged = Staged(policy_version, future, in_group, prepare, timeout_s)
        self._call_soon(self._swapping.staged.put_nowait, staged)
        return future

    def _call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: all requests have ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _main(self) -> None:
        """Serve until the engine is closed, or until the server has failed for good."""
        working = [
            asyncio.create_task(work)
            for work in (self._supervision.run(self.ready), self._sending.run(), self._swapping.run())
        ]
        closing = asyncio.create_task(self._closing.wait())
        done, _ = await asyncio.wait([*working, closing], return_when=asyncio.FIRST_COMPLETED)
        error = next((task.exception() for task in done if task is not closing), None)
        self._death = EngineError("the engine was closed" if error is None else f"the engine stopped: {error}")
        if error is not None:
            logger.error("%s", self._death)
        for task in (*working, closing):
            task.cancel()
        await asyncio.gather(*working, closing, return_exceptions=True)
        if self._state.connection is not None:
            if not self._server.managed:
                with suppress(TimeoutError):  # leave no request running on an external server
                    await self._sending.call_back(timeout_s=_LAST_CALLS_TIMEOUT_S)
            await self._sending.take_back()
            await self._state.connection.client.close()
        await asyncio.to_thread(self._server.kill)
        if self._folder is not None:
            self._folder.close()
        self._queue.close(self._death, failed=error is not None)
        self._swapping.fail_all(self._death)
        if not self.ready.done():
            self.ready.set_exception(error or self._death)
