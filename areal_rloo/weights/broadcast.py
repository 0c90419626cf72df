"""The learner's end of the weights: publishes versions and sends them to the workers, never holding up the train step.

`publish` records a version that the training thread gathered into staged buckets. `run`, a task of the intake's event
loop, carries out the commands of `Offers`, which decides who is offered which version. An error of the transport fails
the offer, and `Offers` makes another: no error ends `run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from areal_rloo.errors import WeightsError, first_line
from areal_rloo.models.fingerprint import Sample
from areal_rloo.telemetry import trace
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.waiting import cancel, failed
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.commands import Answered, Begin, Call, Command, Over, Repeat
from areal_rloo.weights.counts import BroadcastStatistics
from areal_rloo.weights.fingerprint import Sampler
from areal_rloo.weights.manifest import Manifest, Notice, checksum
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.shared_memory import SharedMemorySender

logger = get_logger(__name__)

_LONGEST_WAIT_S = 3600.0


SendTransport = SharedMemorySender | CollectiveSender
"""Moves buckets to the workers. Its methods are called on the broadcaster's event loop; blocking work is awaited."""

SendNotice = Callable[[str, int, int, bytes], None]
"""Sends a worker the notice of an offer: worker id, offer id, policy version, body."""

SendCall = Callable[[str, int], None]
"""Sends a worker a call: worker id, offer id."""


@dataclass(slots=True, eq=False)
class _Version:
    policy_version: int
    buckets: Sequence[Tensor]
    proofs: asyncio.Task[tuple[int, tuple[Sample, ...]]] | None = None  # computed for the first offer
    offers: set[int] = field(default_factory=set)  # still using the buckets


@dataclass(slots=True, eq=False)
class _OpenOffer:
    version: _Version
    began_s: float
    body: bytes = b""  # of the notice


class Broadcaster:
    """One per learner, used on one event loop alone."""

    def __init__(
        self, *, manifest: Manifest, transport: SendTransport, offers: Offers, sampler: Sampler | None = None
    ) -> None:
        """`sampler`: takes the samples that prove which version a server runs; None if the workers check the bytes."""
        self.offers = offers
        self._manifest, self._sampler = manifest, sampler
        self._transport = transport
        self._newest: _Version | None = None  # nothing is published yet
        self._open: dict[int, _OpenOffer] = {}
        self._changed = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self._num_begun = self._sent_bytes = 0
        self._last_s = self._total_s = 0.0

    async def stage(self, *, gives_up: Callable[[], bool] = lambda: False) -> Sequence[Tensor]:
        """Return free buckets, laid out as the manifest says, to gather the next version into.

        Raises WeightsError if there is no memory for them for minutes, or until `gives_up` returns True.
        """
        return await self._transport.stage(gives_up)

    def publish(self, policy_version: int, buckets: Sequence[Tensor]) -> None:
        """Make the weights in these staged buckets the newest version. An older version is not offered any more."""
        replaced, self._newest = self._newest, _Version(policy_version, buckets)
        self.offers.publish(policy_version)
        if replaced is not None:
            self._release_if_unused(replaced)
        self.changed()

    def changed(self) -> None:
        """Look at the offers again, after an event of a worker."""
        self._changed.set()

    def statistics(self) -> BroadcastStatistics:
        return BroadcastStatistics(
            newest_version=self.offers.newest_version,
            versions={worker_id: member.policy_version for worker_id, member in self.offers.members.items()},
            broadcasts=self._num_begun,
            failures=self.offers.num_failures,
            left_out=self.offers.num_left_out,
            missing_memory_bytes=self._transport.missing_bytes,
            last_broadcast_s=self._last_s,
            broadcast_s=self._total_s,
            sent_bytes=self._sent_bytes,
        )

    def close(self) -> None:
        """Free the transport. Cancel `run` first."""
        self._transport.close()

    async def run(self, send_call: SendCall, send_notice: SendNotice) -> None:
        """Carry out the commands of the offers, until cancelled."""
        try:
            while True:
                self._changed.clear()
                for command in self.offers.poll(time.monotonic()):
                    self._carry_out(command, send_call, send_notice)
                wait_s = min(_LONGEST_WAIT_S, self.offers.due_s() - time.monotonic())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, wait_s)):
                        await self._changed.wait()
        finally:
            await cancel(self._sending)

    def _carry_out(self, command: Command, send_call: SendCall, send_notice: SendNotice) -> None:
        match command:
            case Call():
                for worker_id in command.workers:
                    send_call(worker_id, command.offer_id)
            case Begin():
                assert self._newest is not None, "only a published version is offered"
                self._newest.offers.add(command.offer_id)
                self._open[command.offer_id] = _OpenOffer(self._newest, time.monotonic())
                sending = asyncio.create_task(self._send(command, send_notice), name=f"offer {command.offer_id}")
                self._sending.add(sending)
                sending.add_done_callback(self._sending.discard)
            case Repeat():
                if (offer := self._open.get(command.offer_id)) is not None and offer.body:
                    send_notice(command.worker_id, command.offer_id, offer.version.policy_version, offer.body)
            case Answered():
                (self._transport.taken if command.taken else self._transport.lost)(command.worker_id)
            case Over():
                offer = self._open.pop(command.offer_id)
                self._last_s = time.monotonic() - offer.began_s
                self._total_s += self._last_s
                trace.record("weights", f"broadcast version {offer.version.policy_version}", offer.began_s)
                offer.version.offers.discard(command.offer_id)
                self._release_if_unused(offer.version)

    async def _send(self, command: Begin, send_notice: SendNotice) -> None:
        """Send a version to the workers of an offer; an error fails the offer."""
        offer = self._open[command.offer_id]
        version, workers = offer.version, command.workers
        self._num_begun += 1
        try:
            if version.proofs is None or failed(version.proofs):
                work = asyncio.to_thread(self._proofs, version)
                version.proofs = asyncio.create_task(work, name=f"checksum of version {version.policy_version}")
            found, samples = await asyncio.shield(version.proofs)
            made = await self._transport.offer(version.buckets, workers)
            offer.body = msgspec.msgpack.encode(Notice(version.policy_version, self._manifest, found, made, samples))
            self.offers.begun(command.offer_id, found)
            for worker_id in workers:
                send_notice(worker_id, command.offer_id, version.policy_version, offer.body)
            await self._transport.send(version.buckets)
            self._sent_bytes += self._manifest.total_bytes * len(workers)
        except Exception as error:  # noqa: BLE001 - of sockets, stores, files, memory: `Offers` tries again
            level = logger.warning if isinstance(error, WeightsError) else logger.exception
            level("offer %d of version %d failed: %s", command.offer_id, version.policy_version, first_line(error))
            self.offers.broken(command.offer_id, first_line(error), time.monotonic())
        finally:
            self.offers.sent(command.offer_id)
            self.changed()

    def _proofs(self, version: _Version) -> tuple[int, tuple[Sample, ...]]:
        """Compute the checksum of a version, and the samples; runs on a thread."""
        samples: tuple[Sample, ...] = ()
        if self._sampler is not None:
            samples = self._sampler.samples(self._manifest, version.buckets, version.policy_version)
        return checksum(version.buckets), samples

    def _release_if_unused(self, version: _Version) -> None:
        if version is not self._newest and not version.offers:
            self._transport.release(version.buckets)
