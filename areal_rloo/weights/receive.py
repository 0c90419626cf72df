"""A rollout worker's end of the weights: receives the versions on offer and hands them to the engine.

A task of the worker's event loop awaits `receive`: take the buckets, verify the checksum, and wait until the engine has
swapped them in between two decode steps. Generation goes on meanwhile: copies and collectives run on threads. An engine
with separate processes (a server) joins the collective itself, through `join_group`; no bucket passes through
here then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import torch
from torch import Tensor

from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import ChecksumError, ModelError, WeightsError
from areal_rloo.models.stored import check_base
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.telemetry.trace import span
from areal_rloo.weights.collective import CollectiveReader
from areal_rloo.weights.manifest import CollectiveOffer, Notice, checksum, views
from areal_rloo.weights.shared_memory import SharedMemoryReader

logger = get_logger(__name__)


class ReceiveStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start."""

    metrics_prefix: ClassVar[str] = "weights_"

    policy_version: Annotated[int, Metric("Version of the weights that this worker's receiver delivered", "versions")]
    received: Annotated[int, Metric("Versions this worker received", kind="counter")]
    failed: Annotated[int, Metric("Versions that did not arrive whole at this worker", kind="counter")]
    received_bytes: Annotated[int, Metric("Bytes of weights this worker received", "bytes", "counter")]


class Receiver:
    """One per rollout worker, used on the worker's event loop alone."""

    def __init__(
        self,
        *,
        worker_id: str,
        policy_version: Callable[[], int],
        load_weights: Callable[[int, Iterable[tuple[str, Tensor]]], Future[int]],
        join_group: Callable[[Notice, CollectiveOffer], Awaitable[int]] | None = None,
        device: torch.device,
        base: tuple[str, Path] | None = None,
    ) -> None:
        """
        Args:
            worker_id: names this worker in offers.
            policy_version: returns the version the engine runs; lower than before after a restart of the engine.
            load_weights: hands a version to the engine.
            join_group: lets the engine join a collective itself. None if the receiver joins.
            device: of the buckets of a collective.
            base: digest and folder of the engine's model, if versions are adapters to it; else None.
        """
        self._policy_version, self._base = policy_version, base
        self._load_weights, self._join_group = load_weights, join_group
        self._collective, self._shared_memory = CollectiveReader(worker_id, device), SharedMemoryReader()
        self._received = self._failed = self._received_bytes = 0
        self._under_way: str | None = None

    async def receive(self, body: bytes) -> int:
        """Receive the version of a notice; returns the checksum of the notice when the engine runs the version.

        Raises:
            WeightsError: the version did not arrive whole; the engine does not run it.
            ModelError: the adapters belong to another model than this worker has.
        """
        try:
            notice = from_msgpack(body, Notice)
            if self._base is not None:
                check_base(notice.manifest.base, *self._base)
            self._under_way = f"version {notice.policy_version}"
            with span("weights", f"receive {self._under_way}"):
                await self._receive(notice)
        except ModelError:
            raise
        except Exception as error:  # whatever the reason, the learner hears of it, and offers the version again
            self._failed += 1
            logger.warning("a version of the weights did not arrive: %s", error)
            raise WeightsError(f"{type(error).__name__}: {error}") from error
        finally:
            self._under_way = None
        return notice.checksum

    def under_way(self) -> str | None:
        """Return the version that is being received; None if there is none."""
        return self._under_way

    def statistics(self) -> ReceiveStatistics:
        return ReceiveStatistics(
            policy_version=self._policy_version(),
            received=self._received,
            failed=self._failed,
            received_bytes=self._received_bytes,
        )

    async def _receive(self, notice: Notice) -> None:
        if self._join_group is not None and isinstance(notice.offer, CollectiveOffer):
            await self._join_group(notice, notice.offer)
        else:
            buckets = await self._buckets(notice)
            if notice.policy_version <= self._policy_version():
                return
            found = await asyncio.to_thread(checksum, buckets)
            if found != notice.checksum:
                raise ChecksumError(f"version {notice.policy_version}: expected {notice.checksum}, got {found}")
            tensors = views(notice.manifest, buckets)
            await asyncio.wrap_future(self._load_weights(notice.policy_version, tensors))
        self._received += 1
        self._received_bytes += notice.manifest.total_bytes

    async def _buckets(self, notice: Notice) -> Sequence[Tensor]:
        if isinstance(notice.offer, CollectiveOffer):
            # Take part for a version that the engine has, too: a collective needs all ranks.
            return await self._collective.take(notice.offer, notice.manifest)
        if notice.policy_version <= self._policy_version():
            return ()
        return await asyncio.to_thread(self._shared_memory.take, notice.offer, notice.manifest)
