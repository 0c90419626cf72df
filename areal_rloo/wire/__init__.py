"""ZeroMQ between the learner and the rollout workers; the only package that knows ZeroMQ.

`messages` is the whole protocol. `codec` turns messages into frames and back, `columns` the trajectories, `turns`
partial rollouts; `token_rules` has the rules of both. `envelope` has the version and the checksum of a message.
`channels` has the two ends as asyncio sockets, `counts` their statistics, `peers` the limits of each peer. `address`
says where the ends meet, `security` makes and loads CURVE keys.
"""

from typing import TYPE_CHECKING

from areal_rloo.exports import exports_of

if TYPE_CHECKING:
    from areal_rloo.wire.address import Address, SocketFile, TcpAddress
    from areal_rloo.wire.channels import LearnerChannel, WorkerChannel
    from areal_rloo.wire.codec import decode_learner, decode_worker, encode
    from areal_rloo.wire.columns import Limits, check_trajectories, decode_columns, encode_columns
    from areal_rloo.wire.counts import ChannelStatistics
    from areal_rloo.wire.messages import (
        Ack,
        Failed,
        Finished,
        Goodbye,
        Heartbeat,
        Hello,
        LearnerMessage,
        Lease,
        Leases,
        Results,
        Welcome,
        WorkerMessage,
    )
    from areal_rloo.wire.security import CurveKeys, load_keys, make_keys

__all__ = [
    "Ack",
    "Address",
    "ChannelStatistics",
    "CurveKeys",
    "Failed",
    "Finished",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "LearnerChannel",
    "LearnerMessage",
    "Lease",
    "Leases",
    "Limits",
    "Results",
    "SocketFile",
    "TcpAddress",
    "Welcome",
    "WorkerChannel",
    "WorkerMessage",
    "check_trajectories",
    "decode_columns",
    "decode_learner",
    "decode_worker",
    "encode",
    "encode_columns",
    "load_keys",
    "make_keys",
]

__getattr__ = exports_of(__name__)
