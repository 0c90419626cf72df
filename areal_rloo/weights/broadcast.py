"""The learner's end of the weights: publish versions, know which worker runs which, never hold up the train step.

`publish` records a version that the training thread gathered into staged buckets. `run`, a task of the intake's event
loop, offers the newest version to every worker behind, one broadcast at a time, and waits for acknowledgements
within `weights.timeout_s`. A worker that does not answer in time is left out, so no other worker waits for it. Its next
heartbeat brings it back (`heard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import msgspec
from torch import Tensor

from areal_rloo.errors import WeightsError
from areal_rloo.models.fingerprint import Sample
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.fingerprint import Sampler
from areal_rloo.weights.manifest import Manifest, Notice, checksum
from areal_rloo.weights.shared_memory import SharedMemorySender

logger = get_logger(__name__)

_MOST_DOUBLINGS = 5  # of the backoff of a worker with repeated failures: 0, 1, 3, ... 31 s


SendTransport = SharedMemorySender | CollectiveSender
"""Moves buckets to the workers. Its methods are called on the broadcaster's event loop; blocking work is awaited."""


class BroadcastStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start; `versions` is the version that each present worker runs."""

    metrics_prefix: ClassVar[str] = "weights_"

    newest_version: Annotated[int, Metric("Newest version that the broadcaster has", "versions")]
    versions: dict[str, int]
    broadcasts: Annotated[int, Metric("Broadcasts of weights begun", kind="counter")]
    failures: Annotated[int, Metric("Versions that a worker could not take", kind="counter", healthy=(0, 0))]
    left_out: Annotated[int, Metric("Times a timeout left a worker out of a broadcast", kind="counter", healthy=(0, 0))]
    last_broadcast_s: Annotated[float, Metric("Time that the last broadcast took", "s")]
    broadcast_s: Annotated[float, Metric("Time spent broadcasting", "s", "counter")]
    sent_bytes: Annotated[int, Metric("Bytes of weights sent", "bytes", "counter")]


@dataclass(slots=True)
class _Version:
    policy_version: int
    buckets: Sequence[Tensor]
    checksum: int | None = None  # computed by the first broadcast
    samples: tuple[Sample, ...] = ()


@dataclass(slots=True)
class _Member:
    policy_version: int
    left_out: bool = False
    failures_in_a_row: int = 0
    again_at_s: float = 0.0


class Broadcaster:
    """One per learner, used on one event loop alone."""

    def __init__(
        self, *, manifest: Manifest, transport: SendTransport, timeout_s: float, sampler: Sampler | None = None
    ) -> None:
        self._manifest, self._sampler = manifest, sampler
        self._transport = transport
        self._timeout_s = timeout_s
        self._members: dict[str, _Member] = {}
        self._newest = _Version(-1, ())  # nothing is published yet
        self._sending: _Version | None = None
        self._pending: set[str] = set()  # workers with an open offer of `_sending`
        self._changed = asyncio.Event()
        self._broadcasts = self._failures = self._left_out = self._sent_bytes = 0
        self._last_s = self._total_s = 0.0

    async def stage(self) -> Sequence[Tensor]:
        """Return free buckets, laid out as the manifest says, to gather the next version into."""
        return await self._transport.stage()

    def publish(self, policy_version: int, buckets: Sequence[Tensor]) -> None:
        """Make the weights in these staged buckets the newest version. An older waiting version is discarded."""
        replaced, self._newest = self._newest, _Version(policy_version, buckets)
        if replaced.buckets and replaced is not self._sending:
            self._transport.release(replaced.buckets)
        self._changed.set()

    def join(self, worker_id: str, policy_version: int | None) -> None:
        """Add a worker at this version, or record a restart of the engine; offer the newest version to a worker behind.

        `policy_version` is None if the engine takes no weights now, for example while the server starts.
        """
        if policy_version is None:
            self.leave(worker_id)
            return
        member = self._members.setdefault(worker_id, _Member(policy_version))
        if member.left_out or policy_version < member.policy_version:
            logger.info("%s is back with version %d", worker_id, policy_version)
        if policy_version < member.policy_version:
            self._pending.discard(worker_id)  # the engine restarted and will not answer the open offer
            self._transport.lost(worker_id)
        member.policy_version, member.left_out = policy_version, False
        self._changed.set()

    def heard(self, worker_id: str, policy_version: int | None) -> None:
        """Record a sign of life: a worker left out before takes part again, after a failure with a backoff."""
        member = self._members.get(worker_id)
        left_out = member is None or (member.left_out and time.monotonic() >= member.again_at_s)
        if left_out or policy_version is None:
            self.join(worker_id, policy_version)

    def leave(self, worker_id: str) -> None:
        """Forget a departed worker."""
        if self._members.pop(worker_id, None) is not None:
            self._pending.discard(worker_id)
            self._transport.lost(worker_id)
            self._changed.set()

    def acknowledge(self, worker_id: str, policy_version: int, received_checksum: int) -> None:
        """Record that a worker runs this version, and the checksum of the received bytes."""
        member, sending = self._members.get(worker_id), self._sending
        if member is None:
            return
        if sending is not None and sending.policy_version == policy_version:
            if sending.checksum != received_checksum:
                self.fail(worker_id, policy_version, "the received checksum differs from the sent checksum")
                return
            self._transport.taken(worker_id)
            self._pending.discard(worker_id)
        member.policy_version = max(member.policy_version, policy_version)
        member.failures_in_a_row = 0
        self._changed.set()

    def fail(self, worker_id: str, policy_version: int, detail: str) -> None:
        """Record that a worker did not receive this version; offer again after a backoff."""
        logger.warning("%s could not take version %d: %s", worker_id, policy_version, detail)
        self._failures += 1
        self._pending.discard(worker_id)
        if (member := self._members.get(worker_id)) is not None:
            # Back off: the cause may take a moment to go away, and in a collective a retry costs all workers.
            member.again_at_s = time.monotonic() + (2.0**member.failures_in_a_row - 1)
            member.failures_in_a_row = min(member.failures_in_a_row + 1, _MOST_DOUBLINGS)
            self._leave_out(worker_id)
        self._changed.set()

    def statistics(self) -> BroadcastStatistics:
        return BroadcastStatistics(
            newest_version=self._newest.policy_version,
            versions={worker_id: member.policy_version for worker_id, member in self._members.items()},
            broadcasts=self._broadcasts,
            failures=self._failures,
            left_out=self._left_out,
            last_broadcast_s=self._last_s,
            broadcast_s=self._total_s,
            sent_bytes=self._sent_bytes,
        )

    def close(self) -> None:
        """Free the transport. Cancel `run` first."""
        self._transport.close()

    async def run(self, send_notice: Callable[[str, int, bytes], None]) -> None:
        """Send the newest version to every worker behind, until cancelled.

        `send_notice` sends an encoded notice of a version to a worker, without waiting.
        """
        while True:
            await self._until(self._behind, timeout_s=None)
            version = self._sending = self._newest
            await self._broadcast(version, send_notice)
            self._sending = None
            if version is not self._newest:
                self._transport.release(version.buckets)
            del version  # a segment that was given up is freed with its last reference

    async def _broadcast(self, version: _Version, send_notice: Callable[[str, int, bytes], None]) -> None:
        if version.checksum is None:
            version.checksum = await asyncio.to_thread(checksum, version.buckets)
            if self._sampler is not None:
                take, manifest = self._sampler.samples, self._manifest
                version.samples = await asyncio.to_thread(take, manifest, version.buckets, version.policy_version)
        if not self._behind():
            return  # the last worker behind left meanwhile
        started_s = time.monotonic()
        audience = self._present() if self._transport.needs_all else self._behind()
        self._pending = set(audience)
        try:
            offer = await self._transport.offer(version.buckets, audience)
        except WeightsError as error:
            for worker_id in sorted(self._pending):
                self.fail(worker_id, version.policy_version, str(error))
            return
        notice = Notice(version.policy_version, self._manifest, version.checksum, offer, version.samples)
        body = msgspec.msgpack.encode(notice)
        for worker_id in audience:
            send_notice(worker_id, version.policy_version, body)
        try:
            await self._transport.send(version.buckets)
        except WeightsError as error:
            logger.warning("broadcast of version %d failed: %s", version.policy_version, error)
        left_s = self._timeout_s - (time.monotonic() - started_s)
        await self._until(lambda: not self._pending, timeout_s=max(0.1, left_s))
        for worker_id in sorted(self._pending):
            logger.warning("%s did not take version %d in time: leave it out", worker_id, version.policy_version)
            self._leave_out(worker_id)
            self._left_out += 1
        self._broadcasts += 1
        self._last_s = time.monotonic() - started_s
        self._total_s += self._last_s
        self._sent_bytes += self._manifest.total_bytes * len(audience)

    async def _until(self, condition: Callable[[], object], *, timeout_s: float | None) -> None:
        """Wait until a change of state makes the condition true, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    def _leave_out(self, worker_id: str) -> None:
        self._members[worker_id].left_out = True
        self._transport.lost(worker_id)

    def _present(self, below_version: float = math.inf) -> list[str]:
        """Return the workers that take part now and run a version below this version."""
        members = self._members.items()
        return [name for name, member in members if not member.left_out and member.policy_version < below_version]

    def _behind(self) -> list[str]:
        return self._present(below_version=self._newest.policy_version)
