"""How many acknowledged trajectories per second does the wire carry, compared with raw PUSH/PULL of encoded bytes?

A process sends and another process receives. `raw` sends the bytes of a trajectory per message, without codec and
acknowledgement. `protocol` is the production path: encode, batch all finished samples, decode with every check, and
acknowledge each message. `lock_step` waits for each sample's acknowledgement before the next send.

`ipc` is a socket file, `curve` is TCP with keys on loopback. `tcp` is TCP without keys on loopback, which the wire does
not have: this benchmark alone makes such an address. The named alternatives are raw for the protocol, TCP without keys
for the other addresses, and the protocol for lock step.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Generator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np
import zmq

from areal_rloo.ports import ReservedPorts
from areal_rloo.rollout.protocol import EngineState, WorkerProtocol
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire.address import Address, SocketFile, read_address
from areal_rloo.wire.channels import LearnerChannel, WorkerChannel
from areal_rloo.wire.codec import encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import (
    Ack,
    Duty,
    Finished,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Lease,
    Leases,
    Results,
    Welcome,
    Work,
)
from areal_rloo.wire.security import load_keys, make_keys
from benchmarks.harness import Benchmark, Case

LIMITS = Limits()
KINDS = ("raw_tcp", "raw_curve", "raw_ipc", "protocol_tcp", "protocol_curve", "protocol_ipc", "lock_step_ipc")
RATIOS = (
    *(("raw_curve", "raw_tcp"), ("raw_ipc", "raw_tcp")),
    *(("protocol_tcp", "raw_tcp"), ("protocol_curve", "raw_curve"), ("protocol_ipc", "raw_ipc")),
    *(("protocol_curve", "protocol_tcp"), ("protocol_ipc", "protocol_tcp"), ("lock_step_ipc", "protocol_ipc")),
)
_AHEAD = 1000  # trajectories without an acknowledgement: as many messages of `raw` wait in a socket of ZeroMQ
_SHARES = {"raw": 2.0, "protocol": 1.0, "lock_step": 0.02}  # of the trajectories: a turn of each takes a similar time


class PlainTcp(SocketFile):
    """TCP without keys on loopback; the path is the host and the port."""

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.path}"

    def open_folder(self) -> int:
        """Accept an address that everybody can connect to."""
        return os.open("/", os.O_RDONLY)

    def endpoint_in(self, folder: int) -> str:
        return self.endpoint


def cases(quick: bool) -> Generator[Case]:
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    context.Process(target=_receiver, args=(there,), daemon=True).start()
    for num_tokens, count in ((64, 600),) if quick else ((1024, 18_000), (8192, 4500)):
        contestants = {
            name: partial(_rate, name, pipe, num_tokens, round(_SHARES[name.rpartition("_")[0]] * count))
            for name in KINDS
        }
        yield Case(
            f"{num_tokens}_tokens",
            "trajectories/s",
            contestants,
            RATIOS,
            rounds=2 if quick else 7,
            turns=1 if quick else 3,
            larger_is_better=True,
            facts={"trajectory_bytes": len(_ready_bytes(num_tokens))},
        )
    pipe.send(None)


def _rate(name: str, pipe: Connection, num_tokens: int, count: int) -> float:
    """Return trajectories per second between the first and the last arrival."""
    method, _, kind = name.rpartition("_")
    with tempfile.TemporaryDirectory(prefix="wire-") as name_of_folder:
        folder = Path(name_of_folder)
        make_keys(folder / "keys")
        pipe.send((method, kind, folder, count))
        endpoint = pipe.recv()
        if method == "raw":
            _send_raw(endpoint, kind, folder, num_tokens, count)
        else:
            address = _address(endpoint, kind, folder, "worker")
            asyncio.run(_send(address, num_tokens, count, lock_step=method == "lock_step"))
        seconds: float = pipe.recv()
    return (count - 1) / seconds


def _receiver(pipe: Connection) -> None:
    """Receive in a process of its own, with other addresses each time."""
    while (message := pipe.recv()) is not None:
        method, kind, folder, count = message
        with ReservedPorts(1) as reserved:
            (port,) = reserved.ports
            endpoint = SocketFile.inside(folder).endpoint if kind == "ipc" else f"tcp://127.0.0.1:{port}"
            if method == "raw":
                _receive_raw(endpoint, kind, folder, count, pipe)
            else:
                asyncio.run(_receive_acknowledging(_address(endpoint, kind, folder, "learner"), count, pipe))


def _address(endpoint: str, kind: str, folder: Path, end: Literal["learner", "worker"]) -> Address:
    if kind == "tcp":
        return PlainTcp(Path(endpoint.removeprefix("tcp://")))
    return read_address(endpoint, keys=folder / "keys", end=end)


def _receive_raw(endpoint: str, kind: str, folder: Path, count: int, pipe: Connection) -> None:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    if kind == "curve":
        keys = load_keys(folder / "keys", end="learner")
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = keys.public, keys.secret, True
    socket.bind(endpoint)
    pipe.send(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    socket.recv()
    started = time.perf_counter()
    for _ in range(count - 1):
        socket.recv()
    pipe.send(time.perf_counter() - started)
    socket.close(0)


def _send_raw(endpoint: str, kind: str, folder: Path, num_tokens: int, count: int) -> None:
    frame = _ready_bytes(num_tokens)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    if kind == "curve":
        keys = load_keys(folder / "keys", end="worker")
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        socket.curve_serverkey = keys.peer_public
    socket.connect(endpoint)
    for _ in range(count):
        socket.send(frame)
    socket.close()


async def _receive_acknowledging(address: Address, count: int, pipe: Connection) -> None:
    learner = LearnerChannel.bind(address, limits=LIMITS)
    pipe.send(learner.address.endpoint)
    num, started = 0, 0.0
    while num < count:
        peer, message = await learner.receive()
        if isinstance(message, Hello):
            learner.send(peer, Welcome("learner", message.number, (("learner", 0),)))
            lease = Lease(1, 0, tuple(range(count)), (1,), Item("?"), 0, 0)
            learner.send(peer, Leases("learner", (lease,)))
        elif isinstance(message, Heartbeat):
            learner.send(peer, HeartbeatReply("learner", message.number, 1, say_hello=False))
        elif isinstance(message, Results):
            started = started or time.perf_counter()
            num += len(message.finished)
            learner.send(peer, Ack(message.number))
    pipe.send(time.perf_counter() - started)
    await asyncio.sleep(0.2)  # the last acknowledgement leaves
    learner.close()


async def _send(address: Address, num_tokens: int, count: int, *, lock_step: bool) -> None:
    worker = WorkerChannel(address, worker_id="w", incarnation="1", limits=LIMITS)
    protocol = WorkerProtocol(
        worker_id="w",
        incarnation="1",
        capacity_samples=count,
        heartbeat_s=1.0,
        heartbeat_timeout_s=60.0,
        max_batch_bytes=8 * 2**20,
    )
    engine = EngineState(0, 0, Work())
    trajectories = [_trajectory(index, num_tokens) for index in range(8)]
    num_bytes = len(_ready_bytes(num_tokens))
    left: deque[Duty] = deque()

    async def receive() -> None:
        while True:
            for lease in protocol.handle(await worker.receive(), engine).start:
                left.extend(lease.duties)

    receiving = asyncio.create_task(receive())
    await worker.connected(60)
    num_done = 0
    while num_done < count or protocol.statistics().unacknowledged:
        ahead = 1 if lock_step else _AHEAD
        while left and protocol.statistics().unacknowledged < ahead:
            protocol.finish(left.popleft(), [trajectories[num_done % 8]], num_bytes)
            num_done += 1
        for message in protocol.poll(time.monotonic(), engine):
            worker.send(message)
        await asyncio.sleep(0)
    receiving.cancel()
    worker.close()


def _ready_bytes(num_tokens: int) -> bytes:
    """Return an encoded trajectory as a single frame."""
    return b"".join(encode(Results("learner", 1, (Finished(1, (_trajectory(0, num_tokens),)),))))


def _trajectory(index: int, num_tokens: int) -> Trajectory:
    rng = np.random.default_rng(index)
    completion = Completion(
        rng.integers(0, 150_000, num_tokens).astype(np.int32),
        -rng.random(num_tokens, dtype=np.float32),
        np.sort(rng.integers(7, 9, num_tokens)).astype(np.int32),
        "stop",
    )
    return Trajectory(index, 0, rng.integers(0, 150_000, 128).astype(np.int32), completion, 1.0)


BENCHMARK = Benchmark("wire", __doc__, cases)
