"""A small process that outlives the launcher, and kills the launcher's children which ignore its death.

Linux sends the children of a killed launcher SIGTERM, and they drain. A stopped or hung child does not. The launcher
passes a pidfd of each child to the guard over a socket. The socket closes with the launcher; some time later the guard
kills the rest of the children. A pidfd never means another process, even if the process id is used again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys

from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_END_TIMEOUT_S = 5.0
# Runs without the package: a Python without imports takes 8 MB.
_PROGRAM = """
import os, select, signal, socket, sys, time
launcher, patience_s = socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2])
poll, children = select.poll(), set()
poll.register(launcher, select.POLLIN)
ends_s = None
while ends_s is None or (children and time.monotonic() < ends_s):
    for number, _ in poll.poll(None if ends_s is None else 1000 * max(0.0, ends_s - time.monotonic())):
        if number in children:
            poll.unregister(number)
            children.discard(number)
            os.close(number)
            continue
        message, received, _, _ = socket.recv_fds(launcher, 1, 1)
        for child in received:
            poll.register(child, select.POLLIN)
            children.add(child)
        if not message:
            poll.unregister(launcher)
            ends_s = time.monotonic() + patience_s
for child in children:
    signal.pidfd_send_signal(child, signal.SIGKILL)
"""


class Guard:
    """The guard of this process. Only Linux has pidfds; elsewhere, nothing is guarded."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: time for the children to drain after the death of this process."""
        self._socket: socket.socket | None = None
        if sys.platform != "linux":
            return
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    (sys.executable, "-I", "-S", "-c", _PROGRAM, str(theirs.fileno()), str(patience_s)),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            self._unguarded(error)

    def watch(self, pid: int) -> None:
        """Guard a child of this process, not reaped yet."""
        if sys.platform == "linux" and self._socket is not None:
            try:
                child = os.pidfd_open(pid)
                try:
                    socket.send_fds(self._socket, [b"+"], [child])
                finally:
                    os.close(child)
            except OSError as error:
                self._unguarded(error)

    def close(self) -> None:
        """End the guard; all children have ended."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_TIMEOUT_S)

    def _unguarded(self, error: OSError) -> None:
        logger.warning("no guard: a hung process would outlive a killed launcher: %s", error)
