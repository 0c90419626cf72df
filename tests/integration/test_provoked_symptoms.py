"""Real runs that do not learn, one for each way: the terminal, the log and the report name the symptom.

`test_watched_runs.py` has the ways that need no training, and `test_provoked_learning_alarms.py` has those that need
another sampling, episode or bound.
"""

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.local_runs import Run
from support.patience import eventually

pytestmark = [pytest.mark.slow, pytest.mark.rare]

REWARDS = """
import pathlib

def num_steps():
    records = pathlib.Path({metrics!r})
    return records.read_bytes().count(b"reward_mean") if records.exists() else 0

def fading(prompt):
    # Later than the first steps, whatever the policy does, an answer is worth nothing.
    return float(num_steps() < 7)

def long(completion_ids):
    # A random model begins with long completions, so they become short first.
    return (-1 if num_steps() < 9 else 1) * len(completion_ids) / 64

def noise(completion_ids):
    return float(sum(completion_ids) % 2)
"""
ENOUGH = ("learner.groups_per_step=25", "learner.num_train_steps=24", "learner.microbatch_tokens=4096")
NO_EVALUATION = ("evaluation.every_n_versions=0", "data.eval=null")
EVALUATED = ("evaluation.every_n_versions=1", "data.eval.num_prompts=40")


@pytest.mark.parametrize(
    ("reward", "options", "symptoms"),
    [
        pytest.param(
            "noise", (*NO_EVALUATION, "learner.optimizer.max_grad_norm=1e-6"), {"always_clipped"}, id="tiny limit"
        ),
        pytest.param(
            "noise", (*NO_EVALUATION, "learner.optimizer.learning_rate=1.0"), {"entropy_collapse"}, id="huge rate"
        ),
        pytest.param(
            "long",
            (
                *(*NO_EVALUATION, "rollout.sampling.max_new_tokens=64", "learner.optimizer.learning_rate=0.01"),
                "learner.num_train_steps=40",
            ),
            {"longer"},
            id="reward for length",
        ),
        pytest.param("fading", EVALUATED, {"reward_fell", "accuracy_fell"}, id="worth nothing later"),
    ],
)
def test_a_run_says_why_it_does_not_learn(
    reward: str, options: tuple[str, ...], symptoms: set[str], start: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS.format(metrics=str(tmp_path / "run" / "metrics.jsonl")))
    rewards = f"rewards=[{{function: {tmp_path / 'rewards.py'}:{reward}}}]"
    of_evaluation = [f"data.eval.{rewards}"] if options is EVALUATED else []
    run = start(f"data.train.{rewards}", *ENOUGH, *options, *of_evaluation)
    code, output = run.wait()
    assert code == 0, output
    log, report = (run.folder / "logs" / "learner.log").read_text(), (run.folder / "report.html").read_text()
    for place in (output, log, report):
        assert symptoms <= set(re.findall(r"health: (\w+): ", place)), place[-3000:]
    timeline = report[report.index("<h2>Timeline") :].partition("</section>")[0]
    assert all(f">{name}</text>" in timeline for name in symptoms)


def test_a_worker_that_takes_no_weights_is_named(start: Callable[..., Run]) -> None:
    run = start(
        *("rollout.num_workers=2", "learner.num_train_steps=100000", "wire.heartbeat_timeout_s=1000"),
        *("weights.timeout_s=2", "launcher.drain_timeout_s=20", *NO_EVALUATION),
    )
    run.wait_for(lambda: len(run.records()) >= 2)
    stopped = run.children("areal_rloo.rollout")[0]
    stopped.send_signal(signal.SIGSTOP)
    log = run.folder / "logs" / "learner.log"
    try:
        eventually(lambda: "health: weights_late: a rollout worker is" in log.read_text(), "the symptom")
    finally:
        stopped.send_signal(signal.SIGCONT)
    eventually(lambda: "health: weights_late is over" in log.read_text(), "the end of the symptom")
    run.process.terminate()
    code, output = run.wait()
    assert code == 0, output
    assert output.count("health: weights_late: ") == 1
