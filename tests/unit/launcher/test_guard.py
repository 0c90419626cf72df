"""A killed launcher's children which ignore their SIGTERM."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.patience import eventually
from support.processes import processes_with

from areal_rloo.launcher.processes import DRAIN_FIRST_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pidfds")

# Plays the launcher: starts a process that hangs in the way of the second argument, and is killed.
LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.processes import LocalStarter
starter = LocalStarter(float(sys.argv[3]))
spec = ProcessSpec(name="one", role="test", host="here", device="cpu", gpu_ids=(), num_threads=1,
                   environment={}, command=(sys.executable, "-c", sys.argv[2]))
out = Path(sys.argv[1]) / "one.out"
process = starter.start(spec, out)
while "ready" not in out.read_text():
    time.sleep(0.01)
print(process.pid, flush=True)
if sys.argv[4] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
process.kill()
starter.close()
"""
STOPPED = "import os, signal; print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(1000)
"""


def _launch(folder: Path, program: str, *, drain_timeout_s: float, end: str) -> int:
    command = [sys.executable, "-c", LAUNCHER, str(folder), program, str(drain_timeout_s), end]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("program", [STOPPED, DEAF])
def test_a_hung_child_of_a_killed_launcher_is_killed(tmp_path: Path, program: str) -> None:
    pid = _launch(tmp_path, program, drain_timeout_s=0.5 - DRAIN_FIRST_S, end="killed")
    eventually(lambda: _is_gone(pid), "it lives on")


def test_the_guard_ends_with_the_launcher(tmp_path: Path) -> None:
    pid = _launch(tmp_path, DEAF, drain_timeout_s=54321.0, end="alone")
    assert _is_gone(pid)
    eventually(lambda: not processes_with([str(54321.0 + DRAIN_FIRST_S)]), "the guard waits for a dead child")
