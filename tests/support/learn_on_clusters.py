"""Run the quickstart with SGLang as a Slurm job, and with the embedded engine on Ray, over two nodes each.

    learn_on_clusters.py FOLDER RUN_FOLDER [KEY=VALUE ...]

Each run has a real cluster of two nodes: the learner on the first, the rollout worker on the second. The runs start
from the model of RUN_FOLDER, change the config by each KEY=VALUE, and leave the run folders FOLDER/slurm and FOLDER/ray
for check_learned.py. pytest does not collect this file; CI runs it.
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
# A node has room for a single process: the worker runs on the other node, and weights travel over the network.
ON_TWO_NODES = ("launcher.num_hosts=2", "launcher.cores_per_host=1", "learner.num_threads=1", "rollout.num_threads=1")
SGLANG = ("rollout.engine=sglang", "rollout.num_slots=64", "learner.groups_per_step=32")  # some 6 s a step here


def main() -> int:
    folder, before = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((before / "model.json").read_text())["path"]
    for launcher, cluster, changes in (("slurm", _on_slurm, SGLANG), ("ray", _on_ray, ())):
        with cluster(folder / f"{launcher}-cluster") as (arguments, environment):
            command = [
                *(sys.executable, "-m", f"areal_rloo.launcher.{launcher}", *arguments, "--config", "quickstart.yaml"),
                *(f"run.folder={folder / launcher}", f"model.path={model}", *ON_TWO_NODES),
                *("evaluation.every_n_versions=0", *changes, *sys.argv[3:]),
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
