"""The two ends of the wire over real sockets."""

import asyncio
import multiprocessing
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import zmq
from support.workers import make_channel

from areal_rloo.errors import PreflightError
from areal_rloo.trajectory import Completion, Item, Trajectory
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
from areal_rloo.wire.security import CurveKeys, load_keys, make_keys

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

LIMITS = Limits(max_message_bytes=2**22)
GOODBYE = Goodbye(None, Work())


def _results(number: int) -> Results:
    arrays = (np.ones(4, np.int32), -np.ones(4, np.float32), np.zeros(4, np.int32))
    trajectory = Trajectory(number, 0, np.ones(2, np.int32), Completion(*arrays, "stop"), 1.0)
    return Results("learner", number, (Finished(number, (trajectory,)),))


async def _worker(port: int, incarnation: str = "1", *, keys: CurveKeys | None = None) -> WorkerChannel:
    """Return a connected worker."""
    channel = make_channel(port, incarnation=incarnation, limits=LIMITS, keys=keys)
    assert await channel.connected(30)
    return channel


def _run(scenario: Callable[[LearnerChannel], Awaitable[None]], keys: CurveKeys | None = None) -> None:
    async def main() -> None:
        learner = LearnerChannel.bind("127.0.0.1", 0, limits=LIMITS, keys=keys)
        try:
            async with asyncio.timeout(30):
                await scenario(learner)
        finally:
            learner.close()

    asyncio.run(main())


def test_messages_go_both_ways() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = await _worker(learner.port)
        assert worker.send(GOODBYE)
        peer, message = await learner.receive()
        assert message == GOODBYE
        assert learner.send(peer, Welcome("x", 3, (("x", 0),)))
        assert await worker.receive() == Welcome("x", 3, (("x", 0),))
        worker.close()

    _run(scenario)


def test_a_message_to_a_learner_that_is_away_is_lost_at_once() -> None:
    """The protocol sends again. Messages of hours must not flood a learner that returns."""

    async def main() -> None:
        first = LearnerChannel.bind("127.0.0.1", 0, limits=LIMITS, keys=None)
        worker = await _worker(first.port)
        first.close()
        number = 0
        while worker.send(_results(number)):  # until the connection is known to be gone
            number += 1
            await asyncio.sleep(0.01)
        assert worker.statistics().unroutable == 1
        second = LearnerChannel.bind("127.0.0.1", first.port, limits=LIMITS, keys=None)
        assert await worker.connected(30)
        assert worker.send(GOODBYE)
        assert (await second.receive())[1] == GOODBYE
        worker.close()
        second.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_many_leases_are_split_into_messages_under_the_limit() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = await _worker(learner.port)
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

    _run(scenario)


def _send_for_ever(port: int) -> None:
    async def main() -> None:
        worker = await _worker(port, "killed")
        for number in range(10**9):
            worker.send(_results(number))
            await asyncio.sleep(0)

    asyncio.run(main())


def test_a_worker_killed_while_sending_leaves_whole_messages() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        process = multiprocessing.get_context("spawn").Process(target=_send_for_ever, args=(learner.port,))
        process.start()
        await learner.receive()
        assert process.pid is not None
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        worker = await _worker(learner.port, "next")
        worker.send(GOODBYE)
        while (await learner.receive())[1] != GOODBYE:
            pass
        assert learner.statistics().refused == 0
        worker.close()

    _run(scenario)


def _say_hello(port: int) -> None:
    async def main() -> None:
        worker = await _worker(port, "killed")
        worker.send(Hello("w", "killed", 4, 0, None, 1, 0, (), Work()))
        await worker.receive()

    asyncio.run(main())


def test_the_end_of_a_killed_process_is_noticed_at_once() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        process = multiprocessing.get_context("spawn").Process(target=_say_hello, args=(learner.port,))
        process.start()
        peer, _ = await learner.receive()
        disconnected = asyncio.create_task(learner.disconnected())
        other = await _worker(learner.port, "other")
        other.send(Hello("other", "1", 4, 0, None, 1, 0, (), Work()))
        await learner.receive()
        assert not disconnected.done()
        process.kill()
        assert await disconnected == peer
        process.join()
        other.close()

    _run(scenario)


class _RawPeer:
    """A connection that speaks ZMTP 3 without libzmq, so a test decides about each byte."""

    def __init__(self, port: int, identity: bytes) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        names = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
        words = [bytes([len(n)]) + n + len(value).to_bytes(4, "big") + value for n, value in names]
        body = b"\x05READY" + b"".join(words)
        self._connection.sendall(b"\x04" + bytes([len(body)]) + body)
        self._connection.recv(64, socket.MSG_WAITALL)

    def send(self) -> None:
        self._connection.sendall(b"\x00\x01x")

    def reset(self) -> None:
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()


def _learn_long(port: "multiprocessing.Queue[int]", ends: "multiprocessing.Queue[None]") -> None:
    """Receive messages, and live for longer than the interval of the heartbeats of ZeroMQ, if there are heartbeats."""

    async def main() -> None:
        learner = LearnerChannel.bind("127.0.0.1", 0, limits=LIMITS, keys=None)
        interval_ms = learner._socket.getsockopt(zmq.HEARTBEAT_IVL)
        port.put(learner.port)
        receiving = asyncio.create_task(_ignored_for_ever(learner))
        await asyncio.to_thread(ends.get)
        await asyncio.sleep(1.5 * interval_ms / 1000)
        receiving.cancel()
        learner.close()

    asyncio.run(main())


def test_a_replaced_connection_that_is_reset_ends_no_learner() -> None:
    """With heartbeats, libzmq aborts: a timer sends on the connection, whose input has stopped before the reset."""
    context = multiprocessing.get_context("spawn")
    port, ends = context.Queue(), context.Queue()
    process = context.Process(target=_learn_long, args=(port, ends))
    process.start()
    number = port.get(timeout=60)
    silent = _RawPeer(number, b"w#1")
    silent.send()
    time.sleep(0.3)
    successor = _RawPeer(number, b"w#1")
    successor.send()
    time.sleep(0.3)
    silent.send()  # to a pipe that has gone to the successor, so libzmq stops reading
    time.sleep(0.3)
    silent.reset()
    time.sleep(0.3)
    ends.put(None)
    process.join(60)
    successor.reset()
    assert process.exitcode == 0


def test_invalid_messages_are_counted_and_do_not_stall_other_peers() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        vandal = zmq.Context.instance().socket(zmq.DEALER)
        vandal.connect(f"tcp://127.0.0.1:{learner.port}")
        for number in range(500):
            vandal.send_multipart([bytes([number % 256]) * (number % 50), b"x"])
        worker = await _worker(learner.port)
        worker.send(GOODBYE)
        assert (await learner.receive())[1] == GOODBYE
        while not learner.statistics().cut_off:
            await asyncio.wait([asyncio.create_task(_ignored(learner))], timeout=0.05)
        assert vandal.poll(2000)
        assert b"refusal" in vandal.recv()
        vandal.close(0)
        worker.close()

    _run(scenario)


async def _ignored(learner: LearnerChannel) -> None:
    try:
        async with asyncio.timeout(0.04):
            await learner.receive()
    except TimeoutError:
        return


def test_a_message_to_a_lost_peer_is_only_counted() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        assert not learner.send(b"nobody".hex(), Drain())
        assert learner.statistics().unroutable == 1

    _run(scenario)


def test_under_curve_the_messages_of_a_peer_without_the_key_are_lost(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "other")

    async def scenario(learner: LearnerChannel) -> None:
        stranger = make_channel(learner.port, incarnation="plain")
        forger = make_channel(learner.port, incarnation="forged", keys=_forged(tmp_path))
        assert not await stranger.connected(0.3)
        assert not await forger.connected(0.3)
        worker = await _worker(learner.port, keys=load_keys(tmp_path / "keys", end="worker"))
        for channel in (stranger, forger, worker):
            channel.send(GOODBYE)
        await learner.receive()
        assert learner.statistics().messages_in == 1
        for channel in (stranger, forger, worker):
            channel.close()

    _run(scenario, keys=load_keys(tmp_path / "keys", end="learner"))


def _forged(folder: Path) -> CurveKeys:
    """Return the right server key with a client key that the learner does not know."""
    own = load_keys(folder / "other", end="worker")
    return CurveKeys(own.public, own.secret, load_keys(folder / "keys", end="worker").peer_public)


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()} == {0o600}
    (tmp_path / "keys" / "learner.secret").chmod(0o644)
    with pytest.raises(PreflightError, match="others can read"):
        load_keys(tmp_path / "keys", end="learner")


def test_an_open_address_without_keys_and_a_taken_port_are_refused() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        with pytest.raises(PreflightError, match="needs CURVE"):
            LearnerChannel.bind("0.0.0.0", 0, limits=LIMITS, keys=None)
        with pytest.raises(PreflightError, match=r"wire\.port: cannot bind"):
            LearnerChannel.bind("127.0.0.1", learner.port, limits=LIMITS, keys=None)

    _run(scenario)


def test_an_unreadable_message_is_answered_with_the_reason() -> None:
    async def scenario(learner: LearnerChannel) -> None:
        worker = await _worker(learner.port)
        await worker._socket.send_multipart([b"\x92\x04\x80"])  # wire version 4
        receiving = asyncio.create_task(_ignored_for_ever(learner))
        message = await worker.receive()
        assert isinstance(message, Refusal)
        assert "wire version 4" in message.detail
        receiving.cancel()
        worker.close()

    _run(scenario)


async def _ignored_for_ever(learner: LearnerChannel) -> None:
    while True:
        await learner.receive()
