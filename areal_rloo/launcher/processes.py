"""Processes of this host, each in a separate session. The session ends with the process.

Ctrl-C on a terminal therefore reaches the launcher only, and the launcher decides the reaction. If the launcher is
killed, Linux sends SIGTERM to the processes, and they drain.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from areal_rloo.children import exit_code_of
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.parent_death import bound_to_this_process
from areal_rloo.waiting import wait_until

_SESSION_ENDS_S = 10.0
_LOOK_EVERY_S = 0.02


class LocalProcess:
    """A running process of this host: a `Handle` (supervisor.py)."""

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
            environment: all environment variables of the process.
            bound: send SIGTERM to the process when this process dies (on Linux), and kill the rest of the session when
                the process ends.
            folder: working folder; None for the folder of this process.
        """
        self._bound = bound
        self._process = subprocess.Popen(
            bound_to_this_process(command, signal.SIGTERM) if bound else command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.label = f"pid {self._process.pid}"

    def exit_code(self) -> int | None:
        if self._process.returncode is None and exit_code_of(self._process) is not None:
            self._kill_session()  # before `poll` reaps: later the system may give this process id to another process
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and wait for the end; wait some seconds for the session of an unbound process."""
        if self.exit_code() is not None:
            return
        self._kill_session()
        self._process.kill()
        self._process.wait()
        if not self._bound:
            wait_until(lambda: not self._has_session(), timeout_s=_SESSION_ENDS_S, look_every_s=_LOOK_EVERY_S)

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
    """Starts processes on this host; holds no resources."""

    restarts = False

    def start(self, spec: ProcessSpec, log: Path) -> LocalProcess:
        with log.open("ab") as output:
            return LocalProcess(spec.command, {**os.environ, **spec.environment}, output)

    def close(self) -> None:
        pass


class Tail:
    """Reads new text at the end of a file; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def read(self) -> str:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                fresh = file.read()
        except OSError:  # missing, or on a network file system that fails for a moment
            return ""
        self._position += len(fresh)
        return fresh.decode(errors="replace")
