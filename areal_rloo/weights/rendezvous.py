"""Where the ranks of a collective meet: a store that listens on the address asked for, and Gloo on the same interface.

torch's own store listens on all interfaces, whatever host it is given. The store and Gloo have no authentication: every
program that reaches the address can join.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

_BACKLOG = 2048  # as torch's own store has


def serve_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Serve a store at this address of this host alone; port 0 takes a free port.

    Raises:
        OSError: the address is not of this host, or the port is taken.
        RuntimeError: torch cannot start the store.
    """
    family, address = _lookup(host, port)
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


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host; Gloo would guess from the machine's name.

    Raises:
        OSError: the host has no address, or there is no route.
    """
    family, address = _lookup(host, 1)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def _lookup(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Look up the family and the address of a host, IPv4 first: ZeroMQ takes the IPv4 address of a name, too."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address
