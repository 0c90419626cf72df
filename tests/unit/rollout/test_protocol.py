"""The worker's end of the protocol as a state machine; no sockets, no tasks."""

import numpy as np
import pytest
from support.workers import ENGINE, make_protocol

from areal_rloo.errors import WentBackError
from areal_rloo.rollout.protocol import EngineState, WorkerProtocol
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire.messages import (
    Abort,
    Ack,
    Drain,
    Duty,
    Failed,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Lease,
    Leases,
    Partial,
    Partials,
    PartialsCall,
    Results,
    WeightsCall,
    WeightsFailed,
    WeightsNotice,
    WeightsReady,
    WeightsReceived,
    Welcome,
    Work,
    WorkerMessage,
    digest,
)

LEARNER = "learner"
HISTORY = ((LEARNER, 0),)


def _lease(lease_id: int, group_id: int = 0, num: int = 2) -> Lease:
    return Lease(lease_id, group_id, tuple(range(num)), (1, 2), Item("?"), 0, 0)


def _leases(*lease_ids: int, learner_id: str = LEARNER) -> Leases:
    return Leases(learner_id, tuple(_lease(lease_id, group_id=lease_id) for lease_id in lease_ids))


def _trajectory(duty: Duty) -> Trajectory:
    completion = Completion(np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32), "stop")
    return Trajectory(*duty.sample_id, np.ones(2, np.int32), completion, 1.0)


def _finish(protocol: WorkerProtocol, *duties: Duty, num_bytes: int = 100) -> None:
    for duty in duties:
        protocol.finish(duty, [_trajectory(duty)], num_bytes)


def _of(messages: list[WorkerMessage], kind: type[WorkerMessage]) -> list[WorkerMessage]:
    return [message for message in messages if isinstance(message, kind)]


def _met(**options: int) -> WorkerProtocol:
    """Return a worker that has been welcomed, at time 0."""
    protocol = make_protocol(heartbeat_s=1.0, **options)
    hello, beat = protocol.poll(0.0, ENGINE)
    assert isinstance(hello, Hello) and isinstance(beat, Heartbeat)
    protocol.handle(Welcome(LEARNER, hello.number, HISTORY), ENGINE)
    return protocol


def _beat(protocol: WorkerProtocol, now_s: float) -> Heartbeat:
    (beat,) = _of(protocol.poll(now_s, ENGINE), Heartbeat)
    assert isinstance(beat, Heartbeat)
    return beat


def _reply(
    beat: Heartbeat, *, newest_lease: int = 0, say_hello: bool = False, learner_id: str = LEARNER
) -> HeartbeatReply:
    return HeartbeatReply(learner_id, beat.number, newest_lease, say_hello)


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_starts_once_and_only_from_the_known_learner() -> None:
    protocol = make_protocol()
    assert protocol.handle(_leases(1), ENGINE).start == []
    protocol = _met()
    assert protocol.handle(_leases(1, learner_id="before"), ENGINE).start == []
    assert [lease.lease_id for lease in protocol.handle(_leases(1, 2), ENGINE).start] == [1, 2]
    assert protocol.handle(_leases(1, 2), ENGINE).start == []


def test_a_lease_that_comes_after_a_later_lease_is_void() -> None:
    """The heartbeat has told the learner, who has leased the samples again."""
    protocol = _met()
    protocol.handle(_leases(2), ENGINE)
    beat = _beat(protocol, 1.0)
    assert (beat.newest_lease, beat.duties) == (2, digest(_lease(2, 2).duties))
    assert protocol.handle(_leases(1), ENGINE).start == []


def test_a_lost_lease_is_given_back_with_a_hello() -> None:
    protocol = _met()
    protocol.handle(_leases(1), ENGINE)
    protocol.handle(_reply(_beat(protocol, 1.0), newest_lease=3), ENGINE)
    (hello,) = _of(protocol.poll(2.0, ENGINE), Hello)
    assert isinstance(hello, Hello)
    assert (hello.newest_lease, set(hello.duties)) == (3, set(_lease(1, 1).duties))
    assert protocol.handle(_leases(3), ENGINE).start == [], "it comes late, and is void"


def test_a_hello_is_repeated_until_its_welcome_comes() -> None:
    protocol = make_protocol(heartbeat_s=1.0)
    numbers = []
    for now_s in (0.0, 0.5, 2.0, 4.0):
        numbers += [message.number for message in protocol.poll(now_s, ENGINE) if isinstance(message, Hello)]
    assert len(numbers) == 3
    protocol.handle(Welcome(LEARNER, numbers[0], HISTORY), ENGINE)
    assert len(_of(protocol.poll(6.0, ENGINE), Hello)) == 1, "this Welcome answers an earlier Hello"
    protocol.handle(Welcome(LEARNER, numbers[-1] + 3, HISTORY), ENGINE)


def test_an_abort_cancels_running_duties_alone() -> None:
    protocol = _met()
    protocol.handle(_leases(1), ENGINE)
    first, second = _lease(1, 1).duties
    _finish(protocol, first)
    orders = protocol.handle(Abort(LEARNER, (first, second, Duty(9, 9, 9))), ENGINE)
    assert orders.cancel == [second]
    _finish(protocol, second)
    (results,) = _of(protocol.poll(0.1, ENGINE), Results)
    assert isinstance(results, Results)
    assert [each.trajectories[0].sample_id for each in results.finished] == [first.sample_id]


def test_a_drain_is_passed_on() -> None:
    assert _met().handle(Drain(), ENGINE).drain


# -- results -----------------------------------------------------------------------------------------------------------


def test_results_and_failures_that_are_ready_share_a_message() -> None:
    protocol = _met()
    protocol.handle(_leases(1, 2), ENGINE)
    first, second, third, fourth = [*_lease(1, 1).duties, *_lease(2, 2).duties]
    _finish(protocol, first, third)
    protocol.fail(Failed(*second, "reward_error", "no", ""), 100)
    (results,) = _of(protocol.poll(0.1, ENGINE), Results)
    assert isinstance(results, Results)
    assert [each.lease_id for each in results.finished] == [1, 2]
    assert [Duty(each.lease_id, each.group_id, each.sample_index) for each in results.failed] == [second]
    assert protocol.statistics().unacknowledged == 3
    protocol.handle(Ack(results.number), ENGINE)
    assert protocol.statistics().unacknowledged == 0
    assert protocol.duties == [fourth]


def test_messages_in_flight_are_bounded_and_the_rest_is_batched() -> None:
    protocol = _met(capacity_samples=100)
    lease = _lease(1, 1, num=40)
    protocol.handle(Leases(LEARNER, (lease,)), ENGINE)
    sizes, numbers = [], []
    for duty in lease.duties:
        _finish(protocol, duty)
        for results in protocol.poll(0.1, ENGINE):
            assert isinstance(results, Results)
            sizes.append(len(results.finished))
            numbers.append(results.number)
    assert sizes == [1] * 16
    protocol.handle(Ack(numbers[0]), ENGINE)
    (rest,) = protocol.poll(0.1, ENGINE)
    assert isinstance(rest, Results)
    assert len(rest.finished) == 24


def test_a_message_keeps_to_the_limit_of_bytes() -> None:
    protocol = _met(max_batch_bytes=1000)
    lease = _lease(1, 1, num=8)
    protocol.handle(Leases(LEARNER, (lease,)), ENGINE)
    _finish(protocol, *lease.duties[:6], num_bytes=400)
    _finish(protocol, *lease.duties[6:], num_bytes=5000)
    messages = protocol.poll(0.1, ENGINE)
    assert [len(message.finished) for message in messages if isinstance(message, Results)] == [2, 2, 2, 1, 1]


@pytest.mark.parametrize("busy", [False, True])
def test_a_lost_result_is_sent_again_after_the_next_heartbeat(busy: bool) -> None:
    """Also if the worker goes on sending: no silence is needed."""
    protocol = _met(capacity_samples=100)
    lease = _lease(1, 1, num=10)
    protocol.handle(Leases(LEARNER, (lease,)), ENGINE)
    protocol.fail(Failed(*lease.duties[0], "reward_error", "no", ""), 100)
    (lost,) = _of(protocol.poll(0.1, ENGINE), Results)
    beat = _beat(protocol, 1.0)
    if busy:
        _finish(protocol, *lease.duties[1:4])
        (later,) = _of(protocol.poll(1.05, ENGINE), Results)
    protocol.handle(_reply(beat, newest_lease=1), ENGINE)
    assert protocol.poll(1.1, ENGINE) == [lost], "messages sent after the heartbeat may still be on their way"
    assert protocol.poll(1.2, ENGINE) == []
    protocol.handle(_reply(_beat(protocol, 2.1), newest_lease=1), ENGINE)
    again = _of(protocol.poll(2.2, ENGINE), Results)
    assert again == [lost, later] if busy else [lost]


def test_results_on_their_way_do_not_change_the_digest() -> None:
    protocol = _met()
    protocol.handle(_leases(1), ENGINE)
    first, second = _lease(1, 1).duties
    _finish(protocol, first)
    assert _of(protocol.poll(0.5, ENGINE), Results)
    assert _beat(protocol, 1.0).duties == digest([second])
    protocol.handle(_reply(_beat(protocol, 2.0), newest_lease=1, say_hello=True), ENGINE)
    (hello,) = _of(protocol.poll(2.1, ENGINE), Hello)
    assert isinstance(hello, Hello)
    assert set(hello.duties) == {first, second}


# -- another learner ---------------------------------------------------------------------------------------------------


def test_another_learner_gets_no_old_samples_and_a_hello() -> None:
    protocol = _met()
    protocol.handle(_leases(1), ENGINE)
    first, second = _lease(1, 1).duties
    _finish(protocol, first)
    protocol.poll(0.5, ENGINE)
    orders = protocol.handle(_reply(_beat(protocol, 2.0), learner_id="another"), ENGINE)
    assert orders.cancel == [second]
    (hello,) = protocol.poll(2.1, ENGINE)
    assert isinstance(hello, Hello)
    assert (hello.learner_id, hello.newest_lease, hello.duties) == (None, 0, ())
    assert protocol.handle(_leases(1, learner_id="another"), ENGINE).start == [], "its history is not known yet"
    protocol.handle(Welcome("another", hello.number, (("another", 0),)), ENGINE)
    assert [lease.lease_id for lease in protocol.handle(_leases(1, learner_id="another"), ENGINE).start] == [1]


def _at_57() -> tuple[WorkerProtocol, EngineState]:
    """Return a worker with version 57 of the learner."""
    protocol, engine = _met(), EngineState(57, 57, Work())
    notice = WeightsNotice(LEARNER, 1, 57, b"")
    protocol.handle(notice, ENGINE)
    protocol.weights_received(notice, 7, engine)
    return protocol, engine


@pytest.mark.parametrize(
    "history",
    [
        [("another", 0)],
        [("another", 57)],
        [(LEARNER, 0), ("another", 50)],
        [(LEARNER, 0), ("third", 50), ("another", 60)],
        [("first", 0), (LEARNER, 30), ("another", 56)],
    ],
)
def test_a_learner_of_another_history_ends_the_worker(history: list[tuple[str, int]]) -> None:
    """Also if the learner has caught up since: its version 57 has other weights than this worker's version 57."""
    protocol, engine = _at_57()
    with pytest.raises(WentBackError, match=f"began with version {history[-1][1]}; .* version 57 of learner learner"):
        protocol.handle(Welcome("another", 1, tuple(history)), engine)


@pytest.mark.parametrize(
    "history",
    [
        [(LEARNER, 0), ("another", 57)],
        [(LEARNER, 0), ("another", 60)],
        [("first", 0), (LEARNER, 30), ("third", 58), ("another", 99)],
    ],
)
def test_a_learner_of_the_same_history_changes_nothing(history: list[tuple[str, int]]) -> None:
    protocol, engine = _at_57()
    protocol.handle(Welcome("another", 1, tuple(history)), engine)


def test_initial_weights_are_of_every_history() -> None:
    protocol, _ = _at_57()
    protocol.handle(Welcome("another", 1, (("another", 9),)), ENGINE)  # the engine restarted


def test_weights_of_an_earlier_learner_that_arrive_late_end_the_worker() -> None:
    protocol = _met()
    notice = WeightsNotice(LEARNER, 1, 51, b"")
    assert protocol.handle(notice, ENGINE).receive is notice
    protocol.handle(Welcome("another", 1, ((LEARNER, 0), ("another", 50))), ENGINE)
    with pytest.raises(WentBackError, match="version 51 of learner learner"):
        protocol.weights_received(notice, 7, EngineState(51, 51, Work()))


# -- weights -----------------------------------------------------------------------------------------------------------


def test_an_offer_is_received_once_and_answered_until_acknowledged() -> None:
    protocol = _met()
    notice = WeightsNotice(LEARNER, 1, 5, b"")
    assert protocol.handle(notice, ENGINE).receive is notice
    assert protocol.handle(notice, ENGINE).receive is None
    beat = _beat(protocol, 1.0)
    assert (beat.newest_offer, beat.receiving) == (1, True)
    protocol.weights_received(notice, 7, EngineState(5, 5, Work()))
    (answer,) = protocol.poll(1.1, ENGINE)
    assert isinstance(answer, WeightsReceived)
    assert (answer.offer_id, answer.checksum) == (1, 7)
    beat = _beat(protocol, 2.0)
    assert not beat.receiving
    protocol.handle(_reply(beat), ENGINE)
    assert protocol.poll(2.1, ENGINE) == [answer]
    protocol.handle(Ack(answer.number), ENGINE)
    protocol.handle(_reply(_beat(protocol, 3.0)), ENGINE)
    assert protocol.poll(3.1, ENGINE) == []


def test_a_call_is_answered_when_nothing_is_being_received() -> None:
    protocol = _met()
    notice = WeightsNotice(LEARNER, 1, 5, b"")
    protocol.handle(notice, ENGINE)
    protocol.handle(WeightsCall(LEARNER, 2), ENGINE)
    assert protocol.poll(0.1, ENGINE) == []
    protocol.weights_failed(notice, "no")
    ready, failed = protocol.poll(0.2, ENGINE)
    assert ready == WeightsReady(LEARNER, 2)
    assert isinstance(failed, WeightsFailed)
    protocol.handle(WeightsCall(LEARNER, 1), ENGINE)
    assert protocol.poll(0.3, ENGINE) == [], "an old call"


# -- partial rollouts --------------------------------------------------------------------------------------------------


def test_partial_rollouts_of_running_duties_follow_the_results() -> None:
    protocol = _met()
    protocol.handle(_leases(1, 2), ENGINE)
    finished, running, *_ = _lease(1, group_id=1).duties
    assert protocol.handle(PartialsCall(LEARNER, 5), ENGINE).tell_partials == 5
    _finish(protocol, finished)
    protocol.tell_partials({finished: b"late", running: b"turns", Duty(9, 9, 9): b"cancelled"})
    sent = protocol.poll(0.1, ENGINE)
    assert [type(message) for message in sent] == [Results, Partials]
    assert sent[-1] == Partials(LEARNER, 5, (Partial(*running, b"turns"),), last=True)
    assert protocol.poll(0.2, ENGINE) == [], "sent once"


def test_a_call_without_any_partial_rollout_is_answered() -> None:
    protocol = _met()
    protocol.handle(PartialsCall(LEARNER, 5), ENGINE)
    protocol.tell_partials({})
    assert protocol.poll(0.1, ENGINE) == [Partials(LEARNER, 5, (), last=True)]


def test_partial_rollouts_keep_to_the_limit_of_bytes() -> None:
    protocol = _met(max_batch_bytes=100)
    protocol.handle(Leases(LEARNER, (_lease(1, num=5),)), ENGINE)
    sizes = dict(zip(_lease(1, num=5).duties, (60, 60, 40, 101, 0), strict=True))  # the last two are not sent
    protocol.tell_partials({duty: b"x" * size for duty, size in sizes.items()})
    sent = _of(protocol.poll(0.1, ENGINE), Partials)
    assert [[len(partial.turns) for partial in message.partials] for message in sent] == [[60], [60, 40]]
    assert [(message.call_id, message.last) for message in sent] == [(0, False), (0, True)]


def test_another_learner_gets_no_partial_rollouts_of_the_learner_before() -> None:
    protocol = _met()
    protocol.handle(_leases(1), ENGINE)
    protocol.handle(PartialsCall(LEARNER, 5), ENGINE)
    protocol.tell_partials({_lease(1, group_id=1).duties[0]: b"turns"})
    protocol.handle(_reply(_beat(protocol, 1.0), learner_id="another"), ENGINE)
    assert not _of(protocol.poll(1.1, ENGINE), Partials)
    protocol.tell_partials({_lease(1, group_id=1).duties[0]: b"turns"})  # asked for by the learner before
    assert not _of(protocol.poll(1.2, ENGINE), Partials)


# -- a dead connection -------------------------------------------------------------------------------------------------


def test_heartbeats_without_an_answer_ask_for_a_new_connection_once() -> None:
    protocol = _met(heartbeat_timeout_s=3)
    deaf = []
    for now_s in range(1, 10):
        _beat(protocol, now_s)
        deaf.append(protocol.is_deaf())
    assert deaf == [False, False, False, True, False, False, False, True, False]


def test_any_message_of_the_learner_keeps_the_connection() -> None:
    protocol = _met(heartbeat_timeout_s=3)
    for now_s in range(1, 10):
        _beat(protocol, now_s)
        assert not protocol.is_deaf()
        protocol.handle(Ack(1000), ENGINE)


def test_a_worker_that_was_stopped_for_long_keeps_its_connection() -> None:
    """The answers wait in the socket."""
    protocol = _met(heartbeat_timeout_s=3)
    _beat(protocol, 1.0)
    _beat(protocol, 1000.0)
    assert not protocol.is_deaf()


def test_samples_with_many_trajectories_travel_in_messages_of_their_own() -> None:
    """The learner refuses a message with more trajectories than its limit."""
    protocol = _met(capacity_samples=8)
    protocol.handle(_leases(1, 2, 3), ENGINE)
    duties = list(protocol.duties)
    for duty, num in zip(duties, (1, 60, 3, 1, 4096, 2), strict=True):
        protocol.finish(duty, [_trajectory(duty)] * num, 100)
    sent = [message for message in _of(protocol.poll(0.0, ENGINE), Results) if isinstance(message, Results)]
    assert [[len(each.trajectories) for each in message.finished] for message in sent] == [[1, 60, 3], [1], [4096], [2]]
