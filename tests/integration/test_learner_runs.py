"""Whole runs with several learner ranks, and runs that resume bit for bit, under the local launcher."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from safetensors.torch import load_file
from support.local_runs import REPO, Run
from torch import equal

from areal_rloo.telemetry.records import TrainRecord

pytestmark = pytest.mark.slow

NUM_STEPS = 12
# Each completion is decoded alone: then its logprobs do not depend, in their last bit, on which others there are.
TO_THE_BIT = (
    "algorithm.max_staleness=0",
    "rollout.num_slots=1",
    "rollout.sampling.max_new_tokens=12",
    f"learner.num_train_steps={NUM_STEPS}",
    "learner.num_minibatches=2",
    "learner.optimizer={schedule: cosine, warmup_steps: 3, learning_rate: 1e-3}",
    "evaluation.every_n_versions=0",
    "checkpoint.every_n_steps=2",
    "checkpoint.partial_rollouts=false",  # a continued sample has other rounding errors
)


def _numbers(record: TrainRecord) -> dict[str, object]:
    fields = ("loss", "reward_mean", "gradient_norm", "learning_rate", "trained_tokens", "entropy", "mismatch_max")
    return {"step": record.num_train_steps} | {name: getattr(record, name) for name in fields}


def _assert_same_end(one: Run, other: Run) -> None:
    ours, theirs = ([_numbers(record) for record in run.records()] for run in (one, other))
    assert [msgspec.json.encode(row) for row in ours] == [msgspec.json.encode(row) for row in theirs]
    last = Path("checkpoints") / f"step-{NUM_STEPS:06d}" / "model" / "model.safetensors"
    weights, expected = load_file(one.folder / last), load_file(other.folder / last)
    assert weights.keys() == expected.keys()
    assert all(equal(weights[name], expected[name]) for name in expected)


def _resume(run: Run, *arguments: str) -> None:
    """Start the launcher again on the folder of this run, and wait for the end."""
    again = Run(run.folder, *arguments, "--resume")
    code, output = again.wait()
    assert again.process.stdout is not None
    again.process.stdout.close()
    assert code == 0, output
    assert "resume: from step" in (run.folder / "logs" / "learner.log").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of one rank that nothing interrupted."""
    environment = {"AREAL_RLOO_CACHE": str(REPO / ".pytest_cache" / "models")}
    run = Run(tmp_path_factory.mktemp("runs") / "whole", *TO_THE_BIT, environment=environment)
    code, output = run.wait()
    assert code == 0, output
    return run


@pytest.mark.rare
def test_a_stopped_then_killed_run_resumes_bit_for_bit(start: Callable[..., Run], whole: Run) -> None:
    run = start(*TO_THE_BIT)
    run.wait_for(lambda: len(run.records()) >= 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 0
    saved = run.saved_steps()
    assert 2 <= saved == len(run.records()) < NUM_STEPS - 4, "there is no room for a second stop"
    again = start(*TO_THE_BIT, "--resume")
    again.wait_for_checkpoint(saved + 1)
    again.children("areal_rloo.learner")[0].kill()
    assert again.wait()[0] != 0
    _resume(run, *TO_THE_BIT)
    _assert_same_end(run, whole)


def test_two_ranks_resume_bit_for_bit_and_as_three_ranks(start: Callable[..., Run], tmp_path: Path) -> None:
    arguments = (*TO_THE_BIT, "learner.gradient_checkpointing=true")
    two_ranks = (*arguments, "learner.num_ranks=2")
    uninterrupted = start(*two_ranks, name="uninterrupted")
    code, output = uninterrupted.wait()
    assert code == 0, output
    times_s = uninterrupted.records()[0].times_s
    assert {"waiting", "proximal", "forward", "backward", "optimizer", "gather", "broadcast"} <= times_s.keys()

    killed = start(*two_ranks, name="killed")
    killed.wait_for_checkpoint(2)
    killed.children("areal_rloo.learner")[0].kill()
    assert killed.wait()[0] != 0
    saved = killed.folder / "checkpoints" / f"step-{killed.saved_steps():06d}"
    assert len(list((saved / "shards").glob("rank-*-of-2.safetensors"))) == 2
    shutil.copytree(killed.folder, tmp_path / "before")
    _resume(killed, *two_ranks)
    _assert_same_end(killed, uninterrupted)
    shutil.rmtree(killed.folder)
    (tmp_path / "before").rename(killed.folder)
    _resume(killed, *arguments, "learner.num_ranks=3")
    assert [record.num_train_steps for record in killed.records()] == list(range(1, NUM_STEPS + 1))


def test_a_dead_rank_ends_the_run_and_is_named_with_the_remedy(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=1000", "learner.num_ranks=2", "checkpoint.every_n_steps=2")
    run.wait_for_checkpoint(2)
    follower = run.rank(1)
    follower.kill()
    code, output = run.wait()
    assert code != 0
    assert "learner-1 ended with code 137" in output
    assert "areal-rloo resume " in output
    assert not psutil.pid_exists(follower.pid)
