"""Results of a worker on their way to the learner: batched, bounded, and sent again; no sockets, no tasks."""

import pytest
from support.protocols import (
    LEARNER,
    finish,
    make_lease,
    make_leases,
    make_trajectory,
    next_beat,
    of_kind,
    reply_to,
    welcomed,
)
from support.workers import ENGINE

from areal_rloo.rollout.protocol import WorkerProtocol
from areal_rloo.wire.messages import (
    Ack,
    Duty,
    Failed,
    Hello,
    Lease,
    Leases,
    Partials,
    PartialsCall,
    Results,
    digest,
)


def _with_lease(num: int, **options: int) -> tuple[WorkerProtocol, Lease]:
    """Return a welcomed worker with a lease of so many samples."""
    protocol, lease = welcomed(**options), make_lease(1, 1, num=num)
    protocol.handle(Leases(LEARNER, (lease,)), ENGINE)
    return protocol, lease


def test_results_and_failures_that_are_ready_share_a_message() -> None:
    protocol = welcomed()
    protocol.handle(make_leases(1, 2), ENGINE)
    first, second, third, fourth = [*make_lease(1, 1).duties, *make_lease(2, 2).duties]
    finish(protocol, first, third)
    protocol.fail(Failed(*second, "reward_error", "no", "", 3), 100)
    (results,) = of_kind(protocol.poll(0.1, ENGINE), Results)
    assert isinstance(results, Results)
    assert [each.lease_id for each in results.finished] == [1, 2]
    assert [Duty(each.lease_id, each.group_id, each.sample_index) for each in results.failed] == [second]
    assert protocol.statistics().unacknowledged == 3
    protocol.handle(Ack(results.number), ENGINE)
    assert protocol.statistics().unacknowledged == 0
    assert protocol.duties == [fourth]


def _all_results(protocol: WorkerProtocol) -> list[Results]:
    """Acknowledge each message with results until there are no more."""
    messages: list[Results] = []
    while sent := [message for message in protocol.poll(0.1, ENGINE) if isinstance(message, Results)]:
        messages += sent
        for message in sent:
            protocol.handle(Ack(message.number), ENGINE)
    return messages


def _sent(protocol: WorkerProtocol) -> list[tuple[int, int]]:
    """Poll; return the number and the size of each message with results."""
    messages = [message for message in protocol.poll(0.1, ENGINE) if isinstance(message, Results)]
    return [(message.number, len(message.finished)) for message in messages]


def test_messages_in_flight_are_bounded_and_the_rest_is_batched() -> None:
    protocol, lease = _with_lease(140, capacity_samples=200)
    sent: list[tuple[int, int]] = []
    for duty in lease.duties:
        finish(protocol, duty)
        sent += _sent(protocol)
    (first, _), (second, _) = sent
    assert [size for _, size in sent] == [1, 64], "only a full message leaves before the acknowledgement of another"
    protocol.handle(Ack(first), ENGINE)
    ((third, size),) = _sent(protocol)
    assert size == 64
    protocol.handle(Ack(second), ENGINE)
    assert _sent(protocol) == [], "11 results fill no message"
    protocol.handle(Ack(third), ENGINE)
    assert [size for _, size in _sent(protocol)] == [11]


def test_all_results_leave_before_partial_rollouts() -> None:
    """Else finished samples would be generated again, after a stop of this worker or a resume of the run."""
    protocol, lease = _with_lease(8, capacity_samples=8)
    for duty in lease.duties[:4]:
        finish(protocol, duty)
        sent = _sent(protocol)
    assert sent == [], "three results wait"
    protocol.handle(PartialsCall(LEARNER, 1), ENGINE)
    protocol.tell_partials({lease.duties[4]: b"turns"})
    results, partials = protocol.poll(0.1, ENGINE)
    assert isinstance(results, Results) and len(results.finished) == 3
    assert isinstance(partials, Partials)


def test_a_message_is_full_by_its_bytes_too() -> None:
    protocol, lease = _with_lease(8, max_batch_bytes=1000)
    sizes = []
    for duty in lease.duties:
        finish(protocol, duty, num_bytes=400)
        sizes += [size for _, size in _sent(protocol)]
    assert sizes == [1, 2]


def test_a_message_is_full_by_its_trajectories_too() -> None:
    protocol, lease = _with_lease(20, capacity_samples=100)
    sizes = []
    for duty in lease.duties:
        protocol.finish(duty, [make_trajectory(duty)] * 8, 100)
        sizes += [size for _, size in _sent(protocol)]
    assert sizes == [1, 8]


def test_a_full_message_of_failures_leaves_too() -> None:
    protocol, lease = _with_lease(80, capacity_samples=100)
    finish(protocol, lease.duties[0])
    assert len(_sent(protocol)) == 1
    for duty in lease.duties[1:65]:
        assert _sent(protocol) == []
        protocol.fail(Failed(*duty, "reward_error", "no", "", 3), 100)
    assert len(_sent(protocol)) == 1


def test_a_message_keeps_to_the_limit_of_bytes() -> None:
    protocol, lease = _with_lease(8, max_batch_bytes=1000)
    finish(protocol, *lease.duties[:6], num_bytes=400)
    finish(protocol, *lease.duties[6:], num_bytes=5000)
    assert [len(message.finished) for message in _all_results(protocol)] == [2, 2, 2, 1, 1]


@pytest.mark.parametrize("busy", [False, True])
def test_a_lost_result_is_sent_again_after_the_next_heartbeat(busy: bool) -> None:
    """Also if the worker goes on sending: no silence is needed."""
    protocol, lease = _with_lease(80, capacity_samples=100)
    protocol.fail(Failed(*lease.duties[0], "reward_error", "no", "", 3), 100)
    (lost,) = of_kind(protocol.poll(0.1, ENGINE), Results)
    beat = next_beat(protocol, 1.0)
    if busy:
        finish(protocol, *lease.duties[1:65])
        (later,) = of_kind(protocol.poll(1.05, ENGINE), Results)
    protocol.handle(reply_to(beat, newest_lease=1), ENGINE)
    assert protocol.poll(1.1, ENGINE) == [lost], "messages sent after the heartbeat may still be on their way"
    assert protocol.poll(1.2, ENGINE) == []
    protocol.handle(reply_to(next_beat(protocol, 2.1), newest_lease=1), ENGINE)
    again = of_kind(protocol.poll(2.2, ENGINE), Results)
    assert again == [lost, later] if busy else [lost]


def test_results_on_their_way_do_not_change_the_digest() -> None:
    protocol = welcomed()
    protocol.handle(make_leases(1), ENGINE)
    first, second = make_lease(1, 1).duties
    finish(protocol, first)
    assert of_kind(protocol.poll(0.5, ENGINE), Results)
    assert next_beat(protocol, 1.0).duties == digest([second])
    protocol.handle(reply_to(next_beat(protocol, 2.0), newest_lease=1, say_hello=True), ENGINE)
    (hello,) = of_kind(protocol.poll(2.1, ENGINE), Hello)
    assert isinstance(hello, Hello)
    assert set(hello.duties) == {first, second}


def test_samples_with_many_trajectories_travel_in_messages_of_their_own() -> None:
    """The learner refuses a message with more trajectories than its limit."""
    protocol = welcomed(capacity_samples=8)
    protocol.handle(make_leases(1, 2, 3), ENGINE)
    duties = list(protocol.duties)
    for duty, num in zip(duties, (1, 60, 3, 1, 4096, 2), strict=True):
        protocol.finish(duty, [make_trajectory(duty)] * num, 100)
    sent = _all_results(protocol)
    assert [[len(each.trajectories) for each in message.finished] for message in sent] == [[1, 60, 3], [1], [4096], [2]]
