"""The counts of each end of the wire."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from areal_rloo.telemetry.metric import Metric


class ChannelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the channel was made."""

    metrics_prefix: ClassVar[str] = "wire_"

    messages_in: Annotated[int, Metric("Messages received", kind="counter")] = 0
    messages_out: Annotated[int, Metric("Messages sent", kind="counter")] = 0
    bytes_in: Annotated[int, Metric("Bytes received", "bytes", "counter")] = 0
    bytes_out: Annotated[int, Metric("Bytes sent", "bytes", "counter")] = 0
    refused: Annotated[int, Metric("Messages that were unreadable or not allowed", kind="counter", healthy=(0, 0))] = 0
    discarded: Annotated[int, Metric("Messages refused unread: of a flood, or of a peer cut off", kind="counter")] = 0
    cut_off: Annotated[int, Metric("Peers cut off after unreadable messages", kind="counter")] = 0
    refused_connections: Annotated[int, Metric("Connections without a message: no keys, say", kind="counter")] = 0
    excess_connections: Annotated[int, Metric("Connections ended: too few open files", kind="counter")] = 0
    unroutable: Annotated[int, Metric("Messages too long, or whose peer was gone", kind="counter")] = 0
