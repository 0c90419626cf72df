"""Turns of the learner and of the engines on the same devices (`rollout.share_devices=in_turns`).

    learner: wants the devices ─► waits until no engine computes ─► steps, frees memory ─► gives the devices back
    engine:  computes ─► sees the wish between two decode steps ─► frees memory, gives the devices ─► waits ─► computes

All are processes of one host, so the kernel decides: there are files with locks. The learner locks `wanted` from
the wish to the end of the step. It locks `turn` alone; the engines share this lock, because all ranks of the learner
step at the same time. The kernel frees the locks of a dead process. These locks (POSIX) belong to a process, and not to
the open file: a child that the user's code forked does not keep the turn of a dead worker.

The learner has the turn only during a step, and an engine answers every request without computation while it waits: so
neither waits for the other in a circle. An engine that does not give the turn in time (it hangs, or has a SIGSTOP)
costs the learner a limited time; then the step computes beside the engine. Some work of an engine takes longer, and has
time limits of its own: a server starts, takes weights, falls asleep. A step beside such work could have too little
memory. So the engine says again and again that it is busy (the time of the file `busy`), and the learner's patience
counts from the last word, within a limit for the whole wait. A stopped process says nothing. A wait of an engine ends
with the step, or with the learner's process.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated, ClassVar

import msgspec

from areal_rloo.errors import PreflightError
from areal_rloo.files import SharedFolder
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.waiting import wait_until

logger = get_logger(__name__)

LOOK_EVERY_S = 0.005  # an engine looks for the learner's wish, or for the end of the step
_POLL_S = 0.001
PATIENCE_S = 60.0  # far more than a decode step, and a prefill between two steps
_SHORT_PATIENCE_S = 5.0  # after an engine kept the turn: until the learner gets a turn again
_BUSY_EVERY_S = 0.25  # far less than the patience
_SAY_EVERY_S = 30.0
_FROZEN_S = 0.5  # a later look than this: this process stood still
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of Linux: type, whence, start, length, process


class TurnStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the start of the learner."""

    metrics_prefix: ClassVar[str] = "turn_"

    taken: Annotated[int, Metric("Turns the learner took on the devices", kind="counter")]
    missed: Annotated[
        int, Metric("Steps beside an engine that did not give the devices in time", kind="counter", healthy=(0, 0))
    ]
    wait_s: Annotated[float, Metric("Time the learner waited for its turn", "s", "counter")]


class LearnerTurn:
    """The learner's side: a context manager around a train step, used by the training thread alone."""

    def __init__(
        self,
        run_folder: Path,
        *,
        free: Callable[[], None],
        tell: Callable[[bool], None] = lambda computes: None,
        patience_s: float = PATIENCE_S,
        busy_s: float = math.inf,
        drain_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Open the files of the run, on this host.

        Args:
            free: called at the end of a turn, to free memory of the devices.
            tell: called with True when the engines begin to wait, and with False afterwards.
            patience_s: how long to wait for an engine, from its last word that it is busy.
            busy_s: limit for the whole wait.
            drain_s: limit for the whole wait now; the end of a run may not take as long.

        Raises:
            PreflightError: the files cannot be made.
        """
        self._files = _Files(run_folder)
        self._free, self._tell, self._drain_s = free, tell, drain_s
        self._patience_s, self._busy_s = patience_s, busy_s
        self._is_patient = True  # no engine was late the last time
        self._num_taken = self._num_missed = 0
        self._waited_s = 0.0

    def __enter__(self) -> None:
        entered_s = began_s = since_s = said_s = looked_s = time.monotonic()
        word = self._files.last_busy()
        self._tell(True)
        patience_s = self._patience_s if self._is_patient else min(_SHORT_PATIENCE_S, self._patience_s)

        def has_turn() -> bool:
            self._files.wanted.lock(fcntl.LOCK_EX)  # again and again: the learner before may not be quite dead
            return self._files.turn.lock(fcntl.LOCK_EX)

        def is_late() -> bool:
            nonlocal began_s, since_s, said_s, looked_s, word
            now_s = time.monotonic()
            # Frozen with the engine, as in a paused container. A part counts, so a process with few cycles has limits.
            if (frozen_s := now_s - looked_s - _FROZEN_S) > 0:
                began_s, since_s = began_s + frozen_s, since_s + frozen_s
            looked_s = now_s
            if (newest := self._files.last_busy()) != word:
                word, since_s = newest, now_s
            if now_s - said_s >= _SAY_EVERY_S:
                said_s = now_s
                busy = "is busy (its server starts, takes weights or falls asleep)" if since_s > began_s else "computes"
                logger.info("the step has waited %.0f s for an engine that %s", now_s - began_s, busy)
            return now_s - since_s > patience_s or now_s - began_s > min(self._busy_s, self._drain_s())

        self._is_patient = wait_until(has_turn, timeout_s=math.inf, look_every_s=_POLL_S, stops=is_late)
        waited_s = time.monotonic() - entered_s
        self._waited_s += waited_s
        self._num_taken += self._is_patient
        self._num_missed += not self._is_patient
        if not self._is_patient:
            logger.error(
                "an engine has not given the device for %.0f s (rollout.share_devices=in_turns): the step computes "
                "beside the engine; see the logs of the workers",
                waited_s,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if error is None:  # after an error, the learner ends
            self._free()
            self._tell(False)
        self._files.turn.unlock()
        self._files.wanted.unlock()

    def statistics(self) -> TurnStatistics:
        return TurnStatistics(taken=self._num_taken, missed=self._num_missed, wait_s=self._waited_s)

    def close(self) -> None:
        self._files.close()


class EngineTurn:
    """An engine's side, used by the engine's thread alone. The engine has no turn at first."""

    def __init__(self, run_folder: Path) -> None:
        """Open the files of the run, on this host.

        Raises:
            PreflightError: the files cannot be made.
        """
        self.held = False
        self.num_given = 0
        self.waited_s = 0.0  # with requests, for the end of a step
        self._files = _Files(run_folder)
        self._looked_s = self._said_s = self._was_busy_s = 0.0
        self._waits_since_s: float | None = None
        self._counts_since_s: float | None = None

    def is_wanted(self) -> bool:
        """Return True if the learner wants the devices. Looks at most every LOOK_EVERY_S; False in between."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return False
        self._looked_s = now_s
        return self._files.wanted.is_locked()

    def take(self, *, has_requests: bool = True) -> bool:
        """Take the turn if no learner wants the devices; return at once. Only a wait with requests is counted."""
        now_s = time.monotonic()
        if not self._files.wanted.is_locked() and self._files.turn.lock(fcntl.LOCK_SH):
            self.held = True
            if self._counts_since_s is not None:
                self.waited_s += now_s - self._counts_since_s
            self._waits_since_s = self._counts_since_s = None
            return True
        if self._waits_since_s is None:
            self._waits_since_s = self._said_s = now_s
        if not has_requests:
            self._counts_since_s = None
        elif self._counts_since_s is None:
            self._counts_since_s = now_s
        if now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            logger.info("the engine has waited %.0f s for the end of the learner's step", now_s - self._waits_since_s)
        return False

    def give(self) -> None:
        """Give the turn to the learner; the engine has freed its memory."""
        self.held = False
        self.num_given += 1
        self._files.turn.unlock()

    def says_busy(self) -> None:
        """Tell a waiting learner that this engine does work with a time limit, before it can give the turn.

        To be called again and again meanwhile, from the thread that does the work: so a process that hangs says
        nothing.
        """
        now_s = time.monotonic()
        if now_s - self._was_busy_s >= _BUSY_EVERY_S:
            self._was_busy_s = now_s
            self._files.now_busy()

    def close(self) -> None:
        self.held = False
        self._files.close()


class _Lock:
    """A lock of this process on a file; see fcntl(2), F_SETLK."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def lock(self, kind: int) -> bool:
        """Take the lock, alone (LOCK_EX) or together with others (LOCK_SH); return False if another process has it."""
        try:
            fcntl.lockf(self._descriptor, kind | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def is_locked(self) -> bool:
        """Return True if another process has the lock alone. A look locks nothing, wherever the process is stopped."""
        asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)  # could this process share the lock?
        answer, *_ = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, asked))
        return bool(answer != fcntl.F_UNLCK)


class _Files:
    """The files, in a folder of the host that all processes of the run name in the same way."""

    def __init__(self, run_folder: Path) -> None:
        name = hashlib.sha256(os.fsencode(run_folder)).hexdigest()[:16]
        self._descriptors: list[int] = []
        self._folder: SharedFolder | None = None
        try:
            self._folder = folder = SharedFolder(f"turns-{name}")
            self.turn, self.wanted = (_Lock(self._open(folder, name)) for name in ("turn", "wanted"))
            self._busy = self._open(folder, "busy")
        except OSError as error:
            self.close()
            raise PreflightError(
                f"rollout.share_devices: in_turns needs a folder in memory: {error}; free memory there if it is full, "
                "remove the folder if another user made it, or set rollout.share_devices=auto"
            ) from error

    def now_busy(self) -> None:
        os.utime(self._busy)

    def last_busy(self) -> int:
        """When an engine of the run was busy, in nanoseconds: only to be compared with an earlier answer."""
        return os.fstat(self._busy).st_mtime_ns

    def _open(self, folder: SharedFolder, name: str) -> int:
        self._descriptors.append(folder.open(name))
        return self._descriptors[-1]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())
        if self._folder is not None:
            self._folder.close()
