"""Completions without a reward are dropped; too many end the run with the reason."""

import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import RewardError, UserError
from areal_rloo.intake.reward_failures import RewardFailures

ERROR = RewardError(
    "reward_error", 'ValueError: no such thing\nTraceback:\n  File "mine.py", line 3\nValueError: no such thing\nmore\n'
)


def _failures(*overrides: str) -> RewardFailures:
    small = ["algorithm.group_size=4", "learner.groups_per_step=10", "learner.num_minibatches=1"]
    return RewardFailures(load_config("quickstart.yaml", [*small, *overrides]))


def test_rewards_that_always_fail_end_the_run_with_the_first_error() -> None:
    failures = _failures()
    for _ in range(19):
        failures.failed(ERROR)
    with pytest.raises(UserError) as caught:
        failures.failed(RewardError("reward_timeout", "late"))
    assert "20 of the last 20 completions got none, more than rollout.max_reward_failure_share=0.5" in str(caught.value)
    assert "the first: reward_error: ValueError: no such thing" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rewards_that_fail_half_the_time_never_end_the_run() -> None:
    failures = _failures()
    for _ in range(200):
        failures.scored(1)
        failures.failed(ERROR)
    with pytest.raises(UserError, match="21 of the last 40 completions"):
        failures.failed(ERROR)


def test_a_late_outage_of_a_service_is_noticed_within_a_batch() -> None:
    failures = _failures("rollout.max_reward_failure_share=0.25")
    failures.scored(100_000)
    for _ in range(10):
        failures.failed(ERROR)
    with pytest.raises(UserError, match="11 of the last 40 completions"):
        failures.failed(ERROR)


def test_rewards_without_a_process_do_not_end_the_run() -> None:
    """The worker ends after a while, and others may have their processes."""
    failures = RewardFailures(load_config("quickstart.yaml"))
    for _ in range(100):
        failures.failed(RewardError("reward_unavailable", "no process could be started"))
    assert sum(failures._failed) == 0
