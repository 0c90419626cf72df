"""Whole runs whose learner has several ranks, and runs that go on to the bit, under the local launcher."""

import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from local_runs import Run
from safetensors.torch import load_file
from torch import equal

from areal_rloo.telemetry.records import TrainRecord

pytestmark = pytest.mark.slow

NUM_STEPS = 12
# Each completion is decoded alone: then its logprobs do not depend, in their last bit, on which others there are.
TO_THE_BIT = (
    "algorithm.max_staleness=0",
    "rollout.num_slots=1",
    f"learner.num_train_steps={NUM_STEPS}",
    "learner.num_minibatches=2",
    "learner.optimizer={schedule: cosine, warmup_steps: 3, learning_rate: 1e-3}",
    "evaluation.every_n_versions=0",
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


def _resumed(run: Run, *arguments: str) -> None:
    again = Run(run.folder, *arguments, "--resume")
    code, output = again.wait()
    assert again.process.stdout is not None
    again.process.stdout.close()
    assert code == 0, output
    assert "resuming from" in (run.folder / "logs" / "learner.log").read_text()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_was_stopped_or_killed_goes_on_to_the_bit(start: Callable[..., Run], num_ranks: int) -> None:
    arguments = (*TO_THE_BIT, f"learner.num_ranks={num_ranks}", "checkpoint.every_n_steps=2")
    whole = start(*arguments, name="whole")
    code, output = whole.wait()
    assert code == 0, output
    killed = start(*arguments, name="killed")
    killed.wait_for_checkpoint(2)
    killed.children("areal_rloo.learner")[0].kill()
    assert killed.wait()[0] != 0
    _resumed(killed, *arguments)
    _assert_same_end(killed, whole)
    if num_ranks == 1:
        stopped = start(*arguments, name="stopped")
        stopped.wait_for(lambda: len(stopped.records()) >= 3)
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.wait()[0] == 0
        assert len(stopped.records()) < NUM_STEPS
        _resumed(stopped, *arguments)
        _assert_same_end(stopped, whole)


def test_two_ranks_train_as_one_does_and_any_number_goes_on_from_their_checkpoint(start: Callable[..., Run]) -> None:
    arguments = (*TO_THE_BIT, "checkpoint.every_n_steps=3")
    alone = start(*arguments, name="alone")
    code, output = alone.wait()
    assert code == 0, output
    run = start(*arguments, "learner.num_ranks=2", "learner.gradient_checkpointing=true")
    run.wait_for_checkpoint(3)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 0
    saved = run.folder / "checkpoints" / f"step-{run.saved_steps():06d}"
    assert len(list((saved / "shards").glob("*.distcp"))) == 2
    _resumed(run, *arguments, "learner.num_ranks=3")
    first, expected = run.records()[0], alone.records()[0]
    assert first.trained_tokens == expected.trained_tokens
    assert first.loss == pytest.approx(expected.loss, rel=1e-3)
    assert first.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    assert [record.num_train_steps for record in run.records()] == list(range(1, NUM_STEPS + 1))
    assert {"waiting", "proximal", "forward", "backward", "optimizer", "gather", "broadcast"} <= first.times_s.keys()


def test_a_rank_that_dies_ends_the_run_and_is_named_with_how_to_go_on(start: Callable[..., Run]) -> None:
    run = start("learner.num_train_steps=1000", "learner.num_ranks=2", "checkpoint.every_n_steps=2")
    run.wait_for_checkpoint(2)
    follower = next(p for p in run.children("areal_rloo.learner") if "--rank=1" in p.cmdline())
    follower.kill()
    code, output = run.wait()
    assert code != 0
    assert "learner-1 ended with code 137" in output
    assert "--resume" in output
    assert not psutil.pid_exists(follower.pid)
