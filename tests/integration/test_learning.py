"""The quickstart learns on real clusters of two nodes, and with learner and engine in turns on the same cores.

On Slurm with SGLang, and on Ray with the embedded engine, the learner runs on one node and the rollout worker on the
other, so weights travel over the network.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.check_learned import conditions
from support.ray_cluster import ray_cluster
from support.server_support import sglang_python
from support.slurm_cluster import missing_programs, slurm_cluster

from areal_rloo.config import load_config
from areal_rloo.learner.warm_start import prepare_tiny_model
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord

REPO = Path(__file__).resolve().parents[2]
MISSING = missing_programs()
ON_TWO_NODES = ("launcher.num_hosts=2", "launcher.cores_per_host=1", "learner.num_threads=1", "rollout.num_threads=1")
FASTER = (  # as much learning from fewer samples; .ci/run runs the quickstart with the shipped optimizer, too
    *("learner.num_minibatches=4", "learner.optimizer.learning_rate=1.5e-4"),
    *("learner.groups_per_step=32", "learner.num_train_steps=52"),
    *("evaluation.every_n_versions=0", "data.eval.num_prompts=500"),
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


def _model() -> str:
    """Return the folder of the quickstart's model; make the model if no run has done so."""
    return prepare_tiny_model(load_config("quickstart.yaml"), REPO / ".pytest_cache" / "models" / "models").path


def _learn(
    folder: Path, launcher: str, *arguments: str, environment: Mapping[str, str], places: Sequence[str] = ON_TWO_NODES
) -> list[str]:
    """Run the quickstart; return the conditions that do not hold."""
    command = [sys.executable, "-m", f"areal_rloo.launcher.{launcher}", "--config", "quickstart.yaml"]
    changes = (f"run.folder={folder}", f"model.path={_model()}", *places, *FASTER, *arguments)
    ended = subprocess.run([*command, *changes], cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [text for text, holds in conditions(folder).items() if not holds]


@pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed here: no {', '.join(MISSING)}")
def test_the_quickstart_learns_with_sglang_on_slurm(tmp_path: Path) -> None:
    sglang = ("rollout.engine=sglang", f"rollout.sglang.python={sglang_python()}", "rollout.num_slots=128")
    with slurm_cluster(tmp_path / "cluster") as cluster:
        run = _learn(tmp_path / "run", "slurm", "--wait", *sglang, environment=cluster.environment)
    assert run == []


def test_the_quickstart_learns_on_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed here: make extras")
    with ray_cluster(tmp_path, num_cpus=1) as cluster:
        address = ("--address", cluster.address)
        run = _learn(tmp_path / "run", "ray", *address, environment={**os.environ, **cluster.environment})
    assert run == []


@pytest.mark.parametrize("eta", [0, 2])
def test_the_quickstart_learns_in_turns_on_the_same_cores(eta: int, tmp_path: Path) -> None:
    in_turns = ("rollout.share_devices=in_turns", f"algorithm.max_staleness={eta}")
    failed = _learn(tmp_path / "run", "local", *in_turns, environment=os.environ, places=())
    if eta == 0:  # synchronous: no weights come while completions are made
        failed = [text for text in failed if not text.startswith(("the run was asynchronous", "weights came while"))]
    assert [text for text in failed if not text.startswith("generation and training overlapped")] == []
    steps = [record for record in read_records(tmp_path / "run" / "metrics.jsonl") if isinstance(record, TrainRecord)]
    assert len(steps) == 52
    assert max(step.staleness_max for step in steps) <= eta
