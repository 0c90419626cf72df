"""Disturb the TCP connections of running processes, without their help and without tools of the network.

Linux lends the socket of another process of this user (pidfd_getfd). A filter on the socket drops every segment that
arrives, so the connection is silent, and the peer's kernel sends again. A pacing rate makes the connection slow. A
shutdown ends the connection. Both ends see the same as with a bad network.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MAX_PACING_RATE = 26, 27, 47
_UNLIMITED = 2**32 - 1
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # `ret #0`
_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def connections(pid: int, port: int) -> list[socket.socket]:
    """Borrow the established TCP sockets of a process whose own port or peer's port is `port`."""
    return [borrowed for borrowed in _sockets(pid) if _is_of(borrowed, port)]


def silence(connection: socket.socket) -> None:
    """Drop everything that arrives."""
    instructions = ctypes.create_string_buffer(_DROP_ALL)
    program = _Program(1, ctypes.addressof(instructions))
    size = ctypes.sizeof(program)
    code = _libc.setsockopt(
        connection.fileno(), socket.SOL_SOCKET, _SO_ATTACH_FILTER, ctypes.byref(program), ctypes.c_uint(size)
    )
    if code:
        raise OSError(ctypes.get_errno(), "SO_ATTACH_FILTER")


def let_through(connection: socket.socket) -> None:
    """Undo `silence`."""
    with contextlib.suppress(OSError):  # the connection has ended
        connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def slow_down(connection: socket.socket, bytes_per_s: int = _UNLIMITED) -> None:
    """Limit the rate of sending; without a rate, lift the limit."""
    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", bytes_per_s))


def _sockets(pid: int) -> Iterator[socket.socket]:
    try:
        process = os.pidfd_open(pid)
    except OSError:  # has ended
        return
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):  # noqa: PTH115
                    number = _libc.syscall(_PIDFD_GETFD, process, int(name), 0)
                    if number >= 0:
                        yield socket.socket(fileno=number)
    except OSError:  # has ended
        return
    finally:
        os.close(process)


def _is_of(borrowed: socket.socket, port: int) -> bool:
    if borrowed.family == socket.AF_INET and borrowed.type == socket.SOCK_STREAM:
        with contextlib.suppress(OSError):  # listens, or has ended
            if port in (borrowed.getsockname()[1], borrowed.getpeername()[1]):
                return True
    borrowed.close()
    return False
