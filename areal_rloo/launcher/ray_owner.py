"""What runs inside Ray: the owner of a process, and a keeper of what the run has on the learner's host beside them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import ray

from areal_rloo.errors import EXIT_WENT_BACK
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.processes import LocalProcess
from areal_rloo.launcher.tail import Tail
from areal_rloo.ports import ReservedPorts

_POLL_EVERY_S = 0.2
_OF_RAY = ("RAY_", "PYTHONBREAKPOINT")


class OwnedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner is to run.

    Attributes:
        spec: of the plan.
        run_folder: on a file system that all hosts share.
        log: what the process prints; in the run folder.
        folder: to be run in, where the host has it; None for Ray's own.
        variables: of the launcher, that its processes have too. Secrets may be among them, so they are no part of
            Ray's runtime environment, which its dashboard shows.
    """

    spec: ProcessSpec
    run_folder: Path
    log: Path
    folder: Path | None
    variables: Mapping[str, str]


class Owner:
    """Runs one process where Ray put it. Ray makes it anew after it ended by itself, and calls `run` again."""

    def __init__(self) -> None:
        self._process: LocalProcess | None = None
        self._told_to_end = False
        self._lock = threading.Lock()  # `signal` and `kill` come on a thread of their own

    @ray.method(max_task_retries=-1)  # as often as Ray makes it anew
    def run(self, command: OwnedCommand) -> tuple[int, str]:
        """The process, from its start to its end; gives its exit code, and words where it could not be started."""
        if not (command.run_folder / "config.yaml").is_file():
            return 2, (
                f"error: run.folder: {command.run_folder} is not there on {ray.util.get_node_ip_address()}; "
                "it must lie on a file system that all hosts share"
            )
        spec, tails = command.spec, [Tail(command.log), Tail(command.log.with_suffix(".log"))]
        with self._lock:
            if self._told_to_end:
                return 128 + signal.SIGTERM, ""
            process = self._process = self._started(command)
        _show(f"{spec.name}: {process.label}, logs in {command.log.parent}\n")
        while (code := process.exit_code()) is None:
            time.sleep(_POLL_EVERY_S)
            for tail in tails:
                _show(tail.read())
        _show(f"{spec.name} ended with code {code}\n")
        if spec.max_restarts and code not in (0, 2, EXIT_WENT_BACK) and not self._told_to_end:
            os._exit(1)  # Ray's own way of starting again, as if the node had gone
        return code, ""

    @ray.method(concurrency_group="control")
    def is_up(self) -> bool:
        """Answered once Ray has found a place for it."""
        return True

    @ray.method(concurrency_group="control")
    def signal(self, number: int) -> None:
        """Pass a signal on; before there is a process, it means that there is to be none."""
        with self._lock:
            self._told_to_end = True
            if self._process is not None:
                self._process.signal(number)

    @ray.method(concurrency_group="control")
    def kill(self) -> None:
        """End the process and all of its session."""
        with self._lock:
            self._told_to_end = True
            if self._process is not None:
                self._process.kill()

    def _started(self, command: OwnedCommand) -> LocalProcess:
        spec = command.spec
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_RAY)}
        environment |= {**command.variables, **spec.environment}
        if spec.gpu_ids:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))  # those that Ray chose
        folder = command.folder if command.folder is not None and command.folder.is_dir() else None
        with command.log.open("ab", buffering=0) as output:
            if ray.get_runtime_context().was_current_actor_reconstructed:
                with contextlib.suppress(OSError):  # a full disk, which is no reason not to start
                    output.write(f"{spec.name} is started again by Ray\n".encode())
            return LocalProcess((sys.executable, *spec.command[1:]), environment, output, folder=folder)


def _show(text: str) -> None:
    """In Ray's dashboard, which shows what we print; a disk that fails meanwhile is not the process's end."""
    with contextlib.suppress(OSError):
        sys.stdout.write(text)
        sys.stdout.flush()


class Keeper:
    """Sits on the learner's host."""

    def reserve(self, num: int) -> tuple[int, ...]:
        """Ports, for as long as this lives."""
        self._reserved = ReservedPorts(num)
        return self._reserved.ports

    def remove(self, folder: Path) -> None:
        """A folder that is of no use any more."""
        shutil.rmtree(folder, ignore_errors=True)
