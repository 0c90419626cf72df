"""A coroutine beside the user's code: tasks that exit or ignore their cancellation, and threads that hang."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from support.patience import PATIENCE_S

from areal_rloo import waiting
from areal_rloo.waiting import fault_of, run_beside_user_code


@pytest.fixture
def sigint() -> Iterator[None]:
    """Restore the handler of SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_another_task_or_callback_leaves_the_loop_running(error: type[BaseException]) -> None:
    if error is KeyboardInterrupt:  # a worker handles SIGINT, so then the exception comes from the user's code
        signal.signal(signal.SIGINT, lambda *_: None)

    async def leave() -> None:
        raise error(0)

    def leave_at_once() -> None:
        raise error(0)

    async def main() -> str:
        asyncio.get_running_loop().call_soon(leave_at_once)
        task = asyncio.ensure_future(leave())
        await asyncio.sleep(0.05)
        with pytest.raises(error):
            await task
        return "done"

    assert run_beside_user_code(main()) == "done"


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("mine")])
def test_an_error_of_the_coroutine_itself_is_raised(error: BaseException) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(type(error)):
        run_beside_user_code(main())


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_interrupts_a_loop_that_does_not_handle_it() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    async def main() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        run_beside_user_code(main())


def test_tasks_are_cancelled_at_the_end_and_abandoned_if_they_ignore_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_LAST_S", 0.1)
    cancelled = []

    async def stays(obeys: bool) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(obeys)
                if obeys:
                    raise

    tasks = []

    async def main() -> None:
        tasks.extend([asyncio.ensure_future(stays(obeys)) for obeys in (True, False)])
        await asyncio.sleep(0.01)

    run_beside_user_code(main())
    assert sorted(cancelled) == [False, True]
    assert caplog.messages == []
    tasks[1]._log_destroy_pending = False  # type: ignore[attr-defined]


def test_calls_that_hang_in_threads_delay_no_other_call() -> None:
    goes_on = threading.Event()

    async def main() -> int:
        hanging = [asyncio.ensure_future(asyncio.to_thread(goes_on.wait)) for _ in range(100)]
        await asyncio.sleep(0)
        value = await asyncio.wait_for(asyncio.to_thread(int, "7"), PATIENCE_S)
        assert not any(task.done() for task in hanging)
        return value

    assert run_beside_user_code(main()) == 7
    goes_on.set()


def test_threads_that_never_end_do_not_keep_the_process() -> None:
    program = """
import threading
from areal_rloo import waiting
waiting._LAST_S = 0.1
threading.Thread(target=threading.Event().wait).start()
waiting.exit_despite_threads(4)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=PATIENCE_S).returncode == 4


def test_an_exit_despite_a_hung_call_ends_as_others_do() -> None:
    program = """
import atexit, threading, time
from areal_rloo import waiting
waiting.on_daemon_thread(threading.Event().wait, name="hangs")
threading.Thread(target=lambda: (time.sleep(0.5), print("a thread has ended"))).start()
atexit.register(print, "at exit")
waiting.exit_despite_calls(4)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout) == (4, b"a thread has ended\nat exit\n"), ended.stderr


def test_only_a_cancel_by_the_owner_is_an_expected_end() -> None:
    async def raises(error: BaseException) -> None:
        raise error

    async def fault(work: Coroutine[Any, Any, None], *, cancelled: bool = False) -> BaseException | None:
        task = asyncio.create_task(work, name="the heartbeat")
        if cancelled:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        return fault_of(task)

    assert asyncio.run(fault(asyncio.sleep(1000), cancelled=True)) is None
    assert str(asyncio.run(fault(raises(KeyError("a bug"))))) == "'a bug'"
    assert str(asyncio.run(fault(asyncio.sleep(0)))) == "the heartbeat ended without an error"
    assert str(asyncio.run(fault(raises(asyncio.CancelledError())))) == "the heartbeat was cancelled from inside"
