"""The watchdog: reports a hang once, ends a process only for essential work, and survives stops of the process."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from areal_rloo.loop_thread import LoopThread
from areal_rloo.telemetry.watchdog import Watchdog

_LONGEST_S = 100  # on a busy machine


class Watched:
    """A watchdog on a test's clock, over one work with a deadline of 100 s."""

    def __init__(self, *, essential: bool) -> None:
        self.value: object = 0
        self.codes: list[int] = []
        self.now_s = 1000.0
        self.watchdog = Watchdog(exit_process=self.codes.append)
        self.watchdog.watch("the engine", lambda: self.value, 100.0, essential=essential)
        self.watchdog.look(self.now_s)

    def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            self.watchdog.look(self.now_s)


def test_a_hang_is_reported_once_with_stacks_then_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(essential=True)
    watched.pass_s(45)
    assert not caplog.records
    watched.pass_s(50)
    assert [record.message.partition("\n")[0] for record in caplog.records] == [
        "watchdog: the engine has not moved for 50 s (0); the process ends after 100 s",
        "watchdog: stacks:",
    ]
    assert watched.codes == [] and watched.watchdog.statistics().hangs == 1
    watched.pass_s(5)
    assert watched.codes == [1]


def test_other_work_is_only_reported_and_may_move_again(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(essential=False)
    watched.pass_s(500)
    assert watched.codes == [] and len(caplog.records) == 2
    watched.value = 1
    watched.pass_s(1)
    assert caplog.records[-1].message == "watchdog: the engine moves again"
    watched.pass_s(60)
    assert watched.watchdog.statistics().hangs == 2


@pytest.mark.parametrize("values", [range(1000), [None] * 1000], ids=["progress", "no work"])
def test_work_that_moves_and_no_work_are_no_hang(
    values: "range | list[None]", caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(essential=True)
    for watched.value in values:
        watched.pass_s(1)
    assert watched.codes == [] and not caplog.records


def test_a_stop_of_the_process_is_no_hang() -> None:
    watched = Watched(essential=True)
    for _ in range(20):
        watched.now_s += 3600  # SIGSTOP, a suspended machine, a debugger
        watched.pass_s(1)
    assert watched.codes == [] and watched.watchdog.statistics().hangs == 0


def test_a_blocked_loop_is_found_and_a_turning_loop_is_not() -> None:
    codes: list[int] = []
    loop, blocked = LoopThread("test"), threading.Event()
    watchdog = Watchdog(exit_process=codes.append)
    seen = watchdog.watch_loop("the event loop", loop.call(asyncio.get_running_loop), 50.0, look=lambda: "looked")
    for now_s in range(200):
        watchdog.look(float(now_s))
        loop.call(lambda: None)
    assert seen() == "looked" and watchdog.statistics().hangs == 0
    loop.soon(lambda: blocked.wait(_LONGEST_S))
    for now_s in range(200, 252):
        watchdog.look(float(now_s))
    blocked.set()
    assert codes and watchdog.statistics().hangs == 1
    loop.close()
    for now_s in range(252, 400):
        watchdog.look(float(now_s))
    assert watchdog.statistics().hangs == 1, "a closed loop has no work"


PROGRAM = """
    import asyncio, sys, time
    from pathlib import Path
    from areal_rloo.telemetry.logs import setup_logs
    from areal_rloo.telemetry.watchdog import Watchdog

    setup_logs("worker", level="info", file=Path(sys.argv[1]))

    def an_endless_call():
        print("ready", flush=True)
        while len(sys.argv) > 2:
            time.sleep(0.1)

    async def main():
        watchdog = Watchdog()
        watchdog.watch_loop("the event loop", asyncio.get_running_loop(), 6.0)
        with watchdog:
            an_endless_call()
            await asyncio.sleep(8)

    asyncio.run(main())
"""


def test_a_process_whose_loop_hangs_ends_with_the_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "log"), "hang"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: watchdog: the event loop has not moved for")
    assert "in an_endless_call" in (tmp_path / "log").read_text()


def test_a_stopped_process_goes_on_after_the_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "log")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    threading.Event().wait(8)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(_LONGEST_S) == 0
    process.stdout.close()
    assert not (tmp_path / "log").read_text()
