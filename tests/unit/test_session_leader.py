"""A child and its session end together, and a kill waits for all of them."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import eventually

from areal_rloo import session_leader
from areal_rloo.session_leader import SessionLeader

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"])
open(sys.argv[1], "w").write(str(child.pid))
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the child is killed")
def test_a_kill_waits_for_the_whole_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, str(pid)]
    parent = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    eventually(pid.read_text, "the number of the child")
    leader, child = SessionLeader(parent), int(pid.read_text())
    killed, kill = [], SessionLeader._kill_session

    def kill_parent(self: SessionLeader) -> None:
        killed.append(self.pid)
        self._child.send_signal(signal.SIGKILL)

    monkeypatch.setattr(SessionLeader, "_kill_session", kill_parent)  # the child takes its time
    assert not leader.kill(0.5), "a process of the session still runs"
    assert killed
    assert Path(f"/proc/{child}").exists()
    assert leader.exit_code() == -signal.SIGKILL
    monkeypatch.setattr(SessionLeader, "_kill_session", kill)
    kill(leader)
    assert leader.kill(10)
    assert not session_leader._lives(leader.pid)
    parent.stdout.close()


HALF_ENDED = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_process_whose_first_thread_has_ended_still_lives() -> None:
    """It looks like a zombie, but the other threads hold all of its memory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HALF_ENDED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    stat = Path(f"/proc/{process.pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the first thread has ended")
    assert session_leader._lives(process.pid)
    process.stdin.close()
    eventually(lambda: not session_leader._lives(process.pid), "the process has ended, and is not reaped yet")
    process.wait()
    process.stdout.close()
