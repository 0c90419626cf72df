"""Unfinished samples of a checkpoint go on after a resume, and a stopped worker's samples on another worker."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run, balanced, gone

from areal_rloo.learner.batches import list_batches, read_batch
from areal_rloo.learner.checkpoint import read_state
from areal_rloo.learner.checkpoint_folder import list_checkpoints
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.wire.turns import RecordedTurn, decode_turns

pytestmark = pytest.mark.slow

LONG = (
    "wire.record=true",
    "data.eval=null",
    "learner.num_train_steps=4",
    "algorithm.max_staleness=4",  # on a slow machine too, no group is past the deadline, where a sample begins anew
    "learner.num_minibatches=2",
    "learner.microbatch_tokens=4096",
    "rollout.num_workers=2",
    "rollout.sampling.max_new_tokens=240",
    "checkpoint.every_n_steps=0",
)
MULTI_TURN = (
    "rollout.episode.type=multi_turn",
    "rollout.episode.max_turns=3",
    "rollout.episode.max_turn_tokens=75",
)

# The engine is much slower than the learner, so most samples are unfinished at each checkpoint.
SLOW = """
import time
from areal_rloo.engines.embedded.scheduler import Scheduler

step = Scheduler.step

def slow(self, *arguments, **options):
    time.sleep(0.01)
    return step(self, *arguments, **options)

Scheduler.step = slow
"""


@pytest.fixture
def slow(tmp_path: Path) -> str:
    (tmp_path / "slow.py").write_text(SLOW)
    return f"run.entry={tmp_path / 'slow.py'}"


def _saved(folder: Path) -> dict[SampleId, tuple[RecordedTurn, ...]]:
    """Return the partial rollouts of the newest checkpoint."""
    groups = read_state(list(list_checkpoints(folder / "checkpoints").values())[-1]).ledger.groups
    return {(g.group_id, s.sample_index): decode_turns(s.partial) for g in groups for s in g.samples if s.partial}


def _trained(folder: Path) -> dict[SampleId, Trajectory]:
    batches = [read_batch(paths[-1]) for paths in list_batches(folder / "batches").values()]
    return {made.sample_id: made for batch in batches for group in batch for made in group.trajectories}


def _begins_with(trajectory: Trajectory, turns: tuple[RecordedTurn, ...]) -> bool:
    completion = trajectory.completion
    start = 0
    for number, (_, turn) in enumerate(turns):
        end = start + len(turn.tokens)
        if any(
            ours[start:end].tobytes() != theirs.tobytes()
            for ours, theirs in (
                (completion.tokens, turn.tokens),
                (completion.behaviour_logprobs, turn.behaviour_logprobs),
                (completion.versions, turn.versions),
            )
        ):
            return False
        start += sum(completion.spans[2 * number : 2 * number + 2])
    return True


@pytest.mark.rare
def test_unfinished_samples_of_a_drained_run_go_on_after_its_resume(start: Callable[..., Run], slow: str) -> None:
    run = start(*LONG, *MULTI_TURN, slow)
    run.wait_for(lambda: len(run.records()) >= 2)
    run.process.send_signal(signal.SIGTERM)
    code, output = run.wait()
    assert code == 0, output
    saved = _saved(run.folder)
    assert len(saved) > 4
    code, output = start(*LONG, *MULTI_TURN, slow, "--resume").wait()
    assert code == 0, output
    _assert_continued(run.folder, saved)


def test_after_a_kill_samples_go_on_and_then_on_another_worker(start: Callable[..., Run], slow: str) -> None:
    run = start(*LONG, slow, "checkpoint.every_n_steps=1000")  # and after the first step
    run.wait_for_checkpoint(1)
    run.process.kill()
    run.process.wait()
    assert gone(run)
    saved = _saved(run.folder)
    assert saved
    again = start(*LONG, slow, "--resume")
    logs = [run.folder / "logs" / f"rollout-{number}.log" for number in range(2)]
    continuing = lambda: [log.stem for log in logs if "continues sample" in log.read_text()]  # noqa: E731
    again.wait_for(lambda: bool(continuing()))
    name = continuing()[0]
    (worker,) = (each for each in again.children("areal_rloo.rollout") if f"--worker-id={name}" in each.cmdline())
    worker.terminate()
    code, output = again.wait()
    assert code == 0, output
    _assert_continued(run.folder, saved)
    written = "".join(log.read_text() for log in logs)
    assert written.count("continues sample") > len(saved), "the stopped worker's samples began anew elsewhere"


def _assert_continued(folder: Path, saved: dict[SampleId, tuple[RecordedTurn, ...]]) -> None:
    trained, ledger = _trained(folder), json.loads((folder / "summary.json").read_text())["ledger"]
    for sample_id, turns in saved.items():
        assert _begins_with(trained[sample_id], turns), f"sample {sample_id} began anew"
    assert balanced(ledger)
    assert ledger["trained"] == 4 * 16
    assert ledger["dropped"].keys() <= {"stale"}, "a slow machine; the prompts come again"
