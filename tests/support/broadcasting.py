"""Small weights to send, and a broadcaster and a receiver on private event loops, for tests on the main thread."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_rloo.errors import WeightsError
from areal_rloo.loop_thread import LoopThread
from areal_rloo.weights.broadcast import Broadcaster, SendTransport
from areal_rloo.weights.counts import BroadcastStatistics
from areal_rloo.weights.fingerprint import Sampler
from areal_rloo.weights.manifest import Manifest, build_manifest, gather
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.receive import Receiver

CALL_TIMEOUT_S = 0.5


def tensors_of(version: int) -> list[tuple[str, Tensor]]:
    """Return the weights of a version; every element is the version."""
    return [(f"layer.{i}", torch.full((64, 128 + i), float(version))) for i in range(5)]


MANIFEST = build_manifest(tensors_of(0), bucket_bytes=100_000)


def fill_with(version: int) -> Callable[[Sequence[Tensor]], None]:
    return partial(gather, MANIFEST, tensors_of(version))


class Broadcasting:
    """A running broadcaster."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        transport: SendTransport,
        timeout_s: float,
        send_call: Callable[[str, int], None],
        send_notice: Callable[[str, int, int, bytes], None],
        sampler: Sampler | None = None,
    ) -> None:
        self._loop = LoopThread("broadcast")
        self._offers = Offers(together=transport.needs_all, timeout_s=timeout_s, call_timeout_s=CALL_TIMEOUT_S)
        self._broadcaster = self._loop.call(
            lambda: Broadcaster(manifest=manifest, transport=transport, offers=self._offers, sampler=sampler)
        )
        running = self._broadcaster.run(send_call, send_notice)
        self._loop.begin(running, lambda task: task.cancelled() or task.result())

    def publish(self, policy_version: int, fill: Callable[[Sequence[Tensor]], None]) -> None:
        buckets = self._loop.run(self._broadcaster.stage())
        fill(buckets)
        self._loop.call(self._broadcaster.publish, policy_version, buckets)

    def tell(self, event: Callable[[Offers], object]) -> None:
        """Tell the offers of an event of a worker, as the intake does."""

        def told() -> None:
            event(self._offers)
            self._broadcaster.changed()

        self._loop.call(told)

    def statistics(self) -> BroadcastStatistics:
        return self._loop.call(self._broadcaster.statistics)

    def close(self) -> None:
        self._loop.close()
        self._broadcaster.close()


class Receiving:
    """A running receiver; the loop of the receiver calls `on_received` and `on_failed`, with the id of the offer."""

    def __init__(
        self, on_received: Callable[[int, int], object], on_failed: Callable[[int, str], object], **options: Any
    ) -> None:
        self._loop = LoopThread("receive")
        self._receiver = self._loop.call(lambda: Receiver(**options))
        self._offers: asyncio.Queue[tuple[int, bytes]] = asyncio.Queue()
        self._loop.begin(self._take(on_received, on_failed), lambda task: task.cancelled() or task.result())

    async def _take(self, on_received: Callable[[int, int], object], on_failed: Callable[[int, str], object]) -> None:
        while True:
            offer_id, body = await self._offers.get()
            try:
                checksum = await self._receiver.receive(body)
            except WeightsError as error:
                on_failed(offer_id, str(error))
            else:
                on_received(offer_id, checksum)

    def offer(self, offer_id: int, body: bytes) -> None:
        self._loop.call(self._offers.put_nowait, (offer_id, body))

    def close(self) -> None:
        self._loop.close()
