"""The learner's end of the weights: publish versions, know who runs which, never wait in the train step.

`publish` (training thread) gathers the weights into buckets and returns. A thread of the broadcaster's own offers the
newest version to every worker that is behind, one broadcast at a time, and waits for acknowledgements within
`weights.timeout_s`. A worker that stays silent is left out, so that nobody else waits for it; it is offered the newest
version again when it is next heard of (`join`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from torch import Tensor

from areal_rloo.errors import WeightsError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.weights.manifest import (
    CollectiveOffer,
    Manifest,
    Notice,
    SharedMemoryOffer,
    checksum,
    encode_notice,
)

logger = get_logger(__name__)

_MOST_DOUBLINGS = 5  # of the seconds until a worker that fails again and again is offered a version: 0, 1, 3, ... 31


class SendTransport(Protocol):
    """How buckets reach the workers. Called on any thread, all but `send` and `close` under the broadcaster's lock."""

    needs_all: bool
    """True where every present worker takes part in every broadcast, also one that has the version already."""

    def stage(self) -> Sequence[Tensor]:
        """Buckets that no worker reads."""

    def offer(self, buckets: Sequence[Tensor], worker_ids: Sequence[str]) -> SharedMemoryOffer | CollectiveOffer:
        """What to tell these workers."""

    def send(self, buckets: Sequence[Tensor]) -> None:
        """Move the buckets to the workers of the last offer, within the timeout.

        Raises:
            WeightsError: it did not work for at least one of them.
        """

    def taken(self, worker_id: str) -> None:
        """This worker has the version of the last offer and reads the buckets no more."""

    def lost(self, worker_id: str) -> None:
        """This worker may read what it was offered at any time to come."""

    def release(self, buckets: Sequence[Tensor]) -> None:
        """A newer version replaces what is in these buckets."""

    def close(self) -> None:
        """Free everything."""


class BroadcastStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start; `versions` says which version each present worker runs."""

    newest_version: int
    versions: dict[str, int]
    broadcasts: int
    failures: int
    left_out: int
    last_broadcast_s: float
    broadcast_s: float
    sent_bytes: int


@dataclass(slots=True)
class _Version:
    policy_version: int
    buckets: Sequence[Tensor]
    checksum: int | None = None  # known from its first broadcast on


@dataclass(slots=True)
class _Member:
    policy_version: int
    left_out: bool = False
    failures_in_a_row: int = 0
    again_at_s: float = 0.0


@dataclass(slots=True)
class _Totals:
    broadcasts: int = 0
    failures: int = 0
    left_out: int = 0
    last_s: float = 0.0
    total_s: float = 0.0
    sent_bytes: int = 0
    pending: set[str] = field(default_factory=set)


class Broadcaster:
    """One per learner. Every method may be called from any thread and returns at once, `flush` excepted."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        transport: SendTransport,
        timeout_s: float,
        send_notice: Callable[[str, int, bytes], None],
    ) -> None:
        self._manifest = manifest
        self._transport = transport
        self._timeout_s = timeout_s
        self._send_notice = send_notice
        self._members: dict[str, _Member] = {}
        self._newest: _Version | None = None
        self._sending: _Version | None = None
        self._totals = _Totals()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="broadcast", daemon=True)
        self._thread.start()

    def publish(self, policy_version: int, fill: Callable[[Sequence[Tensor]], None]) -> None:
        """Make this the newest version: `fill` gathers it into free buckets, laid out as the manifest says.

        A version nobody was offered yet is replaced.
        """
        with self._changed:
            buckets = self._transport.stage()
        fill(buckets)
        version = _Version(policy_version, buckets)
        with self._changed:
            replaced, self._newest = self._newest, version
            if replaced is not None and replaced is not self._sending:
                self._transport.release(replaced.buckets)
            self._changed.notify_all()

    def join(self, worker_id: str, policy_version: int | None) -> None:
        """A worker is here and runs this version; if that is behind, it is offered the newest.

        None: its engine takes no weights for now, as a server does not that is being started.
        """
        if policy_version is None:
            self.leave(worker_id)
            return
        with self._changed:
            member = self._members.setdefault(worker_id, _Member(policy_version))
            if member.left_out or policy_version < member.policy_version:
                logger.info("%s is back with version %d", worker_id, policy_version)
            if policy_version < member.policy_version:
                self._totals.pending.discard(worker_id)  # its engine started anew, and takes no more what was offered
                self._transport.lost(worker_id)
            member.policy_version, member.left_out = policy_version, False
            self._changed.notify_all()

    def heard(self, worker_id: str, policy_version: int | None) -> None:
        """A sign of life: one that was left out takes part again. Says nothing new about anybody else."""
        with self._changed:
            member = self._members.get(worker_id)
            left_out = member is None or (member.left_out and time.monotonic() >= member.again_at_s)
        if left_out or policy_version is None:
            self.join(worker_id, policy_version)

    def leave(self, worker_id: str) -> None:
        """A worker is gone."""
        with self._changed:
            if self._members.pop(worker_id, None) is not None:
                self._totals.pending.discard(worker_id)
                self._transport.lost(worker_id)
                self._changed.notify_all()

    def acknowledge(self, worker_id: str, policy_version: int, received_checksum: int) -> None:
        """A worker runs this version, and its bytes had this checksum."""
        with self._changed:
            member, sending = self._members.get(worker_id), self._sending
            if member is None:
                return
            if sending is not None and sending.policy_version == policy_version:
                if sending.checksum != received_checksum:
                    self._failed(worker_id, policy_version, "its checksum differs from the sent one")
                    return
                self._transport.taken(worker_id)
                self._totals.pending.discard(worker_id)
            member.policy_version = max(member.policy_version, policy_version)
            member.failures_in_a_row = 0
            self._changed.notify_all()

    def fail(self, worker_id: str, policy_version: int, detail: str) -> None:
        """A worker could not take this version; it is offered again when it is next heard of."""
        with self._changed:
            self._failed(worker_id, policy_version, detail)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every present worker runs the newest version; False when the timeout came first."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._behind() and not self._totals.pending, timeout_s)

    def statistics(self) -> BroadcastStatistics:
        with self._changed:
            return BroadcastStatistics(
                newest_version=-1 if self._newest is None else self._newest.policy_version,
                versions={worker_id: member.policy_version for worker_id, member in self._members.items()},
                broadcasts=self._totals.broadcasts,
                failures=self._totals.failures,
                left_out=self._totals.left_out,
                last_broadcast_s=self._totals.last_s,
                broadcast_s=self._totals.total_s,
                sent_bytes=self._totals.sent_bytes,
            )

    def close(self) -> None:
        """Stop; a broadcast under way ends within its timeout, on its own thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=self._timeout_s + 1)
        self._transport.close()

    def _failed(self, worker_id: str, policy_version: int, detail: str) -> None:
        logger.warning("%s could not take version %d: %s", worker_id, policy_version, detail)
        self._totals.failures += 1
        self._totals.pending.discard(worker_id)
        member = self._members.get(worker_id)
        if member is not None:
            # Not at once, and ever more seldom: what it lacks may take a moment, and in a collective all take part.
            member.again_at_s = time.monotonic() + (2.0**member.failures_in_a_row - 1)
            member.failures_in_a_row = min(member.failures_in_a_row + 1, _MOST_DOUBLINGS)
            member.left_out = True
            self._transport.lost(worker_id)
        self._changed.notify_all()

    def _behind(self) -> list[str]:
        newest = self._newest
        if newest is None:
            return []
        return [
            worker_id
            for worker_id, member in self._members.items()
            if not member.left_out and member.policy_version < newest.policy_version
        ]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._behind())
                if self._closing:
                    return
                assert self._newest is not None, "somebody is behind, so there is a version"
                version = self._sending = self._newest
                present = [worker_id for worker_id, member in self._members.items() if not member.left_out]
                audience = present if self._transport.needs_all else self._behind()
                self._totals.pending = set(audience)
                offer = self._transport.offer(version.buckets, audience)
            self._broadcast(version, offer, audience)

    def _broadcast(self, version: _Version, offer: SharedMemoryOffer | CollectiveOffer, audience: list[str]) -> None:
        if version.checksum is None:
            version.checksum = checksum(version.buckets)  # here, so that the learner's next step does not wait for it
        started_s = time.monotonic()
        body = encode_notice(Notice(version.policy_version, self._manifest, version.checksum, offer))
        for worker_id in audience:
            self._send_notice(worker_id, version.policy_version, body)
        try:
            self._transport.send(version.buckets)
        except WeightsError as error:
            logger.warning("broadcast of version %d failed: %s", version.policy_version, error)
        with self._changed:
            left_s = self._timeout_s - (time.monotonic() - started_s)
            self._changed.wait_for(lambda: self._closing or not self._totals.pending, max(0.1, left_s))
            for worker_id in self._totals.pending & self._members.keys():
                logger.warning("%s did not take version %d in time: left out", worker_id, version.policy_version)
                self._members[worker_id].left_out = True
                self._totals.left_out += 1
                self._transport.lost(worker_id)
            self._totals.pending = set()
            self._totals.broadcasts += 1
            self._totals.last_s = time.monotonic() - started_s
            self._totals.total_s += self._totals.last_s
            self._totals.sent_bytes += self._manifest.total_bytes * len(audience)
            self._sending = None
            if version is not self._newest:
                self._transport.release(version.buckets)
            self._changed.notify_all()
