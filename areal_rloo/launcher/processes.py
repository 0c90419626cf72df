"""Processes on this host: started in a session of their own, which ends with them.

Ctrl-C on a terminal so reaches the launcher alone, which decides what it means. Should the launcher itself be killed,
Linux sends its processes SIGTERM, and they drain.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from areal_rloo.launcher.plan import ProcessSpec

_SESSION_ENDS_S = 10.0
_LOOK_EVERY_S = 0.02

# Run by the process itself before it becomes what it is to be: between fork and exec nothing of Python is safe where
# the launcher has threads, as in Ray. A parent that ended meanwhile sends no signal any more. Ray blocks SIGINT.
_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class LocalProcess:
    """A process of this host, of which `output` has everything it prints."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        *,
        bound: bool = True,
        folder: Path | None = None,
    ) -> None:
        """
        Args:
            command: to be run.
            environment: all of its variables.
            output: what it prints.
            bound: it is told to end when we do, however that comes about (on Linux alone), and what it leaves of its
                session ends with it.
            folder: to be run in; None for ours.
        """
        self._bound = bound
        wraps = bound and sys.platform == "linux"
        wrapper = (sys.executable, "-S", "-c", _BOUND_TO_PARENT, str(os.getpid())) if wraps else ()
        self._process = subprocess.Popen(
            (*wrapper, *command),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.label = f"pid {self._process.pid}"

    def exit_code(self) -> int | None:
        """None while it runs; 128 + n for signal n, as a shell says it."""
        if self._process.returncode is None and self._process.poll() is not None:
            self._kill_session()  # now: later its number may be another's
        code = self._process.returncode
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL; waits for its end, and a while for that of a session which is not bound to it."""
        if self.exit_code() is not None:
            return
        self._kill_session()
        self._process.kill()
        self._process.wait()
        ends_s = time.monotonic() + _SESSION_ENDS_S
        while not self._bound and self._has_session() and time.monotonic() < ends_s:
            time.sleep(_LOOK_EVERY_S)

    def _has_session(self) -> bool:
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def _kill_session(self) -> None:
        if self._bound:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)


class LocalStarter:
    """Starts processes on this host."""

    restarts = False

    def start(self, spec: ProcessSpec, log: Path) -> LocalProcess:
        """Start a process whose output is appended to a file."""
        with log.open("ab") as output:
            return LocalProcess(spec.command, {**os.environ, **spec.environment}, output)

    def close(self) -> None:
        """Nothing is left but what was started."""
