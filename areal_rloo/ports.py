"""Reserved ports of this host, for listening processes."""

from __future__ import annotations

import socket


class ReservedPorts:
    """Reserves free ports of this host; processes of the run can listen on them.

    A reserved port is bound exclusively, so the system gives the port to no other process. Then SO_REUSEADDR opens the
    port to other sockets with SO_REUSEADDR: ZeroMQ, torch and SGLang set this option. Two runs never get the same port,
    and a restarted learner can use the port again.
    """

    def __init__(self, num: int) -> None:
        self._sockets = [socket.socket() for _ in range(num)]
        for reserved in self._sockets:
            reserved.bind(("", 0))
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
