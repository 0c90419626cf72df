"""Ports: reserved ports of this host, for listening processes, and addresses as text."""

from __future__ import annotations

import socket


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
