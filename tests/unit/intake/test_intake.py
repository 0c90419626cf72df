"""The intake as a state machine: a message in, changes of the ledger and messages out; no sockets, no threads."""

from pathlib import Path

import numpy as np
import pytest
from support.intakes import make_broadcaster, make_intake

from areal_rloo.intake.intake import Intake, Outgoing
from areal_rloo.trajectory import Completion, Trajectory, purpose_of
from areal_rloo.wire.messages import (
    Abort,
    Drain,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Leases,
    SampleFailed,
    TrajectoryAck,
    TrajectoryBatch,
    Welcome,
)


@pytest.fixture
def intake(tmp_path: Path) -> Intake:
    """Groups of two, batches of one group, no staleness."""
    one_group = ("learner.groups_per_step=1", "learner.num_minibatches=1")
    options = ("algorithm.group_size=2", *one_group, "algorithm.max_staleness=0")
    return make_intake(make_broadcaster(tmp_path), *options)


def _hello(worker_id: str = "w", incarnation: str = "1", held: tuple[tuple[int, int], ...] = ()) -> Hello:
    return Hello(worker_id, incarnation, 4, 0, held)


def _trajectory(index: int) -> Trajectory:
    completion = Completion(np.array([2], np.int32), np.array([-1.0], np.float32), np.array([0], np.int32), "stop")
    return Trajectory(0, index, np.array([1, 2], np.int32), completion, float(index))


def _leases(messages: list[Outgoing]) -> list[tuple[int, tuple[int, ...]]]:
    leases = [lease for _, message in messages if isinstance(message, Leases) for lease in message.leases]
    return [(lease.group_id, lease.sample_indices) for lease in leases]


def test_a_hello_is_answered_with_a_welcome_and_the_admitted_groups(intake: Intake) -> None:
    sent = intake.handle("peer", _hello(), 0.0)
    assert [type(message) for _, message in sent] == [Welcome, Leases]
    assert {peer for peer, _ in sent} == {"peer"}
    assert _leases(sent) == [(0, (0, 1))]


def test_trajectories_are_acknowledged_and_complete_the_batch(intake: Intake) -> None:
    intake.handle("peer", _hello(), 0.0)
    assert intake.take_batch() is None
    sent = intake.handle("peer", TrajectoryBatch("w", 7, (_trajectory(0), _trajectory(1))), 0.0)
    assert sent == [Outgoing("peer", TrajectoryAck((7,)))]
    batch = intake.take_batch()
    assert batch is not None
    assert [group.group_id for group in batch] == [0]


def test_a_commit_trains_the_batch_and_admits_the_next_group_at_once(intake: Intake) -> None:
    intake.handle("peer", _hello(), 0.0)
    intake.handle("peer", TrajectoryBatch("w", 7, (_trajectory(0), _trajectory(1))), 0.0)
    intake.take_batch()
    sent = intake.commit(1, [], evaluate=False)
    assert _leases(sent) == [(1, (0, 1))]
    counts = intake.statistics().ledger
    assert (counts.trained, counts.in_flight, counts.buffered) == (2, 2, 0)


def test_a_refused_batch_is_dropped_with_its_reason(intake: Intake) -> None:
    intake.handle("peer", _hello(), 0.0)
    intake.handle("peer", TrajectoryBatch("w", 7, (_trajectory(0), _trajectory(1))), 0.0)
    intake.take_batch()
    assert _leases(intake.refuse_batch("non_finite")) == [(1, (0, 1))]
    assert intake.statistics().ledger.dropped == {"non_finite": 2}


def test_a_silent_worker_loses_its_samples_to_another(intake: Intake) -> None:
    intake.handle("first", _hello("first"), 0.0)
    intake.handle("second", _hello("second"), 1000.0)
    sent = intake.remove_silent(1000.0)
    assert _leases(sent) == [(0, (0, 1))]
    assert {peer for peer, _ in sent} == {"second"}
    assert intake.remove_silent(1000.0) == []


def test_an_unknown_worker_is_told_to_say_hello(intake: Intake) -> None:
    ((_, reply),) = intake.handle("peer", Heartbeat("w", 0, 0.0, 0), 0.0)
    assert isinstance(reply, HeartbeatReply)
    assert reply.lease_sequence == -1


def test_samples_that_the_learner_did_not_lease_are_aborted(intake: Intake) -> None:
    sent = [message for _, message in intake.handle("peer", _hello(held=((5, 0),)), 0.0)]
    assert Abort(((5, 0),)) in sent


def test_nothing_is_leased_while_draining_and_late_workers_are_told(intake: Intake) -> None:
    intake.handle("peer", _hello(), 0.0)
    assert intake.stop() == [Outgoing("peer", Drain())]
    late = [message for _, message in intake.handle("late", _hello("late"), 0.0)]
    assert [type(message) for message in late] == [Welcome, Drain]
    assert intake.take_batch() is None
    assert intake.no_more_batches


def test_a_goodbye_and_a_failed_sample_change_the_ledger_without_a_reply(intake: Intake) -> None:
    intake.handle("peer", _hello(), 0.0)
    assert intake.handle("peer", SampleFailed("w", 0, 0, "reward_error", "no", ""), 0.0) == []
    assert intake.statistics().ledger.dropped == {"reward_error": 1}
    intake.handle("peer", Goodbye("w"), 0.0)
    assert intake.statistics().num_workers == 0
    assert intake.handle("peer", Goodbye("w"), 0.0) == []


def test_the_sign_of_a_group_id_is_its_purpose() -> None:
    assert [purpose_of(group_id) for group_id in (-2, -1, 0, 1)] == ["eval", "eval", "train", "train"]
