"""Floods of strangers, broken peers and connections, beside an honest worker that still gets its answers."""

import asyncio
import multiprocessing
import resource
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
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
from support.patience import PATIENCE_S
from support.workers import LIMITS, Played

from areal_rloo.intake.service import IntakeService
from areal_rloo.rollout.protocol import Orders
from areal_rloo.telemetry.logs import setup_logs
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.channels import ChannelStatistics, LearnerChannel
from areal_rloo.wire.codec import encode
from areal_rloo.wire.messages import Heartbeat, Hello, Lease, Work

_CONTEXT = multiprocessing.get_context("spawn")
_MOST_GROWTH_BYTES = 200 * 2**20
_MOST_LOG_BYTES = 2**20


def _learn(folder: str, most_files: int, port: "Queue[int]", ends: Event, told: "Queue[ChannelStatistics]") -> None:
    """Lease samples, and drop every batch, until the end."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most))
    setup_logs("learner", level="info", file=Path(folder) / "learner.log")
    broadcaster = make_broadcaster(Path(folder))
    service = IntakeService(
        make_intake(broadcaster.offers, *ONE_GROUP),
        broadcaster,
        lambda: LearnerChannel.bind("127.0.0.1", 0, limits=LIMITS, keys=None),
        heartbeat_s=1,
    )
    port.put(service.channel.port)

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
    port: int
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
    process = _CONTEXT.Process(target=_learn, args=(str(folder), most_files, port, ends, told))
    process.start()
    try:
        number = port.get(timeout=PATIENCE_S)
        yield _Learner(psutil.Process(process.pid), number, folder / "learner.log", ends, told)
    finally:
        ends.set()
        process.join(PATIENCE_S)
        process.kill()


def _flood(port: int, began: Event, ends: Event) -> None:
    """Send all kinds of garbage, and too much of what is no garbage, until the end."""
    context = zmq.Context()
    context.setsockopt(zmq.LINGER, 0)
    random = np.random.default_rng(0)
    endpoint = f"tcp://127.0.0.1:{port}"

    def connected(identity: bytes) -> "zmq.Socket[bytes]":
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, identity)
        peer.setsockopt(zmq.SNDHWM, 1000)
        peer.connect(endpoint)
        return peer

    def sent(peer: "zmq.Socket[bytes]", frames: list[Any], number: int) -> None:
        for _ in range(number):
            try:
                peer.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                return

    (heartbeat,) = encode(Heartbeat(LEARNER, 1, 0, b"", 0, 0, False, Work()))
    vandal, chatty, long, many = map(connected, (b"vandal#1", b"chatty#1", b"long#1", b"many#1"))
    round_number = 0
    while not ends.is_set():
        round_number += 1
        sent(vandal, [random.bytes(200), b"x"], 500)
        sent(chatty, [heartbeat], 2000)
        sent(long, [random.bytes(2**20)], 5)
        sent(many, [b""] * 20_000, 1)
        for number in range(5):
            name = f"stranger-{round_number}-{number}"
            stranger = connected(f"{name}#1".encode())
            stranger.send(encode(Hello(name, "1", 0, 0, None, 1, 0, (), Work()))[0])
            stranger.close(20)
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(random.bytes(1000))
        began.set()
    context.destroy(0)


async def _work(learner: _Learner, during: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Finish samples as an honest worker does, some of them after `during`; return the growth of the learner's memory.

    `during` begins after the first samples.
    """
    worker = Played.at(learner.port, "honest")
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


@pytest.mark.parametrize("for_s", [2.0, pytest.param(60.0, marks=pytest.mark.full)])
def test_a_flood_delays_an_honest_worker_but_cuts_off_only_vandals(tmp_path: Path, for_s: float) -> None:
    with _learner(tmp_path) as learner:
        began, ends = _CONTEXT.Event(), _CONTEXT.Event()
        flood = _CONTEXT.Process(target=_flood, args=(learner.port, began, ends))

        async def flooded() -> None:
            flood.start()
            assert await asyncio.to_thread(began.wait, PATIENCE_S)
            await asyncio.sleep(for_s)
            assert flood.is_alive()

        try:
            growth_bytes = asyncio.run(_work(learner, flooded))
        finally:
            ends.set()
            flood.join(PATIENCE_S)
            flood.kill()
        counts = learner.statistics()
        log = learner.log.read_text()
    assert counts.cut_off >= 3  # also connections whose random bytes are messages by chance
    assert counts.refused >= counts.discarded > 100
    assert growth_bytes < _MOST_GROWTH_BYTES
    assert len(log) < _MOST_LOG_BYTES
    assert "chatty#1' floods" in log
    assert "b'honest" not in log


def test_connections_without_end_leave_descriptors_for_workers(tmp_path: Path) -> None:
    with _learner(tmp_path, most_files=300) as learner, ExitStack() as connections:

        async def crowded() -> None:
            for _ in range(600):
                connection = connections.enter_context(socket.socket())
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", learner.port))
            while learner.process.num_fds() > 200:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)

        asyncio.run(_work(learner, crowded))
        assert learner.statistics().excess_connections > 100
