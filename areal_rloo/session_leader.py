"""A child process that leads a session of its own, and all processes of that session.

The system gives the number of a reaped process to another process. So signals are sent only while the child is not yet
reaped: a dead child keeps the number until then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from areal_rloo.waiting import wait_until

_LOOK_EVERY_S = 0.02


class SessionLeader:
    """Takes over a child that was started with `start_new_session`. Any thread may call the methods."""

    def __init__(self, child: subprocess.Popen[bytes], *, kills_session: bool = True) -> None:
        """With `kills_session`, the end of the child also kills all other processes of the session."""
        self.pid = child.pid
        self._child = child
        self._kills_session = kills_session
        self._lock = threading.Lock()

    def exit_code(self) -> int | None:
        """Return the exit code as `subprocess` does; None while the child runs."""
        with self._lock:
            return self._reaped()

    def signal(self, number: int) -> None:
        """Send a signal to a running child."""
        with self._lock:
            if self._reaped() is None:
                os.kill(self.pid, number)

    def kill(self, timeout_s: float) -> bool:
        """Kill child and session, and wait for the end of all; return False if one hangs in a system call."""
        with self._lock:
            if self._reaped() is None:
                self._kill_session()
                os.kill(self.pid, signal.SIGKILL)
        return wait_until(self._all_ended, timeout_s=timeout_s, look_every_s=_LOOK_EVERY_S)

    def _all_ended(self) -> bool:
        if self.exit_code() is None:
            return False
        return not self._kills_session or sys.platform != "linux" or not _lives(self.pid)

    def _reaped(self) -> int | None:
        if self._child.returncode is None:
            if sys.platform == "linux":  # elsewhere, `waitid` may be missing, and the rest of the session is left alone
                if not _has_ended(self.pid):
                    return None
                self._kill_session()
            self._child.poll()
        return self._child.returncode

    def _kill_session(self) -> None:
        if self._kills_session:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


def _lives(session: int) -> bool:
    """Return whether a process of a session still runs.

    A zombie has no memory, unless only the first of several threads has ended.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            state, number, num_threads = fields[0], int(fields[3]), int(fields[17])
            if number == session and (state not in "ZX" or num_threads > 1):
                return True
    return False


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave the child unreaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
