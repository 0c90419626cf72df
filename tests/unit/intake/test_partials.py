"""Partial rollouts in the intake: asked for, kept with their samples, and leased again; no sockets, no threads."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from support.intakes import LEARNER, ONE_GROUP, make_intake, make_offers

from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger, LedgerGroup, Sample
from areal_rloo.intake.prompts import Prompt
from areal_rloo.intake.saved_ledger import LedgerState, ledger_of, ledger_state
from areal_rloo.intake.work import Totals
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire.messages import (
    Duty,
    Failed,
    Finished,
    Goodbye,
    Hello,
    Lease,
    Leases,
    Partial,
    Partials,
    PartialsCall,
    Results,
    Work,
)
from areal_rloo.wire.turns import RecordedTurn, decode_turns, encode_turns


def _hello(worker_id: str = "w") -> Hello:
    return Hello(worker_id, "1", 4, 0, None, 1, 0, (), Work())


def _completion(num: int) -> Completion:
    return Completion(np.full(num, 2, np.int32), np.full(num, -1, np.float32), np.zeros(num, np.int32), "stop")


def _results(duty: Duty) -> Results:
    completion = Completion(np.array([2], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), "stop")
    made = Trajectory(*duty.sample_id, np.array([1, 2], np.int32), completion, 1.0)
    return Results(LEARNER, 7, (Finished(duty.lease_id, (made,)),))


def _leased(messages: Sequence[Outgoing]) -> list[Lease]:
    return [lease for _, message in messages if isinstance(message, Leases) for lease in message.leases]


def _duties(messages: Sequence[Outgoing]) -> list[Duty]:
    return [duty for lease in _leased(messages) for duty in lease.duties]


def _turns(token: int) -> bytes:
    completion = Completion(np.array([token]), np.array([-1.0]), np.array([0]), "abort")
    return encode_turns([RecordedTurn(b"", completion)])


TURNS = _turns(3)


def _partials(*duties: Duty, call_id: int = 0, last: bool = True, turns: bytes = TURNS) -> Partials:
    return Partials(LEARNER, call_id, tuple(Partial(*duty, turns) for duty in duties), last)


def test_a_call_is_answered_when_all_workers_with_samples_have_answered(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.handle("idle peer", _hello("idle"), 0.0)
    calls = intake.call_for_partials()
    assert calls == [Outgoing("peer", PartialsCall(LEARNER, 1))]
    intake.handle("peer", _partials(duties[0], call_id=1, last=False), 0.0)
    assert not intake.has_partials
    intake.handle("peer", _partials(duties[1], call_id=1), 0.0)
    assert intake.has_partials
    saved = [sample.partial for group in ledger_state(intake.ledger).groups for sample in group.samples]
    assert saved == [TURNS, TURNS]


def test_an_answer_of_a_worker_taken_for_dead_counts_for_its_samples(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.call_for_partials()
    intake.tick(1000.0)
    assert intake.has_partials
    intake.handle("peer", _partials(*duties, call_id=1), 1000.0)
    saved = [sample.partial for group in ledger_state(intake.ledger).groups for sample in group.samples]
    assert saved == [TURNS, TURNS]


def test_a_partial_rollout_of_an_older_lease_is_not_kept(intake: Intake) -> None:
    """The newer lease has its own, perhaps of newer versions."""
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.tick(1000.0)
    again = _duties(intake.handle("other peer", _hello("other"), 1000.0))
    intake.handle("other peer", _partials(*again, turns=_turns(4)), 1000.0)
    intake.handle("peer", _partials(*duties), 1000.0)
    assert intake.lies.statistics().refused_answers == {}
    assert [sample.partial for sample in intake.ledger.groups[0].samples.values()] == [_turns(4)] * 2


def test_a_partial_rollout_may_end_with_a_turn_without_tokens(intake: Intake) -> None:
    """The engine was stopped before the first token of the turn."""
    (first, *_) = _duties(intake.handle("peer", _hello(), 0.0))
    empty = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort")
    turns = encode_turns([*decode_turns(TURNS), RecordedTurn(b"", empty)])
    intake.handle("peer", _partials(first, turns=turns), 0.0)
    assert intake.lies.statistics().refused_answers == {}
    assert intake.ledger.groups[0].samples[0].partial == turns


def test_tokens_older_than_the_lease_in_a_partial_rollout_are_a_lie(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    for duty in duties:
        intake.handle("peer", _results(duty), 0.0)
    assert intake.take_batch() is not None
    (duty, *_) = _duties(intake.commit(1, evaluate=False))
    intake.handle("peer", _partials(duty), 0.0)
    assert intake.lies.statistics().refused_answers == {"versions": 1}


def test_an_answer_to_an_earlier_call_counts_for_its_samples_alone(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.call_for_partials()
    intake.call_for_partials()
    intake.handle("peer", _partials(*duties, call_id=1), 0.0)
    assert not intake.has_partials
    assert intake.ledger.groups[0].samples[0].partial == TURNS


@pytest.mark.parametrize("leaves", [Goodbye(LEARNER, Work()), None], ids=["goodbye", "dead"])
def test_a_worker_that_leaves_owes_nothing_and_others_continue(intake: Intake, leaves: Goodbye | None) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.call_for_partials()
    intake.handle("peer", _partials(duties[1], call_id=7), 0.0)
    if leaves is not None:
        intake.handle("peer", leaves, 1.0)
    else:
        intake.tick(1000.0)
    assert intake.has_partials
    leases = _leased(intake.handle("other peer", _hello("other"), 1000.0))
    assert [(lease.sample_indices, lease.partial) for lease in leases] == [((1,), TURNS), ((0,), b"")]


def test_a_partial_rollout_past_its_bound_begins_anew(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.handle("peer", _partials(*duties), 0.0)
    intake.commit(1, evaluate=False)  # with max_staleness=0 no token of version 0 is fresh
    intake.handle("peer", Goodbye(LEARNER, Work()), 1.0)
    first = _leased(intake.handle("other peer", _hello("other"), 1.0))[0]
    assert (first.group_id, first.sample_indices, first.partial) == (0, (0, 1), b"")


def test_a_finished_sample_keeps_no_partial_rollout(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.handle("peer", _partials(*duties), 0.0)
    intake.handle("peer", _results(duties[0]), 0.0)
    intake.handle("peer", _partials(*duties, turns=_turns(4)), 0.0)
    assert [sample.partial for sample in intake.ledger.groups[0].samples.values()] == [b"", _turns(4)]


def test_partial_rollouts_of_strangers_and_other_samples_are_ignored(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    other = Duty(duties[0].lease_id + 1, *duties[0].sample_id)
    intake.handle("peer", _partials(other, Duty(1, 99, 0), Duty(1, -1, 0)), 0.0)
    intake.handle("stranger", Partials("another", 0, _partials(*duties).partials, last=True), 0.0)
    assert not any(sample.partial for sample in intake.ledger.groups[0].samples.values())


def test_a_restored_ledger_leases_partial_rollouts_again(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.handle("peer", _partials(duties[1]), 0.0)
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger_state(intake.ledger)), type=LedgerState)
    prompts = {group.group_id: group.prompt for group in intake.ledger.groups.values()}
    again = make_intake(make_offers(), *ONE_GROUP, ledger=ledger_of(state, prompts, {}))
    leases = _leased(again.handle("peer", _hello(), 0.0))
    assert [(lease.sample_indices, lease.partial) for lease in leases] == [((1,), TURNS), ((0,), b"")]


def test_a_lost_answer_of_a_worker_without_samples_delays_no_later_call(intake: Intake) -> None:
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.call_for_partials()  # the call or its answer is lost
    for duty in duties:
        intake.handle("peer", _results(duty), 1.0)
    assert not intake.has_partials
    assert intake.call_for_partials() == []
    assert intake.has_partials


@pytest.mark.parametrize("failed", [False, True])
def test_only_workers_that_fail_use_up_the_attempts_of_a_sample(intake: Intake, failed: bool) -> None:
    for number in range(3):  # wire.max_attempts
        duties = _duties(intake.handle(f"peer{number}", _hello(f"w{number}"), float(number)))
        intake.handle(f"peer{number}", _partials(*duties), float(number))
        intake.handle(f"peer{number}", Goodbye(LEARNER, Work(), failed), float(number))
    counts = intake.ledger.counts()
    assert counts.dropped == counts.dropped_tokens == ({"max_attempts": 2} if failed else {})  # of one token each


def _continued(intake: Intake) -> Lease:
    """Return another worker's lease of a sample that began at a worker that has left."""
    duties = _duties(intake.handle("peer", _hello(), 0.0))
    intake.handle("peer", _partials(duties[0]), 0.0)
    intake.handle("peer", Goodbye(LEARNER, Work()), 0.0)
    first, _ = _leased(intake.handle("other peer", _hello("other"), 0.0))
    return first


def test_a_failure_after_a_partial_rollout_counts_when_begun_anew(intake: Intake) -> None:
    first = _continued(intake)
    failed = Results(LEARNER, 2, (), (Failed(*first.duties[0], "episode_error", "no", "", 3),))
    (again,) = _leased(intake.handle("other peer", failed, 0.0))
    assert (first.partial, again.partial) == (TURNS, b"")
    assert intake.ledger.groups[0].samples[again.sample_indices[0]].num_attempts == 1
    assert again.sample_indices == first.sample_indices
    assert intake.statistics().ledger.dropped == {}
    failed = Results(LEARNER, 3, (), (Failed(*again.duties[0], "episode_error", "no", "", 3),))
    intake.handle("other peer", failed, 0.0)
    ledger = intake.statistics().ledger
    assert (ledger.dropped, ledger.dropped_tokens) == ({"episode_error": 1}, {"episode_error": 3})


def test_the_last_failure_after_a_partial_rollout_counts_its_tokens() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.max_attempts=1")
    failed = Failed(*_continued(intake).duties[0], "episode_error", "no", "", 33)
    intake.handle("other peer", Results(LEARNER, 2, (), (failed,)), 0.0)
    ledger = intake.statistics().ledger
    assert (ledger.dropped, ledger.dropped_tokens) == ({"max_attempts": 1}, {"max_attempts": 33})


def test_a_dropped_sample_counts_the_tokens_of_the_policy() -> None:
    ledger, completion = Ledger(), _completion(5)
    ledger.admit(Prompt(0, 0, (1, 2), Item("?")), group_size=2, admission_version=0, deadline=9)
    with_tool = msgspec.structs.replace(completion, spans=(2, 3))
    for index, each in enumerate((completion, with_tool)):
        ledger.groups[0].samples[index].trajectories = (Trajectory(0, index, np.array([1], np.int32), each, 1.0),)
        ledger.drop_sample((0, index), "stale")
    assert ledger.counts().dropped_tokens == {"stale": 5 + 2}


def test_a_failed_reward_after_a_partial_rollout_counts_at_once(intake: Intake) -> None:
    first = _continued(intake)
    failed = Results(LEARNER, 2, (), (Failed(*first.duties[0], "reward_error", "no", "", 3),))
    assert _leased(intake.handle("other peer", failed, 0.0)) == []
    assert intake.statistics().ledger.dropped == {"reward_error": 1}


def test_a_partial_rollout_that_fits_no_lease_is_left_out() -> None:
    """It is a liar's, or of a run with longer messages: ZeroMQ would end the connection of every holder."""
    limit = 2**23
    for num_bytes, is_kept in ((limit // 2, True), (limit // 2 + 1, False)):
        sample = Sample(partial=bytes(num_bytes))
        group = LedgerGroup(0, Prompt(0, 0, (1, 2), Item("?")), 0, 0, {0: sample})
        ledger = Ledger([group], Totals(admitted_groups=1))
        resumed = make_intake(make_offers(), *ONE_GROUP, f"wire.max_message_bytes={limit}", ledger=ledger)
        (lease,) = (lease for lease in _leased(resumed.handle("w", _hello(), 0.0)) if lease.group_id == 0)
        assert bool(lease.partial) == is_kept
