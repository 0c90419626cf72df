"""Completions without a reward are dropped; too many end the run with the reason, or set their worker aside."""

import random
import re
from collections.abc import Collection

import msgspec
import numpy as np
import pytest
from support.intakes import LEARNER, ONE_GROUP, duties_of, fail, heartbeat, make_intake, make_offers

from areal_rloo.config import load_config
from areal_rloo.errors import RewardError, UserError, shortened
from areal_rloo.intake.fleet import SET_ASIDE_S
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.reward_failures import RewardFailures, _Outcomes
from areal_rloo.intake.worker import LAST_OUTCOMES, Standing
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.messages import Abort, Duty, Finished, Goodbye, Heartbeat, Hello, Results, Work, digest

ERROR = RewardError(
    "reward_error", 'ValueError: no such thing\nTraceback:\n  File "mine.py", line 3\nValueError: no such thing\nmore\n'
)

NO_PROCESS = RewardError("reward_unavailable", "no process could be started")


@pytest.mark.parametrize("seed", range(5))
def test_the_count_of_failures_is_that_of_the_last_outcomes(seed: int) -> None:
    rng, outcomes, last = random.Random(seed), _Outcomes(7), list[bool]()
    for _ in range(50):
        failed = rng.random() < 0.5
        outcomes.append(failed)
        last = [*last, failed][-7:]
        assert (outcomes.num_failed, len(outcomes)) == (sum(last), len(last))


class _Failures:
    """The failures of a small config, with workers that have completions or duties."""

    def __init__(self, *overrides: str, num_workers: int = 1) -> None:
        small = ["algorithm.group_size=4", "learner.groups_per_step=10", "learner.num_minibatches=1"]
        self._failures = RewardFailures(load_config("quickstart.yaml", [*small, *overrides]))
        self.standings = [Standing() for _ in range(num_workers)]

    def scored(self, number: int = 0) -> None:
        self._failures.scored(self.standings[number])

    def failed(self, number: int = 0, error: RewardError = ERROR) -> None:
        self._failures.failed(self.standings[number], error, self._votes())

    def blamed(self) -> list[int]:
        judged = enumerate(self.standings)
        return [number for number, standing in judged if self._failures.blame(standing, self._votes())]

    def _votes(self) -> list[Collection[bool]]:
        return [standing.failed for standing in self.standings]


def test_rewards_that_always_fail_end_the_run_with_the_first_error() -> None:
    failures = _Failures()
    for _ in range(19):
        failures.failed()
    with pytest.raises(UserError) as caught:
        failures.failed(error=RewardError("reward_timeout", "late"))
    assert "20 of the last 20 completions got no reward, more than rollout.max_reward_failure_share=0.5" in str(
        caught.value
    )
    assert "the first: reward_error: ValueError: no such thing" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_traceback_is_promised_only_for_an_error_that_has_one() -> None:
    long = shortened(f"ValueError: no\nTraceback:\n{'x' * 5000}\n{ERROR.detail}")  # only the end is kept
    wrong_type = RewardError("reward_wrong_type", "mine: the reward: expected a number, got str")
    for error, promised in ((ERROR, True), (RewardError("reward_error", long), True), (wrong_type, False)):
        failures = _Failures()
        with pytest.raises(UserError) as caught:
            for _ in range(20):
                failures.failed(error=error)
        assert str(caught.value).endswith(" (its traceback is in logs/learner.log)") is promised


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        ("reward_error", "rewards"),
        ("reward_timeout", "rewards"),
        ("generation_failed", "rollout.engine=embedded"),
        ("episode_error", "rollout.episode."),
        ("episode_timeout", "rollout.episode."),
        ("mine", "rollout.episode."),
    ],
)
@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("rollout.episode.type=my.py:Mine",), "type=my.py:Mine"),
        (("rollout.episode.type=agent", "rollout.episode.agent=my.py:play"), "agent=my.py:play"),
        ((), "type=single_turn"),
    ],
)
def test_the_end_of_a_run_names_the_code_that_failed(
    reason: str, key: str, options: tuple[str, ...], name: str
) -> None:
    failures = _Failures(*options)
    expected = key + (name if key.endswith(".") else "") + ": 20 of the last 20 completions got no reward"
    with pytest.raises(UserError, match=f"^{re.escape(expected)}, more than .*; the first: {reason}: no$"):
        for _ in range(20):
            failures.failed(error=RewardError(reason, "no"))


def test_rewards_that_fail_half_the_time_never_end_the_run() -> None:
    failures = _Failures()
    for _ in range(200):
        failures.scored()
        failures.failed()
    with pytest.raises(UserError, match="21 of the last 40 completions"):
        failures.failed()


def test_a_late_outage_of_a_service_is_noticed_within_a_batch() -> None:
    failures = _Failures("rollout.max_reward_failure_share=0.25")
    for _ in range(1000):
        failures.scored()
    for _ in range(10):
        failures.failed()
    with pytest.raises(UserError, match="11 of the last 40 completions"):
        failures.failed()


def test_rewards_without_a_process_do_not_end_the_run() -> None:
    """The worker ends after a while, and others may have their processes."""
    failures = _Failures()
    for _ in range(100):
        failures.failed(error=NO_PROCESS)
    assert failures.blamed() == []  # there is no other worker


@pytest.mark.parametrize(("num_workers", "num_failing"), [(2, 1), (3, 1), (4, 2), (9, 4)])
def test_a_few_workers_cannot_end_a_run(num_workers: int, num_failing: int) -> None:
    """Not before the others have a completion, either."""
    failures = _Failures(num_workers=num_workers)
    for _ in range(3):
        for number in range(num_failing):
            for _ in range(100):
                failures.failed(number)
        for number in range(num_failing, num_workers):
            failures.scored(number)
    assert failures.blamed() == list(range(num_failing))


@pytest.mark.parametrize("num_workers", [2, 3, 9])
def test_most_workers_end_the_run_as_early_as_a_single_one(num_workers: int) -> None:
    failures = _Failures(num_workers=num_workers)
    for turn in range(19):
        failures.failed(turn % num_workers)
    with pytest.raises(UserError, match="20 of the last 20 completions"):
        failures.failed()


def test_a_prompt_whose_rewards_fail_sets_nobody_aside() -> None:
    """A worker generates a whole group, so most of its last completions can fail."""
    failures = _Failures(num_workers=3)
    for _ in range(40):
        failures.scored(1)
    for _ in range(20):
        failures.failed(0)
    assert failures.blamed() == []


def test_a_worker_whose_completions_mostly_get_rewards_is_not_to_blame() -> None:
    """Although too many of all failed: those of another worker."""
    failures = _Failures(num_workers=3)
    for _ in range(20):
        failures.failed(0)
        failures.failed(1)
        for _ in range(3):
            failures.scored(1)
    for _ in range(40):
        failures.failed(0)
    assert failures.blamed() == [0]


def test_the_last_completions_of_a_worker_decide_whether_it_is_to_blame() -> None:
    failures = _Failures(num_workers=3)
    for _ in range(LAST_OUTCOMES):
        failures.failed(0)
        failures.failed(0)
    assert failures.blamed() == [0]
    for _ in range(LAST_OUTCOMES // 2):
        failures.scored(0)
    assert failures.blamed() == []


def test_nobody_is_to_blame_when_most_workers_are_without_a_process() -> None:
    """Their completions say nothing about the rewards, but neither can the one worker with a process be judged."""
    failures = _Failures(num_workers=3)
    for number, error in ((0, ERROR), (1, NO_PROCESS), (2, NO_PROCESS)):
        for _ in range(LAST_OUTCOMES):
            failures.failed(number, error)
    assert failures.blamed() == []


def test_only_twenty_rewards_in_a_row_end_the_doubling_of_the_time() -> None:
    failures = _Failures(num_workers=2)
    failures.standings[0].num_set_aside = 3
    for _ in range(LAST_OUTCOMES - 1):
        failures.scored(0)
    assert failures.standings[0].num_set_aside == 3
    failures.failed(0)
    for _ in range(LAST_OUTCOMES - 1):
        failures.scored(0)
        assert failures.standings[0].num_set_aside == 3
    failures.scored(0)
    assert failures.standings[0].num_set_aside == 0


# -- in the intake -----------------------------------------------------------------------------------------------------


def _hello(worker_id: str) -> Hello:
    return Hello(worker_id, "1", 2, 0, None, 1, 0, (), Work())


def _with_a_bad_and_a_good_worker() -> tuple[Intake, list[Duty], list[Duty]]:
    """Return an intake with two groups, and the duties of each worker."""
    intake = make_intake(make_offers(), *ONE_GROUP, "learner.groups_per_step=2")
    good = duties_of(intake.handle("good", _hello("good"), 0.0), "good")
    bad = duties_of(intake.handle("bad", _hello("bad"), 0.0), "bad")
    assert len(good) == len(bad) == 2
    return intake, bad, good


def test_a_worker_that_fails_alone_is_set_aside_for_a_while() -> None:
    intake, bad, good = _with_a_bad_and_a_good_worker()
    for _ in range(LAST_OUTCOMES // 2):
        assert intake.fleet.alive["bad"].gets_leases
        bad = duties_of(fail(intake, "bad", bad), "bad")
    assert bad == []
    assert intake.fleet.statistics(0.0).set_aside == 1
    assert intake.statistics().ledger.balanced
    for now_s in (1.0, SET_ASIDE_S - 1.0):
        for worker, duties in (("bad", []), ("good", good)):
            work = Work(0.0, int(now_s))  # each makes progress, or says so
            digested = digest(duties)
            intake.handle(worker, Heartbeat(LEARNER, 1, 100, digested, 0, 0, receiving=False, work=work), now_s)
        intake.tick(now_s)
    assert not intake.fleet.alive["bad"].gets_leases
    assert len(duties_of(intake.tick(SET_ASIDE_S), "bad")) == 2


def test_the_unfinished_samples_of_a_worker_set_aside_go_elsewhere() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "learner.groups_per_step=20", "algorithm.group_size=2")
    duties = duties_of(intake.handle("bad", msgspec.structs.replace(_hello("bad"), capacity_samples=30), 0.0), "bad")
    intake.handle("good", msgspec.structs.replace(_hello("good"), capacity_samples=40), 0.0)
    sent = fail(intake, "bad", duties[:20])
    assert [to for to, message in sent if isinstance(message, Abort)] == ["bad"]
    samples = {duty.sample_id for duty in duties_of(sent, "good")}
    assert {duty.sample_id for duty in duties[20:]} <= samples
    assert intake.fleet.alive["bad"].duties == set()


def test_the_last_worker_is_tried_again_when_no_other_is_awaited() -> None:
    """The others may leave: better than to stand still."""
    intake, bad, _ = _with_a_bad_and_a_good_worker()
    for _ in range(LAST_OUTCOMES // 2):
        bad = duties_of(fail(intake, "bad", bad), "bad")
    assert bad == []
    intake.handle("good", Goodbye(LEARNER, Work()), 0.0)
    for second in range(0, 299, 10):
        intake.handle("bad", heartbeat(), float(second))
        assert duties_of(intake.tick(float(second)), "bad") == [], "the other may come back"
    assert len(duties_of(intake.tick(300.0), "bad")) == 2


def test_rewards_that_fail_for_every_fourth_completion_end_no_run() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "algorithm.group_size=4")
    zero, prompt = np.zeros(1, np.int32), np.array([1, 2], np.int32)
    completion = Completion(zero, np.array([-1.0], np.float32), zero, "stop")
    duties = duties_of(intake.handle("w", msgspec.structs.replace(_hello("w"), capacity_samples=4), 0.0), "w")
    for _ in range(2 * LAST_OUTCOMES):
        fail(intake, "w", duties[:1])
        made = (Finished(each.lease_id, (Trajectory(*each.sample_id, prompt, completion, 1.0),)) for each in duties[1:])
        intake.handle("w", Results(LEARNER, 7, tuple(made)), 0.0)
        assert intake.take_batch() is not None
        duties = duties_of(intake.refuse_batch("a test"), "w")


def test_a_late_failure_of_a_worker_taken_for_dead_drops_the_sample() -> None:
    """It waits for another worker still."""
    intake = make_intake(make_offers(), *ONE_GROUP)
    duties = duties_of(intake.handle("w", _hello("w"), 0.0), "w")
    intake.tick(1000.0)
    fail(intake, "w", duties[:1])
    assert intake.statistics().ledger.dropped == {"reward_error": 1}


def test_a_sample_without_a_reward_process_is_generated_again() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.max_attempts=3")
    duties = duties_of(intake.handle("w", _hello("w"), 0.0), "w")
    for _ in range(2):
        again = duties_of(fail(intake, "w", duties, "reward_unavailable"), "w")
        assert [duty.sample_id for duty in again] == [duty.sample_id for duty in duties]
        duties = again
    fail(intake, "w", duties, "reward_unavailable")
    assert intake.statistics().ledger.dropped == {"reward_unavailable": 2}
