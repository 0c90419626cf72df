"""The alarms about a full disk and a full shared memory fire in a real run on file systems of its own.

The minutes of the rules are seconds.
"""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run
from support.patience import eventually
from support.prometheus import prometheus, sooner

pytestmark = [
    *(pytest.mark.slow, pytest.mark.rare),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed here"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare(1) here, so no file system of one's own"),
]

# The shell becomes the launcher. Meanwhile, the sizes of both file systems follow the file `resize`.
IN_A_NAMESPACE = """
cd "$0"
mount -t tmpfs -o size=4g tmpfs disk && mount -t tmpfs -o size=1g tmpfs /dev/shm || exit 77
( while kill -0 $$ 2>/dev/null; do
    if [ -e resize ]; then
      read mount spare < resize
      used=$(df -B1 --output=used $mount | tail -n 1)
      mount -o remount,size=$((used + spare)) $mount && rm resize  # fails, and is tried again, if more is used by now
    fi
    sleep 0.1
  done ) > /dev/null 2>&1 &
cd "$OLDPWD"
exec "$@"
"""
# The first step waits for the word, so the second version of the weights finds no memory.
NOISE = """
import time
from pathlib import Path

def noise(completion_ids):
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.1)
    return float(sum(completion_ids) % 2)
"""
ROOMY, FULL = 4_000_000_000, 4096  # bytes


def test_full_disks_fire_their_alarms_until_there_is_room(start: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "noise.py").write_text(NOISE)

    def resize(mount: str, spare_bytes: int) -> None:
        (tmp_path / "written").write_text(f"{mount} {spare_bytes}\n")
        (tmp_path / "written").rename(tmp_path / "resize")
        eventually(lambda: not (tmp_path / "resize").exists(), "the file system has another size")

    run = start(
        *(
            "learner.num_train_steps=100000",
            "rollout.reward_timeout_s=600",
            "evaluation.every_n_versions=0",
            "data.eval=null",
        ),
        *(f"data.train.rewards=[{{function: {tmp_path / 'noise.py'}:noise}}]", "launcher.min_free_disk_bytes=1000000"),
        f"telemetry.targets_folder={tmp_path / 'targets'}",
        name="disk/run",
        before=("unshare", "--mount", "--map-root-user", "sh", "-c", IN_A_NAMESPACE, str(tmp_path)),
    )
    with prometheus(tmp_path, tmp_path / "targets", rules=sooner) as server:
        eventually(lambda: run.process.poll() is not None or server.query("up == 1"), "the learner serves metrics")
        if run.process.poll() == 77:
            pytest.skip("no file system of one's own can be mounted here")
        resize("/dev/shm", FULL)
        (tmp_path / "go").touch()
        run.wait_for(lambda: "SharedMemoryFull" in server.alarms())
        assert not {"DiskFull", "CheckpointNotWritten"} & server.alarms()
        resize("/dev/shm", ROOMY)
        run.wait_for(lambda: "SharedMemoryFull" not in server.alarms())
        run.wait_for(lambda: server.query("areal_rloo_num_train_steps_total > 3"))
        resize("disk", FULL)
        ends = {"DiskFull", "CheckpointNotWritten", "CheckpointOld"}
        run.wait_for(lambda: ends <= server.alarms())
        resize("disk", ROOMY)
        run.wait_for(lambda: not ends & server.alarms())
        run.process.send_signal(signal.SIGTERM)
        code, output = run.wait()
        assert code == 0, output
        eventually(lambda: server.alarms() == set(), "an end without alarms")
