"""Whole runs with SGLang servers: GSM8K with a managed server, and two runs in a row on an external server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.sglang_support import server_processes, sglang_python

from areal_rloo.config import SGLangConfig, load_config
from areal_rloo.engines.sglang.process import ServerPlan, ServerProcess
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import write_model
from areal_rloo.learner.team import Team
from areal_rloo.models.files import load_tokenizer
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord

REPO = Path(__file__).resolve().parents[2]
KEY = "AREAL_RLOO_TEST_SERVERS_KEY"

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


@pytest.fixture
def exported(tiny_folders: dict[str, Path], tmp_path: Path) -> Path:
    """Make a model in the form of a checkpoint."""
    folder = str(tiny_folders["qwen2"])
    rank = build_rank(load_config("quickstart.yaml"), model_path=folder, device=torch.device("cpu"))
    weights = Team(rank).whole_weights()
    write_model(tmp_path / "exported", rank.policy.causal, weights, tokenizer=load_tokenizer(folder))
    return tmp_path / "exported"


@pytest.fixture
def server(exported: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    plan = ServerPlan(exported, "cpu", "float32", 1, 8, 256, 1, model_context_tokens=4096)
    process = ServerProcess(sglang_python(), SGLangConfig(), plan, tmp_path / "server.log")
    yield process
    process.kill()


def _run(config: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", config, f"run.folder={folder}"),
        *("rollout.engine=sglang", "rollout.num_slots=8", "rollout.sampling.max_new_tokens=16"),
        *("algorithm.group_size=2", "learner.groups_per_step=4", "learner.num_train_steps=4"),
        "learner.optimizer.learning_rate=0.01",  # so that versions differ enough to reveal a wrong version
        *arguments,
    ]
    return subprocess.run(
        command, cwd=REPO, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=300
    )


def _run_at(server: ServerProcess, model: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    where = (f"model.path={model}", f"rollout.sglang.urls=[{server.url}]", f"rollout.sglang.api_key_env={KEY}")
    return _run("quickstart.yaml", folder, *where, "data.eval=null", *arguments, **{KEY: server.api_key})


def _train_records(folder: Path) -> list[TrainRecord]:
    return [record for record in read_records(folder / "metrics.jsonl") if isinstance(record, TrainRecord)]


def test_two_runs_in_sequence_share_a_server(server: ServerProcess, exported: Path, tmp_path: Path) -> None:
    """The second run finds the last weights and the prompt cache of the first run, and uses neither."""
    for name in ("first", "second"):
        done = _run_at(server, exported, tmp_path / name)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert summary["num_train_steps"] == 4
        fresh = _train_records(tmp_path / name)[0]
        assert set(fresh.staleness_tokens) == {0}
        assert fresh.mismatch_max < 1e-3, "its tokens are of the first weights, cache and all"
    assert server.exit_code() is None
    assert len(server_processes(tmp_path / "server.log")) >= 3
    wrong = _run_at(server, exported, tmp_path / "third", "rollout.tensor_parallel=2")
    assert wrong.returncode == 2
    assert "expected a server with tp_size 2, as rollout.tensor_parallel says, got 1" in wrong.stdout + wrong.stderr


def test_gsm8k_trains_on_a_managed_server(gsm8k_folder: Path, tmp_path: Path) -> None:
    done = _run(
        "gsm8k_rloo.yaml",
        tmp_path / "run",
        *(f"data.train.path={gsm8k_folder / 'train.jsonl'}", "data.max_prompt_tokens=1600", "data.eval.num_prompts=8"),
        *("model.path=tiny", "model.dtype=float32", "model.tiny.warm_start=null", "model.tiny.hidden_size=48"),
        *("model.tiny.num_layers=2", f"rollout.sglang.python={sglang_python()}", "rollout.num_workers=1"),
        *("learner.microbatch_tokens=4096", "learner.num_minibatches=1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["num_train_steps"] == 4
    assert ledger["admitted"] == ledger["trained"] + ledger["buffered"] + ledger["in_flight"]
    assert ledger["trained"] == 4 * 4 * 2
    assert server_processes(tmp_path / "run" / "logs" / "rollout-0.sglang.log") == []
