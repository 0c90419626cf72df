"""Connections that are dead or would die: garbage of another program, and messages above the limit."""

import asyncio
import dataclasses
import socket
import time
from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.workers import Ends, Played, connected_channel, make_ends, make_protocol

from areal_rloo.trajectory import Item
from areal_rloo.wire.address import Address, TcpAddress
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import (
    Drain,
    Failed,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Leases,
    Results,
    Welcome,
    Work,
)

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

LIMITS = Limits(max_message_bytes=2**22)
GOODBYE = Goodbye(None, Work())


_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


def _answer_once(listener: socket.socket, answer: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(answer)
        time.sleep(0.3)
    listener.close()


async def _until_heard(learner: LearnerChannel, worker: Played) -> None:
    """Let a worker send its heartbeats until the learner hears one."""
    hearing = asyncio.create_task(learner.receive())
    async with asyncio.timeout(PATIENCE_S):
        while not hearing.done():
            worker.send_due()
            await asyncio.sleep(0.05)
    assert isinstance(hearing.result()[1], Hello | Heartbeat)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" * 4,
        _GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x26\x05READY",
        _GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\x0a\x07WELCOME12",
    ],
    ids=["http", "another mechanism", "garbage in the handshake"],
)
def test_a_worker_survives_garbage_of_another_program_at_the_port(tmp_path: Path, answer: bytes) -> None:
    """libzmq gives such a connection up for ever."""
    ends = make_ends("tcp", tmp_path)

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        assert isinstance(ends.address, TcpAddress)
        address = dataclasses.replace(ends.address, port=listener.getsockname()[1])
        worker = Played.at(ends.of_worker(address))
        await asyncio.to_thread(_answer_once, listener, answer)
        learner = LearnerChannel.bind(address, limits=LIMITS)
        await _until_heard(learner, worker)
        worker.channel.close()
        learner.close()

    asyncio.run(main())


def test_a_worker_survives_a_message_above_the_limit(ends: Ends) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        worker = Played(await connected_channel(address, limits=LIMITS), make_protocol())
        worker.send_due()  # a Hello and a heartbeat
        peer, _ = await learner.receive()
        await learner.receive()
        await learner._socket.send_multipart([bytes.fromhex(peer), bytes(LIMITS.max_message_bytes + 1)])
        assert await learner.disconnected() == peer
        await _until_heard(learner, worker)
        assert learner.send(peer, Welcome("x", 3, (("x", 0),)))
        assert await worker.channel.receive() == Welcome("x", 3, (("x", 0),))
        worker.channel.close()

    ends.run(scenario, limits=LIMITS)


def test_a_receive_under_way_goes_on_with_a_new_connection(ends: Ends) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        worker = await connected_channel(address, limits=LIMITS)
        receiving = asyncio.create_task(worker.receive())
        await asyncio.sleep(0)
        worker.connect_anew()
        assert await worker.connected(PATIENCE_S)
        assert worker.send(GOODBYE)
        peer, _ = await learner.receive()
        assert learner.send(peer, Drain())
        assert await receiving == Drain()
        worker.close()

    ends.run(scenario, limits=LIMITS)


def test_neither_end_sends_a_message_above_the_limit(ends: Ends) -> None:
    """The other end would end the connection."""
    text = "x" * (LIMITS.max_message_bytes + 1)

    async def scenario(learner: LearnerChannel, address: Address) -> None:
        worker = await connected_channel(address, limits=LIMITS)
        assert not worker.send(Results("learner", 1, (), (Failed(1, 0, 0, "reward_error", text, "", 3),)))
        assert worker.send(GOODBYE)
        peer, message = await learner.receive()
        assert message == GOODBYE
        assert not learner.send(peer, Leases("learner", (Lease(1, 0, (0,), (1,), Item(text), 0, 0),)))
        assert learner.send(peer, Drain())
        assert await worker.receive() == Drain()
        assert worker.statistics().unroutable == learner.statistics().unroutable == 1
        worker.close()

    ends.run(scenario, limits=LIMITS)
