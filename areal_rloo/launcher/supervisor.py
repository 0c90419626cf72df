"""Starts processes, restarts crashed ones, and leaves none behind. A `Starter` starts a process on a host.

`Supervisor` has every process by name.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from areal_rloo.errors import EXIT_WENT_BACK, PreflightError
from areal_rloo.launcher.long_logs import MOST_BYTES, shorten
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.telemetry.logs import STOPPED, get_logger
from areal_rloo.waiting import wait_until

logger = get_logger(__name__)

_BACKOFF_S = (0.0, 0.5, 2.0, 5.0)
RESTART_WINDOW_S = 24 * 3600.0  # `max_restarts` counts the restarts of this time
_LAST_WORDS_BYTES = 64 * 1024
_FULL_BYTES = 64 * 1024  # a disk with less room has lost output
_LOOK_EVERY_S = 0.02
_GRACE_S = 5.0
KILLED = 128 + signal.SIGKILL


def named(code: int | None) -> str:
    """Show an exit code, with the name of a signal or the reason: 137 (SIGKILL)."""
    names = {128 + number: number.name for number in signal.Signals}
    names[EXIT_WENT_BACK] = "the learner restarted from an older version"
    return f"{code} ({names[code]})" if code in names else str(code)


class Handle(Protocol):
    """A started process, on any host."""

    label: str

    def exit_code(self) -> int | None:
        """Give the exit code, 128 + n for signal n as in a shell; None while the process runs."""

    def signal(self, number: int) -> None:
        """Send a signal if the process still runs."""

    def kill(self) -> None:
        """Kill the process and all children at once."""


class Starter(Protocol):
    """Starts processes. `restarts`: True if the backend (Ray) restarts dead processes itself, `max_restarts` times."""

    restarts: bool

    def start(self, spec: ProcessSpec, log: Path) -> Handle:
        """Start a process and append the output to a file.

        Raises:
            OSError: the process cannot be started now, for example because no memory is free.
        """

    def close(self) -> None:
        """Release the resources of the processes."""


@dataclass(slots=True)
class _Child:
    """A process with a history of restarts."""

    spec: ProcessSpec
    handle: Handle
    started_s: float
    num_restarts: int = 0
    counted_s: list[float] = field(default_factory=list)  # times of the restarts that count
    num_failed_starts: int = 0  # since the process ended
    restart_at_s: float | None = None
    given_up_s: float | None = None  # when no restart was left


class Supervisor:
    """The processes of a run, by name."""

    def __init__(
        self,
        starter: Starter,
        logs: Path,
        *,
        goodbye_s: float,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own no process yet.

        `goodbye_s`: a process with exit code 0 is restarted or given up after this time; until then the run may end.
        `say` tells the user of an unexpected end.
        """
        self._starter = starter
        self._logs = logs
        self._goodbye_s = goodbye_s
        self._say = say
        self._clock = clock
        self._children: dict[str, _Child] = {}
        self._num_starts = Counter[str]()

    def start(self, spec: ProcessSpec) -> None:
        child = _Child(spec, self._started(spec), self._clock())
        self._num_starts[spec.name] += 1
        self._children[spec.name] = child
        logger.info("started %s (%s)", spec.name, child.handle.label)

    def exit_code(self, name: str) -> int | None:
        return self._children[name].handle.exit_code()

    def restarts(self) -> dict[str, int]:
        """Count the starts of each process after the first."""
        return {name: number - 1 for name, number in self._num_starts.items()}

    def is_refused(self, name: str) -> bool:
        """Return whether the first start of a process ended with a user's mistake; after a restart, 2 is a crash."""
        return self._children[name].num_restarts == 0 and self.exit_code(name) == 2

    def tend(self, name: str) -> bool:
        """Restart a dead process after a backoff; give False if no restart is left.

        A start that fails is repeated later and does not count as a restart.
        """
        child = self._children[name]
        code = self.exit_code(name)
        if code is None:
            return True
        if child.restart_at_s is None:
            if code != EXIT_WENT_BACK and not self._has_restart_left(child, code):
                if child.given_up_s is None:
                    child.given_up_s = self._clock()
                    if code != 0:
                        self._say_end(name, code, "no restart is left (launcher.max_restarts)")
                waits = code == 0 and self._clock() - child.given_up_s < self._goodbye_s
                if code == 0 and not waits and child.given_up_s > -math.inf:  # a goodbye, and the learner goes on
                    child.given_up_s = -math.inf
                    self._say_end(name, code, "no restart is left (launcher.max_restarts)")
                return waits
            wait_s = self._goodbye_s if code == 0 else backoff_s(len(child.counted_s)) * (code != EXIT_WENT_BACK)
            if code != 0:  # else the process drained: probably the learner ends, too, and nothing is restarted
                self._say_end(name, code, f"restart in {wait_s:.1f} s")
            child.restart_at_s = self._clock() + wait_s
        if self._clock() >= child.restart_at_s:
            self._restart(child, code)
        return True

    def _say_end(self, name: str, code: int, then: str) -> None:
        """Tell the user of an end: the exit code, the next action, the logs, and the last line of output."""
        place = f"{self._logs / name}.out and .log say more"
        self._say(f"{name} ended with code {named(code)}; {then} ({place}). {self.last_words(name)}".rstrip())

    def _has_restart_left(self, child: _Child, code: int) -> bool:
        now_s, most = self._clock(), child.spec.max_restarts
        if self._starter.restarts and code != 0:  # the backend has used up `max_restarts` since the start
            return most > 0 and now_s - child.started_s > RESTART_WINDOW_S
        child.counted_s = [s for s in child.counted_s if now_s - s < RESTART_WINDOW_S]
        return len(child.counted_s) < most

    def _restart(self, child: _Child, code: int) -> None:
        name, now_s = child.spec.name, self._clock()
        try:
            child.handle = self._started(child.spec)
        except OSError as error:
            child.num_failed_starts += 1
            child.restart_at_s = now_s + backoff_s(child.num_failed_starts)
            if child.num_failed_starts == 1:
                logger.error("%s cannot be restarted: %s; the launcher goes on trying", name, error)
            return
        child.num_restarts += 1
        self._num_starts[name] += 1
        if code != EXIT_WENT_BACK:  # the learner caused this exit, not the worker
            child.counted_s.append(now_s)
        child.started_s, child.restart_at_s, child.num_failed_starts, child.given_up_s = now_s, None, 0, None
        logger.info("restarted %s (%s, restart %d)", name, child.handle.label, child.num_restarts)

    def signal(self, name: str, number: int) -> None:
        self._children[name].handle.signal(number)

    def kill(self, name: str) -> None:
        self._children[name].handle.kill()

    def forget(self, name: str) -> None:
        """Forget an ended process, without a restart."""
        del self._children[name]

    def wait(self, names: Collection[str], timeout_s: float) -> bool:
        """Wait for the end of all these processes; give False after the timeout."""
        return wait_until(
            lambda: all(self.exit_code(name) is not None for name in names),
            timeout_s=timeout_s,
            look_every_s=_LOOK_EVERY_S,
        )

    def stop_all(self, grace_s: float) -> None:
        """Send SIGTERM to every process, wait for `grace_s`, then kill the rest."""
        for name in self._children:
            self.signal(name, signal.SIGTERM)
        if not self.wait(self._children, grace_s):
            logger.warning("killing the processes that did not end within %.0f s", grace_s)
        for child in self._children.values():
            child.handle.kill()
        self._children.clear()
        self._starter.close()

    def shorten_logs(self) -> None:
        """Keep the output of every process bounded, also of trackers and servers: code of others may print without end.

        Raises:
            OSError: the disk refuses.
        """
        for path in self._logs.glob("*.*"):
            if path.suffix in (".log", ".out"):  # `.log` of a server, which no other limit bounds
                shorten(path, MOST_BYTES)

    def last_words(self, name: str) -> str:
        """Give the last line of a process's output, or an empty string.

        If a full disk has lost the output, give the state of the disk, and the error from the log if the log has it.
        """
        try:
            lines = self._last_lines(f"{name}.out")
            free = shutil.disk_usage(self._logs).free
        except OSError:
            return ""
        if lines or free >= _FULL_BYTES:
            return lines[-1] if lines else ""
        error = self.last_logged(name, f"{STOPPED}: ")
        error = f"error: {error}. " if error else ""
        return f"{error}Its output is missing: {self._logs} has {free} bytes free; free some disk"

    def last_logged(self, name: str, words: str) -> str:
        """Give the rest of the last line with these words in a process's log, or an empty string."""
        with contextlib.suppress(OSError):
            found = [line.partition(words)[2] for line in self._last_lines(f"{name}.log")]
            return next((rest for rest in reversed(found) if rest), "")
        return ""

    def _last_lines(self, file_name: str) -> list[str]:
        with (self._logs / file_name).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
            return file.read().decode(errors="replace").strip().splitlines()

    def _started(self, spec: ProcessSpec) -> Handle:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self._starter.start(spec, self._logs / f"{spec.name}.out")


@contextlib.contextmanager
def first_start() -> Iterator[None]:
    """Start processes of which none runs; other starts are repeated after a failure.

    Raises:
        PreflightError: the system starts no process; says why and what to do.
    """
    try:
        yield
    except OSError as error:
        raise PreflightError(
            f"a process cannot be started: {error}; free memory or disk, or raise `ulimit -n` and `ulimit -u`"
        ) from error


def backoff_s(num_before: int) -> float:
    """Give the wait before the next of several attempts in a row."""
    return _BACKOFF_S[min(num_before, len(_BACKOFF_S) - 1)]
