"""`python -m areal_rloo.rewards`: a worker process of a reward pool. Started by one, ends with it.

In, over the socket whose number is on the command line: what its scorer is made of, then jobs. Out: a reply to each.
Jobs run one after the other; with a number of seconds on the command line the scorer is async, and they run together on
an event loop, each for so long at most.

The scorer is the user's code, and may do anything: print, fork, start threads, hang. A fork of this process has no
socket, so it can neither answer nor keep the other end waiting once this one is dead.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from areal_rloo.config import import_function
from areal_rloo.errors import RewardError, described
from areal_rloo.rewards.process import Job, Reply

_PR_SET_PDEATHSIG = 1

Scorer = Callable[[Job], Any]
"""Gives a Worth, or where jobs run together an awaitable of one."""


def main() -> None:
    """Serve until the other end is gone."""
    _die_with_parent()
    socket = int(sys.argv[1])
    os.set_inheritable(socket, False)
    connection = Connection(socket)
    os.register_at_fork(after_in_child=connection.close)
    os.register_at_fork(after_in_child=_die_with_parent)
    try:
        scorer: Scorer = import_function("rewards", sys.argv[2])(connection.recv_bytes())
    except Exception as error:  # noqa: BLE001 - making a scorer runs the user's code
        connection.send_bytes(msgspec.msgpack.encode(Reply(reason="reward_error", detail=str(error))))
        return
    connection.send_bytes(msgspec.msgpack.encode(Reply()))  # ready
    if len(sys.argv) > 3:
        asyncio.run(_Together(connection, scorer, float(sys.argv[3])).serve())
    else:
        _serve_in_turn(connection, scorer)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while a reward hangs


def _serve_in_turn(connection: Connection, scorer: Scorer) -> None:
    this_process = os.getpid()
    while True:
        try:
            job = msgspec.msgpack.decode(connection.recv_bytes(), type=Job)
            reply = _replied(job, scorer)
            _end_forks(this_process)
            connection.send_bytes(msgspec.msgpack.encode(reply))
        except (EOFError, OSError):
            return


def _replied(job: Job, scorer: Scorer) -> Reply:
    try:
        return Reply(job_id=job.job_id, worth=scorer(job))
    except Exception as error:  # noqa: BLE001 - a reward is the user's code; whatever it raises drops its sample alone
        return _failure(job, error)


def _failure(job: Job, error: BaseException) -> Reply:
    if isinstance(error, RewardError):
        return Reply(job_id=job.job_id, reason=error.reason, detail=error.detail)  # type: ignore[arg-type]
    return Reply(job_id=job.job_id, reason="reward_error", detail=described(error))


def _end_forks(this_process: int) -> None:
    """A reward may fork, and its fork may come back from it as if it were the worker."""
    if os.getpid() != this_process:
        os._exit(0)


class _Together:
    """Jobs on an event loop. Whoever sends them sees to it that there are not too many."""

    def __init__(self, connection: Connection, scorer: Scorer, deadline_s: float) -> None:
        self._connection = connection
        self._scorer = scorer
        self._deadline_s = deadline_s
        self._running: set[asyncio.Task[None]] = set()
        self._this_process = os.getpid()

    async def serve(self) -> None:
        """Until the other end is gone, which the thread that reads finds out."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        await loop.create_future()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                encoded = self._connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # no matter what still runs
            loop.call_soon_threadsafe(self._begin, msgspec.msgpack.decode(encoded, type=Job))

    def _begin(self, job: Job) -> None:
        task = asyncio.get_running_loop().create_task(self._run(job))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, job: Job) -> None:
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                worth = await self._scorer(job)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - as above; it may also cancel itself
            if limit.expired():
                detail = f"no reward within {self._deadline_s:g} s"
                reply = Reply(job_id=job.job_id, reason="reward_timeout", detail=detail)
            else:
                reply = _failure(job, error)
        else:
            reply = Reply(job_id=job.job_id, worth=worth)
        _end_forks(self._this_process)
        self._connection.send_bytes(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
