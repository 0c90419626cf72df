"""A rollout worker's end of the weights: receives the versions on offer and hands them to the engine.

`offer` records a notice. `receive`, consumed by a task of the worker's event loop, takes the buckets, verifies their
checksum, and waits until the engine has swapped them in between two decode steps. Generation goes on meanwhile: copies
and collectives run on threads. An engine with separate processes (an SGLang server) joins the collective itself,
through `join_group`; no bucket passes through here then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
import torch
from torch import Tensor

from areal_rloo.errors import ArealRlooError, ChecksumError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.weights.collective import CollectiveReader
from areal_rloo.weights.manifest import CollectiveOffer, Notice, checksum, decode_notice, views
from areal_rloo.weights.shared_memory import SharedMemoryReader

logger = get_logger(__name__)


class ReceiveStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start."""

    metrics_prefix: ClassVar[str] = "weights_"

    policy_version: Annotated[int, Metric("Version of the weights that this worker's receiver delivered", "versions")]
    received: Annotated[int, Metric("Versions this worker received", kind="counter")]
    failed: Annotated[int, Metric("Versions that did not arrive whole at this worker", kind="counter")]
    received_bytes: Annotated[int, Metric("Bytes of weights this worker received", "bytes", "counter")]


@dataclass(frozen=True, slots=True)
class Received:
    """The engine runs this version."""

    policy_version: int
    checksum: int


@dataclass(frozen=True, slots=True)
class NotReceived:
    """This version did not arrive whole; the engine keeps the weights from before."""

    policy_version: int
    detail: str


class Receiver:
    """One per rollout worker, used on the worker's event loop alone."""

    def __init__(
        self,
        *,
        worker_id: str,
        policy_version: Callable[[], int],
        load_weights: Callable[[int, Iterable[tuple[str, Tensor]]], Future[int]],
        join_group: Callable[[Notice, CollectiveOffer], Future[int]] | None = None,
        device: torch.device,
    ) -> None:
        """
        Args:
            worker_id: of the worker.
            policy_version: returns the version the engine runs; lower than before after a restart of the engine.
            load_weights: hands a version to the engine; called on a thread.
            join_group: lets the engine join a collective itself; called on a thread. None if the receiver joins.
            device: of the buckets of a collective.
        """
        self._load_weights = load_weights
        self._join_group = join_group
        self._policy_version = policy_version
        self._collective = CollectiveReader(worker_id, device)
        self._shared_memory = SharedMemoryReader()
        self._offer: Notice | None = None
        self._offered = asyncio.Event()
        self._received = 0
        self._failed = 0
        self._received_bytes = 0

    def offer(self, body: bytes) -> None:
        """Record the notice of a version. A later notice replaces one not yet begun: that broadcast is over.

        Raises:
            msgspec.DecodeError: the bytes are not a notice.
        """
        self._offer = decode_notice(body)
        self._offered.set()

    async def receive(self) -> AsyncIterator[Received | NotReceived]:
        """Receive each version on offer; yields the outcome, without end."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            notice, self._offer = self._offer, None
            assert notice is not None, "the event says that there is an offer"
            try:
                await self._take(notice)
            except (ArealRlooError, RuntimeError, OSError) as error:
                self._failed += 1
                logger.warning("version %d did not arrive: %s", notice.policy_version, error)
                yield NotReceived(notice.policy_version, str(error))
            else:
                yield Received(notice.policy_version, notice.checksum)

    def statistics(self) -> ReceiveStatistics:
        return ReceiveStatistics(
            policy_version=self._policy_version(),
            received=self._received,
            failed=self._failed,
            received_bytes=self._received_bytes,
        )

    async def _take(self, notice: Notice) -> None:
        if self._join_group is not None and isinstance(notice.offer, CollectiveOffer):
            await asyncio.wrap_future(await asyncio.to_thread(self._join_group, notice, notice.offer))
        else:
            buckets = await self._buckets(notice)
            if notice.policy_version <= self._policy_version():
                return
            found = await asyncio.to_thread(checksum, buckets)
            if found != notice.checksum:
                raise ChecksumError(f"version {notice.policy_version}: expected {notice.checksum}, got {found}")
            tensors = views(notice.manifest, buckets)
            await asyncio.wrap_future(await asyncio.to_thread(self._load_weights, notice.policy_version, tensors))
        self._received += 1
        self._received_bytes += notice.manifest.total_bytes

    async def _buckets(self, notice: Notice) -> Sequence[Tensor]:
        if isinstance(notice.offer, CollectiveOffer):
            # Take part for a version that the engine has, too: a collective needs all ranks.
            return await self._collective.take(notice.offer, notice.manifest)
        if notice.policy_version <= self._policy_version():
            return ()
        return await asyncio.to_thread(self._shared_memory.take, notice.offer, notice.manifest)
