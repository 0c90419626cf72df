"""Strangers at the sockets of a run: bytes, handshakes without the keys, and a worker with the keys that lies."""

import asyncio
import contextlib
import http.client
import random
import socket
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq
from support.patience import PATIENCE_S
from support.workers import Played, make_channel

from areal_rloo.errors import CutOffError
from areal_rloo.rollout.protocol import Orders
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.address import Address
from areal_rloo.wire.messages import Duty, Hello, LearnerMessage, Lease, Work
from areal_rloo.wire.peers import MOST_OFFENCES
from areal_rloo.wire.security import CurveKeys

_WAIT_S = 2.0  # for the answer of a socket
_GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00%b" + b"\0" * 32  # of ZMTP 3.0, with the name of a mechanism
_BYTES = (
    random.Random(0).randbytes(5000),
    b"GET /metrics HTTP/1.1\r\nHost: a",
    *(_GREETING % name.ljust(20, b"\0") for name in (b"NULL", b"PLAIN")),
    _GREETING % b"CURVE".ljust(20, b"\0") + random.Random(1).randbytes(200),
)
TcpPort = tuple[str, int]
# An agent for a run, so that a chat endpoint listens. Notes the keys of the sessions beside this file.
AGENT = """
import pathlib, openai

def solve(base_url, api_key, model, prompt):
    with (pathlib.Path(__file__).parent / "session_keys").open("a") as keys:
        keys.write(api_key + "\\n")
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": prompt}]
        return len(client.chat.completions.create(model=model, messages=messages).choices[0].message.content) / 24
"""


def processes_of(launcher: int) -> list[psutil.Process]:
    process = psutil.Process(launcher)
    return [process, *process.children(recursive=True)]


def tcp_ports(processes: Sequence[psutil.Process]) -> set[TcpPort]:
    """Return the host and the port of each TCP socket that listens, and of each bound UDP socket."""
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or (not connection.raddr and connection.status == "NONE")
    }


def socket_files(processes: Sequence[psutil.Process]) -> set[Path]:
    paths = [str(each.laddr) for process in processes for each in process.net_connections("unix")]
    return {Path(path) for path in paths if path.startswith("/")}


def without_keys(where: TcpPort | Path, keys: CurveKeys) -> int:
    """Send bytes and begin handshakes that must fail; return the number of connections at least.

    `keys` of a worker: a stranger has one of the two, never both.
    """
    for sent in _BYTES:
        with _connected(where) as connection, contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.settimeout(_WAIT_S / 10)
            connection.recv(1000)
    endpoint = f"ipc://{where}" if isinstance(where, Path) else f"tcp://{where[0]}:{where[1]}"
    other_public, other_secret = zmq.curve_keypair()
    mechanisms: list[dict[str, Any]] = [
        {"plain_username": b"worker", "plain_password": b"guess"},
        {"curve_publickey": other_public, "curve_secretkey": other_secret, "curve_serverkey": keys.peer_public},
        {"curve_publickey": keys.public, "curve_secretkey": keys.secret, "curve_serverkey": other_public},
    ]
    if not isinstance(where, Path):  # a socket file needs no key
        mechanisms.append({})
    for options in mechanisms:
        _shake_hands(endpoint, options)
    return len(_BYTES) + len(mechanisms)


@contextlib.contextmanager
def _connected(where: TcpPort | Path) -> Iterator[socket.socket]:
    family = socket.AF_UNIX if isinstance(where, Path) else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(_WAIT_S)
        connection.connect(str(where) if isinstance(where, Path) else where)
        yield connection


def _shake_hands(endpoint: str, options: dict[str, Any]) -> None:
    """Connect with a mechanism until the handshake has failed, or the other end says nothing."""
    failed = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        for name, value in options.items():
            setattr(peer, name, value)
        with peer.get_monitor_socket(failed) as monitor:
            peer.connect(endpoint)
            peer.send(b"hello")
            monitor.poll(int(1000 * _WAIT_S))
            peer.disable_monitor()


def lies(lease: Lease, duty: Duty) -> list[Callable[[], Sequence[Trajectory]]]:
    """Return answers to a lease with a lie in each field."""

    def answer(*, prompt: Sequence[int] = lease.prompt_tokens, token: int = 3, version: int = lease.min_version,
               num: int = 2, spans: tuple[int, ...] = (), sample: int = 0) -> Trajectory:  # fmt: skip
        completion = Completion(
            np.full(num, token, np.int32), np.full(num, -1, np.float32), np.full(num, version, np.int32), "stop", spans
        )
        return Trajectory(duty.group_id, duty.sample_index + sample, np.array(prompt, np.int32), completion, 1e9)

    return [
        lambda: [answer(version=10**6)],
        lambda: [answer(token=10**6)],
        lambda: [answer(prompt=[1, 1, 1])],
        lambda: [answer(num=5000)],
        lambda: [answer(), answer()],
        lambda: [answer(spans=(1, 1), num=2)],
        lambda: [answer(version=10**6, token=10**6)],
        lambda: [answer(prompt=[10**6])],
    ]


def lie_until_cut_off(address: Address) -> int:
    """Say Hello with the keys, and answer every lease with a lie; return the number of lies sent."""
    return asyncio.run(_lie(address))


async def _lie(address: Address) -> int:
    worker, num_lies = Played.at(address, "liar", capacity_samples=4), 0

    def obey(orders: Orders) -> None:
        nonlocal num_lies
        for lease in orders.start:
            for duty in lease.duties:
                worker.finish(duty, lies(lease, duty)[num_lies % MOST_OFFENCES]())
                num_lies += 1

    with contextlib.suppress(CutOffError, TimeoutError):  # the learner cuts the process off
        async with asyncio.timeout(PATIENCE_S):
            await worker.serve(obey)
    worker.channel.close()
    return num_lies


def claim_name(address: Address, worker_id: str) -> LearnerMessage:
    """Say Hello with the keys, under the name of another process; return the learner's answer."""

    async def claim() -> LearnerMessage:
        channel = make_channel(address, worker_id, "impostor")
        try:
            async with asyncio.timeout(PATIENCE_S):
                await channel.connected(PATIENCE_S)
                channel.send(Hello(worker_id, "impostor", 4, 0, None, 1, 0, (), Work()))
                return await channel.receive()
        finally:
            channel.close()

    return asyncio.run(claim())


def scraped(where: TcpPort) -> dict[str, float]:
    """Return the numbers at /metrics; none if something else listens there."""
    try:
        with urllib.request.urlopen(f"http://{where[0]}:{where[1]}/metrics", timeout=PATIENCE_S) as answer:
            lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    except (OSError, http.client.HTTPException):
        return {}
    return {name: float(value) for name, _, value in lines}
