"""The Slurm cluster of the tests: both nodes work, exit codes arrive, nothing is left behind."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.networks import CAN_MAKE_NETWORKS, two_networks
from support.slurm_cluster import SlurmCluster, missing_programs, slurm_cluster

MISSING = missing_programs()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed here: no {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def test_a_step_runs_on_both_nodes(cluster: SlurmCluster) -> None:
    assert sorted(cluster.run("srun", "-N2", "-n2", "printenv", "SLURMD_NODENAME").split()) == ["n1", "n2"]


def test_the_exit_code_of_a_batch_job_is_returned(cluster: SlurmCluster) -> None:
    command = ["sbatch", "--wait", "--output=/dev/null", "--wrap=exit 7"]
    ended = subprocess.run([*cluster.prefix, *command], env=cluster.environment, capture_output=True, check=False)
    assert ended.returncode == 7
    assert [(job.state, job.exit_code) for job in cluster.settled_jobs() if job.name == "wrap"] == [("FAILED", 7)]


def test_the_error_of_a_failed_command_is_raised(cluster: SlurmCluster) -> None:
    with pytest.raises(RuntimeError, match="Invalid job id"):
        cluster.run("scontrol", "requeue", "4000000")


@pytest.mark.skipif(not CAN_MAKE_NETWORKS, reason="only root, with ip and nsenter, can make networks")
def test_nodes_in_two_networks_meet_and_leave_nothing_behind(tmp_path: Path) -> None:
    with two_networks() as networks, slurm_cluster(tmp_path / "cluster", networks) as cluster:
        seen = cluster.run("srun", "-N2", "-n2", "ip", "-4", "-oneline", "address", "show", "scope", "global")
        assert networks.first.address in seen
        assert networks.second.address in seen
        # A task without an environment, so that only its parentage tells whose it is.
        cluster.run("sbatch", "-N2", "-n2", "--output=/dev/null", "--wrap=srun env -i sleep 1234.5")
        cluster.wait_for(lambda: len(_sleepers()) == 2, timeout_s=60)
    assert not _sleepers()
    assert not Path(f"/run/netns/{networks.first.name}").exists()


def _sleepers() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "1234.5"]]
