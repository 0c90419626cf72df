"""A worker process that scores, seen from the process that started it; `__main__.py` is the other end.

    first message: the argument of the scorer's factory   ─►   ready, or why the scorer cannot be made
    a job                                                 ─►   a Reply

Messages are msgpack over a socket pair, each after its length; nothing is pickled. The process leads its own session,
so that `kill` also ends every process that a reward started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from areal_rloo.errors import ConfigError, RewardError
from areal_rloo.rewards.request import FailureReason, FinalAnswer, RewardRequest, Worth

_START_S = 120.0  # a scorer may import a large library
_STDERR = 2
_LENGTH = struct.Struct("!i")  # the format of `multiprocessing.connection`, which the other end uses
_Result = TypeVar("_Result", Worth, FinalAnswer)


class PartJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for one part of a completion's reward. The reply has the `job_id` too."""

    job_id: int
    request: RewardRequest
    part: str


class AnswerJob(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the final answer of a completion."""

    job_id: int
    request: RewardRequest


Job = PartJob | AnswerJob


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
    """This end of one worker process. Make and use it on one event loop."""

    def __init__(self, factory: str, argument: bytes, *, async_deadline_s: float | None = None) -> None:
        """Start the process. On Linux it ends with the thread that calls this.

        `factory` is the import path of a function that is called with `argument` in the process and returns the scorer.
        With `async_deadline_s` the scorer is async, jobs run concurrently, and the process gives each this many
        seconds. Without, jobs run one after the other, and the caller of `receive` keeps the deadline.
        """
        self._argument, self._killed = argument, False
        self._socket, theirs = socket.socketpair()
        self._disconnect: Callable[[], None] = self._socket.close
        command = [sys.executable, "-m", "areal_rloo.rewards", str(theirs.fileno()), factory]
        if async_deadline_s is not None:
            command.append(str(async_deadline_s))
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # output of a reward is a log
                start_new_session=True,
            )

    async def ready(self) -> None:
        """Wait until the scorer is made. Call this before `send` and `receive`.

        Raises:
            ConfigError: the scorer cannot be made.
        """
        self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._disconnect = self._writer.close
        self.send(self._argument)
        try:
            async with asyncio.timeout(_START_S):
                reply = await self.receive()
        except EOFError:
            code = await self.end()
            raise ConfigError(f"rewards: a worker process ended with code {code} before it was ready") from None
        except TimeoutError:
            reply = Reply(reason="reward_error", detail=f"rewards: a worker process was not ready after {_START_S:g} s")
        if reply.reason is not None:
            await self.end()
            raise ConfigError(reply.detail)

    def send(self, job: bytes) -> None:
        """Send an encoded job, without waiting; to a dead process, nothing is sent."""
        self._writer.write(_LENGTH.pack(len(job)) + job)

    async def receive(self) -> Reply:
        """Wait for the next reply. A process that sends garbage is killed.

        Raises:
            EOFError: the process is dead.
        """
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return msgspec.msgpack.decode(await self._reader.readexactly(length), type=Reply)
        except (OSError, ValueError, msgspec.MsgspecError) as error:  # the connection is broken, or has garbage
            self.kill()
            raise EOFError from error

    def died_idle(self) -> bool:
        """Return True if an idle process is dead. Asks the kernel: the event loop may not have read the end yet."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:  # closed by `end`
            return True

    def kill(self) -> None:
        """Kill the process and everything it started. `receive` then raises EOFError."""
        if not self._killed:  # not reaped yet, so no other session can have this number
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Kill the process, wait for the end, and return the exit code."""
        self.kill()
        self._disconnect()
        return await asyncio.to_thread(self._process.wait)
