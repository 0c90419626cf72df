"""A supervisor with real processes: restarts, and no process left behind."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.patience import eventually

from areal_rloo.errors import EXIT_WENT_BACK
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.processes import LocalProcess, LocalStarter
from areal_rloo.launcher.supervisor import Supervisor

# Ends with a code so many times, then stays; each start writes a line.
ENDS = """
import sys, time
from pathlib import Path
file, code, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
with file.open("a") as opened:
    opened.write("start\\n")
if len(file.read_text().splitlines()) <= times:
    sys.exit(code)
time.sleep(1000)
"""
# Leaves a child in its session.
LEAVES = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid, flush=True)
"""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(LocalStarter(), tmp_path / "logs")
    yield supervisor
    supervisor.stop_all(1.0)


def _spec(*command: str, max_restarts: int = 0) -> ProcessSpec:
    return ProcessSpec(
        name="one",
        role="test",
        host="here",
        device="cpu",
        gpu_ids=(),
        num_threads=1,
        memory_bytes=0,
        environment={},
        command=command,
        max_restarts=max_restarts,
    )


def _ends(folder: Path, code: int, times: int, *, max_restarts: int) -> ProcessSpec:
    return _spec(sys.executable, "-c", ENDS, str(folder / "starts"), str(code), str(times), max_restarts=max_restarts)


def _num_starts(folder: Path) -> int:
    file = folder / "starts"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_failed_process_is_restarted_max_restarts_times(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(_ends(tmp_path, 1, 10, max_restarts=1))
    eventually(lambda: not supervisor.tend("one"), "it was not given up")
    assert (_num_starts(tmp_path), supervisor.exit_code("one")) == (2, 1)
    assert not supervisor.tend("one"), "and not once more later"


def test_a_worker_with_a_diverged_history_is_always_restarted(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(_ends(tmp_path, EXIT_WENT_BACK, 3, max_restarts=0))
    eventually(lambda: supervisor.tend("one") and _num_starts(tmp_path) == 4, "it was not started four times")
    assert supervisor.exit_code("one") is None


def test_the_rest_of_a_session_is_killed_after_the_process(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start(_spec(sys.executable, "-c", LEAVES))
    eventually(lambda: supervisor.exit_code("one") is not None, "it did not end")
    left = int((tmp_path / "logs" / "one.out").read_text())
    eventually(
        lambda: not psutil.pid_exists(left) or psutil.Process(left).status() == psutil.STATUS_ZOMBIE,
        "what it left is still there",
    )


def test_a_reaped_process_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number may belong to another process by then."""
    with (tmp_path / "out").open("wb") as output:
        process = LocalProcess([sys.executable, "-c", ""], os.environ, output)
    eventually(lambda: process.exit_code() is not None, "it did not end")

    def refuse(*arguments: int) -> None:
        raise AssertionError(f"a signal to {arguments}")

    monkeypatch.setattr("os.killpg", refuse)
    monkeypatch.setattr("os.kill", refuse)
    process.kill()
    process.signal(signal.SIGTERM)
    assert process.exit_code() == 0
