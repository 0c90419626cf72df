"""A run on a disk that is full for a while: a small file system in a separate mount namespace."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.local_runs import Run
from support.patience import eventually
from support.processes import children_with, command_of

REPO = Path(__file__).resolve().parents[2]
COMMAND = [
    *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
    *("model.tiny.warm_start=null", "model.tiny.hidden_size=48", "model.tiny.num_layers=2", "data.eval=null"),
    *("rollout.num_slots=8", "rollout.sampling.max_new_tokens=16", "algorithm.group_size=2"),
    *("learner.groups_per_step=4", "learner.num_train_steps=100000", "checkpoint.every_n_steps=10"),
    *("launcher.min_free_disk_bytes=1000000", "telemetry.progress=false"),
]
# As soon as there is a checkpoint, the disk is filled; it has room again when the file `free` is there.
IN_A_NAMESPACE = """
mount -t tmpfs -o size=48m tmpfs disk || exit 77
( until ls -d disk/run/checkpoints/step-* >/dev/null 2>&1; do sleep 0.1; done
  cat /dev/zero > disk/filler 2>/dev/null
  touch full
  until [ -e free ]; do sleep 0.1; cat /dev/zero >> disk/filler 2>/dev/null; done
  rm disk/filler
  touch freed ) &
"$@" run.folder=$PWD/disk/run
code=$?
cp disk/run/summary.json disk/run/logs/learner.log .
exit $code
"""

pytestmark = pytest.mark.slow


def test_a_full_disk_is_reported_and_training_continues(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare(1) here, so no file system of one's own")
    (tmp_path / "disk").mkdir()
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", IN_A_NAMESPACE, "sh", *COMMAND]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command.append(f"telemetry.metrics_port={port}")
    environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    try:
        said = run.stderr.readline()
        if run.poll() == 77 or "unshare" in said or "mount" in said:
            pytest.skip(f"no file system of one's own can be mounted here: {said.strip()}")
        while "training goes on, but no checkpoint and no record can be written" not in said:
            said = run.stderr.readline()
            assert said, "the run has ended"
        assert re.search(r"if the run ends now, the steps after \S*step-\d+ are lost; free some disk", said), said
        eventually((tmp_path / "full").exists, "the disk is not full")
        eventually(lambda: _num_failed(port) > 0, "no checkpoint failed")
        assert run.poll() is None
        (learner,) = children_with("areal_rloo.learner", _launcher(run))
        learner.kill()
        while "the learner restarts from step-" not in said:
            said = run.stderr.readline()
            assert said, "the run has ended"
        eventually(lambda: _num_failed(port) > 0, "no checkpoint of the restarted learner failed")
        assert run.poll() is None
        (tmp_path / "free").touch()
        eventually((tmp_path / "freed").exists, "the disk has no room again")
        _launcher(run).send_signal(signal.SIGINT)
        _, rest = run.communicate(timeout=200)
    finally:
        for process in (*psutil.Process(run.pid).children(recursive=True), run) if run.poll() is None else ():
            process.kill()
        run.stderr.close()
    assert run.returncode == 0, rest
    assert "the learner restarts" not in rest, "a full disk is no reason to end"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["exit_reason"] == "drained"
    assert summary["failed_checkpoints"] > 0
    ledger = summary["ledger"]
    assert ledger["dropped"].keys() <= {"stale"}, "a slow machine; the prompts come again"
    num_dropped = sum(ledger["dropped"].values())
    assert ledger["admitted"] == ledger["trained"] + num_dropped + ledger["buffered"] + ledger["in_flight"]


def _num_failed(port: int) -> float:
    """Read the number of failed checkpoints from the learner's metrics; the full disk takes no log."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return 0.0
    found = re.search(r"^areal_rloo_failed_checkpoints_total (\S+)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found.group(1))


def _launcher(run: "subprocess.Popen[str]") -> psutil.Process:
    """Return the launcher, a child of the shell."""
    found = children_with("areal_rloo.launcher.local", psutil.Process(run.pid))
    (launcher,) = (process for process in found if command_of(process)[1] == "-m")  # not the part of the script in `&`
    return launcher


FULL_MEMORY = """
from areal_rloo.weights import shared_memory

sender = shared_memory.SharedMemorySender
sender.__init__.__kwdefaults__["patience_s"] = 1.0
reserve = shared_memory._reserve


def full(path, size):
    if path.name != "segment-0":
        raise OSError(28, "No space left on device")
    reserve(path, size)


shared_memory._reserve = full
"""


def test_full_shared_memory_ends_the_run_after_a_checkpoint(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "full_memory.py").write_text(FULL_MEMORY)
    run = start(f"run.entry={tmp_path / 'full_memory.py'}", "checkpoint.every_n_steps=0")
    code, output = run.wait()
    assert code == 1, output
    assert "bytes of shared memory" in output
    assert run.saved_steps() == len(run.records()) == 1
