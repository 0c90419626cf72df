"""A lost lease counts as an attempt if the sample may be why; the last attempt is another worker's."""

from collections.abc import Callable

import numpy as np
import pytest
from support.intakes import LEARNER, ONE_GROUP, VOCAB_SIZE, duties_of, fail, make_intake, make_offers

from areal_rloo.intake.evaluation import EvalSet, Evaluation
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.prompts import Prompt
from areal_rloo.intake.queues import GroupQueue
from areal_rloo.intake.saved_ledger import ledger_of, ledger_state
from areal_rloo.intake.worker import LAST_OUTCOMES
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire.messages import (
    MOST_COUNT,
    Duty,
    Finished,
    Goodbye,
    Heartbeat,
    Hello,
    Results,
    Work,
    digest,
)

EPISODES = ("wire.stall_timeout_s=60", "rollout.episode.timeout_s=740")


def _hello(worker_id: str, incarnation: str = "1", *, capacity: int = 2, newest: int = 0) -> Hello:
    return Hello(worker_id, incarnation, capacity, 0, LEARNER, 1, newest, (), Work())


def _goes(intake: Intake, *, failed: bool) -> None:
    intake.handle("w", Goodbye(LEARNER, Work(), failed=failed), 0.0)


def _is_silent(intake: Intake) -> None:
    intake.tick(1000.0)


def _stalls(intake: Intake) -> None:
    intake.fleet.alive["w"].last_heard_s = 61.0
    intake.tick(61.0)


def _holds_for_too_long(intake: Intake) -> None:
    while intake.fleet.statistics(0.0).set_aside == 0:
        now_s = intake.fleet.alive["w"].last_heard_s + 1.0
        duties, work = digest(intake.fleet.alive["w"].duties), Work(0.0, int(now_s))
        intake.handle("w", Heartbeat(LEARNER, 2, MOST_COUNT, duties, 0, 0, receiving=False, work=work), now_s)
        intake.tick(now_s)
    assert now_s > 800.0


def _starts_anew(intake: Intake) -> None:
    intake.disconnected("w", 1.0)
    intake.handle("w again", _hello("w", "2"), 2.0)


def _never_got_the_lease(intake: Intake) -> None:
    intake.handle("w", _hello("w", newest=MOST_COUNT), 1.0)


def _lies(intake: Intake) -> None:
    tokens, zero = np.array([VOCAB_SIZE], np.int32), np.zeros(1, np.int32)
    completion = Completion(tokens, np.array([-1.0], np.float32), zero, "stop")
    duties = [duty for duty in sorted(intake.fleet.alive["w"].duties) if duty.group_id == 0]
    for duty in duties:
        lie = Trajectory(*duty.sample_id, np.array([1, 2], np.int32), completion, 1.0)
        intake.handle("w", Results(LEARNER, 7, (Finished(duty.lease_id, (lie,)),)), 0.0)
    assert intake.lies.statistics().refused_answers == {"vocabulary": 2}


def _is_to_blame(intake: Intake) -> None:
    """The worker, not its samples: the rewards of others failed there."""
    intake.handle("good", _hello("good", capacity=1), 0.0)
    others = [duty for duty in sorted(intake.fleet.alive["w"].duties) if duty.group_id > 0]
    fail(intake, "w", others[:LAST_OUTCOMES], "reward_error")
    assert intake.fleet.statistics(0.0).set_aside == 1


LOSSES: list[tuple[Callable[[Intake], None], bool]] = [
    (lambda intake: _goes(intake, failed=True), True),
    (_is_silent, True),
    (_starts_anew, True),
    (_stalls, True),
    (_holds_for_too_long, True),
    (_lies, True),
    (lambda intake: _goes(intake, failed=False), False),
    (_never_got_the_lease, False),
    (_is_to_blame, False),
]


@pytest.mark.parametrize(("lose", "is_attempt"), LOSSES)
def test_a_lost_lease_is_an_attempt_if_the_sample_may_be_why(lose: Callable[[Intake], None], is_attempt: bool) -> None:
    options = (*ONE_GROUP, *EPISODES, "learner.groups_per_step=20", "wire.max_attempts=2", "rollout.num_slots=30")
    intake = make_intake(make_offers(), *options)
    intake.handle("w", _hello("w", capacity=30), 0.0)
    samples = intake.ledger.groups[0].samples
    assert [sample.worker_id for sample in samples.values()] == ["w", "w"]
    lose(intake)
    assert [sample.num_attempts for sample in samples.values()] == [is_attempt, is_attempt]


def _with_an_evaluation(*names: str) -> tuple[Intake, dict[str, list[Duty]]]:
    """Return an intake with a group to evaluate and a group to train, and the duties of the workers."""
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.max_attempts=2")
    evaluation = Evaluation([EvalSet("held-out", [Prompt(0, 0, (1, 2), Item("?"))], 2)], lambda record: None)
    intake.evaluation = intake._leasing.evaluation = evaluation
    sent = [each for name in names for each in intake.handle(name, _hello(name), 0.0)]
    sent += intake.evaluate()
    return intake, {name: duties_of(sent, name) for name in names}


@pytest.mark.parametrize("purpose", ["train", "eval"])
@pytest.mark.parametrize("names", [("first", "second"), ("first",)])
def test_the_last_attempt_is_of_another_worker_if_there_is_one(purpose: str, names: tuple[str, ...]) -> None:
    intake, duties = _with_an_evaluation(*names)
    mine = [duty for duty in duties["first"] if duty.purpose == purpose]
    assert len(mine) == 2
    sent = fail(intake, "first", mine, "reward_unavailable")
    again = duties_of(sent, names[-1])
    assert [duty.sample_id for duty in again] == [duty.sample_id for duty in mine]
    fail(intake, names[-1], again, "reward_unavailable")
    assert [intake._leasing.sample(duty.sample_id) for duty in mine] == [None, None]


def test_any_worker_may_have_the_last_attempt_after_a_restart() -> None:
    """The new learner does not know the last holder."""
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.max_attempts=2")
    intake.handle("w", _hello("w"), 0.0)
    _goes(intake, failed=True)
    prompts = {number: group.prompt for number, group in intake.ledger.groups.items()}
    restored = ledger_of(ledger_state(intake.ledger), prompts, {})
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.max_attempts=2", ledger=restored)
    assert [duty.sample_id for duty in duties_of(intake.handle("w", _hello("w"), 0.0), "w")] == [(0, 0), (0, 1)]
    _goes(intake, failed=True)
    assert intake.statistics().ledger.dropped == {"max_attempts": 2}


@pytest.mark.parametrize("num_groups", [10, 400])
def test_groups_that_wait_for_another_worker_cost_a_message_nothing(
    num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("wire.max_attempts=2", f"learner.groups_per_step={num_groups}", "algorithm.max_staleness=0")
    intake = make_intake(make_offers(), *ONE_GROUP, *options)
    intake.fleet._most_samples = 2 * num_groups
    others = duties_of(intake.handle("x", _hello("x", capacity=4), 0.0), "x")
    intake.handle("w", _hello("w", capacity=2 * num_groups), 0.0)
    _grant_all(intake)
    mine = sorted(intake.fleet.alive["w"].duties)
    assert (len(others), len(mine)) == (4, 2 * num_groups - 4)
    intake.disconnected("w", 1.0)
    intake.handle("w again", _hello("w", "2", capacity=2 * num_groups), 2.0)
    assert duties_of(intake.tick(2.5)) == [], "w alone has room, and may have none of them"
    assert intake.fleet.alive["w"].free_samples == 2 * num_groups
    pops: list[int] = []
    pop = GroupQueue.pop
    monkeypatch.setattr(GroupQueue, "pop", lambda self: pops.append(0) or pop(self))
    assert duties_of(intake.tick(2.75)) == []
    assert not pops
    again = duties_of(fail(intake, "x", others[:2], "reward_unavailable"), "x")
    assert [duty.sample_id for duty in again] == [duty.sample_id for duty in mine[:2]]
    assert len(pops) <= 3, "the group of the failed samples for w, and the first for x"
    intake.handle("x", Goodbye(LEARNER, Work()), 3.0)
    _grant_all(intake)
    assert len(intake.fleet.alive["w"].duties) == 2 * num_groups, "no other worker is left"


def _grant_all(intake: Intake) -> None:
    intake.grants()
    while intake.owes_grants:
        intake.grants()


def test_a_last_attempt_waits_for_room_at_another_worker() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.max_attempts=2", "learner.groups_per_step=2")
    first = duties_of(intake.handle("w", _hello("w"), 0.0), "w")
    others = duties_of(intake.handle("x", _hello("x"), 0.0), "x")
    _starts_anew(intake)
    assert duties_of(intake.tick(2.0)) == []
    assert {sample.worker_id for sample in intake.ledger.groups[first[0].group_id].samples.values()} == {None}
    again = duties_of(fail(intake, "x", others), "x")
    assert [duty.sample_id for duty in again] == [duty.sample_id for duty in first]
