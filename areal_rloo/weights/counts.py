"""The counts of the broadcaster."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from areal_rloo.telemetry.metric import Metric


class BroadcastStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start; `versions` has the version of each present worker."""

    metrics_prefix: ClassVar[str] = "weights_"

    newest_version: Annotated[int, Metric("Newest version of the broadcaster", "versions")]
    versions: dict[str, int]
    broadcasts: Annotated[int, Metric("Offers of weights begun", kind="counter")]
    failures: Annotated[int, Metric("Versions that a worker could not take", kind="counter", healthy=(0, 0))]
    left_out: Annotated[int, Metric("Times a timeout left a worker out of a broadcast", kind="counter", healthy=(0, 0))]
    missing_memory_bytes: Annotated[
        int, Metric("Shared memory that the next version of the weights waits for", "bytes", healthy=(0, 0))
    ]
    last_broadcast_s: Annotated[float, Metric("Time of the last broadcast", "s")]
    broadcast_s: Annotated[float, Metric("Time spent broadcasting", "s", "counter")]
    sent_bytes: Annotated[int, Metric("Bytes of weights sent", "bytes", "counter")]
