"""A killed step ends its task, in a real Slurm."""

import sys
from pathlib import Path

import psutil
import pytest
from support.slurm_cluster import missing_programs, slurm_cluster

MISSING = missing_programs()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed here: no {', '.join(MISSING)}"),
]

# The task is deaf, as one is that waits inside a collective for a rank which is gone.
JOB = """
import os, sys, time
from pathlib import Path
from areal_rloo.config import load_config
from areal_rloo.launcher.plan import ProcessSpec
from areal_rloo.launcher.slurm.job import StepStarter

folder = Path(sys.argv[1])
deaf = f"import os, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (10, 15)]; "
deaf += f"open('{folder}/pid', 'w').write(str(os.getpid())); time.sleep(1000)"
spec = ProcessSpec(
    name="deaf", role="test", host=os.environ["SLURMD_NODENAME"], device="cpu", gpu_ids=(), num_threads=1,
    environment={}, command=(sys.executable, "-c", deaf),
)
step = StepStarter(load_config("quickstart.yaml", []).launcher, folder).start(spec, folder / "deaf.out")
while not (folder / "pid").exists() or not (folder / "pid").read_text():
    time.sleep(0.1)
step.signal(15)
time.sleep(0.5)
assert step.exit_code() is None
step.kill()
print("code", step.exit_code(), flush=True)
time.sleep(1000)
"""


def test_a_task_that_ignores_signals_is_killed_with_its_step(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path / "cluster") as cluster:
        (tmp_path / "job.py").write_text(JOB)
        run = f"exec {sys.executable} {tmp_path}/job.py {tmp_path}"
        script = f"#!/usr/bin/env bash\n#SBATCH --output={tmp_path}/out\n{run}\n"
        (tmp_path / "job").write_text(script)
        cluster.run("sbatch", str(tmp_path / "job"))
        cluster.wait_for(lambda: "code" in _text(tmp_path / "out"), timeout_s=60)
        assert _text(tmp_path / "out").split() == ["code", "137"]
        pid = int(_text(tmp_path / "pid"))
        cluster.wait_for(lambda: not psutil.pid_exists(pid), timeout_s=60)
        assert {job.state for job in cluster.jobs()} == {"RUNNING"}, "only the step was ended"
        cluster.run("scancel", "--user=root")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
