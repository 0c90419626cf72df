"""A worker process that scores, seen from the process that started it; `__main__.py` is the other end.

    first message: the argument of the scorer's factory   ─►   ready, or why the scorer cannot be made
    a job                                                 ─►   a Reply

Messages are msgpack over a socket pair; nothing is pickled. The process leads its own session, so that `kill` also ends
every process that a reward started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from typing import TypeVar

import msgspec

from areal_rloo.errors import ConfigError, RewardError
from areal_rloo.rewards.request import FailureReason, FinalAnswer, RewardRequest, Worth

_START_S = 120.0  # a scorer may import a large library
_STDERR = 2
_Result = TypeVar("_Result", Worth, FinalAnswer)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for one part of a completion's reward; `part` None: for the final answer. The reply has the `job_id` too."""

    job_id: int = 0
    request: RewardRequest
    part: str | None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Answers a job: the result, or the reason why there is none."""

    job_id: int = 0
    result: Worth | FinalAnswer | None = None
    reason: FailureReason | None = None
    detail: str = ""

    def value(self, kind: type[_Result]) -> _Result:
        """Return the result: a `Worth` for a part, else a `FinalAnswer`.

        Raises:
            RewardError: there is none.
        """
        if self.reason is not None:
            raise RewardError(self.reason, self.detail)
        assert isinstance(self.result, kind), "a reply has the result of its job, or a reason"
        return self.result


class WorkerProcess:
    """This end of one worker process."""

    def __init__(self, factory: str, argument: bytes, *, async_deadline_s: float | None = None) -> None:
        """Start the process. On Linux it ends with the thread that calls this.

        `factory` is the import path of a function that is called with `argument` in the process and returns the scorer.
        With `async_deadline_s` the scorer is async, jobs run concurrently, and the process gives each this many
        seconds. Without, jobs run one after the other, and the caller of `receive` keeps the deadline.
        """
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "areal_rloo.rewards", str(theirs.fileno()), factory]
        if async_deadline_s is not None:
            command.append(str(async_deadline_s))
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # output of a reward is a log
            start_new_session=True,
        )
        theirs.close()
        with contextlib.suppress(OSError):  # already dead; `wait_until_ready` reports that
            self._connection.send_bytes(argument)

    def wait_until_ready(self) -> None:
        """Wait until the scorer is made.

        Raises:
            ConfigError: the scorer cannot be made.
        """
        try:
            reply = self.receive(_START_S)
        except EOFError:
            raise ConfigError(f"rewards: a worker process ended with code {self.end()} before it was ready") from None
        if reply is None or reply.reason is not None:
            self.end()
            late = f"rewards: a worker process was not ready after {_START_S:g} s"
            raise ConfigError(reply.detail if reply else late)

    def send(self, job: bytes) -> None:
        """Send an encoded job.

        Raises:
            OSError: the process is dead.
        """
        self._connection.send_bytes(job)

    def receive(self, within_s: float | None) -> Reply | None:
        """Wait for the next reply; None if the time runs out first.

        Raises:
            EOFError: the process is dead.
        """
        try:
            if not self._connection.poll(within_s):
                return None
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Reply)
        except OSError as error:
            raise EOFError from error

    def died_idle(self) -> bool:
        """Return True if an idle process is dead: an idle process sends nothing, so any readable byte is its end."""
        return self._connection.poll(0)

    def kill(self) -> None:
        """Kill the process and everything it started; callable on any thread. `receive` then raises EOFError."""
        if self._process.returncode is None:  # not reaped yet, so no other session can have this number
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the process, wait for the end, and return the exit code."""
        self.kill()
        return self._process.wait()
