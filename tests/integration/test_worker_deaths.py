"""A rollout worker dies or stops, as a real process: the samples run elsewhere before a few heartbeats are over."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from support.intakes import make_broadcaster, make_intake
from support.patience import eventually
from support.processes import quickly_started
from support.workers import ENGINE, LIMITS, Played, fresh_address, make_channel, make_protocol

from areal_rloo.intake.service import IntakeService
from areal_rloo.wire.address import Address
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.messages import Heartbeat, HeartbeatReply

HEARTBEAT_S = 0.5
MOST_HEARTBEATS = 2 + round(1 / HEARTBEAT_S) + 1  # the first goes out at once


def _hold_samples(address: Address) -> None:
    """Be a worker that takes samples and finishes none."""

    async def hold() -> None:
        await Played.at(address, "first").serve(lambda orders: None)

    asyncio.run(hold())


async def _heartbeats_until_leased(worker: Played) -> int:
    """Count heartbeats until a lease comes. A heartbeat waits for the reply to the last, so a slow learner slows it."""
    num_heartbeats, waits = 0, False
    while True:
        for message in [] if waits else worker.protocol.poll(time.monotonic(), ENGINE):
            worker.channel.send(message)
            waits |= isinstance(message, Heartbeat)
        try:
            async with asyncio.timeout(None if waits else 0.02):
                message = await worker.channel.receive()
        except TimeoutError:
            continue
        if isinstance(message, HeartbeatReply):
            num_heartbeats, waits = num_heartbeats + 1, False
        if worker.protocol.handle(message, ENGINE).start:
            return num_heartbeats


@pytest.mark.parametrize(
    ("number", "timeout_s"),
    [(signal.SIGKILL, 100.0), (signal.SIGSTOP, 2 * HEARTBEAT_S)],  # a stopped process closes no connection
)
def test_samples_run_elsewhere_within_two_heartbeats_and_a_second(
    tmp_path: Path, number: signal.Signals, timeout_s: float
) -> None:
    broadcaster = make_broadcaster(tmp_path)
    intake = make_intake(
        broadcaster.offers,
        *("algorithm.group_size=2", "learner.groups_per_step=1", "learner.num_minibatches=1"),
        *("algorithm.max_staleness=0", f"wire.heartbeat_s={HEARTBEAT_S}", f"wire.heartbeat_timeout_s={timeout_s}"),
    )
    service = IntakeService(
        intake,
        broadcaster,
        lambda: LearnerChannel.bind(fresh_address(), limits=LIMITS),
        heartbeat_s=HEARTBEAT_S,
    )
    process = quickly_started().Process(target=_hold_samples, args=(service.channel.address,), daemon=True)
    process.start()
    eventually(
        lambda: service.call(lambda: [len(w.duties) for w in intake.fleet.alive.values()]) == [2],
        "the first worker has both samples",
    )

    async def outlive() -> int:
        protocol = make_protocol("second", heartbeat_s=HEARTBEAT_S)
        worker = Played(make_channel(service.channel.address, "second"), protocol)
        await worker.channel.connected(30)
        assert process.pid is not None
        os.kill(process.pid, number)
        async with asyncio.timeout(60):
            num_heartbeats = await _heartbeats_until_leased(worker)
        worker.channel.close()
        return num_heartbeats

    try:
        assert asyncio.run(outlive()) <= MOST_HEARTBEATS
    finally:
        process.kill()
        process.join()
        service.close()
