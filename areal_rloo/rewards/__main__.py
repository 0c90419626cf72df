"""`python -m areal_rloo.rewards`: a worker process of a reward pool. The pool starts it and ends it.

Input, over the socket whose file descriptor is on the command line: the factory's argument, then jobs. Output: a reply
to each job. Jobs run one after the other. If the command line also has a number of seconds, the scorer is async: jobs
run concurrently on an event loop, and each has this deadline.

The limit of memory on the command line holds for this process, and for each process started by a reward. The limit
counts writable memory (RLIMIT_DATA), not reserved addresses (RLIMIT_AS): torch and CUDA reserve far more than they use.
After a MemoryError something may still hold the memory, so the process ends with `OUT_OF_MEMORY`.

The scorer is the user's code. It may print, fork, start threads, or hang. A forked child closes the socket, so it can
neither reply nor keep the pool waiting after this process is dead.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, cast, get_args

import msgspec

from areal_rloo.config import import_function
from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import RewardError, described, is_shortage, raised, shortened
from areal_rloo.keeper import TRY_AGAIN
from areal_rloo.parent_death import signal_on_parent_death
from areal_rloo.rewards.process import MOST_REPLY_BYTES, OUT_OF_MEMORY, Job, Reply
from areal_rloo.rewards.request import FailureReason
from areal_rloo.standard_streams import open_missing_streams
from areal_rloo.telemetry.stacks import show_on_signal
from areal_rloo.waiting import run_beside_user_code

Scorer = Callable[[Job], Any]
"""Returns the result of a job; an async scorer returns an awaitable."""

_THIS_PROCESS = os.getpid()


def main() -> None:
    """Serve until the pool closes the socket."""
    open_missing_streams()
    show_on_signal()
    faulthandler.enable()  # a crash in the user's code gives a traceback, too
    signal_on_parent_death(signal.SIGKILL)  # works also while a reward hangs
    signal.signal(signal.SIGINT, lambda *_: None)  # the pool ends this process, not Ctrl-C
    socket, memory_bytes = int(sys.argv[1]), int(sys.argv[3])
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    if most == resource.RLIM_INFINITY or memory_bytes < most:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    os.set_inheritable(socket, False)
    connection = Connection(socket)
    os.register_at_fork(after_in_child=connection.close)
    os.register_at_fork(after_in_child=lambda: signal_on_parent_death(signal.SIGKILL))
    try:
        _send(connection, Reply())  # begun: an end before this says nothing about the user's code
        scorer: Scorer = import_function("rewards", sys.argv[2])(connection.recv_bytes())
    except BaseException as error:  # noqa: BLE001 - making a scorer runs the user's code, which may call `sys.exit`
        if is_shortage(error):
            traceback.print_exception(error)
            os._exit(TRY_AGAIN)
        _send(connection, Reply(reason="reward_error", detail=raised(error)))
        return
    _send(connection, Reply())  # ready
    if len(sys.argv) > 4:
        run_beside_user_code(_serve_together(connection, scorer, float(sys.argv[4])))
    else:
        _serve_in_turn(connection, scorer)


def _send(connection: Connection, reply: Reply) -> None:
    if os.getpid() != _THIS_PROCESS:  # a child that a reward forked, and that returned from the reward as well
        os._exit(0)
    try:
        encoded = msgspec.msgpack.encode(reply)
        if len(encoded) > MOST_REPLY_BYTES:
            raise ValueError(f"expected at most {MOST_REPLY_BYTES} bytes, got {len(encoded)}")
    except Exception as error:  # noqa: BLE001 - the user's code made the result
        detail = f"the reward cannot be sent: {described(error)}"
        encoded = msgspec.msgpack.encode(Reply(job_id=reply.job_id, reason="reward_error", detail=detail))
    connection.send_bytes(encoded)


def _serve_in_turn(connection: Connection, scorer: Scorer) -> None:
    while True:
        try:
            job: Job = from_msgpack(connection.recv_bytes(), Job)
            try:
                reply = Reply(job_id=job.job_id, result=scorer(job))
            except BaseException as error:  # noqa: BLE001 - the user's code; also `sys.exit` drops only its own sample
                reply = _failure(job.job_id, error)
            _send(connection, reply)
        except (EOFError, OSError):
            return


def _failure(job_id: int, error: BaseException) -> Reply:
    if isinstance(error, MemoryError):
        traceback.print_exception(error)
        os._exit(OUT_OF_MEMORY)
    if isinstance(error, RewardError) and error.reason in get_args(FailureReason):
        reason = cast("FailureReason", error.reason)
        return Reply(job_id=job_id, reason=reason, detail=shortened(str(error.detail)))
    return Reply(job_id=job_id, reason="reward_error", detail=described(error))


async def _serve_together(connection: Connection, scorer: Scorer, deadline_s: float) -> None:
    """Run jobs until the reading thread ends the process. The pool limits how many run at a time."""
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def read() -> None:
        try:
            while True:
                job: Job = from_msgpack(connection.recv_bytes(), Job)
                loop.call_soon_threadsafe(begin, job)
        except (EOFError, OSError):
            os._exit(0)  # also while jobs run
        finally:
            os._exit(1)  # without this thread, every later job would miss its deadline

    def begin(job: Job) -> None:
        task = loop.create_task(run(job), name=f"reward {job.job_id}")
        running.add(task)
        task.add_done_callback(running.discard)

    async def run(job: Job) -> None:
        try:
            async with asyncio.timeout(deadline_s) as limit:
                reply = Reply(job_id=job.job_id, result=await scorer(job))
        except BaseException as error:  # noqa: BLE001 - the user's code may cancel itself, or call `sys.exit`
            late = RewardError("reward_timeout", f"no reward within {deadline_s:g} s")
            reply = _failure(job.job_id, late if limit.expired() else error)
        _send(connection, reply)

    threading.Thread(target=read, name="jobs", daemon=True).start()
    await loop.create_future()


if __name__ == "__main__":
    main()
