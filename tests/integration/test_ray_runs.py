"""Whole runs on a real Ray cluster of two nodes: placement, restarts by Ray, signals, jobs."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.local_runs import REPO, SMALL, Run, assert_drained, assert_kills_cost_nothing, gone, with_last_values

pytest.importorskip("ray", reason="Ray is not installed here: make extras")

from support.ray_cluster import RayCluster, ray_cluster

pytestmark = pytest.mark.full
ON_TWO_NODES = ("launcher.num_hosts=2", "rollout.num_workers=2", "learner.num_ranks=2", "launcher.cores_per_host=2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray"), num_cpus=2, dashboard=True) as cluster:
        yield cluster


@pytest.fixture
def run_on(start: Callable[..., Run], cluster: RayCluster) -> Callable[..., Run]:
    def begin(*arguments: str) -> Run:
        address = ("--address", cluster.address)
        return start(*address, *arguments, launcher="ray", environment=dict(cluster.environment))

    return begin


def test_on_two_nodes_a_killed_worker_and_a_killed_learner_are_replaced(
    run_on: Callable[..., Run], cluster: RayCluster
) -> None:
    run = run_on(*ON_TWO_NODES, "learner.num_train_steps=32", "launcher.max_learner_restarts=1")
    assert_kills_cost_nothing(run)
    outputs = [(run.folder / "logs" / f"rollout-{index}.out").read_text() for index in (0, 1)]
    assert sum("is started again by Ray" in text for text in outputs) == 1
    started = re.findall(r"started (\S+) \(in Ray, on (\S+)\)", (run.folder / "logs" / "launcher.log").read_text())
    hosts = dict(started)
    assert hosts["learner"] == hosts["learner-1"], "packed"
    assert hosts["rollout-0"] == hosts["rollout-1"] != hosts["learner"], "on what the learner leaves"
    shown = "".join(path.read_text(errors="replace") for path in _logs_of_the_dashboard(cluster))
    assert "INFO    learner intake" in shown
    assert "INFO    rollout-1 __main__: ready" in shown


def _logs_of_the_dashboard(cluster: RayCluster) -> Iterator[Path]:
    return (cluster.folder / "ray" / "session_latest" / "logs").glob("worker-*.out")


@pytest.mark.rare
def test_the_exit_code_of_a_failing_run_reaches_the_shell(run_on: Callable[..., Run]) -> None:
    run = run_on("learner.num_train_steps=10000")
    run.wait_for_checkpoint(2)
    run.children("areal_rloo.learner")[0].kill()
    code, output = run.wait()
    assert code == 137, output
    assert "with areal-rloo resume " in output


def test_without_a_cluster_a_local_cluster_starts_and_ctrl_c_ends_it(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=10000", launcher="ray", environment={"RAY_USAGE_STATS_ENABLED": "0"})
    run.wait_for(lambda: len(run.records()) >= 2)
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 0, output
    assert_drained(run)
    assert run.children("areal_rloo.rollout") == []


@pytest.mark.rare
@pytest.mark.rare
def test_workers_leave_and_come_back_but_ray_gives_no_more(start: Callable[..., Run]) -> None:
    environment = {"RAY_USAGE_STATS_ENABLED": "0"}
    run = start("learner.num_train_steps=10000", "rollout.num_workers=2", launcher="ray", environment=environment)
    run.wait_for(lambda: bool(run.records()) and run.records()[-1].num_workers == 2)
    refused = _scale(run.folder, 3)
    assert (refused.returncode, "Ray has reserved places for 2 workers" in refused.stderr) == (2, True)
    for num_workers in (1, 2):
        assert _scale(run.folder, num_workers).returncode == 0
        run.wait_for(lambda n=num_workers: run.records()[-1].num_workers == n)  # type: ignore[misc]
    run.process.send_signal(signal.SIGINT)
    code, output = run.wait()
    assert code == 0, output
    assert_drained(run)


def _scale(folder: Path, num_workers: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_rloo.launcher.scale", str(folder), f"--workers={num_workers}"]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)


def test_a_submitted_job_runs_in_its_working_folder_and_drains(cluster: RayCluster, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    wait = '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}'
    submit = ["ray", "job", "submit", "--address", cluster.dashboard, "--runtime-env-json", wait, "--no-wait"]
    command = ["python", "-m", "areal_rloo.launcher.ray", "--config", "quickstart.yaml", f"run.folder={folder}"]
    environment = {**cluster.environment, "AREAL_RLOO_CACHE": str(REPO / ".pytest_cache" / "models")}
    options = with_last_values(*SMALL, "learner.num_train_steps=10000")
    submitted = subprocess.run(
        [*submit, "--working-dir", str(REPO), "--", *command, *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    found = re.search(r"raysubmit_\w+", submitted.stdout)
    assert found is not None, submitted.stdout
    job_id = found[0]
    _wait_for(lambda: _num_records(folder) >= 2, cluster, job_id)
    stopped = subprocess.run(
        ["ray", "job", "stop", "--address", cluster.dashboard, job_id],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    run = Run.__new__(Run)
    run.folder = folder
    assert gone(run)
    assert_drained(run)


def _num_records(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b'"trained_tokens"') if file.exists() else 0


def _wait_for(condition: Callable[[], bool], cluster: RayCluster, job_id: str) -> None:
    ends_s = time.monotonic() + 300
    while not condition():
        if time.monotonic() > ends_s:
            logs = ["ray", "job", "logs", "--address", cluster.dashboard, job_id]
            said = subprocess.run(logs, env=cluster.environment, capture_output=True, text=True, check=False).stdout
            raise AssertionError(f"the job makes no progress: {said}")
        time.sleep(0.2)
