"""Runs the engine of a rollout worker: embedded in this process, or a server with its weight updates."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from areal_rloo.config import Config
from areal_rloo.engines.base import UNKNOWN, Engine
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.engines.kinds import kind_of
from areal_rloo.engines.server import BucketLayout, ServerEngine, ServerPlan, ServerStatistics, UpdateGroup
from areal_rloo.errors import WeightsError
from areal_rloo.models.files import computation_dtype
from areal_rloo.telemetry.metrics import relay, watch
from areal_rloo.turns import EngineTurn
from areal_rloo.weights.manifest import CollectiveOffer, Notice, by_bucket

_CONNECT_TIMEOUT_S = 5.0
_LEARNER_FIRST_S = 10.0  # the learner times out before the server does, and reports the reason


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """An engine, and the facts that differ between engines.

    Attributes:
        engine: the engine.
        load_weights: hands a version to the engine, whole or as adapters alone.
        device: device of the receiver's buckets.
        join_group: joins a collective in place of the receiver; None if the receiver joins.
        server: the same engine if it drives a server process; else None.
    """

    engine: Engine
    load_weights: Callable[[int, Iterable[tuple[str, Tensor]]], Future[int]]
    device: torch.device
    join_group: Callable[[Notice, CollectiveOffer], Awaitable[int]] | None = None
    server: ServerEngine | None = None

    def watch(self, registry: CollectorRegistry) -> None:
        """Add the server's own metrics, and our statistics about the server, to the registry."""
        server = self.server
        if server is not None:
            watch(registry, ServerStatistics, server.server_statistics)
            relay(registry, server.metrics_text)  # each scrape runs on its own thread


@asynccontextmanager
async def running_engine(
    config: Config,
    model_path: Path,
    *,
    worker_id: str,
    device: torch.device,
    num_threads: int,
    server_url: str | None,
    run_folder: Path,
) -> AsyncIterator[WorkerEngine]:
    """Run the engine that `rollout.engine` names, on the worker's event loop or on a thread; the engine is ready.

    Args:
        config: of the run.
        model_path: folder of the weights of version 0.
        worker_id: names the server's log.
        device: of the engine.
        num_threads: CPU threads of a server.
        server_url: of a server that already runs; None: start a server.
        run_folder: has the folder for a server's output, and names the turns with the learner.

    Raises:
        ModelError: the model cannot be read or served.
        UserError: the server cannot start; says how to correct that.
    """
    rollout = config.rollout
    turn = EngineTurn(run_folder) if rollout.takes_turns else None
    if rollout.engine == "embedded" or (server_config := rollout.server) is None:
        embedded = EmbeddedEngine(
            model_path,
            device=device,
            dtype=computation_dtype(config.model),
            num_slots=rollout.num_slots,
            context_tokens=config.context_tokens,
            options=rollout.embedded,
            policy_version=UNKNOWN if config.publishes_adapters else 0,  # no token before the first adapters have come
            lora=config.learner.lora if config.publishes_adapters else None,
            turn=turn,
        )
        with closing(embedded):
            yield WorkerEngine(embedded, embedded.load_weights, device)
        return
    plan = _plan(config, model_path, device, num_threads)
    engine = ServerEngine(
        kind_of(rollout.engine),
        plan,
        config=server_config,
        url=server_url,
        update_timeout_s=config.weights.timeout_s,
        log=run_folder / "logs" / f"{worker_id}.{rollout.engine}.log",
        turn=turn,
    )
    async with engine as server:
        if (key := server_config.api_key_env) is not None:
            os.environ.pop(key, None)  # the engine has read the key; the processes for rewards do not inherit it
        if config.publishes_adapters:
            yield WorkerEngine(server, server.load_adapters, torch.device("cpu"), server=server)
            return
        joins = joins_group(server, worker_id)
        yield WorkerEngine(server, server.load_weights, torch.device("cpu"), joins, server)


def _plan(config: Config, model_path: Path, device: torch.device, num_threads: int) -> ServerPlan:
    rollout = config.rollout
    return ServerPlan(
        model_path,
        device=device.type,
        dtype=config.model.dtype,
        tensor_parallel=rollout.tensor_parallel,
        num_slots=rollout.num_slots,
        context_tokens=config.context_tokens,
        num_threads=num_threads,
        sleeps=rollout.takes_turns,
        has_version=not config.publishes_adapters,
    )


def joins_group(server: ServerEngine, worker_id: str) -> Callable[[Notice, CollectiveOffer], Awaitable[int]]:
    """Make the receiver's callback for a server whose ranks join the collective themselves."""

    async def join_group(notice: Notice, offer: CollectiveOffer) -> int:
        store = (offer.host, offer.port)
        try:
            (await asyncio.to_thread(socket.create_connection, store, timeout=_CONNECT_TIMEOUT_S)).close()
        except OSError as error:  # the server would retry for minutes, and generate nothing meanwhile
            raise WeightsError(f"{offer.name} is over: its store is unreachable: {error}") from error
        group = UpdateGroup(
            host=offer.host,
            port=offer.port,
            name=offer.name,
            rank_offset=offer.ranks[worker_id],
            world_size=offer.world_size,
            backend="nccl" if offer.backend == "nccl" else "gloo",
            timeout_s=offer.timeout_s + _LEARNER_FIRST_S,
        )
        tensors = ([(spec.name, spec.dtype, spec.shape) for spec in bucket] for bucket in by_bucket(notice.manifest))
        layouts = [BucketLayout(*zip(*bucket, strict=True)) for bucket in tensors]
        updated = server.update_from_group(notice.policy_version, group, layouts, notice.samples)
        return await asyncio.wrap_future(updated)

    return join_group
