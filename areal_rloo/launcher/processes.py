"""Processes of this host, each in a separate session. The session ends with the process.

Ctrl-C on a terminal therefore reaches the launcher only, and the launcher decides the reaction. If the launcher is
killed, Linux sends SIGTERM to the processes, and they drain. guard.py kills the processes that do not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from areal_rloo.launcher.guard import Guard
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.parent_death import bound_to_this_process
from areal_rloo.session_leader import SessionLeader
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.waiting import wait_until

logger = get_logger(__name__)

DRAIN_FIRST_S = 10.0  # a process has its own deadline for a drain, some seconds after the launcher's
_KILL_TIMEOUT_S = 10.0
_SESSION_ENDS_S = 10.0
_LOOK_EVERY_S = 0.02


class LocalProcess:
    """A running process of this host: a `Handle` (supervisor.py). Any thread may call the methods."""

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
        process = subprocess.Popen(
            bound_to_this_process(command, signal.SIGTERM) if bound else command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._leader = SessionLeader(process, kills_session=bound)
        self._hangs = False  # in a system call, and stays after SIGKILL
        self.pid = process.pid
        self.label = f"pid {self.pid}"

    def exit_code(self) -> int | None:
        code = self._leader.exit_code()
        if code is None:
            return 128 + signal.SIGKILL if self._hangs else None
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        self._leader.signal(number)

    def kill(self) -> None:
        """Kill the process and wait for the end; wait some seconds for the session of an unbound process."""
        if self.exit_code() is not None:
            return
        self._hangs = not self._leader.kill(_KILL_TIMEOUT_S)
        if self._hangs:
            logger.error("%s was killed and does not end; its device may stay in use", self.label)
        elif not self._bound:
            wait_until(lambda: not self._has_session(), timeout_s=_SESSION_ENDS_S, look_every_s=_LOOK_EVERY_S)

    def _has_session(self) -> bool:
        """Return whether a process is left in the session; signal 0 only asks."""
        with contextlib.suppress(PermissionError):
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return False
        return True


class LocalStarter:
    """Starts processes on this host; holds no resources."""

    restarts = False

    def __init__(self, drain_timeout_s: float) -> None:
        self._guard = Guard(drain_timeout_s + DRAIN_FIRST_S)

    def start(self, spec: ProcessSpec, log: Path) -> LocalProcess:
        with log.open("ab") as output:
            process = LocalProcess(spec.command, spec.environment_from(os.environ), output)
        self._guard.watch(process.pid)
        return process

    def close(self) -> None:
        self._guard.close()


class Tail:
    """Reads new text at the end of a file; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def read(self) -> str:
        try:
            with self._path.open("rb") as file:
                self._position = min(self._position, file.seek(0, os.SEEK_END))  # the file may be shortened
                file.seek(self._position)
                fresh = file.read()
        except OSError:  # missing, or on a network file system that fails for a moment
            return ""
        self._position += len(fresh)
        return fresh.decode(errors="replace")
