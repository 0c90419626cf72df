"""Starts processes, watches them, starts again what may be, and leaves none behind. What starts one is a `Starter`."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal_rloo.errors import EXIT_WENT_BACK
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_BACKOFF_S = (0.0, 0.5, 2.0, 5.0)
_CLEAN_BACKOFF_S = 10.0
_LOOK_EVERY_S = 0.02


class Handle(Protocol):
    """A process that was started, wherever it is."""

    label: str

    def exit_code(self) -> int | None:
        """None while it runs; 128 + n for signal n, as a shell says it."""

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""

    def kill(self) -> None:
        """End it and all that it started, at once."""


class Starter(Protocol):
    """Starts processes. `restarts` says that one which dies is started again without us, `max_restarts` times."""

    restarts: bool

    def start(self, spec: ProcessSpec, log: Path) -> Handle:
        """Start a process whose output is appended to a file."""

    def close(self) -> None:
        """Give back what was held for the processes."""


@dataclass(slots=True)
class Child:
    """A process and its history."""

    spec: ProcessSpec
    handle: Handle
    num_restarts: int = 0
    restart_at_s: float | None = None
    given_up: bool = False


class Supervisor:
    """The children of one launcher. Standard output and error of each go to logs/<name>.out."""

    def __init__(self, starter: Starter, logs: Path) -> None:
        self._starter = starter
        self._logs = logs
        self._children: dict[str, Child] = {}

    def start(self, spec: ProcessSpec) -> None:
        """Start a process."""
        child = Child(spec, self._started(spec))
        self._children[spec.name] = child
        logger.info("started %s (%s)", spec.name, child.handle.label)

    def exit_code(self, name: str) -> int | None:
        """None while it runs; 128 + n for signal n, as a shell says it."""
        return self._children[name].handle.exit_code()

    def tend(self, name: str) -> bool:
        """Restart a dead process when its time has come; False if it may not be restarted any more."""
        child = self._children[name]
        code = self.exit_code(name)
        if code is None:
            return True
        if child.restart_at_s is None:
            too_often = child.num_restarts >= child.spec.max_restarts or (code != 0 and self._starter.restarts)
            if too_often and code != EXIT_WENT_BACK:
                if not child.given_up:
                    logger.error("%s ended with code %s, and too often to be started again", name, code)
                child.given_up = True
                return False
            wait_s = _wait_s(code, child.num_restarts)
            log = logger.info if code == 0 else logger.warning
            log("%s ended with code %s; restart in %.1f s", name, code, wait_s)
            child.restart_at_s = time.monotonic() + wait_s
        if time.monotonic() >= child.restart_at_s:
            child.handle = self._started(child.spec)
            child.num_restarts += code != EXIT_WENT_BACK  # which is the learner's failure, not the worker's
            child.restart_at_s = None
            logger.info("restarted %s (%s, restart %d)", name, child.handle.label, child.num_restarts)
        return True

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process, if it still runs."""
        self._children[name].handle.signal(number)

    def kill(self, name: str) -> None:
        """End a process at once."""
        self._children[name].handle.kill()

    def wait(self, names: Iterable[str], timeout_s: float) -> bool:
        """True when all of these have ended within the timeout."""
        ends_s = time.monotonic() + timeout_s
        names = list(names)
        while any(self.exit_code(name) is None for name in names):
            if time.monotonic() > ends_s:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def stop_all(self, grace_s: float) -> None:
        """SIGTERM, the grace, then the end."""
        for name in self._children:
            self.signal(name, signal.SIGTERM)
        if not self.wait(self._children, grace_s):
            logger.warning("killing what did not end within %.0f s", grace_s)
        for child in self._children.values():
            child.handle.kill()
        self._children.clear()
        self._starter.close()

    def last_words(self, name: str) -> str:
        """The last line a process wrote to its output, or nothing."""
        path = self._logs / f"{name}.out"
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else ""

    def _started(self, spec: ProcessSpec) -> Handle:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._starter.start(spec, self._logs / f"{spec.name}.out")


def _wait_s(code: int, num_restarts: int) -> float:
    """How long to wait before a restart."""
    if code == 0:  # it was told to end well: the learner is about to end too, and then none is needed
        return _CLEAN_BACKOFF_S
    return 0.0 if code == EXIT_WENT_BACK else _BACKOFF_S[min(num_restarts, len(_BACKOFF_S) - 1)]
