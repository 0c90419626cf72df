"""Train on every prompt of a mixture once per epoch, across stops and with other numbers of workers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from areal_rloo.telemetry.trajectories import FILE_NAME, read_trajectories

REPO = Path(__file__).resolve().parents[2]
REWARD = "def score(completion_ids, level):\n    return len(completion_ids) % 3 + level\n"
SIZES = {"long": 74, "short": 28}

pytestmark = pytest.mark.slow


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    rewards = f"[{{function: {folder / 'score.py'}:score}}]"
    sources = ", ".join(
        f"{{task: rows, name: {name}, path: {folder / name}.jsonl, rewards: {rewards}}}" for name in SIZES
    )
    command = [
        *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
        f"run.folder={folder / 'run'}",
        f"data.train=[{sources}]",
        *("data.eval=null", "data.num_epochs=1", "telemetry.trajectories_per_step=1000000"),
        *("model.tiny.warm_start=null", "model.tiny.hidden_size=48", "model.tiny.num_layers=2"),
        *("rollout.num_slots=4", "rollout.sampling.max_new_tokens=24", "rollout.num_reward_workers=1"),
        *("algorithm.group_size=2", "learner.groups_per_step=3", "learner.num_train_steps=1000"),
        *("checkpoint.every_n_steps=2", "wire.heartbeat_s=0.2", "wire.heartbeat_timeout_s=30"),
        *arguments,
    ]
    return subprocess.Popen(
        command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )


def _steps(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _stop(run: "subprocess.Popen[str]", folder: Path, number: signal.Signals) -> None:
    """Send the signal after 4 more steps, in the middle of the epoch."""
    before = _steps(folder)
    while _steps(folder) < before + 4 and run.poll() is None:
        time.sleep(0.05)
    run.send_signal(number)
    out, _ = run.communicate(timeout=120)
    assert run.returncode == (0 if number == signal.SIGTERM else -number), out
    assert _steps(folder) < sum(SIZES.values()) // 3, "the epoch ended before the signal"


def test_a_run_stopped_twice_trains_on_every_prompt_of_the_mixture_once(tmp_path: Path) -> None:
    """Change the number of workers at each stop."""
    (tmp_path / "score.py").write_text(REWARD)
    for name, size in SIZES.items():
        rows = [{"prompt": f"{name} {index}", "level": index % 2} for index in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _stop(_start(tmp_path, "rollout.num_workers=1"), tmp_path, signal.SIGTERM)
    _stop(_start(tmp_path, "rollout.num_workers=2", "--resume"), tmp_path, signal.SIGKILL)
    last = _start(tmp_path, "rollout.num_workers=1", "--resume")
    out, _ = last.communicate(timeout=200)
    assert last.returncode == 0, out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["exit_reason"] == "end_of_data"
    trained = [t for t in read_trajectories(tmp_path / "run" / FILE_NAME) if t.dropped is None]
    seen = Counter((t.source, t.prompt, t.epoch, t.sample_index) for t in trained)
    assert seen == Counter(
        (name, f"{name} {index}", 0, sample)
        for name, size in SIZES.items()
        for index in range(size)
        for sample in (0, 1)
    )
    ledger = summary["ledger"]
    assert ledger["trained"] == 2 * sum(SIZES.values())
    dropped = sum(ledger["dropped"].values())  # on a slow machine, a group may be late: its prompt comes again
    assert ledger["admitted"] == ledger["trained"] + dropped
