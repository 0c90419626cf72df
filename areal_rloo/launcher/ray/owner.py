"""The owner of a process inside Ray: an actor on a node of the cluster, and the owner as the launcher sees it.

A further actor keeps ports and shared memory on the learner's host.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from areal_rloo.errors import EXIT_WENT_BACK
from areal_rloo.files import remove_abandoned
from areal_rloo.launcher.guard import Guard
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.processes import LocalProcess, Tail
from areal_rloo.ports import ReservedPorts
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_POLL_EVERY_S = 0.2
_START_EVERY_S = 5.0  # after a failed start
_OF_RAY = ("RAY_", "PYTHONBREAKPOINT")
ANSWER_TIMEOUT_S = 5.0
_LOOK_EVERY_S = 0.5  # a look at a process costs the launcher 0.1 ms, and a run may have hundreds
_ASK_EVERY_S = 5.0
_MISSED_S = 30.0
_LOST = 137  # the code of a process whose owner is gone, as after SIGKILL


class OwnedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The process of an owner.

    Attributes:
        run_folder: on a file system of all hosts; `log` is the file for the process's output in the run folder.
        folder: working folder, if the host has it; None for Ray's own.
        variables: inherited from the launcher. They may contain secrets, so they must stay out
            of Ray's runtime environment, which the dashboard shows.
        guard_s: time for the process to drain if the owner is killed.
    """

    spec: ProcessSpec
    run_folder: Path
    log: Path
    folder: Path | None
    variables: Mapping[str, str]
    guard_s: float


class Owner:
    """Runs a process on a node of Ray. If the owner dies, Ray restarts the owner and calls `run` again."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None
        self._told_to_end = False
        self._lock = threading.Lock()  # Ray calls `signal` and `kill` on another thread

    @ray.method(max_task_retries=-1)  # at every restart of the owner
    def run(self, command: OwnedCommand) -> tuple[int, str]:
        """Run the process to the end; give the exit code, and a message if the process could not be started."""
        if not (command.run_folder / "config.yaml").is_file():
            return 1 if _is_restarted() else 2, (
                f"error: run.folder: {command.run_folder} is not there on {ray.util.get_node_ip_address()}; "
                "it must lie on a file system that all hosts share"
            )
        spec, tails = command.spec, [Tail(command.log), Tail(command.log.with_suffix(".log"))]
        while (process := self._start_unless_ending(command)) is None:
            if self._told_to_end:
                return 128 + signal.SIGTERM, ""
            time.sleep(_START_EVERY_S)
        _show(f"{spec.name}: {process.label}, logs in {command.log.parent}\n")
        while (code := process.exit_code()) is None:
            time.sleep(_POLL_EVERY_S)
            for tail in tails:
                _show(tail.read())
        _show(f"{spec.name} ended with code {code}\n")
        final = (0, EXIT_WENT_BACK) if _is_restarted() else (0, 2, EXIT_WENT_BACK)  # at first, 2 is a user's mistake
        if spec.max_restarts and code not in final and not self._told_to_end:
            os._exit(1)  # makes Ray restart the owner, as after the loss of a node
        return code, ""

    @ray.method(concurrency_group="control")
    def is_up(self) -> bool:
        """Answer: Ray has found a place for the owner."""
        return True

    @ray.method(concurrency_group="control")
    def signal(self, number: int) -> None:
        """Pass a signal on to the process; a signal before the start prevents the start."""
        with self._lock:
            self._told_to_end = True
            if self._process is not None:
                self._process.signal(number)

    @ray.method(concurrency_group="control")
    def kill(self) -> None:
        with self._lock:
            self._told_to_end = True
            if self._process is not None:
                self._process.kill()

    def _start_unless_ending(self, command: OwnedCommand) -> LocalProcess | None:
        """Start the process; None after a signal, or if the start of a restarted process fails for now."""
        with self._lock:
            if self._told_to_end:
                return None
            try:
                self._process = self._started(command)
            except OSError as error:
                if not _is_restarted():
                    raise
                _show(f"{command.spec.name} cannot be restarted: {error}\n")
            return self._process

    def _started(self, command: OwnedCommand) -> LocalProcess:
        spec = command.spec
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        environment = spec.environment_from({**environment, **command.variables})
        if spec.gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))  # Ray chose them
        folder = command.folder if command.folder is not None and command.folder.is_dir() else None
        with command.log.open("ab", buffering=0) as output:
            if _is_restarted():
                with contextlib.suppress(OSError):  # a full disk must not prevent the start
                    output.write(f"{spec.name} is started again by Ray\n".encode())
            process = LocalProcess((sys.executable, *spec.command[1:]), environment, output, folder=folder)
        self._guard = Guard(command.guard_s)
        self._guard.watch(process.pid)
        return process


def _is_restarted() -> bool:
    """Return whether Ray has restarted the owner that calls."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _show(text: str) -> None:
    """Print text for Ray's dashboard; ignore errors of the disk."""
    with contextlib.suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


class Keeper:
    """Holds resources on the learner's host."""

    def reserve(self, num: int) -> tuple[int, ...]:
        """Reserve ports as long as the keeper lives."""
        self._reserved = ReservedPorts(num)
        return self._reserved.ports

    def remove_abandoned(self) -> None:
        remove_abandoned()


class OwnedProcess:
    """A process in the cluster, seen through the owner."""

    def __init__(self, owner: Any, command: OwnedCommand, *, place_timeout_s: float) -> None:
        self._owner = owner
        self._asked: Any = owner.is_up.remote()
        self._ending = owner.run.remote(command)
        self._name = command.spec.name
        self._log = command.log
        self._place_timeout_s = place_timeout_s
        self._asked_s = time.monotonic()
        self._missing_since_s: float | None = self._asked_s  # time of the first unanswered question
        self._is_missed = False
        self._looked_s = 0.0
        self._code: int | None = None
        self.label = f"in Ray, on {command.spec.host}"

    def exit_code(self) -> int | None:
        """Give the exit code; None while the process runs, or while Ray restarts the owner."""
        now_s = time.monotonic()
        if self._code is None and now_s - self._looked_s > _LOOK_EVERY_S:
            self._looked_s = now_s
            if ray.wait([self._ending], timeout=0)[0]:
                self._end()
            else:
                self._look_for_owner(now_s)
        return self._code

    def signal(self, number: int) -> None:
        if self.exit_code() is None:
            self._owner.signal.remote(number)

    def kill(self) -> None:
        """Kill the process and the session, then the owner."""
        with contextlib.suppress(RayError):
            if self.exit_code() is not None:
                return
            ray.get(self._owner.kill.remote(), timeout=ANSWER_TIMEOUT_S)
        self._ended(_LOST, "")

    def _look_for_owner(self, now_s: float) -> None:
        """Ask the owner for a sign of life; give the process up if Ray finds no place for the owner in time."""
        if self._asked is None and now_s - self._asked_s > _ASK_EVERY_S:
            self._asked, self._asked_s = self._owner.is_up.remote(), now_s
            self._missing_since_s = self._missing_since_s or now_s
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            with contextlib.suppress(RayError):
                ray.get(self._asked)
                self._missing_since_s = None
            self._asked = None
        missed_s = 0.0 if self._missing_since_s is None else now_s - self._missing_since_s
        if missed_s > self._place_timeout_s:
            words = f"Ray has found no place for it within launcher.place_timeout_s={self._place_timeout_s:g}"
            self._ended(_LOST, words)
        elif missed_s > _MISSED_S and not self._is_missed:
            logger.warning("%s: nothing is heard of its owner; Ray may be looking for a place for it", self._name)
        self._is_missed = missed_s > _MISSED_S

    def _end(self) -> None:
        try:
            code, words = ray.get(self._ending)
        except RayError as error:  # the owner is dead, and has no restart left
            code, words = _LOST, str(error).strip().splitlines()[-1]
        self._ended(code, words)

    def _ended(self, code: int, words: str) -> None:
        self._code = code
        ray.kill(self._owner)  # frees the place
        if words:
            logger.error("%s: %s", self._name, words)
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                log.write(words + "\n")
