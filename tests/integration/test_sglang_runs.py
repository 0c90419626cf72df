"""Whole runs with SGLang servers that run already, one run after the other on the same server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_support import server_processes, sglang_python

from areal_rloo.config import SGLangConfig
from areal_rloo.engines.sglang.process import ServerPlan, ServerProcess

REPO = Path(__file__).resolve().parents[2]
KEY = "AREAL_RLOO_TEST_SERVERS_KEY"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def server(tiny_folders: dict[str, Path], tmp_path: Path) -> Iterator[ServerProcess]:
    plan = ServerPlan(tiny_folders["qwen2"], 4096, "cpu", "float32", 1, 8, 256, 1)
    process = ServerProcess(sglang_python(), SGLangConfig(), plan, tmp_path / "server.log")
    yield process
    process.kill()


def _run(server: ServerProcess, model: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", f"run.folder={folder}"),
        *(f"model.path={model}", "rollout.engine=sglang", f"rollout.sglang.urls=[{server.url}]"),
        *(f"rollout.sglang.api_key_env={KEY}", "rollout.num_slots=8", "rollout.sampling.max_new_tokens=16"),
        *("algorithm.group_size=2", "learner.groups_per_step=4", "learner.num_train_steps=4", "data.eval=null"),
        "learner.optimizer.learning_rate=0.01",  # so that versions differ, and a mistaken one shows
        *arguments,
    ]
    environment = {**os.environ, KEY: server.api_key}
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_runs_follow_each_other_on_a_server_that_goes_on(
    server: ServerProcess, tiny_folders: dict[str, Path], tmp_path: Path
) -> None:
    """The second run finds the weights and the prompt cache of the first one's last version, and uses neither."""
    for name in ("first", "second"):
        done = _run(server, tiny_folders["qwen2"], tmp_path / name)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["num_train_steps"] == 4
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_bytes().splitlines()]
        fresh = records[0]
        assert fresh["staleness_tokens"] == {"0": sum(fresh["staleness_tokens"].values())}
        assert fresh["mismatch_max"] < 1e-3, "its tokens are of the first weights, cache and all"
    assert server.exit_code() is None
    assert len(server_processes(tmp_path / "server.log")) >= 3
    wrong = _run(server, tiny_folders["qwen2"], tmp_path / "third", "rollout.tensor_parallel=2")
    assert wrong.returncode == 2
    assert "expected a server with tp_size 2, as rollout.tensor_parallel says, got 1" in wrong.stdout + wrong.stderr
