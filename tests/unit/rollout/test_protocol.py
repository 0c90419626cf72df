"""The worker's end of the protocol as a state machine; no sockets, no tasks."""

import pytest
from support.protocols import HISTORY, LEARNER, finish, make_lease, make_leases, next_beat, of_kind, reply_to, welcomed
from support.workers import ENGINE, make_protocol

from areal_rloo.errors import WentBackError
from areal_rloo.rollout.protocol import EngineState, WorkerProtocol
from areal_rloo.wire.messages import (
    MOST_PARTIALS,
    Abort,
    Ack,
    Drain,
    Duty,
    Hello,
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
    digest,
)

# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_starts_once_and_only_from_the_known_learner() -> None:
    protocol = make_protocol()
    assert protocol.handle(make_leases(1), ENGINE).start == []
    protocol = welcomed()
    assert protocol.handle(make_leases(1, learner_id="before"), ENGINE).start == []
    assert [lease.lease_id for lease in protocol.handle(make_leases(1, 2), ENGINE).start] == [1, 2]
    assert protocol.handle(make_leases(1, 2), ENGINE).start == []


def test_a_lease_that_comes_after_a_later_lease_is_void() -> None:
    """The heartbeat has told the learner, who has leased the samples again."""
    protocol = welcomed()
    protocol.handle(make_leases(2), ENGINE)
    beat = next_beat(protocol, 1.0)
    assert (beat.newest_lease, beat.duties) == (2, digest(make_lease(2, 2).duties))
    assert protocol.handle(make_leases(1), ENGINE).start == []


def test_a_lost_lease_is_given_back_with_a_hello() -> None:
    protocol = welcomed()
    protocol.handle(make_leases(1), ENGINE)
    protocol.handle(reply_to(next_beat(protocol, 1.0), newest_lease=3), ENGINE)
    (hello,) = of_kind(protocol.poll(2.0, ENGINE), Hello)
    assert isinstance(hello, Hello)
    assert (hello.newest_lease, set(hello.duties)) == (3, set(make_lease(1, 1).duties))
    assert protocol.handle(make_leases(3), ENGINE).start == [], "it comes late, and is void"


def test_a_hello_is_repeated_until_its_welcome_comes() -> None:
    protocol = make_protocol(heartbeat_s=1.0)
    numbers = []
    for now_s in (0.0, 0.5, 2.0, 4.0):
        numbers += [message.number for message in protocol.poll(now_s, ENGINE) if isinstance(message, Hello)]
    assert len(numbers) == 3
    protocol.handle(Welcome(LEARNER, numbers[0], HISTORY), ENGINE)
    assert len(of_kind(protocol.poll(6.0, ENGINE), Hello)) == 1, "this Welcome answers an earlier Hello"
    protocol.handle(Welcome(LEARNER, numbers[-1] + 3, HISTORY), ENGINE)


def test_an_abort_cancels_running_duties_alone() -> None:
    protocol = welcomed()
    protocol.handle(make_leases(1), ENGINE)
    first, second = make_lease(1, 1).duties
    finish(protocol, first)
    orders = protocol.handle(Abort(LEARNER, (first, second, Duty(9, 9, 9))), ENGINE)
    assert orders.cancel == [second]
    finish(protocol, second)
    (results,) = of_kind(protocol.poll(0.1, ENGINE), Results)
    assert isinstance(results, Results)
    assert [each.trajectories[0].sample_id for each in results.finished] == [first.sample_id]


def test_a_drain_is_passed_on() -> None:
    assert welcomed().handle(Drain(), ENGINE).drain


# -- another learner ---------------------------------------------------------------------------------------------------


def test_another_learner_gets_no_old_samples_and_a_hello() -> None:
    protocol = welcomed()
    protocol.handle(make_leases(1), ENGINE)
    first, second = make_lease(1, 1).duties
    finish(protocol, first)
    protocol.poll(0.5, ENGINE)
    orders = protocol.handle(reply_to(next_beat(protocol, 2.0), learner_id="another"), ENGINE)
    assert orders.cancel == [second]
    (hello,) = protocol.poll(2.1, ENGINE)
    assert isinstance(hello, Hello)
    assert (hello.learner_id, hello.newest_lease, hello.duties) == (None, 0, ())
    assert protocol.handle(make_leases(1, learner_id="another"), ENGINE).start == [], "its history is not known yet"
    protocol.handle(Welcome("another", hello.number, (("another", 0),)), ENGINE)
    assert [lease.lease_id for lease in protocol.handle(make_leases(1, learner_id="another"), ENGINE).start] == [1]


def _at_57() -> tuple[WorkerProtocol, EngineState]:
    """Return a worker with version 57 of the learner."""
    protocol, engine = welcomed(), EngineState(57, 57, Work())
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
    protocol = welcomed()
    notice = WeightsNotice(LEARNER, 1, 51, b"")
    assert protocol.handle(notice, ENGINE).receive is notice
    protocol.handle(Welcome("another", 1, ((LEARNER, 0), ("another", 50))), ENGINE)
    with pytest.raises(WentBackError, match="version 51 of learner learner"):
        protocol.weights_received(notice, 7, EngineState(51, 51, Work()))


# -- weights -----------------------------------------------------------------------------------------------------------


def test_an_offer_is_received_once_and_answered_until_acknowledged() -> None:
    protocol = welcomed()
    notice = WeightsNotice(LEARNER, 1, 5, b"")
    assert protocol.handle(notice, ENGINE).receive is notice
    assert protocol.handle(notice, ENGINE).receive is None
    beat = next_beat(protocol, 1.0)
    assert (beat.newest_offer, beat.receiving) == (1, True)
    protocol.weights_received(notice, 7, EngineState(5, 5, Work()))
    (answer,) = protocol.poll(1.1, ENGINE)
    assert isinstance(answer, WeightsReceived)
    assert (answer.offer_id, answer.checksum) == (1, 7)
    beat = next_beat(protocol, 2.0)
    assert not beat.receiving
    protocol.handle(reply_to(beat), ENGINE)
    assert protocol.poll(2.1, ENGINE) == [answer]
    protocol.handle(Ack(answer.number), ENGINE)
    protocol.handle(reply_to(next_beat(protocol, 3.0)), ENGINE)
    assert protocol.poll(3.1, ENGINE) == []


def test_a_call_is_answered_when_nothing_is_being_received() -> None:
    protocol = welcomed()
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
    protocol = welcomed()
    protocol.handle(make_leases(1, 2), ENGINE)
    finished, running, *_ = make_lease(1, group_id=1).duties
    assert protocol.handle(PartialsCall(LEARNER, 5), ENGINE).tell_partials == 5
    finish(protocol, finished)
    protocol.tell_partials({finished: b"late", running: b"turns", Duty(9, 9, 9): b"cancelled"})
    sent = protocol.poll(0.1, ENGINE)
    assert [type(message) for message in sent] == [Results, Partials]
    assert sent[-1] == Partials(LEARNER, 5, (Partial(*running, b"turns"),), last=True)
    assert protocol.poll(0.2, ENGINE) == [], "sent once"


def test_a_call_without_any_partial_rollout_is_answered() -> None:
    protocol = welcomed()
    protocol.handle(PartialsCall(LEARNER, 5), ENGINE)
    protocol.tell_partials({})
    assert protocol.poll(0.1, ENGINE) == [Partials(LEARNER, 5, (), last=True)]


def test_partial_rollouts_keep_to_the_limit_of_bytes() -> None:
    protocol = welcomed(max_batch_bytes=100)
    protocol.handle(Leases(LEARNER, (make_lease(1, num=5),)), ENGINE)
    sizes = dict(zip(make_lease(1, num=5).duties, (60, 60, 40, 101, 0), strict=True))  # the last two are not sent
    protocol.tell_partials({duty: b"x" * size for duty, size in sizes.items()})
    sent = of_kind(protocol.poll(0.1, ENGINE), Partials)
    assert [[len(partial.turns) for partial in message.partials] for message in sent] == [[60], [60, 40]]
    assert [(message.call_id, message.last) for message in sent] == [(0, False), (0, True)]


def test_partial_rollouts_keep_to_the_limit_of_a_message() -> None:
    protocol = welcomed()
    lease = make_lease(1, num=2 * MOST_PARTIALS + 1)
    protocol.handle(Leases(LEARNER, (lease,)), ENGINE)
    protocol.tell_partials(dict.fromkeys(lease.duties, b"turns"))
    sent = of_kind(protocol.poll(0.1, ENGINE), Partials)
    assert [(len(message.partials), message.last) for message in sent] == [(32, False), (32, False), (1, True)]


def test_another_learner_gets_no_partial_rollouts_of_the_learner_before() -> None:
    protocol = welcomed()
    protocol.handle(make_leases(1), ENGINE)
    protocol.handle(PartialsCall(LEARNER, 5), ENGINE)
    protocol.tell_partials({make_lease(1, group_id=1).duties[0]: b"turns"})
    protocol.handle(reply_to(next_beat(protocol, 1.0), learner_id="another"), ENGINE)
    assert not of_kind(protocol.poll(1.1, ENGINE), Partials)
    protocol.tell_partials({make_lease(1, group_id=1).duties[0]: b"turns"})  # asked for by the learner before
    assert not of_kind(protocol.poll(1.2, ENGINE), Partials)


# -- a dead connection -------------------------------------------------------------------------------------------------


def test_heartbeats_without_an_answer_ask_for_a_new_connection_once() -> None:
    protocol = welcomed(heartbeat_timeout_s=3)
    deaf = []
    for now_s in range(1, 10):
        next_beat(protocol, now_s)
        deaf.append(protocol.is_deaf())
    assert deaf == [False, False, False, True, False, False, False, True, False]


def test_any_message_of_the_learner_keeps_the_connection() -> None:
    protocol = welcomed(heartbeat_timeout_s=3)
    for now_s in range(1, 10):
        next_beat(protocol, now_s)
        assert not protocol.is_deaf()
        protocol.handle(Ack(1000), ENGINE)


def test_a_worker_that_was_stopped_for_long_keeps_its_connection() -> None:
    """The answers wait in the socket."""
    protocol = welcomed(heartbeat_timeout_s=3)
    next_beat(protocol, 1.0)
    next_beat(protocol, 1000.0)
    assert not protocol.is_deaf()
