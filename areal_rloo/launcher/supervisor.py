"""Starts processes, watches them, restarts what may be restarted, and leaves none behind.

Every child is in a session of its own, so that Ctrl-C reaches the launcher alone, which decides what it means. Should
the launcher itself be killed, Linux sends the children SIGTERM, and they drain.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_PR_SET_PDEATHSIG = 1
_BACKOFF_S = (0.0, 0.5, 2.0, 5.0)
_CLEAN_BACKOFF_S = 10.0


@dataclass(slots=True)
class Child:
    """A process and its history."""

    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    num_restarts: int = 0
    restart_at_s: float | None = None


class Supervisor:
    """The children of one launcher. Standard output and error of each go to logs/<name>.out."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, Child] = {}

    def start(self, spec: ProcessSpec) -> None:
        """Start a process."""
        self._logs.mkdir(parents=True, exist_ok=True)
        output = (self._logs / f"{spec.name}.out").open("ab")
        self._children[spec.name] = Child(spec, _spawn(spec, output), output)
        logger.info("started %s (pid %d)", spec.name, self._children[spec.name].process.pid)

    def exit_code(self, name: str) -> int | None:
        """None while it runs; 128 + n for signal n, as a shell says it."""
        code = self._children[name].process.poll()
        return code if code is None or code >= 0 else 128 - code

    def tend(self, name: str) -> bool:
        """Restart a dead process when its time has come; False if it may not be restarted any more."""
        child = self._children[name]
        if self.exit_code(name) is None:
            return True
        if child.restart_at_s is None:
            if child.num_restarts >= child.spec.max_restarts:
                return False
            # A worker that ended well was told to: the learner is about to end too, and then none is needed.
            clean = self.exit_code(name) == 0
            wait_s = _CLEAN_BACKOFF_S if clean else _BACKOFF_S[min(child.num_restarts, len(_BACKOFF_S) - 1)]
            log = logger.info if clean else logger.warning
            log("%s ended with code %s; restart in %.1f s", name, self.exit_code(name), wait_s)
            child.restart_at_s = time.monotonic() + wait_s
        if time.monotonic() >= child.restart_at_s:
            child.process = _spawn(child.spec, child.output)
            child.num_restarts += 1
            child.restart_at_s = None
            logger.info("restarted %s (pid %d, restart %d)", name, child.process.pid, child.num_restarts)
        return True

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process, if it still runs."""
        process = self._children[name].process
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def wait(self, names: list[str], timeout_s: float) -> bool:
        """True when all of these have ended within the timeout."""
        ends_s = time.monotonic() + timeout_s
        while any(self.exit_code(name) is None for name in names):
            if time.monotonic() > ends_s:
                return False
            time.sleep(0.02)
        return True

    def stop_all(self, grace_s: float) -> None:
        """SIGTERM, the grace, then SIGKILL to whole sessions."""
        names = list(self._children)
        for name in names:
            self.signal(name, signal.SIGTERM)
        if not self.wait(names, grace_s):
            logger.warning("killing what did not end within %.0f s", grace_s)
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)  # the rest of its session, if any
            child.process.wait()
            child.output.close()
        self._children.clear()

    def last_words(self, name: str) -> str:
        """The last line a process wrote to its output, or nothing."""
        path = self._logs / f"{name}.out"
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else ""


def _spawn(spec: ProcessSpec, output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec.command,
        env={**os.environ, **spec.environment},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509 - this process has one thread
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
