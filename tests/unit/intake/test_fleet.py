"""The fleet decides which workers are dead, stalled, overdue or set aside, and when they get leases again."""

from collections.abc import Sequence

import pytest

from areal_rloo.config import WireConfig
from areal_rloo.intake.fleet import SET_ASIDE_S, Fleet
from areal_rloo.intake.worker import LAST_OUTCOMES, Worker
from areal_rloo.wire.messages import Duty, Heartbeat, Hello, Work, digest

WIRE = WireConfig(heartbeat_s=1.0, heartbeat_timeout_s=1e9, stall_timeout_s=60.0)
DUTY = Duty(1, 0, 0)
MOST_S = 800.0  # that a worker may hold a sample


def _joined(fleet: Fleet, name: str, *, now_s: float = 0.0, capacity: int = 4, version: int = 0) -> Worker:
    hello = Hello(name, "1", capacity, version, None, 1, 0, (), Work())
    return fleet.welcome(hello, name, now_s=now_s, policy_version=0)


def _heard(fleet: Fleet, worker: Worker, now_s: float, *, tokens: int = 0, version: int = 0) -> None:
    heartbeat = Heartbeat("learner", 2, 0, digest(()), version, 0, receiving=False, work=Work(0.0, tokens))
    fleet.heard(worker, heartbeat, now_s)


def _getting_leases(fleet: Fleet) -> list[str]:
    return [worker.worker_id for worker in fleet.alive.values() if worker.gets_leases]


# -- dead --------------------------------------------------------------------------------------------------------------


def test_a_hello_of_a_known_worker_is_a_sign_of_life() -> None:
    fleet, wire = Fleet(most_samples=8), WireConfig(heartbeat_timeout_s=30.0)
    _joined(fleet, "w")
    assert _joined(fleet, "w", now_s=25.0, version=3).policy_version == 3
    assert fleet.silent(50.0, wire) == []
    assert [worker.worker_id for worker in fleet.silent(56.0, wire)] == ["w"]


def test_time_in_which_the_learner_read_nothing_is_no_silence() -> None:
    fleet, wire = Fleet(most_samples=8), WireConfig(heartbeat_timeout_s=30.0, stall_timeout_s=60.0)
    worker = _joined(fleet, "w")
    worker.duties.add(DUTY)
    assert fleet.silent(100.0, wire, late_s=90.0) == []
    assert fleet.stalled(100.0, wire) == []
    assert fleet.silent(119.0, wire) == []
    assert fleet.silent(121.0, wire) == [worker]
    assert fleet.stalled(151.0, wire) == [worker]


def test_a_pause_of_the_learner_does_not_revive_a_dead_worker() -> None:
    fleet, wire = Fleet(most_samples=8), WireConfig(heartbeat_s=1.0, heartbeat_timeout_s=30.0)
    worker = _joined(fleet, "w")
    worker.disconnected_s = 1.0
    assert fleet.silent(11.0, wire, late_s=9.0) == []
    assert not worker.is_connected(wire)
    assert fleet.silent(13.0, wire) == [worker], "two heartbeats after the end of the connection"


@pytest.mark.parametrize("heartbeat_s", [0.2, 5.0])
def test_a_heartbeat_after_the_end_of_the_connection_means_life(heartbeat_s: float) -> None:
    """The last messages of a dead process are read a moment later, and do not."""
    fleet, wire = Fleet(most_samples=8), WireConfig(heartbeat_s=heartbeat_s, heartbeat_timeout_s=30.0)
    worker = _joined(fleet, "w")
    worker.disconnected_s = 1.0
    for late_s, is_connected in ((0.05, False), (min(0.3, heartbeat_s), True)):
        _heard(fleet, worker, 1.0 + late_s)
        assert worker.is_connected(wire) is is_connected


def test_a_worker_that_decodes_nothing_says_what_its_samples_wait_for() -> None:
    fleet = Fleet(most_samples=8)
    worker = _joined(fleet, "w")
    waits = " (all wait for rewards, tools, agents or weights)"
    assert waits not in fleet.describe(1.0)
    worker.duties.add(DUTY)
    assert f"w has 1 samples and decodes 0 at version 0{waits}, last heard 1.0 s ago" in fleet.describe(1.0)
    worker.num_decoding = 1
    assert "w has 1 samples and decodes 1 at version 0, last heard" in fleet.describe(1.0)


# -- without progress --------------------------------------------------------------------------------------------------


def _stalled_at(fleet: Fleet, now_s: float) -> list[str]:
    return [worker.worker_id for worker in fleet.stalled(now_s, WIRE)]


def test_the_time_without_samples_is_no_time_without_progress() -> None:
    fleet = Fleet(most_samples=8)
    worker = _joined(fleet, "w")
    for now_s in (50.0, 200.0, 250.0):
        assert _stalled_at(fleet, now_s) == []
    worker.hold(DUTY)
    assert _stalled_at(fleet, 309.0) == []
    assert _stalled_at(fleet, 311.0) == ["w"]


def test_new_weights_are_progress_once() -> None:
    """The samples may have waited for this version."""
    fleet = Fleet(most_samples=8)
    worker = _joined(fleet, "w")
    worker.hold(DUTY)
    for now_s in range(10, 100, 10):
        _heard(fleet, worker, float(now_s), version=now_s // 50)
        assert _stalled_at(fleet, float(now_s)) == []
    for now_s in (100, 159):
        _heard(fleet, worker, float(now_s), version=2)
    assert _stalled_at(fleet, 160.0) == []
    assert _stalled_at(fleet, 161.0) == ["w"]


def test_a_single_token_is_progress() -> None:
    fleet = Fleet(most_samples=8)
    worker = _joined(fleet, "w")
    worker.hold(DUTY)
    for number in range(1, 10):
        _heard(fleet, worker, 50.0 * number, tokens=number)
        assert _stalled_at(fleet, 50.0 * number + 1.0) == []


def test_a_wait_for_the_learners_step_is_no_time_without_progress() -> None:
    fleet = Fleet(most_samples=8)
    _joined(fleet, "w").hold(DUTY)
    fleet.engines_wait = True
    for now_s in (50.0, 200.0, 250.0):
        assert _stalled_at(fleet, now_s) == []
    fleet.engines_wait = False
    assert _stalled_at(fleet, 309.0) == []
    assert _stalled_at(fleet, 311.0) == ["w"]


# -- overdue -----------------------------------------------------------------------------------------------------------


def _overdue_at(fleet: Fleet, times_s: Sequence[float], *, newest_lease: int) -> float | None:
    """Return the first of these times at which a worker is overdue."""
    return next((now_s for now_s in times_s if fleet.overdue(now_s, MOST_S, newest_lease)), None)


@pytest.mark.parametrize("lease_id", [1, 10**9])
def test_a_sample_is_overdue_whatever_the_number_of_its_lease(lease_id: int) -> None:
    """Although the worker finishes others."""
    fleet = Fleet(most_samples=8)
    worker = _joined(fleet, "w")
    worker.hold(Duty(lease_id, 0, 0))
    for second in range(0, 2000, 5):
        worker.standing.held_s = 0.0
        if fleet.overdue(float(second), MOST_S, lease_id):
            break
    assert MOST_S < second <= MOST_S * 9 / 8 + 10.0


def test_only_seconds_with_samples_count_as_held() -> None:
    """Leases in place of lost ones are new, so their age says nothing."""
    fleet = Fleet(most_samples=8)
    worker = _joined(fleet, "w")
    for tick in range(400):  # without samples
        assert not fleet.overdue(tick * 0.5, MOST_S, 0)
    for tick in range(400, 2100):
        worker.duties = {Duty(tick, 0, 0)}
        if fleet.overdue(tick * 0.5, MOST_S, tick):
            break
    assert tick == 400 + 2 * MOST_S


def test_a_pause_of_the_learner_does_not_make_workers_overdue() -> None:
    """Results may have waited for as long."""
    fleet = Fleet(most_samples=8)
    worker = _joined(fleet, "w")
    assert not fleet.overdue(0.0, MOST_S, 0)
    worker.hold(DUTY)
    assert not fleet.overdue(2000.0, MOST_S, 1)


def test_an_overdue_worker_begins_anew() -> None:
    fleet = Fleet(most_samples=8)
    worker = _joined(fleet, "w")
    worker.hold(DUTY)
    first_s = _overdue_at(fleet, range(2000), newest_lease=1)
    assert first_s == MOST_S + 1.0
    worker.duties = {Duty(2, 0, 0)}
    assert _overdue_at(fleet, range(int(first_s) + 1, 4000), newest_lease=2) == 2 * first_s


# -- set aside ---------------------------------------------------------------------------------------------------------


def test_only_the_worker_whose_time_has_come_gets_leases_again() -> None:
    fleet = Fleet(most_samples=8)
    good, second, first = (_joined(fleet, name) for name in ("good", "second", "first"))
    for worker in (good, first, second):
        worker.standing.failed.append(True)
    fleet.set_aside(first, 0.0, "a test")
    fleet.set_aside(second, 100.0, "a test")
    fleet.try_again(SET_ASIDE_S)
    assert _getting_leases(fleet) == ["good", "first"]
    assert [len(worker.standing.failed) for worker in (good, first, second)] == [1, 0, 1]
    fleet.try_again(SET_ASIDE_S + 100.0)
    assert _getting_leases(fleet) == ["good", "second", "first"]


def _with_a_bad_worker(*others: str, num_expected: int = 0) -> tuple[Fleet, Worker]:
    """Return a fleet whose worker "bad" is set aside for 20 minutes, after two times before."""
    fleet = Fleet(most_samples=8, num_expected=num_expected)
    bad, *_ = (_joined(fleet, name) for name in ("bad", *others))
    bad.standing.num_set_aside = 2
    bad.standing.failed.extend([True] * LAST_OUTCOMES)
    fleet.set_aside(bad, 0.0, "a test")
    return fleet, bad


def _tried_again_s(fleet: Fleet) -> float:
    """Return when the bad worker gets leases."""
    for second in range(0, 2000, 10):
        fleet.try_again(float(second))
        if "bad" in _getting_leases(fleet):
            return second
    return 2000.0


def test_a_lone_worker_is_tried_at_once_as_if_never_set_aside() -> None:
    """Its time without leases is as long as before when it fails again."""
    fleet, bad = _with_a_bad_worker()
    bad.stalled = True
    assert _tried_again_s(fleet) == 0.0
    assert list(fleet.votes()) == [bad.standing.failed]
    assert len(bad.standing.failed) == 0
    _joined(fleet, "good")
    fleet.set_aside(bad, 0.0, "a test")
    assert _tried_again_s(fleet) == 4 * SET_ASIDE_S


def test_workers_set_aside_wait_while_another_gets_leases() -> None:
    assert _tried_again_s(_with_a_bad_worker("good")[0]) == 4 * SET_ASIDE_S


def test_a_stalled_worker_is_tried_before_workers_set_aside() -> None:
    fleet, _ = _with_a_bad_worker("stalled")
    fleet.alive["stalled"].hold(DUTY)
    assert _stalled_at(fleet, 61.0) == ["stalled"]
    assert _getting_leases(fleet) == []
    fleet.try_again(62.0)
    assert _getting_leases(fleet) == ["stalled"]
    assert _stalled_at(fleet, 121.0) == []


@pytest.mark.parametrize("num_expected", [0, 1, 2])
def test_workers_set_aside_wait_five_minutes_for_departed_workers(num_expected: int) -> None:
    fleet, _ = _with_a_bad_worker("good", num_expected=num_expected)
    fleet.alive["good"].last_heard_s = 100.0
    fleet.remove(fleet.alive["good"])
    assert _tried_again_s(fleet) == 100.0 + SET_ASIDE_S


def test_workers_set_aside_do_not_wait_for_departed_watchers() -> None:
    """Nor for those that were set aside, too."""
    fleet, _ = _with_a_bad_worker("aside")
    fleet.set_aside(fleet.alive["aside"], 0.0, "a test")
    _joined(fleet, "watcher", capacity=0)
    for name in ("aside", "watcher"):
        fleet.remove(fleet.alive[name])
    assert _tried_again_s(fleet) == 0.0


def test_workers_set_aside_wait_five_minutes_for_expected_workers() -> None:
    assert _tried_again_s(_with_a_bad_worker(num_expected=2)[0]) == SET_ASIDE_S


def test_the_five_minutes_of_expected_workers_begin_at_the_first_tick() -> None:
    """A learner may load for an hour before, and its clock begins anywhere."""
    fleet, bad = _with_a_bad_worker(num_expected=2)
    bad.standing.set_aside_until_s = 1e9
    times_s = range(10_000, 12_000, 10)
    tried_s = next(now_s for now_s in times_s if fleet.try_again(float(now_s)) or _getting_leases(fleet))
    assert tried_s == 10_000 + SET_ASIDE_S


# -- votes -------------------------------------------------------------------------------------------------------------


def _votes(fleet: Fleet) -> list[int]:
    """Return the number of completions of each voter."""
    return sorted(len(failed) for failed in fleet.votes())


def test_workers_with_completions_vote_and_so_do_those_that_may_get_some() -> None:
    """Watchers without room have no vote: a crowd of them would hide that all rewards fail."""
    fleet, bad = _with_a_bad_worker("good")
    for number in range(10):
        _joined(fleet, f"watcher-{number}", capacity=0)
    assert _votes(fleet) == [0, LAST_OUTCOMES]
    fleet.alive["good"].standing.failed.append(False)
    assert _votes(fleet) == [1, LAST_OUTCOMES]
    bad.standing.failed.clear()
    assert _votes(fleet) == [1]


def test_each_worker_has_one_vote_wherever_it_is() -> None:
    fleet = Fleet(most_samples=8, num_expected=3)
    assert _votes(fleet) == [0, 0, 0]
    worker = _joined(fleet, "rollout-0")
    worker.standing.failed.append(True)
    assert _votes(fleet) == [0, 0, 1]
    fleet.remove(worker)
    assert _votes(fleet) == [0, 0, 1]
    _joined(fleet, "rollout-0")
    assert _votes(fleet) == [0, 0, 1]
    for name in ("rollout-1", "rollout-2", "another"):
        _joined(fleet, name)
    assert _votes(fleet) == [0, 0, 0, 1]
