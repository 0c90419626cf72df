"""Where the ranks of a collective meet: a store that listens on the address asked for, and on no other.

torch's own store listens on all interfaces, whatever host it is given. The store and Gloo have no authentication: every
program that reaches the address can join.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from areal_rloo.ports import look_up

_BACKLOG = 2048  # as torch's own store has


def serve_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Serve a store at this address of this host alone; port 0 takes a free port.

    Raises:
        OSError: the address is not of this host, or the port is taken.
        RuntimeError: torch cannot start the store.
    """
    family, address = look_up(host, port)
    with socket.create_server(address[:2], family=family, backlog=_BACKLOG) as listening:
        taken = listening.getsockname()[1]
        return TCPStore(  # owns the descriptor from here on
            host,
            taken,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listening.detach(),
        )


def join_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Connect to the store of another process.

    Raises:
        RuntimeError: there is no store at the address within the timeout.
    """
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
