"""A worker process that scores, seen from the process that started it; `__main__.py` is the other end.

                                                               begun
    first message: the argument of the scorer's factory   ─►   ready, or why the scorer cannot be made
    a job                                                 ─►   a Reply

Messages are msgpack over a socket pair, each after its length; nothing is pickled. The process has a keeper
(`areal_rloo/keeper.py`), so `kill` and the death of the rollout worker also end every process that a reward started,
and only a bounded part of the output of rewards gets into the log.
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
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import ConfigError, DecodeError, RewardError, StartError
from areal_rloo.keeper import kept, was_killed
from areal_rloo.rewards.request import FailureReason, FinalAnswer, RewardRequest, Worth

_KEEPER_S = 10.0  # for the keeper to kill everything; then the keeper hangs
_END_S = 20.0  # for the end of a killed process
_LOOK_S = 0.005
_STDERR = 2
_LENGTH = struct.Struct("!i")  # the format of `multiprocessing.connection`, which the other end uses
OUT_OF_MEMORY = 71  # exit code of a process after a MemoryError
MOST_REPLY_BYTES = 16 * 2**20  # rewards for a million tokens
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


def crash(code: int | None) -> Reply:
    """Return the reply for the job of a process that ended with this code."""
    why = ": out of memory (rollout.reward_memory_bytes)" if code == OUT_OF_MEMORY else ""
    more = "the output of the rollout worker (logs/rollout-*.out) may have a traceback"
    return Reply(reason="reward_crash", detail=f"its worker process ended with code {code}{why}; {more}")


class WorkerProcess:
    """This end of one worker process. Make and use it on one event loop."""

    def __init__(
        self,
        factory: str,
        argument: bytes,
        *,
        memory_bytes: int,
        async_deadline_s: float | None = None,
    ) -> None:
        """Start the process. On Linux the process ends with the thread that calls this function.

        `factory` is the import path of a function that is called with `argument` in the process and returns the scorer.
        The process may use `memory_bytes`. With `async_deadline_s` the scorer is async, jobs run concurrently, and the
        process gives each this many seconds. Without, jobs run one after the other, and the caller of `receive` keeps
        the deadline.

        Raises:
            OSError: the machine cannot start another process.
        """
        self._argument, self._killed = argument, False
        self._last_resort: asyncio.TimerHandle | None = None
        self._socket, theirs = socket.socketpair()
        self._disconnect: Callable[[], None] = self._socket.close
        command = [sys.executable, "-m", "areal_rloo.rewards", str(theirs.fileno()), factory, str(memory_bytes)]
        if async_deadline_s is not None:
            command.append(str(async_deadline_s))
        with theirs, contextlib.ExitStack() as failed:
            failed.callback(self._socket.close)
            self._process = subprocess.Popen(
                kept(command),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # output of a reward is a log
                start_new_session=True,
            )
            failed.pop_all()

    async def ready(self, within_s: float) -> None:
        """Wait until the scorer is made. Call this before `send` and `receive`. If this fails, the process is ended.

        Raises:
            ConfigError: the scorer cannot be made.
            StartError: the process was killed meanwhile, or the machine is too slow for it.
        """
        has_begun = False
        try:
            self._reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._disconnect = self._writer.close
            self.send(self._argument)
            async with asyncio.timeout(within_s):
                await self.receive()
                has_begun = True
                reply = await self.receive()
            if reply.reason is not None:
                raise ConfigError(reply.detail)
        except EOFError:
            code = await self.end()
            failure = ConfigError if has_begun and not was_killed(code) else StartError
            raise failure(f"rewards: a worker process ended with code {code} before it was ready") from None
        except TimeoutError:
            await self.end()
            raise StartError(f"rewards: a worker process was not ready after {within_s:g} s") from None
        except BaseException:
            await self.end()
            raise

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
            if length > MOST_REPLY_BYTES:
                raise ValueError(f"a reply of {length} bytes")
            return from_msgpack(await self._reader.readexactly(length), Reply)
        except (OSError, ValueError, DecodeError) as error:  # the connection is broken, or has garbage
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
        if not self._killed and self._process.returncode is None:
            self._killed = True
            self._signal_session(signal.SIGCONT)  # a reward may have stopped the keeper
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            self._last_resort = asyncio.get_running_loop().call_later(_KEEPER_S, self._signal_session, signal.SIGKILL)

    async def end(self) -> int | None:
        """Kill the process, wait for the end, and return the exit code; None if the kernel cannot end the process."""
        self.kill()
        self._disconnect()
        ends_s = time.monotonic() + _END_S
        while not self._has_ended() and time.monotonic() < ends_s:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(_LOOK_S)
        if self._last_resort is not None:
            self._last_resort.cancel()
        self._signal_session(signal.SIGKILL)  # if the keeper itself was killed, the session may have other processes
        return self._process.poll()

    def _has_ended(self) -> bool:
        """Return whether the process has ended. Does not reap: until then, no other session can have this number."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _signal_session(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
