"""A rollout worker's end of the weights: takes what is offered in the background, and hands it to the engine.

`offer` (event loop) returns at once. A thread of the receiver's own takes the buckets, checks their sum, and waits for
the engine to swap them in between two decode steps; generation goes on all the while. An engine that has processes of
its own (an SGLang server) joins the collective itself, through `join_group`: then no bucket comes through here.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

import msgspec
import torch
from torch import Tensor

from areal_rloo.errors import ArealRlooError, ChecksumError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.weights.collective import CollectiveReader
from areal_rloo.weights.manifest import CollectiveOffer, Notice, checksum, decode_notice, views
from areal_rloo.weights.shared_memory import SharedMemoryReader

logger = get_logger(__name__)


class ReceiveStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start."""

    policy_version: int
    received: int
    failed: int
    received_bytes: int


class Receiver:
    """One per rollout worker. The callbacks are called on the receiver's thread.

    `policy_version` is what the engine runs: less than it was, where the engine had to start anew.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        policy_version: Callable[[], int],
        load_weights: Callable[[int, Iterable[tuple[str, Tensor]]], Future[int]],
        join_group: Callable[[Notice, CollectiveOffer], Future[int]] | None = None,
        on_received: Callable[[int, int], None],
        on_failed: Callable[[int, str], None],
        device: torch.device,
    ) -> None:
        self._load_weights = load_weights
        self._join_group = join_group
        self._on_received = on_received
        self._on_failed = on_failed
        self._policy_version = policy_version
        self._collective = CollectiveReader(worker_id, device)
        self._shared_memory = SharedMemoryReader()
        self._received = 0
        self._failed = 0
        self._received_bytes = 0
        self._offers: queue.SimpleQueue[Notice | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="receive", daemon=True)
        self._thread.start()

    def offer(self, body: bytes) -> None:
        """A notice came; it is taken up in the background.

        Raises:
            msgspec.DecodeError: it is not a notice.
        """
        self._offers.put(decode_notice(body))

    def statistics(self) -> ReceiveStatistics:
        return ReceiveStatistics(
            policy_version=self._policy_version(),
            received=self._received,
            failed=self._failed,
            received_bytes=self._received_bytes,
        )

    def close(self) -> None:
        """Take nothing more. A collective under way ends by its own timeout, on a daemon thread."""
        self._offers.put(None)
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (notice := self._offers.get()) is not None:
            if not self._offers.empty():
                continue  # one broadcast is under way at a time: with another on offer, this one is over
            try:
                self._take(notice)
            except (ArealRlooError, RuntimeError) as error:
                self._failed += 1
                logger.warning("version %d did not arrive: %s", notice.policy_version, error)
                self._on_failed(notice.policy_version, str(error))

    def _take(self, notice: Notice) -> None:
        if self._join_group is not None and isinstance(notice.offer, CollectiveOffer):
            self._join_group(notice, notice.offer).result()
            self._took(notice)
        else:
            buckets = self._buckets(notice)
            if notice.policy_version > self._policy_version():
                found = checksum(buckets)
                if found != notice.checksum:
                    raise ChecksumError(f"version {notice.policy_version}: expected {notice.checksum}, got {found}")
                self._load_weights(notice.policy_version, views(notice.manifest, buckets)).result()
                self._took(notice)
        self._on_received(notice.policy_version, notice.checksum)

    def _took(self, notice: Notice) -> None:
        self._received += 1
        self._received_bytes += notice.manifest.total_bytes

    def _buckets(self, notice: Notice) -> Sequence[Tensor]:
        if isinstance(notice.offer, CollectiveOffer):
            return self._collective.take(notice.offer, notice.manifest)  # also a known version: the group needs all
        if notice.policy_version <= self._policy_version():
            return ()
        return self._shared_memory.take(notice.offer, notice.manifest)
