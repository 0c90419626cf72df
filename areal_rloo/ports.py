"""Ports of this host, for whoever starts a process that listens."""

from __future__ import annotations

import socket
from types import TracebackType


class ReservedPorts:
    """Ports of this host that nobody else is given while they are held, and that our own processes can listen on.

    A port is bound, exclusively, and not listened on; then it is opened to sockets that share addresses, as those of
    ZeroMQ, of torch and of an SGLang server do. So two runs that start together never get the same one, and a learner
    that begins anew finds its port free.
    """

    def __init__(self, num: int) -> None:
        self._sockets = [socket.socket() for _ in range(num)]
        for one in self._sockets:
            one.bind(("", 0))
        for one in self._sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.ports = tuple(int(one.getsockname()[1]) for one in self._sockets)

    def close(self) -> None:
        for one in self._sockets:
            one.close()

    def __enter__(self) -> ReservedPorts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
