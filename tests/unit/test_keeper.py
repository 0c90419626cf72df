"""A keeper ends everything that its command started, and exits as the command did."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import PATIENCE_S, eventually
from support.processes import processes_with

from areal_rloo.keeper import kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has child subreapers")

# Starts processes in sessions of their own, as daemons do: the second one forks twice.
DAEMONS = """
import os, subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(3600)", sys.argv[1]]
subprocess.Popen(sleep, start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sleep[0], sleep)
    os._exit(0)
"""


def _started(code: str, mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(kept([sys.executable, "-c", code, mark]), stdout=subprocess.PIPE, start_new_session=True)


def test_a_trusted_command_writes_its_output_itself(tmp_path: Path) -> None:
    code = f"{DAEMONS}\nprint('x' * 3_000_000); sys.stderr.write('end')"
    with (tmp_path / "log").open("wb") as log:
        command = kept([sys.executable, "-c", code, str(tmp_path)], bounded=False)
        assert subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True).wait(PATIENCE_S) == 0
    assert processes_with([str(tmp_path)]) == []
    written = (tmp_path / "log").read_text()
    assert written.count("x") == 3_000_000
    assert written.endswith("end")


def _nothing_is_left(mark: str) -> None:
    eventually(lambda: not processes_with([mark]), "nothing is left")


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(0)", 0),
        ("os._exit(7)", 7),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_everything_ends_with_the_command(tmp_path: Path, ending: str, code: int) -> None:
    with _started(f"{DAEMONS}\n{ending}", str(tmp_path)) as keeper:
        assert keeper.wait(PATIENCE_S) == code
    assert processes_with([str(tmp_path)]) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL])
def test_everything_ends_with_the_keeper(tmp_path: Path, number: signal.Signals) -> None:
    """If the keeper is killed, the command ends; sessions that the command started are then out of reach."""
    code = f"{'' if number == signal.SIGKILL else DAEMONS}\nimport time; print('up', flush=True); time.sleep(3600)"
    with _started(code, str(tmp_path)) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"up\n"
        keeper.send_signal(number)
    _nothing_is_left(str(tmp_path))


def test_everything_ends_with_the_starter(tmp_path: Path) -> None:
    command = f"{DAEMONS}\nimport time; print('up', flush=True); time.sleep(3600)"
    starter = f"""
import subprocess, sys, time
from areal_rloo.keeper import kept
subprocess.Popen(kept([sys.executable, "-c", {command!r}, {str(tmp_path)!r}]), start_new_session=True)
time.sleep(3600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
    _nothing_is_left(str(tmp_path))


def test_a_command_that_forks_without_end_is_ended(tmp_path: Path) -> None:
    code = "import os, time\nwhile True:\n    if os.fork() == 0: os.setsid()\n    time.sleep(0.05)"
    with _started(code, str(tmp_path)) as keeper:
        eventually(lambda: len(processes_with([str(tmp_path)])) > 8, "it forks")
        keeper.terminate()
        keeper.wait(PATIENCE_S)
    _nothing_is_left(str(tmp_path))


def test_a_command_that_cannot_be_run_fails() -> None:
    with subprocess.Popen(kept(["/no/such/program"]), stderr=subprocess.PIPE) as keeper:
        assert keeper.wait(PATIENCE_S) == 1


def test_output_arrives_whole_until_it_is_too_much() -> None:
    code = "import os, sys; print('out'); sys.stdout.flush(); os.write(2, b'errors'); os.abort()"
    with _started(code, "") as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.read() == b"out\nerrors"
    with _started("print('x' * 3_000_000)", "") as keeper:
        assert keeper.stdout is not None
        first, _, told = keeper.stdout.read().partition(b"\n")
    assert 2**20 <= len(first) < 2**20 + 10_000
    assert int(told.split()[0][1:]) == 3_000_001 - len(first)


def test_a_command_goes_on_without_a_reader_of_its_output() -> None:
    with subprocess.Popen(kept([sys.executable, "-c", "print('x' * 300_000)"]), stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        keeper.stdout.close()
        assert keeper.wait(PATIENCE_S) == 0
