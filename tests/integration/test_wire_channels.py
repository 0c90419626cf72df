"""The two ends of the wire over real sockets."""

import asyncio
import multiprocessing
import os
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
import zmq.asyncio
from support.workers import Ends, connected_channel, fresh_address, make_ends

from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.waiting import cancel
from areal_rloo.wire.address import Address, SocketFile, TcpAddress
from areal_rloo.wire.channels import LearnerChannel, WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import (
    Drain,
    Finished,
    Goodbye,
    Hello,
    Lease,
    Leases,
    Refusal,
    Results,
    Welcome,
    Work,
)

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

LIMITS = Limits(max_message_bytes=2**22)
GOODBYE = Goodbye(None, Work())


def _results(number: int) -> Results:
    arrays = (np.ones(4, np.int32), -np.ones(4, np.float32), np.zeros(4, np.int32))
    trajectory = Trajectory(number, 0, np.ones(2, np.int32), Completion(*arrays, "stop"), 1.0)
    return Results("learner", number, (Finished(number, (trajectory,)),))


async def _worker(address: Address, incarnation: str = "1") -> WorkerChannel:
    """Return a connected worker."""
    return await connected_channel(address, incarnation=incarnation, limits=LIMITS)


def test_messages_go_both_ways(ends: Ends) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        worker = await _worker(address)
        assert worker.send(GOODBYE)
        peer, message = await learner.receive()
        assert message == GOODBYE
        assert learner.send(peer, Welcome("x", 3, (("x", 0),)))
        assert await worker.receive() == Welcome("x", 3, (("x", 0),))
        worker.close()

    ends.run(scenario, limits=LIMITS)


def test_a_message_to_a_learner_that_is_away_is_lost_at_once(ends: Ends) -> None:
    """The protocol sends again. Messages of hours must not flood a learner that returns."""

    async def main() -> None:
        first = LearnerChannel.bind(ends.address, limits=LIMITS)
        worker = await _worker(ends.of_worker(first.address))
        first.close()
        await asyncio.sleep(0.1)  # the event loop forgets descriptors that the second learner gets
        number = 0
        while worker.send(_results(number)):  # until the connection is known to be gone
            number += 1
            await asyncio.sleep(0.01)
        assert worker.statistics().unroutable == 1
        second = LearnerChannel.bind(first.address, limits=LIMITS)
        assert await worker.connected(30)
        assert worker.send(GOODBYE)
        assert (await second.receive())[1] == GOODBYE
        worker.close()
        second.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_many_leases_are_split_into_messages_under_the_limit(ends: Ends) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        worker = await _worker(address)
        worker.send(GOODBYE)
        peer, _ = await learner.receive()
        leases = tuple(Lease(number, -number, (0,), (70_000,) * 5000, Item("?"), 0, 0) for number in range(1, 501))
        assert learner.send(peer, Leases("learner", leases))
        came: list[Lease] = []
        while len(came) < len(leases):
            message = await worker.receive()
            assert isinstance(message, Leases)
            came += message.leases
        assert tuple(came) == leases
        worker.close()

    ends.run(scenario, limits=LIMITS)


def _send_for_ever(address: Address) -> None:
    async def main() -> None:
        worker = await _worker(address, "killed")
        for number in range(10**9):
            worker.send(_results(number))
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_worker_killed_while_sending_leaves_whole_messages(ends: Ends) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        process = multiprocessing.get_context("spawn").Process(target=_send_for_ever, args=(address,))
        process.start()
        await learner.receive()
        assert process.pid is not None
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        worker = await _worker(address, "next")
        worker.send(GOODBYE)
        while (await learner.receive())[1] != GOODBYE:
            pass
        statistics = learner.statistics()
        assert statistics.refused == statistics.discarded, "only a flood's messages, unread"
        worker.close()

    ends.run(scenario, limits=LIMITS)


def _say_hello(address: Address) -> None:
    async def main() -> None:
        worker = await _worker(address, "killed")
        worker.send(Hello("w", "killed", 4, 0, None, 1, 0, (), Work()))
        await worker.receive()

    asyncio.run(main())


def test_the_end_of_a_killed_process_is_noticed_at_once(ends: Ends) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        process = multiprocessing.get_context("spawn").Process(target=_say_hello, args=(address,))
        process.start()
        peer, _ = await learner.receive()
        disconnected = asyncio.create_task(learner.disconnected())
        other = await _worker(address, "other")
        other.send(Hello("other", "1", 4, 0, None, 1, 0, (), Work()))
        await learner.receive()
        assert not disconnected.done()
        process.kill()
        assert await disconnected == peer
        process.join()
        other.close()

    ends.run(scenario, limits=LIMITS)


class _RawPeer:
    """A connection that speaks ZMTP 3 without libzmq, so a test decides about each byte."""

    def __init__(self, address: SocketFile, identity: bytes) -> None:
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.settimeout(30)
        self._connection.connect(str(address.path))
        self._connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        names = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
        words = [bytes([len(n)]) + n + len(value).to_bytes(4, "big") + value for n, value in names]
        body = b"\x05READY" + b"".join(words)
        self._connection.sendall(b"\x04" + bytes([len(body)]) + body)
        self._connection.recv(64, socket.MSG_WAITALL)

    def send(self) -> None:
        self._connection.sendall(b"\x00\x01x")

    def reset(self) -> None:
        """End the connection with unread messages of the learner, which a Unix socket reports as a reset."""
        self._connection.close()


def _learn_long(address: Address, bound: "multiprocessing.Queue[None]", ends: "multiprocessing.Queue[None]") -> None:
    """Receive messages, and live for longer than the interval of the heartbeats of ZeroMQ, if there are heartbeats."""

    async def main() -> None:
        learner = LearnerChannel.bind(address, limits=LIMITS)
        interval_ms = learner._socket.getsockopt(zmq.HEARTBEAT_IVL)
        bound.put(None)
        receiving = asyncio.create_task(_ignored_for_ever(learner))
        await asyncio.to_thread(ends.get)
        await asyncio.sleep(1.5 * interval_ms / 1000)
        receiving.cancel()
        learner.close()

    asyncio.run(main())


def test_a_replaced_connection_that_is_reset_ends_no_learner() -> None:
    """With heartbeats, libzmq aborts: a timer sends on the connection, whose input has stopped before the reset."""
    context = multiprocessing.get_context("spawn")
    address, bound, ends = fresh_address(), context.Queue(), context.Queue()
    process = context.Process(target=_learn_long, args=(address, bound, ends))
    process.start()
    bound.get(timeout=60)
    silent = _RawPeer(address, b"w#1")
    silent.send()
    time.sleep(0.3)
    successor = _RawPeer(address, b"w#1")
    successor.send()
    time.sleep(0.3)
    with suppress(BrokenPipeError):  # libzmq may close the connection instead
        silent.send()  # to a pipe that has gone to the successor, so libzmq stops reading
    time.sleep(0.3)
    silent.reset()
    time.sleep(0.3)
    ends.put(None)
    process.join(60)
    successor.reset()
    assert process.exitcode == 0


def test_invalid_messages_are_counted_and_do_not_stall_other_peers() -> None:
    ends = Ends(fresh_address())

    async def scenario(learner: LearnerChannel, address: Address) -> None:
        vandal = zmq.Context.instance().socket(zmq.DEALER)
        vandal.connect(address.endpoint)
        for number in range(500):
            vandal.send_multipart([bytes([number % 256]) * (number % 50), b"x"])
        worker = await _worker(address)
        worker.send(GOODBYE)
        assert (await learner.receive())[1] == GOODBYE
        while not learner.statistics().cut_off:
            await asyncio.wait([asyncio.create_task(_ignored(learner))], timeout=0.05)
        assert vandal.poll(2000)
        assert b"refusal" in vandal.recv()
        vandal.close(0)
        worker.close()

    ends.run(scenario, limits=LIMITS)


async def _ignored(learner: LearnerChannel) -> None:
    try:
        async with asyncio.timeout(0.04):
            await learner.receive()
    except TimeoutError:
        return


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how many connections a listening socket queues")
def test_a_crowd_of_workers_can_wait_for_the_learner(tmp_path: Path) -> None:
    """A thousand workers connect at once after a restart; the kernel drops connections beyond the queue for seconds."""
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())

    async def scenario(learner: LearnerChannel, address: Address) -> None:
        assert isinstance(address, TcpAddress)
        found = psutil.Process().net_connections("tcp")
        (fd,) = [each.fd for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == address.port]
        with socket.socket(fileno=os.dup(fd)) as listening:
            info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        (longest_queue,) = struct.unpack_from("<I", info, 28)  # `tcpi_sacked` of a listening socket
        assert longest_queue == min(4096, most)

    make_ends("tcp", tmp_path).run(scenario, limits=LIMITS)


def test_a_message_to_a_lost_peer_is_only_counted(ends: Ends) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        assert not learner.send(b"nobody".hex(), Drain())
        assert learner.statistics().unroutable == 1

    ends.run(scenario, limits=LIMITS)


def test_the_socket_file_of_a_killed_learner_is_replaced() -> None:
    async def main() -> None:
        address, bound = fresh_address(), multiprocessing.get_context("spawn").Queue()
        process = multiprocessing.get_context("spawn").Process(target=_learn_long, args=(address, bound, bound))
        process.start()
        await asyncio.to_thread(bound.get, timeout=60)
        worker = await _worker(address)
        process.kill()
        process.join()
        assert address.path.is_socket()
        learner = LearnerChannel.bind(address, limits=LIMITS)
        sending = asyncio.create_task(_keep_sending(worker))  # the first may go to the learner that was killed
        while (await learner.receive())[1] != GOODBYE:
            pass
        await cancel([sending])
        worker.close()
        learner.close()

    asyncio.run(asyncio.wait_for(main(), 60))


async def _keep_sending(worker: WorkerChannel) -> None:
    while True:
        worker.send(GOODBYE)
        await asyncio.sleep(0.05)


def test_an_unreadable_message_is_answered_with_the_reason(ends: Ends) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        worker = await _worker(address)
        await worker._socket.send_multipart([b"\x92\x04\x80"])  # wire version 4
        receiving = asyncio.create_task(_ignored_for_ever(learner))
        message = await worker.receive()
        assert isinstance(message, Refusal)
        assert "wire version 4" in message.detail
        receiving.cancel()
        worker.close()

    ends.run(scenario, limits=LIMITS)


async def _ignored_for_ever(learner: LearnerChannel) -> None:
    while True:
        await learner.receive()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", b"\xff" + bytes(1000)])
def test_connections_without_a_message_are_counted_and_others_are_not(ends: Ends, sent: bytes) -> None:
    async def scenario(learner: LearnerChannel, address: Address) -> None:
        noticing = asyncio.create_task(learner.disconnected())
        worker = await _worker(address, "1")
        worker.send(Hello("w", "1", 4, 0, None, 1, 0, (), Work()))
        peer, _ = await learner.receive()
        for number in range(1, 4):
            await asyncio.to_thread(_send_bytes, address, sent)
            while learner.statistics().refused_connections < number:  # noqa: ASYNC110 - a count has no event
                await asyncio.sleep(0.01)
        worker.close()
        assert await noticing == peer
        assert learner.statistics().refused_connections == 3

    ends.run(scenario, limits=LIMITS)


def _send_bytes(address: Address, sent: bytes) -> None:
    is_file = isinstance(address, SocketFile)
    where = str(address.path) if isinstance(address, SocketFile) else (address.host, address.port)
    family = socket.AF_UNIX if is_file else socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    with socket.socket(family) as stranger:
        stranger.connect(where)
        stranger.sendall(sent)
