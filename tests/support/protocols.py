"""A welcomed worker without an engine, and messages for it: the protocol as a state machine."""

import numpy as np
from support.workers import ENGINE, make_protocol

from areal_rloo.rollout.protocol import WorkerProtocol
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire.messages import (
    Duty,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Lease,
    Leases,
    Welcome,
    WorkerMessage,
)

LEARNER = "learner"
HISTORY = ((LEARNER, 0),)


def make_lease(lease_id: int, group_id: int = 0, num: int = 2) -> Lease:
    return Lease(lease_id, group_id, tuple(range(num)), (1, 2), Item("?"), 0, 0)


def make_leases(*lease_ids: int, learner_id: str = LEARNER) -> Leases:
    return Leases(learner_id, tuple(make_lease(lease_id, group_id=lease_id) for lease_id in lease_ids))


def make_trajectory(duty: Duty) -> Trajectory:
    completion = Completion(np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32), "stop")
    return Trajectory(*duty.sample_id, np.ones(2, np.int32), completion, 1.0)


def finish(protocol: WorkerProtocol, *duties: Duty, num_bytes: int = 100) -> None:
    for duty in duties:
        protocol.finish(duty, [make_trajectory(duty)], num_bytes)


def of_kind(messages: list[WorkerMessage], kind: type[WorkerMessage]) -> list[WorkerMessage]:
    return [message for message in messages if isinstance(message, kind)]


def welcomed(**options: int) -> WorkerProtocol:
    """Return a worker that has been welcomed, at time 0."""
    protocol = make_protocol(heartbeat_s=1.0, **options)
    hello, beat = protocol.poll(0.0, ENGINE)
    assert isinstance(hello, Hello) and isinstance(beat, Heartbeat)
    protocol.handle(Welcome(LEARNER, hello.number, HISTORY), ENGINE)
    return protocol


def next_beat(protocol: WorkerProtocol, now_s: float) -> Heartbeat:
    (beat,) = of_kind(protocol.poll(now_s, ENGINE), Heartbeat)
    assert isinstance(beat, Heartbeat)
    return beat


def reply_to(
    beat: Heartbeat, *, newest_lease: int = 0, say_hello: bool = False, learner_id: str = LEARNER
) -> HeartbeatReply:
    return HeartbeatReply(learner_id, beat.number, newest_lease, say_hello)
