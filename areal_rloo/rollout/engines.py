"""The engine of a rollout worker, in this process or a server that it drives, and how weights reach it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from prometheus_client import CollectorRegistry

from areal_rloo.config import Config
from areal_rloo.engines.base import Engine
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.engines.sglang import BucketLayout, SGLangEngine, UpdateGroup
from areal_rloo.errors import WeightsError
from areal_rloo.models.files import computation_dtype
from areal_rloo.telemetry.metrics import relay, watch
from areal_rloo.telemetry.tables import ENGINE_SERVER
from areal_rloo.weights.manifest import CollectiveOffer, Manifest, Notice, by_bucket

_CONNECT_TIMEOUT_S = 5.0
_SCRAPE_TIMEOUT_S = 10.0
_LEARNER_FIRST_S = 10.0  # the learner gives up before the server does, and says why


@dataclass(frozen=True, slots=True)
class WorkerEngine:
    """An engine and what differs between engines.

    Attributes:
        engine: it.
        join_group: takes the place of the receiver in a collective; None where the receiver does it.
        device: where the receiver's buckets are.
        server: the engine again, where a server of its own stands behind it.
    """

    engine: Engine
    device: torch.device
    join_group: Callable[[Notice, CollectiveOffer], Future[int]] | None = None
    server: SGLangEngine | None = None

    async def until_ready(self) -> None:
        """Until it can be used.

        Raises:
            UserError: it never will be; says what to do.
        """
        if self.server is not None:
            await asyncio.wrap_future(self.server.ready)

    def watch(self, registry: CollectorRegistry) -> None:
        """Serve what its server says about itself, and what we know of it."""
        server = self.server
        if server is not None:
            watch(registry, ENGINE_SERVER, lambda: msgspec.structs.asdict(server.server_statistics()))
            relay(registry, lambda: asyncio.run(_scraped(server)))  # each scrape has a thread of its own


def make_engine(
    config: Config,
    model_path: Path,
    *,
    worker_id: str,
    device: torch.device,
    num_threads: int,
    server_url: str | None,
    logs: Path,
    on_weights_lost: Callable[[], None],
) -> WorkerEngine:
    """Build what `rollout.engine` says.

    Args:
        config: of the run.
        model_path: folder of version 0.
        worker_id: of the worker it is for.
        device: of the engine.
        num_threads: CPU threads of a server.
        server_url: of an SGLang server that runs already.
        logs: folder for a server's output.
        on_weights_lost: called on the engine's thread when it had to start anew, with earlier weights or unknown ones.

    Raises:
        ModelError: the model cannot be read or served.
    """
    rollout = config.rollout
    if rollout.engine == "embedded":
        embedded = EmbeddedEngine(
            model_path,
            device=device,
            dtype=computation_dtype(config.model),
            num_slots=rollout.num_slots,
            context_tokens=config.context_tokens,
            options=rollout.embedded,
        )
        return WorkerEngine(embedded, device)
    server = SGLangEngine(
        model_path,
        config=rollout.sglang,
        url=server_url,
        device=device.type,
        dtype=config.model.dtype,
        tensor_parallel=rollout.tensor_parallel,
        num_slots=rollout.num_slots,
        context_tokens=config.context_tokens,
        num_threads=num_threads,
        update_timeout_s=config.weights.timeout_s,
        log=logs / f"{worker_id}.sglang.log",
        on_weights_lost=on_weights_lost,
    )
    return WorkerEngine(server, torch.device("cpu"), joins_group(server, worker_id), server)


async def _scraped(server: SGLangEngine) -> str:
    """Its metrics; none where it is just ending."""
    try:
        return await asyncio.wait_for(server.metrics_text(), _SCRAPE_TIMEOUT_S)
    except TimeoutError:
        return ""


def joins_group(server: SGLangEngine, worker_id: str) -> Callable[[Notice, CollectiveOffer], Future[int]]:
    """What a receiver calls for a server that takes part in a collective with ranks of its own."""

    def join_group(notice: Notice, offer: CollectiveOffer) -> Future[int]:
        try:
            socket.create_connection((offer.host, offer.port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:  # a server would try for minutes, and generate nothing meanwhile
            raise WeightsError(f"{offer.name} is over: its store cannot be reached: {error}") from error
        group = UpdateGroup(
            host=offer.host,
            port=offer.port,
            name=offer.name,
            rank_offset=offer.ranks[worker_id],
            world_size=offer.world_size,
            backend="nccl" if offer.backend == "nccl" else "gloo",
            timeout_s=offer.timeout_s + _LEARNER_FIRST_S,
        )
        return server.update_from_group(notice.policy_version, group, _bucket_layouts(notice.manifest))

    return join_group


def _bucket_layouts(manifest: Manifest) -> list[BucketLayout]:
    """What each bucket holds, in order."""
    return [
        BucketLayout(
            names=tuple(spec.name for spec in bucket),
            dtypes=tuple(spec.dtype for spec in bucket),
            shapes=tuple(spec.shape for spec in bucket),
        )
        for bucket in by_bucket(manifest)
    ]
