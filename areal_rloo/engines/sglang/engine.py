"""Drives one SGLang server as an engine: requests, weights in between, and a server that may die or hang at any moment.

    submit ─► queue ─► gate ─► POST /generate, at most num_slots ─► segment ─► completion, or back to the queue
                        ▲
    open while the server is healthy, not paused, and its weights are known and no older than they were

One thread with an event loop of its own does everything; callers wait for nothing but their futures. The queue gives
every flight one way out, so nothing is lost and nothing doubled, whatever the server does. SGLang holds one set of
weights, so `pinned` cannot be honoured: what a completion was made by, its versions say.

With `pause: in_place` a token is tagged with the version that sampled it, over a cache that earlier versions filled. A
prompt read before an update whose first token came after it is tagged with the later version alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec
from torch import Tensor

from areal_rloo.config import SGLangConfig
from areal_rloo.engines.base import EngineStatistics, GenerationRequest
from areal_rloo.engines.sglang.capabilities import Capabilities
from areal_rloo.engines.sglang.flight_queue import FlightQueue
from areal_rloo.engines.sglang.model_folder import WeightsFolder, check_shapes, read_model
from areal_rloo.engines.sglang.process import ServerPlan
from areal_rloo.engines.sglang.sending import Sending
from areal_rloo.engines.sglang.server import make_server
from areal_rloo.engines.sglang.state import ServerState
from areal_rloo.engines.sglang.supervision import Supervision
from areal_rloo.engines.sglang.swapping import Staged, Swapping
from areal_rloo.engines.sglang.updates import BucketLayout, ServerUpdates, UpdateGroup
from areal_rloo.errors import EngineError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Completion

logger = get_logger(__name__)

_METRICS_TIMEOUT_S = 5.0
_LAST_CALLS_TIMEOUT_S = 2.0


class SGLangStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of the server behind the engine; counts are since the engine's start.

    `resumed` counts flights that went back to wait, `retractions` those the server put off for want of cache.
    """

    restarts: int
    health_failures: int
    resumed: int
    retractions: int
    weights_lost: int
    last_pause_s: float


class SGLangEngine:
    """Implements `areal_rloo.engines.base.Engine`; see there for what each method promises."""

    def __init__(
        self,
        model_path: Path,
        *,
        config: SGLangConfig,
        url: str | None,
        device: str,
        dtype: str,
        tensor_parallel: int,
        num_slots: int,
        context_tokens: int,
        num_threads: int,
        update_timeout_s: float,
        log: Path,
        on_weights_lost: Callable[[], None],
        capabilities: Capabilities | None = None,
    ) -> None:
        """Begin to start the server, or to connect to the one at `url`; returns at once.

        Args:
            model_path: folder of the weights that are version 0.
            config: rollout.sglang.
            url: of a server that runs already; None: one of our own, on this device, its output going to `log`.
            device: cpu or cuda.
            dtype: float32 or bfloat16.
            tensor_parallel: devices of the server.
            num_slots: completions under way at a time.
            context_tokens: longest prompt and completion together.
            num_threads: CPU threads; 0 leaves it to torch.
            update_timeout_s: of loading weights through files.
            log: a file.
            on_weights_lost: called on the engine's thread when the server turns out to have earlier or unknown weights.
                Nothing is generated before it was given those it had, or later ones.
            capabilities: what the server can do; None asks it.
        """
        self.ready: Future[None] = Future()  # the server answers; a UserError says why it never will
        self._facts = facts = read_model(model_path)
        self._update_timeout_s = update_timeout_s
        plan = ServerPlan(
            model_path=model_path,
            model_context_tokens=facts.context_tokens,
            device=device,
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            num_slots=num_slots,
            context_tokens=context_tokens,
            num_threads=num_threads,
        )
        self._server = make_server(config, url, plan, log, capabilities)
        self._queue = FlightQueue(num_slots=num_slots, context_tokens=context_tokens, vocab_size=facts.vocab_size)
        self._folder: WeightsFolder | None = None
        self._death: EngineError | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._state = ServerState(on_weights_lost)
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
            with suppress(RuntimeError):  # the loop is closed: everything has ended
                asyncio.run_coroutine_threadsafe(self._sending.abort(flight), self._loop)

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, Tensor]]) -> Future[int]:
        """Through files: written while generation goes on, read by the server in the pause."""
        written: list[Path] = []

        async def prepare(_: ServerUpdates) -> None:
            if self._folder is None:
                self._folder = await asyncio.to_thread(WeightsFolder, self._facts)
            written.append(await asyncio.to_thread(self._folder.write, policy_version, weights))

        async def load(updates: ServerUpdates) -> None:
            try:
                await updates.load_folder(policy_version, written[0], timeout_s=self._update_timeout_s)
            finally:
                assert self._folder is not None, "it was written to"
                await asyncio.to_thread(self._folder.remove, written[0])

        return self._stage(policy_version, prepare, load, in_group=False, timeout_s=self._update_timeout_s)

    def update_from_group(
        self, policy_version: int, group: UpdateGroup, buckets: Sequence[BucketLayout]
    ) -> Future[int]:
        """Through a process group: the server receives each bucket from the sender itself.

        The version the server has is received again, since all of a group must take part; an earlier one is not.

        Raises (through the future):
            EngineError: a parameter does not fit the model, the sender did not come, or the update failed.
        """
        shapes = {n: shape for bucket in buckets for n, shape in zip(bucket.names, bucket.shapes, strict=True)}

        async def prepare(updates: ServerUpdates) -> None:
            check_shapes(self._facts, shapes)
            await updates.join(group)

        async def load(updates: ServerUpdates) -> None:
            await updates.load_buckets(policy_version, group, buckets)

        return self._stage(policy_version, prepare, load, in_group=True, timeout_s=group.timeout_s)

    def statistics(self) -> EngineStatistics:
        state = self._state
        return self._queue.statistics(
            ready=state.connection is not None,
            policy_version=state.policy_version,
            weight_updates=state.weight_updates,
            swap_s=state.swap_s,
        )

    def server_statistics(self) -> SGLangStatistics:
        """Of the server behind it."""
        state = self._state
        return SGLangStatistics(
            restarts=state.restarts,
            health_failures=state.health_failures,
            resumed=self._queue.resumed,
            retractions=state.retractions,
            weights_lost=state.weights_lost,
            last_pause_s=state.last_pause_s,
        )

    async def metrics_text(self) -> str:
        """What the server says at /metrics; empty while it does not answer. For any event loop."""
        try:
            asked = asyncio.run_coroutine_threadsafe(self._metrics_text(), self._loop)
        except RuntimeError:  # the loop is closed
            return ""
        return await asyncio.wrap_future(asked)

    def close(self) -> None:
        self._call_soon(self._closing.set)
        self._thread.join()

    def _stage(
        self,
        policy_version: int,
        prepare: Callable[[ServerUpdates], Awaitable[None]],
        load: Callable[[ServerUpdates], Awaitable[None]],
        *,
        in_group: bool,
        timeout_s: float,
    ) -> Future[int]:
        if self._death is not None:
            raise self._death
        future: Future[int] = Future()
        self._call_soon(self._swapping.stage, Staged(policy_version, future, in_group, prepare, load, timeout_s))
        return future

    def _call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: everything has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _main(self) -> None:
        """Serve until closed, or until there is no hope for the server."""
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
                with suppress(TimeoutError):  # leave nothing running there
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

    async def _metrics_text(self) -> str:
        if self._state.connection is None:
            return ""
        try:
            return await self._state.connection.client.text("/metrics", timeout_s=_METRICS_TIMEOUT_S)
        except EngineError:
            return ""
