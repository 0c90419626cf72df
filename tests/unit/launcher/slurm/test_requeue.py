"""A job requeues itself, and no other job, as long as each start brings a checkpoint."""

import sys
from pathlib import Path

import pytest
from support.slurm_cluster import missing_programs, slurm_cluster

MISSING = missing_programs()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed here: no {', '.join(MISSING)}"),
]

# The last job of an array has the array's own id: asked for by that, all of its jobs would be requeued.
SCRIPT = """#!/usr/bin/env bash
#SBATCH --array=0-1
#SBATCH --requeue
#SBATCH --output={folder}/out-%a
echo "start ${{SLURM_RESTART_COUNT:-0}}" >> {folder}/starts-$SLURM_ARRAY_TASK_ID
if [ "$SLURM_ARRAY_TASK_ID" = 1 ]; then
    mkdir -p {folder}/run
    exec {python} -c "
import sys; from pathlib import Path
from areal_rloo.program import run_main
from areal_rloo.launcher.slurm.job import _requeued
sys.exit(run_main(lambda _: _requeued(Path('{folder}/run'))))"
fi
until grep -q 'start 1' {folder}/starts-1; do sleep 1; done
echo end >> {folder}/starts-0
"""


def test_a_job_of_an_array_is_requeued_alone_and_only_with_progress(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path / "cluster") as cluster:
        (tmp_path / "job").write_text(SCRIPT.format(folder=tmp_path, python=sys.executable))
        cluster.run("sbatch", str(tmp_path / "job"))
        first, second = tmp_path / "starts-0", tmp_path / "starts-1"
        cluster.wait_for(lambda: first.exists() and "end" in first.read_text(), timeout_s=200)
        assert first.read_text().split() == ["start", "0", "end"]
        assert second.read_text().split() == ["start", "0", "start", "1"]
        cluster.wait_for(
            lambda: {job.exit_code for job in cluster.jobs() if job.state == "FAILED"} == {2}, timeout_s=60
        )
        assert "stopped twice without a new checkpoint in between" in (tmp_path / "out-1").read_text()
