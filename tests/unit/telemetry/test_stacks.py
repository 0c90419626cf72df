"""Stacks on demand: every thread and every task of a process, in its log."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from support.patience import eventually

from areal_rloo.telemetry.stacks import all_stacks


def test_stacks_name_every_task_and_the_line_of_its_innermost_wait() -> None:
    async def innermost() -> None:
        await asyncio.sleep(1000)

    async def scenario() -> str:
        task = asyncio.create_task(innermost(), name="the heartbeat")
        await asyncio.sleep(0)
        found = await asyncio.to_thread(all_stacks)
        task.cancel()
        return found

    found = asyncio.run(scenario())
    assert "task the heartbeat:" in found and "in innermost" in found
    assert "thread MainThread:" in found


def test_tasks_that_wait_at_the_same_place_share_a_stack() -> None:
    async def waits(event: asyncio.Event) -> None:
        await event.wait()

    async def scenario() -> str:
        event = asyncio.Event()
        tasks = [asyncio.create_task(waits(event), name=f"sample {number}") for number in range(30)]
        await asyncio.sleep(0)
        found = await asyncio.to_thread(all_stacks)
        event.set()
        await asyncio.gather(*tasks)
        return found

    found = asyncio.run(scenario())
    assert found.count("in waits") == 1
    assert " and 25 more tasks:" in found


def test_a_signal_writes_the_stacks_and_the_process_goes_on(tmp_path: Path) -> None:
    program = """
        import asyncio, sys, threading, time
        from pathlib import Path
        from areal_rloo.telemetry.logs import setup_logs
        from areal_rloo.telemetry.stacks import show_on_signal

        show_on_signal()
        setup_logs("worker", level="info", file=Path(sys.argv[1]))

        def fails():
            raise KeyError("a bug in a thread")

        threading.Thread(target=fails, name="helper").start()

        async def beats():
            print("ready", flush=True)  # only now: a signal before the task exists finds no task
            await asyncio.sleep(1000)

        async def main():
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            await asyncio.create_task(beats(), name="the heartbeat")

        asyncio.run(main())
    """
    log = tmp_path / "worker.log"
    with log.open("ab") as output:
        command = [sys.executable, "-c", textwrap.dedent(program), str(log)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGUSR2)
        for words in (
            "task the heartbeat:",
            "Current thread",  # the stacks that come even if the process hangs
            "the thread helper ended with an error",
            "a bug in a thread",
            "ZeroDivisionError",  # of a callback
            "ERROR   worker",
        ):
            eventually(lambda words=words: words in log.read_text(), f"no {words} in the log")  # type: ignore[misc]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_stacks_name_the_tasks_from_before_a_freeze() -> None:
    """Learner and worker freeze what is loaded, and their first tasks with it."""

    async def scenario() -> tuple[str, int]:
        waiting = asyncio.create_task(asyncio.sleep(60), name="frozen one")
        await asyncio.sleep(0)
        gc.freeze()
        stacks, num_frozen = all_stacks(), gc.get_freeze_count()
        waiting.cancel()
        return stacks, num_frozen

    try:
        stacks, num_frozen = asyncio.run(scenario())
    finally:
        gc.unfreeze()
    assert "task frozen one" in stacks
    assert num_frozen > 0
