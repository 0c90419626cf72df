"""Checks of the tests' own helpers: zombies, a missing environment of a server, a blocked event loop."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.event_loops import BlockedLoops
from support.local_runs import Run
from support.patience import eventually
from support.processes import children_with, command_of, processes_with
from support.server_support import SERVERS, server_processes
from support.workers import fresh_address


@pytest.fixture
def zombie() -> Iterator[psutil.Process]:
    """A child of this process that has ended and was not waited for."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        process = psutil.Process(child.pid)
        eventually(lambda: process.status() == psutil.STATUS_ZOMBIE, "the child does not end")
        yield process


def test_a_zombie_has_no_command(zombie: psutil.Process) -> None:
    assert zombie in psutil.Process().children()
    with pytest.raises(psutil.ZombieProcess):
        zombie.cmdline()
    assert command_of(zombie) == []


def test_a_zombie_does_not_hide_other_processes(zombie: psutil.Process, tmp_path: Path) -> None:
    code = "print(flush=True); input()"
    words = ("a-word-of-this-test", f"--run-folder={tmp_path}")
    with subprocess.Popen([sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert children_with(words[0]) == processes_with(words) == [psutil.Process(child.pid)]
        child.kill()
    assert children_with(words[0]) == processes_with(words) == []


def test_runs_and_servers_are_listed_beside_a_zombie(zombie: psutil.Process, tmp_path: Path) -> None:
    run = Run.__new__(Run)
    run.folder = tmp_path
    assert run.children("areal_rloo.learner") == []
    assert server_processes(tmp_path / "server.log") == []


def test_the_socket_of_a_killed_test_is_in_a_folder_that_pytest_removes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assert fresh_address().path.is_relative_to(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", SERVERS)
def test_without_the_environment_of_a_server_a_test_is_skipped(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(f"AREAL_RLOO_{name.upper()}_PYTHON", str(tmp_path / "python"))
    with pytest.raises(pytest.skip.Exception, match=f"run make {name}"):
        SERVERS[name].python()


def test_waiting_for_a_processor_is_not_blocking(no_blocked_loop: BlockedLoops) -> None:
    async def work() -> None:
        started_s, cpu_s = time.monotonic(), time.thread_time()
        while time.thread_time() - cpu_s < 0.2:
            pass
        elapsed.append(time.monotonic() - started_s)

    elapsed: list[float] = []
    burn = [sys.executable, "-c", "while True: pass"]
    rivals = [subprocess.Popen(burn) for _ in range(3 * (os.cpu_count() or 1))]
    try:
        eventually(lambda: all(psutil.Process(rival.pid).cpu_times().user > 0 for rival in rivals), "they compete")
        asyncio.run(work())
    finally:
        for rival in rivals:
            rival.kill()
            rival.wait()
    assert max(seconds for seconds, _ in no_blocked_loop.callbacks) < elapsed[0]


def test_a_callback_that_blocks_its_loop_is_a_failure(no_blocked_loop: BlockedLoops) -> None:
    async def block() -> None:
        time.sleep(0.3)  # noqa: ASYNC251

    asyncio.run(block())
    no_blocked_loop.check()
    no_blocked_loop.limit_s = 0.2
    with pytest.raises(AssertionError, match="blocked an event loop"):
        no_blocked_loop.check()
    no_blocked_loop.callbacks.clear()
