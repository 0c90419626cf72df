"""Floods of strangers, broken peers and connections, beside an honest worker that still gets its answers."""

import asyncio
import multiprocessing
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from support.intakes import LEARNER, ONE_GROUP, make_broadcaster, make_intake
from support.patience import PATIENCE_S, eventually
from support.workers import LIMITS, Played

from areal_rloo.intake.service import IntakeService
from areal_rloo.rollout.protocol import Orders
from areal_rloo.telemetry.logs import setup_logs
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.address import TcpAddress
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.codec import encode
from areal_rloo.wire.counts import ChannelStatistics
from areal_rloo.wire.messages import Heartbeat, Hello, Lease, Work
from areal_rloo.wire.security import load_keys, make_keys

_CONTEXT = multiprocessing.get_context("spawn")
# 64 unread messages of each peer: 64 MiB of the long ones, 1.3 million frames of the others.
_MOST_GROWTH_BYTES = 320 * 2**20
_MOST_LOG_BYTES = 2**20


def _learn(folder: str, most_files: int, port: "Queue[int]", ends: Event, told: "Queue[ChannelStatistics]") -> None:
    """Lease samples, and drop every batch, until the end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most))
    setup_logs("learner", level="info", file=Path(folder) / "learner.log")
    address = TcpAddress("127.0.0.1", 0, load_keys(Path(folder) / "keys", end="learner"))
    broadcaster = make_broadcaster(Path(folder))
    service = IntakeService(
        make_intake(broadcaster.offers, *ONE_GROUP),
        broadcaster,
        lambda: LearnerChannel.bind(address, limits=LIMITS),
        heartbeat_s=1,
    )
    assert isinstance(service.channel.address, TcpAddress)
    port.put(service.channel.address.port)

    def train() -> None:
        while service.take_batch() is not None:
            service.refuse_batch("unwanted")

    training = threading.Thread(target=train)
    training.start()
    ends.wait()
    service.begin_drain()
    training.join()
    told.put(service.call(service.channel.statistics))
    service.close()


@dataclass
class _Learner:
    process: psutil.Process
    address: TcpAddress  # with the keys of a worker
    log: Path
    _ends: Event
    _told: "Queue[ChannelStatistics]"

    def statistics(self) -> ChannelStatistics:
        """End the learner, and return the counts of the wire."""
        self._ends.set()
        return self._told.get(timeout=PATIENCE_S)


@contextmanager
def _learner(folder: Path, *, most_files: int = 4096) -> Iterator[_Learner]:
    port: Queue[int] = _CONTEXT.Queue()
    told: Queue[ChannelStatistics] = _CONTEXT.Queue()
    ends = _CONTEXT.Event()
    make_keys(folder / "keys")
    process = _CONTEXT.Process(target=_learn, args=(str(folder), most_files, port, ends, told))
    process.start()
    try:
        address = TcpAddress("127.0.0.1", port.get(timeout=PATIENCE_S), load_keys(folder / "keys", end="worker"))
        yield _Learner(psutil.Process(process.pid), address, folder / "learner.log", ends, told)
    finally:
        ends.set()
        process.join(PATIENCE_S)
        process.kill()


def _connected(context: "zmq.Context[Any]", address: TcpAddress, identity: bytes) -> "zmq.Socket[bytes]":
    peer = context.socket(zmq.DEALER)
    peer.curve_publickey, peer.curve_secretkey = address.keys.public, address.keys.secret
    peer.curve_serverkey = address.keys.peer_public
    peer.setsockopt(zmq.IDENTITY, identity)
    peer.setsockopt(zmq.SNDHWM, 1000)
    peer.setsockopt(zmq.SNDTIMEO, 100)
    peer.connect(address.endpoint)
    return peer


def _send(peer: "zmq.Socket[bytes]", frames: list[Any], number: int) -> None:
    """Send a message again and again, until no more fits into the queue."""
    with suppress(zmq.Again):
        for _ in range(number):
            peer.send_multipart(frames, zmq.NOBLOCK)


def _chat(address: TcpAddress, ends: Event) -> None:
    """Send good messages as fast as the learner reads them."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    chatty = _connected(context, address, b"chatty#1")
    (heartbeat,) = encode(Heartbeat(LEARNER, 1, 0, b"", 0, 0, False, Work()))
    while not ends.is_set():
        with suppress(zmq.Again):
            chatty.send(heartbeat)
    context.destroy(0)


def _flood(address: TcpAddress, began: Event, ends: Event) -> None:
    """Send all kinds of garbage until the end, most of it with the run's keys."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    random = np.random.default_rng(0)
    vandal, long, many = (_connected(context, address, name) for name in (b"vandal#1", b"long#1", b"many#1"))
    round_number = 0
    while not ends.is_set():
        round_number += 1
        _send(vandal, [random.bytes(200), b"x"], 500)
        _send(long, [random.bytes(2**20)], 5)
        _send(many, [b""] * 20_000, 1)
        for number in range(5):
            name = f"stranger-{round_number}-{number}"
            stranger = _connected(context, address, f"{name}#1".encode())
            stranger.send(encode(Hello(name, "1", 0, 0, None, 1, 0, (), Work()))[0])
            stranger.close(20)
            with socket.create_connection((address.host, address.port)) as raw:
                raw.sendall(random.bytes(1000))
        began.set()
    context.destroy(0)


async def _work(learner: _Learner, during: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Finish samples as an honest worker does, some of them after `during`; return the growth of the learner's memory.

    `during` begins after the first samples.
    """
    worker = Played.at(learner.address, "honest")
    first_bytes = most_bytes = learner.process.memory_info().rss
    num_finished, num_wanted = 0, 2
    running: asyncio.Task[None] | None = None

    def is_done() -> bool:
        nonlocal most_bytes, num_wanted, running
        most_bytes = max(most_bytes, learner.process.memory_info().rss)
        if num_finished < num_wanted:
            return False
        if running is None:
            running = asyncio.create_task(during())
        elif running.done():
            if num_wanted > 2:
                return True
            num_wanted = num_finished + 20
        return False

    def obey(orders: Orders) -> None:
        nonlocal num_finished
        for lease in orders.start:
            for duty in lease.duties:
                worker.finish(duty, [_trajectory(lease, duty.sample_index)])
                num_finished += 1

    async with asyncio.timeout(PATIENCE_S):
        await worker.serve(obey, until=is_done)
    worker.channel.close()
    return most_bytes - first_bytes


def _trajectory(lease: Lease, sample_index: int) -> Trajectory:
    tokens = np.full(2, 3, np.int32)
    completion = Completion(tokens, np.full(2, -1, np.float32), np.full(2, lease.min_version, np.int32), "stop")
    return Trajectory(lease.group_id, sample_index, np.array(lease.prompt_tokens, np.int32), completion, 1.0)


@pytest.mark.parametrize("for_s", [2.0, pytest.param(60.0, marks=pytest.mark.rare)])
def test_a_flood_delays_an_honest_worker_but_cuts_off_only_vandals(tmp_path: Path, for_s: float) -> None:
    with _learner(tmp_path) as learner:
        began, ends = _CONTEXT.Event(), _CONTEXT.Event()
        floods = [
            _CONTEXT.Process(target=_flood, args=(learner.address, began, ends)),
            _CONTEXT.Process(target=_chat, args=(learner.address, ends)),
        ]

        async def flooded() -> None:
            for flood in floods:
                flood.start()
            assert await asyncio.to_thread(began.wait, PATIENCE_S)
            await asyncio.sleep(for_s)
            assert all(flood.is_alive() for flood in floods)

        try:
            growth_bytes = asyncio.run(_work(learner, flooded))
        finally:
            ends.set()
            for flood in floods:
                flood.join(PATIENCE_S)
                flood.kill()
        counts = learner.statistics()
        log = learner.log.read_text()
    assert counts.cut_off >= 3
    assert counts.refused >= counts.discarded > 100
    assert growth_bytes < _MOST_GROWTH_BYTES
    assert len(log) < _MOST_LOG_BYTES
    assert "b'honest" not in log


def test_connections_without_end_leave_descriptors_for_workers(tmp_path: Path) -> None:
    with _learner(tmp_path, most_files=300) as learner, ExitStack() as connections:

        async def crowded() -> None:
            for _ in range(600):
                connection = connections.enter_context(socket.socket())
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, (learner.address.host, learner.address.port))
            while learner.process.num_fds() > 200:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)

        asyncio.run(_work(learner, crowded))
        assert learner.statistics().excess_connections > 100


def _crowd(address: TcpAddress, ends: Event) -> None:
    """Hold many connections without a word, and replace each that is ended; at most 500 new ones a second.

    So the learner's limit is reached in less than the 5 s of a handshake, and the kernel drops no burst for seconds.
    """
    held: dict[int, socket.socket] = {}
    poll = select.poll()
    while not ends.is_set():
        for _ in range(min(10, 1500 - len(held))):
            connection = socket.socket()
            connection.setblocking(False)
            connection.connect_ex((address.host, address.port))
            held[connection.fileno()] = connection
            poll.register(connection, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
        for descriptor, _ in poll.poll(0):
            poll.unregister(descriptor)
            held.pop(descriptor).close()
        time.sleep(0.02)


def test_a_worker_gets_in_while_strangers_hold_all_descriptors(tmp_path: Path) -> None:
    with _learner(tmp_path, most_files=768) as learner:
        ends = _CONTEXT.Event()
        crowd = _CONTEXT.Process(target=_crowd, args=(learner.address, ends))
        crowd.start()

        async def crowded() -> None:
            await asyncio.sleep(1)
            assert crowd.is_alive()

        try:
            eventually(lambda: "the open files run out" in learner.log.read_text(), "no connection is ended")
            asyncio.run(_work(learner, crowded))
        finally:
            ends.set()
            crowd.join(PATIENCE_S)
            crowd.kill()
        assert learner.statistics().excess_connections > 100
