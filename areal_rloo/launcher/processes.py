"""Processes on this host: started in a session of their own, ended with their whole session.

Ctrl-C on a terminal so reaches the launcher alone, which decides what it means. Should the launcher itself be killed,
Linux sends its processes SIGTERM, and they drain.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from areal_rloo.launcher.plan import ProcessSpec

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
            bound: it is told to end when we do, however that comes about; on Linux alone.
            folder: to be run in; None for ours.
        """
        bound = bound and sys.platform == "linux"
        wrapper = (sys.executable, "-S", "-c", _BOUND_TO_PARENT, str(os.getpid())) if bound else ()
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
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to it and what is left of its session; waits for its end."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class LocalStarter:
    """Starts processes on this host."""

    restarts = False

    def start(self, spec: ProcessSpec, log: Path) -> LocalProcess:
        """Start a process whose output is appended to a file."""
        with log.open("ab") as output:
            return LocalProcess(spec.command, {**os.environ, **spec.environment}, output)

    def close(self) -> None:
        """Nothing is left but what was started."""
