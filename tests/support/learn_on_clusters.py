"""The quickstart as a Slurm job and on Ray, over two nodes each, to the target it has locally.

    learn_on_clusters.py FOLDER RUN_FOLDER

Starts a real cluster of two nodes for each, runs the quickstart with its learner on one and its rollout worker on the
other, from the model that RUN_FOLDER was trained from, and leaves run folders in FOLDER/slurm and FOLDER/ray, to be
looked at by check_learned.py. Not collected by pytest; CI runs it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.ray_cluster import ray_cluster
from support.slurm_cluster import slurm_cluster

REPO = Path(__file__).resolve().parents[2]
# One node has room for one process: the worker goes to the other, and weights travel over the network.
ON_TWO_NODES = ("launcher.num_hosts=2", "launcher.cores_per_host=1", "learner.num_threads=1", "rollout.num_threads=1")


def main() -> int:
    folder, before = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((before / "model.json").read_text())["path"]
    for launcher, cluster in (("slurm", _on_slurm), ("ray", _on_ray)):
        with cluster(folder / f"{launcher}-cluster") as (arguments, environment):
            command = [
                *(sys.executable, "-m", f"areal_rloo.launcher.{launcher}", *arguments, "--config", "quickstart.yaml"),
                *(f"run.folder={folder / launcher}", f"model.path={model}", *ON_TWO_NODES),
                *("learner.num_train_steps=28", "evaluation.every_n_versions=0"),
            ]
            code = subprocess.run(
                command, cwd=REPO, env={**environment, "PYTHONUNBUFFERED": "1"}, check=False
            ).returncode
        if code != 0:
            return code
    return 0


@contextmanager
def _on_slurm(folder: Path) -> Iterator[tuple[Sequence[str], Mapping[str, str]]]:
    folder.mkdir()
    with slurm_cluster(folder) as cluster:
        yield ["--wait"], cluster.environment


@contextmanager
def _on_ray(folder: Path) -> Iterator[tuple[Sequence[str], Mapping[str, str]]]:
    folder.mkdir()
    with ray_cluster(folder, num_cpus=1) as cluster:
        yield ["--address", cluster.address], {**os.environ, **cluster.environment}


if __name__ == "__main__":
    sys.exit(main())
