"""A real run with a killed learner is replayed to the bit, from the initial model and from a checkpoint."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import REPO, Run

from areal_rloo.learner.batches import encode_batch, list_batches, list_starts, read_batch
from areal_rloo.learner.checkpoint_folder import list_checkpoints

pytestmark = pytest.mark.slow

NUM_STEPS = 14
REWARDS = "[{task: arithmetic}, {function: examples/custom_reward.py:brevity, weight: 0.3}]"
RECORDED = (
    "wire.record=true",
    f"learner.num_train_steps={NUM_STEPS}",
    "learner.num_minibatches=2",
    "algorithm.max_staleness=2",
    "algorithm.kl={coefficient: 0.05, adaptive: {target: 0.05, horizon: 100}}",
    "model.reference.refresh_every_n_versions=3",
    f"data.train.rewards={REWARDS}",
    "data.eval=null",
    "rollout.num_workers=2",
    "checkpoint.every_n_steps=3",
    "checkpoint.keep=2",
    "launcher.max_learner_restarts=1",
)


def _replay(folder: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "areal_rloo.replay", str(folder), *options]
    ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.rare
def test_a_run_with_a_killed_learner_is_replayed_to_the_bit(start: Callable[..., Run]) -> None:
    run = start(*RECORDED)
    run.wait_for_checkpoint(3)
    run.children("areal_rloo.learner")[0].kill()
    code, output = run.wait()
    assert code == 0, output
    assert "the learner restarts from step-0000" in output
    batches = run.folder / "batches"
    assert list(list_batches(batches)) == list(range(1, NUM_STEPS + 1))
    first, second = list_starts(batches)
    assert first == 0 < second
    assert any(record.staleness_max > 0 for record in run.records()), "no batch depends on the order of arrival"
    code, output = _replay(run.folder)
    assert code == 0, output
    assert f"{NUM_STEPS} equal to the bit, 0 different" in output
    saved = next(iter(list_checkpoints(run.folder / "checkpoints")))
    code, output = _replay(run.folder, "--from", str(saved))
    assert code == 0, output
    assert f"{NUM_STEPS - saved} equal to the bit, 0 different" in output

    path = list_batches(batches)[saved + 1][-1]  # the comparison sees a lost group
    path.write_bytes(encode_batch(read_batch(path)[1:]))
    code, output = _replay(run.folder, "--from", str(saved))
    assert code == 1, output
    assert "0 equal to the bit" in output
