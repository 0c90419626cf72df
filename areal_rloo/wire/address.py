"""The learner's address on the wire: a socket file on a single host, or TCP with CURVE keys.

Nothing else is an address, and only this module makes, binds and connects sockets, so there is no TCP without keys. The
launcher writes an address as text, for the command lines of the processes; the keys are in files of the run folder.

    ipc:///dev/shm/areal_rloo-wire-k3x9/learner    the owner of the folder alone can connect
    tcp://10.0.0.1:5555, tcp://[fd00::1]:5555      the owner of the keys alone can connect
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from areal_rloo.errors import PreflightError
from areal_rloo.ports import host_and_port
from areal_rloo.wire.security import CurveKeys, load_keys

_FILE_NAME = "learner"
_IPC, _TCP = "ipc://", "tcp://"
_OPEN_FLAGS = os.O_PATH if sys.platform == "linux" else os.O_RDONLY


@dataclass(frozen=True, slots=True)
class Admission:
    """Admits workers to a TCP port. If the task ends, no other worker can connect, so the owner looks at the task."""

    authenticator: AsyncioAuthenticator
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class SocketFile:
    """A Unix socket. Only the owner may enter the folder, so no other user can connect, or listen there."""

    path: Path

    @classmethod
    def inside(cls, folder: Path) -> SocketFile:
        """Name the socket file of a private folder.

        Raises:
            PreflightError: the path is too long for the system.
        """
        path = folder / _FILE_NAME
        num_bytes, longest = len(os.fsencode(path)), zmq.IPC_PATH_MAX_LEN
        if num_bytes > longest:
            raise PreflightError(
                f"{path}: a path of {num_bytes} bytes, and the system takes at most {longest} for a socket file; set "
                "TMPDIR to a shorter folder, or set wire.transport=tcp"
            )
        return cls(path)

    @property
    def endpoint(self) -> str:
        return f"{_IPC}{self.path}"

    def open_folder(self) -> int:
        """Return a descriptor of the folder, which no other user can enter.

        Raises:
            PreflightError: the folder is missing, or open to others.
        """
        folder = self.path.parent
        try:
            descriptor = os.open(folder, _OPEN_FLAGS | os.O_NOFOLLOW)
        except OSError as error:
            raise PreflightError(
                f"the wire: {error}; the folder of the run's launcher was removed: by the launcher at its end, or by "
                "somebody else (systemd-logind at a logout, see docs/deploy.md); start the run again"
            ) from error
        found = os.fstat(descriptor)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(descriptor)
            raise PreflightError(
                f"the wire: expected {folder} to be a folder of user {os.geteuid()} with mode 0700, got user "
                f"{found.st_uid} and mode {stat.S_IMODE(found.st_mode):04o}; other users could connect; start the run "
                "again"
            )
        return descriptor

    def endpoint_in(self, folder: int) -> str:
        """Return the endpoint in an open folder, whichever folder has the path later."""
        return f"{_IPC}/proc/self/fd/{folder}/{self.path.name}" if sys.platform == "linux" else self.endpoint


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port, with the keys of this end. Port 0 stands for a free port, for the learner's end alone."""

    host: str
    port: int
    keys: CurveKeys

    @property
    def endpoint(self) -> str:
        return f"{_TCP}{host_and_port(self.host, self.port)}"

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host


Address = SocketFile | TcpAddress


def read_address(text: str, *, keys: Path, end: Literal["learner", "worker"]) -> Address:
    """Read the address of the command line; `keys` is the folder of the run's keys.

    Raises:
        PreflightError: the keys are missing or open to others.
    """
    if text.startswith(_IPC):
        return SocketFile(Path(text.removeprefix(_IPC)))
    parts = urlsplit(text)
    return TcpAddress(parts.hostname or "", parts.port or 0, load_keys(keys, end=end))


def tcp_text(host: str, port: int) -> str:
    """Write the address of a TCP port, for a command line."""
    return f"{_TCP}{host_and_port(host, port)}"


def make_socket(context: zmq.asyncio.Context, kind: int, address: Address) -> zmq.asyncio.Socket:
    """Make a socket that fits the address: with the keys of this end for TCP, else in a private folder.

    Raises:
        PreflightError: other users can enter the folder.
    """
    if isinstance(address, SocketFile):
        os.close(address.open_folder())
    socket: zmq.asyncio.Socket = context.socket(kind)
    if isinstance(address, TcpAddress):
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.IPV6, int(address.is_ipv6))
        socket.curve_publickey, socket.curve_secretkey = address.keys.public, address.keys.secret
    return socket


class Connection:
    """The worker's end connects its socket; the learner may be away.

    libzmq connects again without a check. So a socket file is looked for in the folder that was open at the beginning,
    and a later owner of the path is not found.
    """

    def __init__(self, socket: zmq.asyncio.Socket, address: Address, identity: bytes) -> None:
        """Raises PreflightError if other users can enter the folder."""
        self.socket = socket
        self.direct: zmq.Socket[Any] = zmq.Socket.shadow(socket.underlying)  # never waits, and makes no futures
        socket.setsockopt(zmq.IDENTITY, identity)
        # For this end alone: libzmq 4.3.5 aborts a ROUTER with heartbeats (tests/integration/test_wire_channels.py).
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # no messages of hours flood a learner that returns
        self._folder: int | None = None
        if isinstance(address, TcpAddress):
            socket.curve_serverkey = address.keys.peer_public
            socket.connect(address.endpoint)
        else:
            self._folder = address.open_folder()
            socket.connect(address.endpoint_in(self._folder))

    def close(self, linger_ms: int) -> None:
        """Stop; queued messages get this time to leave."""
        self.socket.close(linger_ms)
        if self._folder is not None:
            os.close(self._folder)


def bind(
    socket: zmq.asyncio.Socket, context: zmq.asyncio.Context, address: Address
) -> tuple[Address, Admission | None]:
    """Bind the learner's end; return the address with the port taken, and the admission of TCP to stop at the end.

    Raises:
        PreflightError: the address is taken, or is not of this host.
    """
    admission = _admit_workers(context, socket, address.keys) if isinstance(address, TcpAddress) else None
    try:
        # The socket file of a killed learner is replaced; the lock of the run folder keeps a second learner out.
        socket.bind(address.endpoint)
    except zmq.ZMQError as error:
        if admission is not None:
            admission.authenticator.stop()
        raise PreflightError(f"the wire: cannot bind {_advised(address, error)}") from error
    if isinstance(address, TcpAddress):
        port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        address = dataclasses.replace(address, port=port)
    return address, admission


def _admit_workers(context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, keys: CurveKeys) -> Admission:
    """Admit the key of this run's workers alone, before the socket is bound."""
    authenticator = AsyncioAuthenticator(context)
    before = asyncio.all_tasks()
    authenticator.start()
    (task,) = asyncio.all_tasks() - before  # pyzmq names no public way to the task
    task.set_name("the admission of workers")
    admitted = SimpleNamespace(callback=lambda domain, key: key == keys.peer_public)
    authenticator.configure_curve_callback("*", admitted)
    socket.curve_server = True
    return Admission(authenticator, task)


def _advised(address: Address, error: zmq.ZMQError) -> str:
    if isinstance(address, SocketFile):
        return f"{address.path}: {error}; free some disk, or set wire.transport=tcp"
    reason = os.strerror(error.errno) if error.errno else str(error)
    where = host_and_port(address.host, address.port)
    if error.errno == errno.EADDRINUSE:
        return f"{where}: {reason}; set wire.port to another port, or to 0"
    return f"{where}: {reason}; set wire.host to an address that `ip address` shows on the learner's host"
