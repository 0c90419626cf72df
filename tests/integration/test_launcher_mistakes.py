"""Messages of the local launcher before the start: mistakes in a config, and the plan."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "nope.yaml"], "nope.yaml: no such config file"),
        (["--config", "quickstart.yaml", "algorithm.group_sise=3"], "did you mean 'group_size'?"),
        (["--config", "quickstart.yaml", "rollout.num_workers=many"], "rollout.num_workers: expected int, got str"),
        (["--config", "quickstart.yaml", "algorithm.group_size=1"], "algorithm.group_size: expected at least 2"),
        (["--config", "quickstart.yaml", "model.path=/nowhere/model"], "model.path: /nowhere/model: no such folder"),
        (["--config", "quickstart.yaml", "learner.device=cuda"], "the plan needs 1 GPUs"),
        (["--config", "quickstart.yaml", "--fast"], "argument '--fast'"),
        (
            ["--config", "gsm8k_rloo.yaml", "rollout.sglang.python=/nowhere/python"],
            "rollout.sglang.python: expected a Python that has sglang, found none at /nowhere/python; run make sglang",
        ),
        (
            ["--config", "quickstart.yaml", "rollout.engine=sglang", "rollout.sglang.urls=[http://a:1, http://b:1]"],
            "rollout.sglang.urls: expected one for each of rollout.num_workers=1, got 2",
        ),
        (
            [
                *("--config", "quickstart.yaml", "rollout.engine=sglang", "rollout.sglang.urls=[http://127.0.0.1:1]"),
                "rollout.sglang.api_key_env=AREAL_RLOO_NO_SUCH_KEY",
            ],
            "rollout.sglang.api_key_env: expected the servers' key in the environment variable AREAL_RLOO_NO_SUCH_KEY",
        ),
        (
            ["--config", "quickstart.yaml", "rollout.engine=sglang", "rollout.sglang.arguments.port=1"],
            "rollout.sglang.arguments.port: not an option here: the worker takes a free port",
        ),
        (
            ["--config", "quickstart.yaml", "rollout.tensor_parallel=2"],
            "rollout.tensor_parallel: expected 1 with rollout.engine=embedded, got 2",
        ),
        (
            ["--config", "gsm8k_rloo.yaml", "rollout.engine=embedded", "data.train.path=no.jsonl", "data.eval=null"],
            "no.jsonl",
        ),
        (
            ["--config", "quickstart.yaml", "algorithm.group_filter=no.py:keep"],
            "algorithm.group_filter: no.py cannot be imported",
        ),
        (
            ["--config", "quickstart.yaml", "algorithm.preset=rlo"],
            "algorithm.preset: expected one of rloo, reinforce, grpo",
        ),
        (["--config", "quickstart.yaml", "run.folder=/proc/run"], "run.folder: /proc/run cannot be written"),
        (["--config", "quickstart.yaml", "run.folder=/nowhere", "--resume"], "holds no run"),
    ],
)
def test_a_mistake_prints_one_line_and_exits_with_2(arguments: list[str], words: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "areal_rloo.launcher.local", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("error: ")
    assert words in ended.stderr
    assert ended.stdout == ""


def test_a_port_in_use_and_an_unreadable_model_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for argument, words in (
            (f"wire.port={port}", f"wire.port: port {port} is in use"),
            (f"telemetry.metrics_port={port}", f"telemetry.metrics_port: port {port} is in use"),
            (f"model.path={tmp_path}", "config.json cannot be read"),
        ):
            command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", argument]
            ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
            assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
            assert words in ended.stderr


def test_a_dry_run_prints_config_and_plan_and_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml", "--dry-run"]
    ended = subprocess.run(
        [*command, f"run.folder={tmp_path / 'run'}", "rollout.num_workers=3"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0
    assert "max_staleness" in ended.stdout
    assert all(name in ended.stdout for name in ("warm_start", "learner", "rollout-0", "rollout-1", "rollout-2"))
    assert not (tmp_path / "run").exists()
