"""Drive a server as an engine: submit requests, load weights in between, survive a server crash or hang.

    submit ─► queue ─► gate ─► HTTP request, at most num_slots ─► segment ─► completion, or back to the queue
                        ▲
    open while the server is healthy and not paused, with known weights not older than before

Tasks on the worker's event loop start the server and call it; file work and kills run on threads. Every flight leaves
the queue exactly once, so a server failure neither loses nor doubles a completion. A server has one set of weights, so
`pinned` has no effect; the versions of a completion tell which weights made each token.

With `pause: in_place` a token is tagged with the version that sampled it, over a cache that earlier versions filled. If
an update came between a prompt and its first token, the token is tagged with the later version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Self

import msgspec
import torch
from torch import Tensor

from areal_rloo.config import ServerConfig
from areal_rloo.engines.base import EngineStatistics, GenerationRequest
from areal_rloo.engines.server.api import BucketLayout, Connection, ServerKind, ServerPlan, UpdateGroup
from areal_rloo.engines.server.client import ServerGoneError
from areal_rloo.engines.server.flights import FlightQueue
from areal_rloo.engines.server.model_folder import WeightsFolder, check_shapes, read_model
from areal_rloo.engines.server.sending import Sending, ServerState
from areal_rloo.engines.server.supervision import ExternalServer, ManagedServer, Server, Supervision
from areal_rloo.engines.server.turns import Turns
from areal_rloo.engines.server.updates import Load, Swapping, Update, prove
from areal_rloo.errors import EngineError
from areal_rloo.models.fingerprint import Sample, sampled_names, take_sample
from areal_rloo.models.stored import merged, stored_parameters
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.trajectory import Completion
from areal_rloo.turns import EngineTurn
from areal_rloo.waiting import cancel, fault_of

logger = get_logger(__name__)

_LAST_CALLS_TIMEOUT_S = 2.0
_CALL_BACK_TIMEOUT_S = 5.0


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the server behind the engine; counts are since the engine's start."""

    metrics_prefix: ClassVar[str] = "engine_server_"

    restarts: Annotated[int, Metric("Times a failed server was started or found again", kind="counter", healthy=(0, 2))]
    health_failures: Annotated[int, Metric("Times the server missed its health timeout", kind="counter")]
    resumed: Annotated[int, Metric("Requests that came back unfinished and were sent again", kind="counter")]
    retractions: Annotated[int, Metric("Requests the server preempted because its cache was full", kind="counter")]
    overdue: Annotated[int, Metric("Requests without an answer for too long, aborted and continued", kind="counter")]
    weights_lost: Annotated[int, Metric("Times the server was found with earlier or unknown weights", kind="counter")]
    proven_updates: Annotated[int, Metric("Updates after which the server held the published weights", kind="counter")]
    unproven_updates: Annotated[
        int, Metric("Updates whose weights could not be compared", kind="counter", healthy=(0, 0))
    ]
    weight_mismatches: Annotated[
        int, Metric("Updates after which the server held other weights", kind="counter", healthy=(0, 0))
    ]
    last_pause_s: Annotated[float, Metric("Time that the last update of the weights paused the server", "s")]


class ServerEngine:
    """Implements `areal_rloo.engines.base.Engine`, which documents the methods, within `async with`."""

    def __init__(
        self,
        kind: ServerKind,
        plan: ServerPlan,
        *,
        config: ServerConfig,
        url: str | None,
        update_timeout_s: float,
        log: Path,
        turn: EngineTurn | None = None,
    ) -> None:
        """
        Args:
            kind: of the server.
            plan: settings of a managed server; an external server must fit them.
            url: of an external server; None for a managed server.
            update_timeout_s: of loading weights through files.
            log: file for the output of a managed server.
            turn: generate in turns with the learner; the engine closes the turn. None: all the time.
        """
        facts = read_model(plan.model_path)
        self._parameters = stored_parameters("model.path", plan.model_path)
        self._update_timeout_s = update_timeout_s
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        plan = replace(plan, model_context_tokens=facts.context_tokens)
        self._server: Server = (
            ManagedServer(kind, config, plan, self._parameters, log)
            if url is None
            else ExternalServer(kind, config, plan, self._parameters, url)
        )
        self._queue = FlightQueue(
            num_slots=plan.num_slots, context_tokens=plan.context_tokens, vocab_size=facts.vocab_size
        )
        self._asked: asyncio.Queue[Future[dict[str, Completion]]] = asyncio.Queue()  # for the tokens so far
        self._folder: WeightsFolder | None = None
        self._closing = asyncio.Event()
        self._state = ServerState()
        self._sending = Sending(self._state, self._queue, vocab_size=facts.vocab_size, config=config)
        self._swapping = Swapping(self._state, self._sending)
        self._supervision = Supervision(self._state, self._server, self._sending, config)
        self._turn = turn
        self._turns = None if turn is None else Turns(self._state, self._sending, turn, self._queue.has_requests)

    async def __aenter__(self) -> Self:
        """Start a managed server, or connect to an external server; wait until the server answers.

        Raises:
            ConfigError: the server cannot be used; the message names a remedy.
            EngineError: the server failed while answering.
        """
        try:
            connection = await self._start()
        except BaseException:
            self._close_turn()
            raise
        self._serving = asyncio.create_task(self._serve(connection), name="the engine")
        return self

    async def __aexit__(self, *_: object) -> None:
        """End all requests with the tokens made so far, and kill a managed server."""
        self._closing.set()
        await self._serving

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        futures = self._queue.submit(requests)
        self._state.changed.set()
        return futures

    def abort(self, request_ids: Iterable[str]) -> None:
        for flight in self._queue.abort(request_ids):
            self._sending.abort(flight)

    def unfinished(self) -> Future[dict[str, Completion]]:
        """Call the requests back from the server, which returns tokens in no other way, and send them again."""
        if self._queue.death is not None:
            raise self._queue.death
        future: Future[dict[str, Completion]] = Future()
        self._asked.put_nowait(future)
        return future

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, Tensor]]) -> Future[int]:
        """Load weights through files, written while generation continues and read by the server in the pause."""

        async def prepare(connection: Connection) -> Load:
            if self._folder is None:
                self._folder = await asyncio.to_thread(WeightsFolder, self._parameters)
            folder, tensors = self._folder, await asyncio.to_thread(dict, weights)
            written = await asyncio.to_thread(folder.write, policy_version, tensors.items())
            samples = await asyncio.to_thread(self._samples, policy_version, tensors, connection)

            async def load() -> bool:
                try:
                    await connection.api.weights.load_folder(policy_version, written, timeout_s=self._update_timeout_s)
                finally:
                    await asyncio.to_thread(folder.remove, written)
                return await prove(connection, policy_version, samples, tensors)

            return load

        update = Update(policy_version, in_group=False, timeout_s=self._update_timeout_s, prepare=prepare)
        return self._swapping.stage(update)

    def load_adapters(self, policy_version: int, adapters: Iterable[tuple[str, Tensor]]) -> Future[int]:
        """Merge adapters into the model's files while generation continues, then load as `load_weights` does."""
        return self.load_weights(policy_version, merged(self._parameters, dict(adapters), self._dtype))

    def update_from_group(
        self, policy_version: int, group: UpdateGroup, buckets: Sequence[BucketLayout], samples: Sequence[Sample]
    ) -> Future[int]:
        """Load weights through a process group: the server receives each bucket from the sender.

        The server's present version is received again, because all members of a group must take part. An earlier
        version is not received. Afterwards the server's parameters must equal one of the sender's samples.

        Raises (through the future):
            EngineError: a parameter does not fit the model, the sender did not come, or the update failed.
        """
        shapes = {n: shape for bucket in buckets for n, shape in zip(bucket.names, bucket.shapes, strict=True)}

        async def prepare(connection: Connection) -> Load:
            check_shapes({name: tensor.shape for name, tensor in self._parameters.items()}, shapes)
            await connection.api.weights.join(group)

            async def load() -> bool:
                await connection.api.weights.load_buckets(policy_version, group, buckets)
                return await prove(connection, policy_version, samples, shapes)

            return load

        update = Update(policy_version, in_group=True, timeout_s=group.timeout_s, prepare=prepare)
        return self._swapping.stage(update)

    def statistics(self) -> EngineStatistics:
        state, turn = self._state, self._turn
        counted = self._queue.statistics(
            ready=state.connection is not None,
            policy_version=state.policy_version,
            weight_updates=state.weight_updates,
            swap_s=state.swap_s,
        )
        if turn is None:
            return counted
        return msgspec.structs.replace(counted, turns_given=turn.num_given, turn_wait_s=turn.waited_s)

    def server_statistics(self) -> ServerStatistics:
        state = self._state
        return ServerStatistics(
            restarts=state.restarts,
            health_failures=state.health_failures,
            resumed=self._queue.resumed,
            retractions=state.retractions,
            overdue=state.overdue,
            weights_lost=state.weights_lost,
            proven_updates=state.proven_updates,
            unproven_updates=state.unproven_updates,
            weight_mismatches=state.weight_mismatches,
            last_pause_s=state.last_pause_s,
        )

    def metrics_text(self) -> str:
        """Return the server's /metrics, as `ServerClient.metrics_text` does."""
        connection = self._state.connection
        return "" if connection is None else connection.api.client.metrics_text()

    def _samples(self, policy_version: int, tensors: Mapping[str, Tensor], connection: Connection) -> list[Sample]:
        if connection.digest is None:
            return []
        num_ranks = connection.api.capabilities.tensor_parallel
        sampled = {name: tensors[name].to("cpu", self._dtype) for name in sampled_names(tensors, policy_version)}
        return [take_sample(sampled, digest=connection.digest, num_ranks=num_ranks)]

    async def _start(self) -> Connection:
        if self._turns is None:
            return await self._supervision.start()
        await self._turns.begin()
        saying = asyncio.create_task(self._turns.say_busy(), name="the engine's word that it is busy")
        try:
            return await self._supervision.start()
        finally:
            await cancel([saying])

    async def _serve(self, connection: Connection) -> None:
        """Serve until the engine is closed, or until the server has failed for good."""
        works = {
            "the health of the server": self._supervision.run(connection),
            "requests to the server": self._sending.run(),
            "updates of the server": self._swapping.run(),
            "questions for the tokens so far": self._tell_unfinished(),
        }
        if self._turns is not None:
            works["turns with the learner"] = self._turns.run()
            works["the engine's word that it is busy"] = self._turns.say_busy()
        closing = asyncio.create_task(self._closing.wait(), name="the end of the engine")
        tasks = [closing, *(asyncio.create_task(work, name=name) for name, work in works.items())]
        error: BaseException | None = None
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            error = next((fault for task in done - {closing} if (fault := fault_of(task)) is not None), None)
        finally:  # also if this task is cancelled
            death = EngineError("the engine was closed" if error is None else f"the engine stopped: {error}")
            if error is not None:
                logger.error("%s", death)
            try:
                await cancel(tasks)
                await self._leave_server()
            finally:
                self._close_turn()
                self._queue.close(death, failed=error is not None)
                self._swapping.close(death)
                while not self._asked.empty():
                    if (future := self._asked.get_nowait()).set_running_or_notify_cancel():
                        future.set_exception(death)

    async def _tell_unfinished(self) -> None:
        while True:
            self._asked.put_nowait(await self._asked.get())  # in the queue, `_serve` answers it if the engine ends now
            async with self._state.exclusive:  # an update may take longer than anybody waits
                asked = [self._asked.get_nowait() for _ in range(self._asked.qsize())]
                waiting = [future for future in asked if future.set_running_or_notify_cancel()]
                try:
                    begun = await self._sending.unfinished(timeout_s=_CALL_BACK_TIMEOUT_S) if waiting else {}
                except BaseException as error:
                    why = EngineError(f"the tokens so far are unknown: {type(error).__name__}: {error}")
                    for future in waiting:
                        future.set_exception(why)
                    raise
                for future in waiting:
                    future.set_result(begun)

    async def _leave_server(self) -> None:
        connection = self._state.connection
        async with AsyncExitStack() as ends:  # each comes, also if another fails; the last one first
            if self._folder is not None:
                ends.push_async_callback(asyncio.to_thread, self._folder.close)
            ends.push_async_callback(asyncio.to_thread, self._server.kill)
            if connection is not None:
                ends.push_async_callback(connection.api.client.close)
            if connection is not None and not self._server.managed:
                with suppress(ServerGoneError):  # leave no request running on an external server
                    await self._sending.call_back(timeout_s=_LAST_CALLS_TIMEOUT_S)
            await self._sending.take_back()

    def _close_turn(self) -> None:
        if self._turn is not None:
            self._turn.close()
