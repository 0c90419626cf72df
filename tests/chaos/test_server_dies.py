"""Kill or stop the server of a run at random moments: the run continues and loses nothing.

`AREAL_RLOO_CHAOS_ROUNDS` is the number of failures (1 by default). A round ends after another train step.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.local_runs import balanced
from support.processes import command_of
from support.server_support import SERVERS

REPO = Path(__file__).resolve().parents[2]
NUM_ROUNDS = int(os.environ.get("AREAL_RLOO_CHAOS_ROUNDS", "1"))
ROUND_TIMEOUT_S = 180

pytestmark = [pytest.mark.full, pytest.mark.rare, pytest.mark.timeout(120 + NUM_ROUNDS * ROUND_TIMEOUT_S)]


@pytest.fixture(params=SERVERS)
def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    kind, key = request.param, f"rollout.{request.param}"
    command = [
        *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
        *(f"run.folder={tmp_path / 'run'}", f"rollout.engine={kind}", f"{key}.python={SERVERS[kind].python()}"),
        *(f"{key}.health_every_s=1", f"{key}.health_timeout_s=6", "weights.timeout_s=15"),
        *(f"{key}.max_server_restarts=1000", "rollout.num_slots=8", "rollout.sampling.max_new_tokens=48"),
        *("model.tiny.warm_start=null", "model.tiny.num_layers=2", "data.eval=null"),
        *("model.tiny.hidden_size=64", "model.tiny.num_heads=2", "model.tiny.num_kv_heads=2"),  # vLLM needs heads of 32
        *("algorithm.group_size=4", "learner.groups_per_step=6", "learner.num_train_steps=100000"),
        *("checkpoint.every_n_steps=0", "telemetry.progress=false"),
    ]
    process = subprocess.Popen(command, cwd=REPO)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def test_a_run_survives_random_server_failures(launcher: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    folder, chance, steps = tmp_path / "run", random.Random(NUM_ROUNDS), 0
    seen: set[psutil.Process] = set()
    for number in range(NUM_ROUNDS):
        _wait_for_step(steps + 1, folder, launcher)
        time.sleep(chance.uniform(0, 4))
        processes = _server_processes(launcher.pid)
        seen |= set(processes)
        victim = chance.choice(processes)
        blow = chance.choice([signal.SIGKILL, signal.SIGSTOP])
        steps = _num_steps(folder) + 1  # a further step may be under way already
        sys.stdout.write(f"round {number}, step {steps}: {blow.name} to {victim.name()}\n")
        victim.send_signal(blow)
    _wait_for_step(steps + 1, folder, launcher)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=120) == 0

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["exit_reason"] == "drained"
    ledger = summary["ledger"]
    assert ledger["dropped"].keys() <= {"stale"}, "the prompts come again"
    assert balanced(ledger)
    records = [json.loads(line) for line in (folder / "trajectories.jsonl").read_bytes().splitlines()]
    identities = [(record["group_id"], record["sample_index"]) for record in records]
    assert len(identities) == len(set(identities)) > 0
    assert [process for process in seen if process.is_running()] == []


def _num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b'"kind":"train"') if path.exists() else 0


def _wait_for_step(number: int, folder: Path, launcher: "subprocess.Popen[bytes]") -> None:
    ends_s = time.monotonic() + ROUND_TIMEOUT_S
    while _num_steps(folder) < number:
        assert launcher.poll() is None, f"the run ended with {launcher.returncode} before step {number}"
        assert time.monotonic() < ends_s, f"step {number} did not come within {ROUND_TIMEOUT_S} s"
        time.sleep(0.1)


def _server_processes(launcher_pid: int) -> list[psutil.Process]:
    """Return the processes of the server. All exist, because a step was made."""
    words = {p: " ".join(command_of(p)) for p in psutil.Process(launcher_pid).children(recursive=True)}
    starts = ("sglang::", "VLLM::")
    names = ("sglang.launch_server", "vllm.entrypoints.cli.main")
    return [
        process
        for process, line in words.items()
        if line.startswith(starts) or (any(name in line for name in names) and "keeper.py" not in line)
    ]
