"""Whole runs as jobs of a real Slurm cluster, two nodes in separate networks: steps, signals, requeues."""

import re
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from support.local_runs import Run, assert_drained, assert_kills_cost_nothing, gone
from support.networks import CAN_MAKE_NETWORKS, two_networks
from support.slurm_cluster import SlurmCluster, missing_programs, slurm_cluster

MISSING = missing_programs()
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed here: no {', '.join(MISSING)}"),
    pytest.mark.skipif(not CAN_MAKE_NETWORKS, reason="only root, with ip and nsenter, can make networks"),
]
ON_ONE_NODE = ("launcher.cores_per_host=2", "launcher.memory_per_host=2000000000", "launcher.slurm.warn_before_s=90")
ON_TWO_NODES = (
    *("launcher.num_hosts=2", "rollout.num_workers=2", "learner.num_ranks=2"),
    *("launcher.cores_per_host=1", "launcher.memory_per_host=2000000000", "launcher.slurm.warn_before_s=90"),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with two_networks() as networks, slurm_cluster(tmp_path_factory.mktemp("slurm"), networks) as cluster:
        yield cluster


@pytest.fixture
def submit(start: Callable[..., Run], cluster: SlurmCluster) -> Iterator[Callable[..., Run]]:
    def begin(*arguments: str, name: str = "run") -> Run:
        return start(
            *arguments, name=name, launcher="slurm", before=cluster.prefix, environment=dict(cluster.environment)
        )

    yield begin
    cluster.run("scancel", "--user=root")


def test_killed_worker_and_learner_are_replaced_over_two_networks(
    submit: Callable[..., Run],
) -> None:
    run = submit(*ON_TWO_NODES, "--wait", "learner.num_train_steps=32", "launcher.max_learner_restarts=1")
    assert_kills_cost_nothing(run)
    assert "restarted rollout-" in (run.folder / "logs" / "launcher.log").read_text()
    config = (run.folder / "config.yaml").read_text()
    assert "host: 10.77." in config
    assert (run.folder / "keys").is_dir()
    hosts = {line.split(" on ")[1] for line in _started(run) if " on " in line}
    assert hosts == {"n1)", "n2)"}


def _started(run: Run) -> list[str]:
    log = (run.folder / "logs" / "launcher.log").read_text().splitlines()
    return [line for line in log if ": started " in line]


def test_the_exit_code_of_a_failing_job_reaches_the_shell(submit: Callable[..., Run]) -> None:
    run = submit(*ON_ONE_NODE, "--wait", "learner.num_train_steps=10000")
    run.wait_for_checkpoint(2)
    run.children("areal_rloo.learner")[0].kill()
    code, output = run.wait()
    assert code == 137, output
    assert "with areal-rloo resume " in output


def test_ctrl_c_drains_a_job_submitted_with_wait(submit: Callable[..., Run], cluster: SlurmCluster) -> None:
    run = submit(*ON_ONE_NODE, "--wait", "learner.num_train_steps=10000")
    run.wait_for(lambda: len(run.records()) >= 2)
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 0, output
    assert "draining job" in output
    assert_drained(run)
    assert all(job.restarts == 0 for job in cluster.jobs())


def test_a_job_that_cannot_start_says_why(submit: Callable[..., Run], cluster: SlurmCluster) -> None:
    run = submit(*ON_ONE_NODE, "--wait", "launcher.slurm.arguments.hold=true")
    cluster.wait_for(lambda: bool(cluster.jobs()), timeout_s=60)
    time.sleep(35)
    cluster.run("scancel", "--user=root")
    _, output = run.wait()
    assert re.search(r"job \d+ waits: JobHeldUser \(squeue --jobs \d+\)", output), output


def test_a_refused_job_leaves_no_folder(submit: Callable[..., Run]) -> None:
    run = submit(*ON_ONE_NODE, "launcher.slurm.partition=nowhere")
    code, output = run.wait()
    assert code == 2, output
    assert "sbatch refuses the job" in output
    assert not run.folder.exists()


def test_the_time_limit_signal_requeues_and_scancel_drains(submit: Callable[..., Run], cluster: SlurmCluster) -> None:
    """`--wait` continues after the requeue."""
    run = submit(
        *(*ON_ONE_NODE, "--wait"),
        "launcher.slurm.time_limit=2",
        "launcher.slurm.warn_before_s=30",
        "launcher.drain_timeout_s=20",
        "learner.num_train_steps=10000",
    )
    log = run.folder / "logs" / "learner.log"
    cluster.wait_for(lambda: log.exists() and "resume: from step" in log.read_text(), timeout_s=240)
    resumed = re.search(r"resume: from step (\d+)", log.read_text())
    assert resumed is not None
    at = int(resumed[1])
    cluster.wait_for(lambda: len(run.records()) >= at + 2, timeout_s=120)
    steps = [record.num_train_steps for record in run.records()]  # read once: the run goes on
    assert steps == list(range(1, len(steps) + 1))
    assert run.process.poll() is None
    cluster.run("scancel", "--user=root")
    code, output = run.wait()
    assert code == 0, output
    assert gone(run)
    assert_drained(run)
    assert run.summary()["policy_version"] > at
    submitted = re.search(r"job (\d+) is submitted", output)
    assert submitted is not None, output
    job_id = int(submitted[1])
    assert [(j.state, j.restarts) for j in cluster.settled_jobs() if j.job_id == job_id] == [("CANCELLED", 1)]
    assert output.count("run folder: ") == 2, "of both of its lives"
    lines = (run.folder / "job.out").read_text().splitlines()
    assert [line for line in lines if not re.match(r"slurmstepd|20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line)] == []
    assert "requeueing the job" in (run.folder / "logs" / "launcher.log").read_text()


def test_an_array_runs_each_seed_in_a_separate_folder(submit: Callable[..., Run]) -> None:
    run = submit(*ON_ONE_NODE, "--wait", "launcher.slurm.num_seeds=2", "run.seed=5", "learner.num_train_steps=2")
    code, output = run.wait()
    assert code == 0, output
    for seed in (5, 6):
        folder = run.folder / f"seed-{seed}"
        assert f"seed: {seed}\n" in (folder / "config.yaml").read_text()
        assert '"completed"' in (folder / "summary.json").read_text()
