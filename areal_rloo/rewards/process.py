"""A worker process that scores, as the process that started it sees it; `__main__.py` is the other end.

    the first message: what its scorer is made of     ─►   ready, or why it cannot be made
    a Job                                             ─►   a Reply

Messages are msgpack over a pair of sockets; nothing is pickled. The process has a session of its own, so that what it
starts ends with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe

import msgspec

from areal_rloo.errors import ConfigError, RewardError
from areal_rloo.rewards.request import FailureReason, RewardRequest, Worth

_START_S = 120.0  # a scorer may import a large library
_STDERR = 2


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a completion's reward, to a worker process.

    Attributes:
        job_id: comes back with the reply.
        request: the completion.
        part: label of the part; None for the final answer alone.
    """

    job_id: int
    request: RewardRequest
    part: str | None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """From a worker process: what a completion is worth, or the reason why there is nothing."""

    job_id: int = 0
    worth: Worth | None = None
    reason: FailureReason | None = None
    detail: str = ""

    def take(self) -> Worth:
        """The worth.

        Raises:
            RewardError: there is none.
        """
        if self.reason is not None:
            raise RewardError(self.reason, self.detail)
        assert self.worth is not None, "a reply has a worth or a reason"
        return self.worth


class WorkerProcess:
    """This side of one worker process."""

    def __init__(self, factory: str, argument: bytes, *, at_once_for_s: float | None = None) -> None:
        """Start it. It ends with the thread that calls this, where the system can see to that.

        Args:
            factory: import path of a function that is called with `argument` in the process and gives its scorer.
            argument: what the factory needs to know.
            at_once_for_s: the scorer is async: jobs run together, each for so long at most. None: one after the other,
                and whoever waits keeps the time.
        """
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "areal_rloo.rewards", str(theirs.fileno()), factory]
        if at_once_for_s is not None:
            command.append(str(at_once_for_s))
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,  # what a reward prints is a log
            start_new_session=True,
        )
        theirs.close()
        with contextlib.suppress(OSError):  # dead already; `wait_until_ready` says so
            self._connection.send_bytes(argument)

    def wait_until_ready(self) -> None:
        """Its scorer is made.

        Raises:
            ConfigError: it cannot be.
        """
        try:
            reply = self.receive(_START_S)
        except EOFError:
            raise ConfigError(f"rewards: a worker process ended with code {self.end()} before it was ready") from None
        if reply is None or reply.reason is not None:
            self.end()
            raise ConfigError(
                reply.detail if reply else f"rewards: a worker process was not ready after {_START_S:g} s"
            )

    def send(self, job: bytes) -> None:
        """
        Raises:
            OSError: it is dead.
        """
        self._connection.send_bytes(job)

    def receive(self, within_s: float | None) -> Reply | None:
        """Its next reply; None where there is none in time.

        Raises:
            EOFError: it is dead.
        """
        try:
            if not self._connection.poll(within_s):
                return None
            return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Reply)
        except OSError as error:
            raise EOFError from error

    def died_idle(self) -> bool:
        """Of a process that has nothing to do: True where it is dead, since it has nothing to say either."""
        return self._connection.poll(0)

    def kill(self) -> None:
        """End it and whatever it started; from any thread. The thread that receives is told by an EOFError."""
        if self._process.returncode is None:  # not reaped, so the number of its session is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """`kill`, and wait until it is gone; gives its exit code."""
        self.kill()
        return self._process.wait()
