"""Small weights to send, and a broadcaster and a receiver on private event loops, for tests on the main thread."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from areal_rloo.errors import WeightsError
from areal_rloo.intake.service import LoopThread
from areal_rloo.weights.broadcast import Broadcaster, BroadcastStatistics, SendTransport
from areal_rloo.weights.fingerprint import Sampler
from areal_rloo.weights.manifest import Manifest, build_manifest, gather
from areal_rloo.weights.receive import Receiver


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
        send_notice: Callable[[str, int, bytes], None],
        sampler: Sampler | None = None,
    ) -> None:
        self._loop = LoopThread("broadcast")
        self._broadcaster = self._loop.call(
            lambda: Broadcaster(manifest=manifest, transport=transport, timeout_s=timeout_s, sampler=sampler)
        )
        self._loop.begin(self._broadcaster.run(send_notice), lambda task: task.cancelled() or task.result())

    def publish(self, policy_version: int, fill: Callable[[Sequence[Tensor]], None]) -> None:
        buckets = self._loop.run(self._broadcaster.stage())
        fill(buckets)
        self._loop.call(self._broadcaster.publish, policy_version, buckets)

    def join(self, worker_id: str, policy_version: int | None) -> None:
        self._loop.call(self._broadcaster.join, worker_id, policy_version)

    def heard(self, worker_id: str, policy_version: int | None) -> None:
        self._loop.call(self._broadcaster.heard, worker_id, policy_version)

    def leave(self, worker_id: str) -> None:
        self._loop.call(self._broadcaster.leave, worker_id)

    def acknowledge(self, worker_id: str, policy_version: int, checksum: int) -> None:
        self._loop.call(self._broadcaster.acknowledge, worker_id, policy_version, checksum)

    def fail(self, worker_id: str, policy_version: int, detail: str) -> None:
        self._loop.call(self._broadcaster.fail, worker_id, policy_version, detail)

    def statistics(self) -> BroadcastStatistics:
        return self._loop.call(self._broadcaster.statistics)

    def close(self) -> None:
        self._loop.close()
        self._broadcaster.close()


class Receiving:
    """A running receiver; the loop of the receiver calls `on_received` and `on_failed`."""

    def __init__(
        self, on_received: Callable[[int, int], object], on_failed: Callable[[int, str], object], **options: Any
    ) -> None:
        self._loop = LoopThread("receive")
        self._receiver = self._loop.call(lambda: Receiver(**options))
        self._loop.begin(self._take(on_received, on_failed), lambda task: task.cancelled() or task.result())

    async def _take(self, on_received: Callable[[int, int], object], on_failed: Callable[[int, str], object]) -> None:
        while True:
            notice = await self._receiver.offered()
            try:
                await self._receiver.receive(notice)
            except WeightsError as error:
                on_failed(notice.policy_version, str(error))
            else:
                on_received(notice.policy_version, notice.checksum)

    def offer(self, body: bytes) -> None:
        self._loop.call(self._receiver.offer, body)

    def close(self) -> None:
        self._loop.close()
