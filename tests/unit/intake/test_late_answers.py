"""Answers of workers taken for dead, and of leases that others hold now: late is no lie, and a lie ends no run."""

import numpy as np
from support.intakes import LEARNER, ONE_GROUP, VOCAB_SIZE, duties_of, make_intake, make_offers

from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.messages import Duty, Finished, Goodbye, Hello, Results, Work


def _joined(intake: Intake, worker_id: str = "w", *, now_s: float = 0.0) -> list[Duty]:
    """Let a worker join; return its duties."""
    hello = Hello(worker_id, "1", 2, 0, None, 1, 0, (), Work())
    return duties_of([*intake.handle(worker_id, hello, now_s), *intake.tick(now_s)])


def _finish(intake: Intake, worker: str, duty: Duty, *, token: int = 3, now_s: float = 1000.0) -> list[Outgoing]:
    tokens, versions = np.array([token], np.int32), np.zeros(1, np.int32)
    completion = Completion(tokens, np.array([-1.0], np.float32), versions, "stop")
    made = Trajectory(*duty.sample_id, np.array([1, 2], np.int32), completion, 1.0)
    return intake.handle(worker, Results(LEARNER, 7, (Finished(duty.lease_id, (made,)),)), now_s)


def _refused(intake: Intake) -> dict[str, int]:
    return intake.lies.statistics().refused_answers


def test_a_lie_of_a_worker_taken_for_dead_is_no_further_attempt(intake: Intake) -> None:
    """The death was the attempt."""
    first, second = _joined(intake)
    intake.tick(1000.0)
    _finish(intake, "w", first, token=VOCAB_SIZE)
    assert _refused(intake) == {"vocabulary": 1}
    assert [sample.num_attempts for sample in intake.ledger.groups[0].samples.values()] == [1, 1]
    _finish(intake, "w", second)
    assert intake.statistics().ledger.buffered == 1


def test_a_lie_of_an_earlier_holder_takes_no_sample_from_the_present_one(intake: Intake) -> None:
    first, _ = _joined(intake, "dead")
    again = _joined(intake, "w", now_s=1000.0)
    assert [duty.sample_id for duty in again] == [(0, 0), (0, 1)]
    assert duties_of(_finish(intake, "dead", first, token=VOCAB_SIZE)) == []
    assert _refused(intake) == {"vocabulary": 1}
    assert intake.fleet.alive["w"].duties == set(again)
    assert [sample.worker_id for sample in intake.ledger.groups[0].samples.values()] == ["w", "w"]


def test_a_late_answer_to_a_forgotten_lease_is_no_lie(intake: Intake) -> None:
    """Only the last leases of a sample are remembered."""
    first, _ = _joined(intake)
    for number in range(40):
        intake.handle("w", Goodbye(LEARNER, Work()), float(number))
        again = _joined(intake, now_s=float(number))
    assert again[0].lease_id == 41
    _finish(intake, "w", first, now_s=40.0)
    assert (_refused(intake), intake.statistics().repeated_results) == ({}, 1)
    assert intake.statistics().ledger.buffered == 0
    _finish(intake, "w", again[0], now_s=40.0)
    assert intake.statistics().ledger.buffered == 1


def test_an_answer_under_the_lease_of_another_sample_is_a_lie() -> None:
    """Even if the learner granted this lease, and to this worker."""
    intake = make_intake(make_offers(), *ONE_GROUP, "learner.groups_per_step=2")
    _joined(intake, "x")
    mine = _joined(intake)
    _finish(intake, "w", Duty(mine[0].lease_id - 1, *mine[0].sample_id), now_s=0.0)
    assert _refused(intake) == {"no_such_lease": 1}
