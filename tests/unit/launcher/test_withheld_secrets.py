"""The key of SGLang servers is in the environment of the rollout workers alone."""

import sys
from pathlib import Path

import msgspec
import pytest
from support.patience import eventually

from areal_rloo.config import load_config
from areal_rloo.launcher.placement import Host, place, with_counts
from areal_rloo.launcher.plan import JobRequest, ProcessSpec, plan_run
from areal_rloo.launcher.processes import LocalStarter
from areal_rloo.launcher.slurm.job import step_command

NAME, KEY = "AREAL_RLOO_TEST_KEY", "a-secret-of-a-test"
OPTIONS = ("rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:1]", f"rollout.sglang.api_key_env={NAME}")


def _specs(folder: Path) -> dict[str, ProcessSpec]:
    hosts = [Host("here", "127.0.0.1", 4, (), 2**34)]
    config = with_counts(load_config("quickstart.yaml", OPTIONS), hosts)
    request = JobRequest(config, place(config, hosts), folder, "tcp://127.0.0.1:1", 0, False)
    return {spec.name: spec for spec in plan_run(request, model_path="tiny").processes}


@pytest.mark.parametrize(("name", "has_key"), [("warm_start", False), ("learner", False), ("rollout-0", True)])
def test_only_a_rollout_worker_gets_the_key_of_servers(
    tmp_path: Path, name: str, has_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, KEY)
    program = "print(open('/proc/self/environ').read())"
    spec = msgspec.structs.replace(_specs(tmp_path)[name], command=(sys.executable, "-c", program))
    starter, log = LocalStarter(1.0), tmp_path / "out"
    process = starter.start(spec, log)
    eventually(lambda: process.exit_code() is not None, "the process ends")
    starter.close()
    assert (KEY in log.read_text()) == has_key
    assert "OMP_NUM_THREADS" in log.read_text()


def test_a_step_of_slurm_unsets_the_key(tmp_path: Path) -> None:
    launcher = load_config("quickstart.yaml").launcher
    commands = {name: step_command(spec, launcher, tmp_path) for name, spec in _specs(tmp_path).items()}
    unset = {name for name, command in commands.items() if f"--unset={NAME}" in command}
    assert unset == {"warm_start", "learner"}
