"""Ports: reserved ports of this host, for listening processes, and addresses of hosts."""

from __future__ import annotations

import socket
from typing import Any


class ReservedPorts:
    """Reserves free ports of this host; processes of the run can listen on them.

    A reserved port is bound exclusively, so the system gives the port to no other process. Then SO_REUSEADDR opens the
    port to other sockets with SO_REUSEADDR: ZeroMQ, torch and SGLang set this option. Two runs never get the same port,
    and a restarted learner can use the port again.
    """

    def __init__(self, num: int) -> None:
        self._sockets = [_bound_socket() for _ in range(num)]
        for reserved in self._sockets:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.ports = tuple(int(reserved.getsockname()[1]) for reserved in self._sockets)

    def close(self) -> None:
        for reserved in self._sockets:
            reserved.close()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def look_up(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Look up the family and the address of a host, IPv4 first: ZeroMQ takes the IPv4 address of a name, too.

    Raises OSError for an unknown name.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label of over 63 characters
        raise OSError(f"{host}: {error}") from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def address_towards(host: str) -> str:
    """Return this machine's address on the route to a host; Gloo would guess from the machine's name.

    Raises:
        OSError: the host has no address, or there is no route.
    """
    family, address = look_up(host, 1)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        own: str = probe.getsockname()[0]
        return own


def host_and_port(host: str, port: int) -> str:
    """Write an address as URLs do: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bound_socket() -> socket.socket:
    """Bind a socket to a free port of all addresses, IPv6 included where this host has IPv6; it never listens."""
    if socket.has_dualstack_ipv6():
        bound = socket.socket(socket.AF_INET6)
        try:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            bound.bind(("::", 0))
            return bound
        except OSError:  # IPv6 is disabled on this host
            bound.close()
    bound = socket.socket()
    bound.bind(("", 0))
    return bound
