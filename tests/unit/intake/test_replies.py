"""Replies of the intake's event loop to the messages of a round: when they leave, and what a peer is charged for."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.intakes import LEARNER, make_broadcaster, make_intake
from support.patience import eventually
from support.workers import fresh_address

from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.service import IntakeService
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Failed, Goodbye, Heartbeat, Hello, LearnerMessage, Leases, Results, Work
from areal_rloo.wire.messages import WorkerMessage as Message

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

HEARTBEAT = Heartbeat(None, 1, 0, b"", 0, 0, False, Work())
_LONG_S = 0.01


def _hello(worker_id: str) -> Hello:
    return Hello(worker_id, "1", 4, 0, None, 1, 0, (), Work())


def _work_long() -> None:
    ends_s = time.thread_time() + _LONG_S
    while time.thread_time() < ends_s:
        pass


class _Scripted(LearnerChannel):
    """Receives the messages of a script as a round, and notes what happens."""

    script: list[tuple[str, Message]]
    events: list[str]
    charged: list[tuple[str, bool]]  # the peer, and if it was charged for long work
    leases_are_long = False

    async def receive(self) -> tuple[str, Message]:
        if not self.script:
            await asyncio.sleep(1000.0)
        self.events.append("in")
        return self.script.pop(0)

    @property
    def has_more(self) -> bool:
        return bool(self.script)

    def send(self, peer: str, message: LearnerMessage) -> bool:
        self.events.append(type(message).__name__)
        if isinstance(message, Leases) and self.leases_are_long:
            _work_long()
        return True

    def charge(self, peer: str, work_s: float) -> None:
        self.charged.append((peer, work_s >= _LONG_S))

    def departed(self, peer: str) -> None:
        self.events.append("departed")


def _played(
    folder: Path, *script: tuple[str, Message], intake_type: type[Intake] = Intake, leases_are_long: bool = False
) -> _Scripted:
    """Return the channel after the script."""
    channels: list[_Scripted] = []

    def bind() -> LearnerChannel:
        channel = _Scripted.bind(fresh_address(), limits=Limits())
        assert isinstance(channel, _Scripted)
        channel.script, channel.events, channel.charged = list(script), [], []
        channel.leases_are_long = leases_are_long
        channels.append(channel)
        return channel

    broadcaster = make_broadcaster(folder)
    intake = make_intake(broadcaster.offers)
    intake.__class__ = intake_type
    service = IntakeService(intake, broadcaster, bind, heartbeat_s=1)
    ended: Callable[[], bool] = lambda: len(channels[0].charged) == len(script)  # noqa: E731
    eventually(ended, "the messages are not handled")
    service.close()
    return channels[0]


def test_a_process_is_charged_for_all_its_hellos_but_the_first(tmp_path: Path) -> None:
    """Each looks for leases; those after the first Hello, and a long look for them, are the learner's own wish."""

    class Slow(Intake):
        def grants(self) -> list[Outgoing]:
            _work_long()
            return super().grants()

    script = [("00", _hello("w")), ("00", _hello("w")), ("01", _hello("w"))]
    assert _played(tmp_path, *script, intake_type=Slow).charged == [("00", False), ("00", True), ("01", True)]


def test_a_process_is_charged_for_long_leases(tmp_path: Path) -> None:
    failed = tuple(Failed(1, 0, index, "reward_unavailable", "no", "", 3) for index in range(8))  # leased again
    results = Results(LEARNER, 1, (), failed)
    channel = _played(tmp_path, ("00", _hello("w")), ("00", results), ("00", HEARTBEAT), leases_are_long=True)
    assert channel.charged == [("00", False), ("00", True), ("00", False)]
    assert channel.events == ["in", "Welcome", "Leases", "in", "Ack", "Leases", "in", "HeartbeatReply"]


def test_replies_leave_together_after_all_queued_messages(tmp_path: Path) -> None:
    events = _played(tmp_path, *[("00", HEARTBEAT)] * 40).events
    assert events == ["in"] * 32 + ["HeartbeatReply"] * 32 + ["in"] * 8 + ["HeartbeatReply"] * 8


def test_a_welcome_leaves_before_its_peer_counts_as_departed(tmp_path: Path) -> None:
    """Else the connection of a departed worker would never make room for another."""
    without_room = Hello("w", "1", 0, 0, None, 1, 0, (), Work())
    channel = _played(tmp_path, ("00", without_room), ("00", Goodbye(None, Work())), ("00", HEARTBEAT))
    assert channel.events == ["in", "in", "Welcome", "departed", "in", "HeartbeatReply"]
