"""The intake as a state machine: a message in, changes of the ledger and messages out; no sockets, no threads."""

from collections.abc import Sequence

import numpy as np
from support.intakes import LEARNER, ONE_GROUP, duties_of, heartbeat, make_intake, make_offers

from areal_rloo.config import load_config
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.trajectory import Completion, Trajectory, purpose_of
from areal_rloo.wire.messages import (
    Abort,
    Ack,
    Drain,
    Duty,
    Failed,
    Finished,
    Goodbye,
    HeartbeatReply,
    Hello,
    LearnerMessage,
    Lease,
    Leases,
    Refusal,
    Results,
    Welcome,
    Work,
)


def _hello(
    worker_id: str = "w", incarnation: str = "1", *, duties: Sequence[Duty] = (), met: bool = False, newest: int = 0
) -> Hello:
    learner_id = LEARNER if met else None
    return Hello(worker_id, incarnation, 4, 0, learner_id, 1, newest, tuple(duties), Work())


def _trajectory(index: int, group_id: int = 0) -> Trajectory:
    completion = Completion(np.array([2], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), "stop")
    return Trajectory(group_id, index, np.array([1, 2], np.int32), completion, float(index))


def _results(*duties: Duty, number: int = 7, learner_id: str = LEARNER) -> Results:
    finished = (Finished(duty.lease_id, (_trajectory(duty.sample_index, duty.group_id),)) for duty in duties)
    return Results(learner_id, number, tuple(finished))


def _failure(duty: Duty) -> Results:
    return Results(LEARNER, 8, (), (Failed(*duty, "reward_error", "no", "", 3),))


def _leased(messages: list[Outgoing]) -> list[Lease]:
    return [lease for _, message in messages if isinstance(message, Leases) for lease in message.leases]


def _sent(messages: list[Outgoing], kind: type[LearnerMessage]) -> list[LearnerMessage]:
    return [message for _, message in messages if isinstance(message, kind)]


def _without(messages: list[Outgoing], duty: Duty) -> list[Duty]:
    return [other for other in duties_of(messages) if other != duty]


def test_a_hello_is_answered_with_a_welcome_and_the_admitted_groups(intake: Intake) -> None:
    sent = intake.handle("peer", _hello(), 0.0)
    assert [type(message) for _, message in sent] == [Welcome, Leases]
    assert {peer for peer, _ in sent} == {"peer"}
    assert [(lease.group_id, lease.sample_indices) for lease in _leased(sent)] == [(0, (0, 1))]


def test_results_are_acknowledged_and_complete_the_batch(intake: Intake) -> None:
    duties = duties_of(intake.handle("peer", _hello(), 0.0))
    assert intake.take_batch() is None
    assert intake.handle("peer", _results(*duties), 0.0) == [Outgoing("peer", Ack(7))]
    batch = intake.take_batch()
    assert batch is not None
    assert [group.group_id for group in batch] == [0]


def test_a_commit_trains_the_batch_and_admits_the_next_group_at_once(intake: Intake) -> None:
    duties = duties_of(intake.handle("peer", _hello(), 0.0))
    intake.handle("peer", _results(*duties), 0.0)
    intake.take_batch()
    sent = intake.commit(1, evaluate=False)
    assert [(lease.group_id, lease.sample_indices) for lease in _leased(sent)] == [(1, (0, 1))]
    counts = intake.statistics().ledger
    assert (counts.trained, counts.in_flight, counts.buffered) == (2, 2, 0)


def test_a_refused_batch_is_dropped_with_its_reason(intake: Intake) -> None:
    duties = duties_of(intake.handle("peer", _hello(), 0.0))
    intake.handle("peer", _results(*duties), 0.0)
    intake.take_batch()
    assert [lease.group_id for lease in _leased(intake.refuse_batch("non_finite"))] == [1]
    ledger = intake.statistics().ledger
    assert (ledger.dropped, ledger.dropped_tokens) == ({"non_finite": 2}, {"non_finite": 2})  # of one token each


# -- workers that are silent, return, or start again -------------------------------------------------------------------


def test_a_silent_worker_loses_its_samples_to_another(intake: Intake) -> None:
    intake.handle("first", _hello("first"), 0.0)
    intake.handle("second", _hello("second"), 1000.0)
    assert intake.fleet.statistics(1000.0).silent_s == {"first": 1000.0, "second": 0.0}
    sent = intake.tick(1000.0)
    assert {peer for peer, _ in sent} == {"second"}
    assert [lease.sample_indices for lease in _leased(sent)] == [(0, 1)]
    assert intake.tick(1000.0) == []


def test_a_killed_worker_loses_its_samples_within_two_heartbeats(intake: Intake) -> None:
    """The kernel closes the connection of a killed process at once."""
    intake.handle("first", _hello("first"), 0.0)
    intake.handle("second", _hello("second"), 0.5)
    intake.disconnected("first", 0.9)
    intake.handle("second", heartbeat(newest=0), 2.8)
    assert _leased(intake.tick(2.8)) == []
    sent = intake.tick(2.95)
    assert {peer for peer, _ in sent} == {"second"}
    assert [lease.sample_indices for lease in _leased(sent)] == [(0, 1)]


def test_a_worker_that_connects_again_keeps_its_samples(intake: Intake) -> None:
    duties = duties_of(intake.handle("peer", _hello(), 0.0))
    intake.disconnected("peer", 0.5)
    intake.handle("peer", heartbeat(duties, newest=1), 1.0)
    assert intake.tick(10.0) == []
    assert intake.statistics().num_workers == 1


def test_a_worker_taken_for_dead_goes_on_with_samples_that_wait(intake: Intake) -> None:
    duties = duties_of(intake.handle("peer", _hello(), 0.0))
    intake.tick(1000.0)
    sent = intake.handle("peer", _hello(duties=duties, met=True, newest=1), 1001.0)
    assert [type(message) for _, message in sent] == [Welcome]
    intake.handle("peer", _results(*duties), 1002.0)
    assert intake.statistics().ledger.buffered == 2


def test_a_worker_taken_for_dead_gives_up_samples_that_another_has_begun(intake: Intake) -> None:
    duties = duties_of(intake.handle("first", _hello("first"), 0.0))
    intake.handle("second", _hello("second"), 1000.0)
    again = duties_of(intake.tick(1000.0))
    sent = intake.handle("first", _hello("first", duties=duties, met=True, newest=1), 1001.0)
    assert _sent(sent, Abort) == [Abort(LEARNER, tuple(duties))]
    assert [duty.sample_id for duty in again] == [duty.sample_id for duty in duties]


def test_a_late_result_of_a_worker_taken_for_dead_ends_the_second_attempt(intake: Intake) -> None:
    duties = duties_of(intake.handle("first", _hello("first"), 0.0))
    intake.handle("second", _hello("second"), 1000.0)
    again = duties_of(intake.tick(1000.0))
    sent = intake.handle("first", _results(duties[0]), 1001.0)
    assert sent == [Outgoing("first", Ack(7)), Outgoing("second", Abort(LEARNER, (again[0],)))]
    assert intake.handle("second", _results(*again), 1002.0) == [Outgoing("second", Ack(7))]
    counts = intake.statistics()
    assert (counts.ledger.buffered, counts.repeated_results) == (2, 1)


def test_a_new_process_of_a_worker_inherits_nothing(intake: Intake) -> None:
    duties = duties_of(intake.handle("old", _hello(), 0.0))
    intake.disconnected("old", 0.5)
    sent = [*intake.handle("new", _hello(incarnation="2"), 1.0), *intake.tick(1.1)]
    assert {peer for peer, _ in sent} == {"new"}
    assert [duty.sample_id for duty in duties_of(sent)] == [duty.sample_id for duty in duties]


def test_a_connected_process_keeps_its_name(intake: Intake) -> None:
    """Another process with the name is refused until the first is gone, or silent for too long."""
    duties = duties_of(intake.handle("first", _hello(), 0.0))
    for now_s in (1.0, 3.0):
        (refused,) = intake.handle("second", _hello(incarnation="2"), now_s)
        assert isinstance(refused.message, Refusal) and not refused.message.final
        assert "another process is w" in refused.message.detail
    assert intake.fleet.statistics(0.0).refused_workers == {"name_taken": 2}
    assert intake.handle("second", _results(*duties), 3.5) == []  # a stranger still
    assert intake.handle("first", _results(duties[0]), 4.0) == [Outgoing("first", Ack(7))]
    silent_s = 1.0 + load_config("quickstart.yaml").wire.heartbeat_timeout_s
    intake.tick(silent_s)
    sent = [*intake.handle("second", _hello(incarnation="2"), silent_s), *intake.tick(silent_s)]
    assert [duty.sample_id for duty in duties_of(sent)] == [duties[1].sample_id]


def test_a_goodbye_of_an_earlier_process_does_not_remove_the_later(intake: Intake) -> None:
    intake.handle("old", _hello(), 0.0)
    intake.disconnected("old", 0.5)
    intake.handle("new", _hello(incarnation="2"), 1.0)
    assert intake.handle("old", Goodbye(LEARNER, Work()), 1.1) == []
    assert intake.statistics().num_workers == 1


def test_answers_of_an_earlier_process_do_not_count_for_the_later(intake: Intake) -> None:
    """Both have the same name, and so have the leases."""
    intake.handle("old", _hello(), 0.0)
    intake.disconnected("old", 0.5)
    intake.handle("new", _hello(incarnation="2"), 1.0)
    duties = duties_of(intake.tick(1.1))
    assert intake.handle("old", _results(*duties), 1.5) == []
    assert intake.statistics().ledger.buffered == 0
    assert intake.handle("new", _results(*duties), 2.0)[0] == Outgoing("new", Ack(7))
    assert intake.statistics().ledger.buffered == 2


def test_results_of_nothing_are_no_progress() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.stall_timeout_s=60", "wire.heartbeat_timeout_s=1000")
    intake.handle("idle", _hello("idle"), 0.0)
    intake.handle("other", _hello("other"), 0.0)
    for second in (30.0, 60.0, 61.0):
        intake.handle("idle", _results(), second)
        sent = intake.tick(second)
    assert [to for to, message in sent if isinstance(message, Abort)] == ["idle"]


def test_an_earlier_process_that_returns_is_told_to_end(intake: Intake) -> None:
    intake.handle("old", _hello(), 0.0)
    intake.disconnected("old", 0.5)
    intake.handle("new", _hello(incarnation="2"), 1.0)
    assert intake.handle("old", _hello(), 2.0) == [Outgoing("old", Drain())]
    assert intake.statistics().num_workers == 1


def test_a_worker_without_progress_loses_its_samples() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.stall_timeout_s=60")
    duties = duties_of(intake.handle("stuck", _hello("stuck"), 0.0))
    intake.handle("other", _hello("other"), 0.0)
    for second in range(1, 61):
        intake.handle("stuck", heartbeat(duties, newest=1), float(second))
        intake.handle("other", heartbeat(newest=0), float(second))
        assert intake.tick(float(second)) == []
    abort, again = intake.tick(61.0)
    assert abort == Outgoing("stuck", Abort(LEARNER, tuple(duties)))
    assert again.peer == "other"
    assert intake.fleet.alive["stuck"].stalled
    intake.handle("stuck", heartbeat(newest=1, tokens=5), 63.0)
    assert not intake.fleet.alive["stuck"].stalled


def test_the_only_worker_is_tried_again_without_progress() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.stall_timeout_s=60", "wire.heartbeat_timeout_s=1000")
    duties = duties_of(intake.handle("stuck", _hello("stuck"), 0.0))
    sent = intake.tick(61.0)
    assert _sent(sent, Abort) == [Abort(LEARNER, tuple(duties))]
    assert [duty.sample_id for duty in duties_of(sent)] == [duty.sample_id for duty in duties]


# -- lost messages -----------------------------------------------------------------------------------------------------


def _reply(messages: list[Outgoing]) -> HeartbeatReply:
    (reply,) = _sent(messages, HeartbeatReply)
    assert isinstance(reply, HeartbeatReply)
    return reply


def test_an_unknown_worker_is_told_to_say_hello(intake: Intake) -> None:
    assert _reply(intake.handle("peer", heartbeat(newest=0), 0.0)).say_hello
    intake.handle("peer", _hello(), 0.0)
    assert _reply(intake.handle("peer", heartbeat(newest=0, met=False), 0.0)).say_hello


def test_a_lost_lease_is_named_to_the_worker_and_granted_again(intake: Intake) -> None:
    duties = duties_of(intake.handle("peer", _hello(), 0.0))
    reply = _reply(intake.handle("peer", heartbeat(newest=0), 1.0))
    assert (reply.newest_lease, reply.say_hello) == (1, False), "the lease may still be on its way"
    sent = [*intake.handle("peer", _hello(met=True, newest=1), 1.1), *intake.tick(1.2)]
    assert [duty.sample_id for duty in duties_of(sent)] == [duty.sample_id for duty in duties]
    assert _leased(sent)[0].lease_id == 2, "a lease id is never used again"


def test_a_lease_that_never_arrived_is_no_attempt() -> None:
    intake = make_intake(make_offers(), *ONE_GROUP, "wire.max_attempts=2")
    sent = intake.handle("peer", _hello(), 0.0)
    for _ in range(10):
        intake.handle("peer", _hello(met=True, newest=_leased(sent)[-1].lease_id), 0.0)
        sent = intake.tick(0.0)
    assert intake.statistics().ledger.dropped == {}


def test_a_hello_before_the_welcome_loses_no_lease_on_its_way(intake: Intake) -> None:
    duties = duties_of(intake.handle("peer", _hello(), 0.0))
    sent = intake.handle("peer", _hello(), 0.1)
    assert [type(message) for _, message in sent] == [Welcome]
    assert intake.fleet.alive["w"].duties == set(duties)


def test_duties_that_the_learner_does_not_know_are_aborted(intake: Intake) -> None:
    strange = Duty(5, 9, 0)
    intake.handle("peer", _hello(), 0.0)
    assert _reply(intake.handle("peer", heartbeat([strange], newest=1), 1.0)).say_hello
    sent = intake.handle("peer", _hello(duties=[strange], met=True, newest=1), 2.0)
    assert Abort(LEARNER, (strange,)) in _sent(sent, Abort)


def test_results_for_an_earlier_learner_change_nothing(intake: Intake) -> None:
    """They waited in the socket while no learner ran. Their group ids may name other prompts now."""
    duties = duties_of(intake.handle("peer", _hello(), 0.0))
    assert intake.handle("peer", _results(*duties, learner_id="before"), 0.0) == []
    assert intake.statistics().ledger.buffered == 0


def test_results_of_leases_never_granted_change_nothing(intake: Intake) -> None:
    intake.handle("peer", _hello(), 0.0)
    sent = intake.handle("peer", _results(Duty(99, 0, 0)), 0.0)
    assert sent == [Outgoing("peer", Ack(7))]
    counts = intake.statistics()
    assert (counts.ledger.buffered, counts.repeated_results) == (0, 0)
    assert intake.lies.statistics().refused_answers == {"no_such_lease": 1}


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failure_is_acknowledged_and_drops_the_sample(intake: Intake) -> None:
    first, _ = duties_of(intake.handle("peer", _hello(), 0.0))
    assert intake.handle("peer", _failure(first), 0.0) == [Outgoing("peer", Ack(8))]
    ledger = intake.statistics().ledger
    assert (ledger.dropped, ledger.dropped_tokens) == ({"reward_error": 1}, {"reward_error": 3})


def test_a_late_failure_does_not_drop_a_sample_that_another_holds(intake: Intake) -> None:
    duties = duties_of(intake.handle("first", _hello("first"), 0.0))
    intake.handle("second", _hello("second"), 1000.0)
    again = duties_of(intake.tick(1000.0))
    intake.handle("first", _failure(duties[0]), 1001.0)
    assert intake.statistics().ledger.dropped == {}
    intake.handle("second", _results(*again), 1002.0)
    assert intake.take_batch() is not None


def test_a_late_failure_does_not_drop_a_sample_in_training(intake: Intake) -> None:
    duties = duties_of(intake.handle("first", _hello("first"), 0.0))
    intake.handle("second", _hello("second"), 1000.0)
    intake.handle("second", _results(*duties_of(intake.tick(1000.0))), 1001.0)
    assert intake.take_batch() is not None
    intake.handle("first", _failure(duties[0]), 1002.0)
    intake.commit(1, evaluate=False)
    counts = intake.statistics().ledger
    assert (counts.trained, counts.dropped) == (2, {})


# -- the end -----------------------------------------------------------------------------------------------------------


def test_nothing_is_leased_while_draining_and_late_workers_are_told(intake: Intake) -> None:
    intake.handle("peer", _hello(), 0.0)
    assert intake.stop() == [Outgoing("peer", Drain())]
    late = [message for _, message in intake.handle("late", _hello("late"), 0.0)]
    assert [type(message) for message in late] == [Welcome, Drain]
    assert intake.take_batch() is None
    assert intake.no_more_batches


def test_a_lost_drain_is_repeated_with_the_next_heartbeat(intake: Intake) -> None:
    intake.handle("peer", _hello(), 0.0)
    intake.stop()
    assert Drain() in _sent(intake.handle("peer", heartbeat(newest=0), 1.0), Drain)


def test_the_work_of_a_worker_counts_from_its_first_hello_to_its_goodbye(intake: Intake) -> None:
    """An earlier learner has counted the rest."""
    intake.handle("peer", Hello("w", "1", 4, 0, None, 1, 0, (), Work(100.0, 5000)), 0.0)
    intake.handle("peer", heartbeat(newest=0, tokens=5030), 1.0)
    assert intake.statistics().generated_tokens == 30
    intake.handle("peer", Hello("w", "1", 4, 0, LEARNER, 3, 0, (), Work(100.0, 5040)), 2.0)
    intake.handle("peer", Goodbye(LEARNER, Work(102.5, 5050)), 3.0)
    statistics = intake.statistics()
    assert (statistics.generated_tokens, statistics.rollout_idle_s, statistics.num_workers) == (50, 2.5, 0)


def test_the_sign_of_a_group_id_is_its_purpose() -> None:
    assert [purpose_of(group_id) for group_id in (-2, -1, 0, 1)] == ["eval", "eval", "train", "train"]
