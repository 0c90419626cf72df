"""Which worker is offered which version, and when again; without transports and without a clock."""

import pytest

from areal_rloo.weights.commands import Answered, Begin, Call, Over, Repeat
from areal_rloo.weights.offers import Offers


def _offers(*workers: str, together: bool = False) -> Offers:
    """Return offers at version 1, with workers at version 0."""
    offers = Offers(together=together, timeout_s=10.0, call_timeout_s=2.0)
    offers.publish(1)
    for worker_id in workers:
        offers.join(worker_id, 0, now_s=0.0)
    return offers


def _begun(offers: Offers, now_s: float = 0.0) -> list[Begin]:
    """Begin the due offers as the broadcaster does over shared memory."""
    found = [command for command in offers.poll(now_s) if isinstance(command, Begin)]
    for begin in found:
        offers.begun(begin.offer_id, 7)
        offers.sent(begin.offer_id)
    return found


def _called(offers: Offers, now_s: float = 0.0) -> Call:
    """Return the call of the due offer."""
    (call,) = (command for command in offers.poll(now_s) if isinstance(command, Call))
    return call


def _heard(
    offers: Offers,
    worker_id: str,
    version: int | None,
    now_s: float,
    *,
    newest_offer: int = 99,
    receiving: bool = False,
) -> None:
    offers.heard(worker_id, version, number=50, newest_offer=newest_offer, receiving=receiving, now_s=now_s)


def test_every_worker_behind_gets_an_offer_of_its_own() -> None:
    offers = _offers("a", "b")
    assert [(begin.policy_version, begin.workers) for begin in _begun(offers)] == [(1, ("a",)), (1, ("b",))]
    assert _begun(offers) == []


def test_an_answer_ends_the_offer() -> None:
    offers = _offers("a")
    (begin,) = _begun(offers)
    offers.received("a", begin.offer_id, 7, number=1, now_s=0.1)
    assert offers.poll(0.1) == [Answered(begin.offer_id, "a", taken=True), Over(begin.offer_id)]
    assert offers.members["a"].policy_version == 1
    assert _begun(offers, 100.0) == []


def test_an_offer_lasts_until_the_transport_has_finished() -> None:
    """The threads of a collective may still read the buckets."""
    offers = _offers("a")
    (begin,) = (command for command in offers.poll(0.0) if isinstance(command, Begin))
    offers.begun(begin.offer_id, 7)
    offers.received("a", begin.offer_id, 7, number=1, now_s=0.1)
    assert offers.poll(0.1) == [Answered(begin.offer_id, "a", taken=True)]
    offers.sent(begin.offer_id)
    assert offers.poll(0.1) == [Over(begin.offer_id)]


def test_a_wrong_checksum_is_a_failure() -> None:
    offers = _offers("a")
    (begin,) = _begun(offers)
    offers.received("a", begin.offer_id, 8, number=1, now_s=0.1)
    assert offers.members["a"].policy_version == 0
    assert offers.num_failures == 1


def test_failures_back_off_and_a_success_ends_the_backoff() -> None:
    offers = _offers("a")
    times, now_s = [], 0.0
    for _ in range(5):
        while not (found := _begun(offers, now_s)):
            now_s = offers.due_s()
        times.append(now_s)
        offers.failed("a", found[0].offer_id, "no", number=1, now_s=now_s)
    assert times == [0.0, 0.0, 2.0, 8.0, 22.0]
    (begin,) = _begun(offers, 1000.0)
    offers.received("a", begin.offer_id, 7, number=2, now_s=1000.0)
    offers.publish(2)
    assert len(_begun(offers, 1000.0)) == 1


def test_a_slow_worker_delays_no_other_over_shared_memory() -> None:
    offers = _offers("slow", "quick")
    for version in range(1, 6):
        offers.publish(version)
        begun = {begin.workers[0]: begin for begin in _begun(offers, float(version))}
        assert set(begun) == ({"slow", "quick"} if version == 1 else {"quick"})
        offers.received("quick", begun["quick"].offer_id, 7, number=version, now_s=float(version))
    assert offers.num_left_out == 0


def test_a_worker_gets_no_second_offer_while_it_receives() -> None:
    offers = _offers("a")
    _begun(offers)
    assert _begun(offers, 10.0) == []
    assert offers.num_left_out == 1
    _heard(offers, "a", 0, 20.0, receiving=True)
    assert _begun(offers, 20.0) == []
    _heard(offers, "a", 0, 30.0)
    assert len(_begun(offers, 30.0)) == 1


def test_a_lost_notice_is_repeated() -> None:
    offers = _offers("a")
    (begin,) = _begun(offers)
    _heard(offers, "a", 0, 1.0, newest_offer=0)
    assert offers.poll(1.0) == [], "the notice may still be on its way"
    _heard(offers, "a", 0, 3.0, newest_offer=0)
    assert offers.poll(3.0) == [Repeat(begin.offer_id, "a")]


def test_an_engine_that_restarts_gets_the_newest_version_again() -> None:
    offers = _offers("a")
    (begin,) = _begun(offers)
    offers.received("a", begin.offer_id, 7, number=1, now_s=0.1)
    _heard(offers, "a", None, 1.0)
    assert "a" not in offers.members
    _heard(offers, "a", 0, 2.0)
    assert len(_begun(offers, 2.0)) == 1


def test_a_worker_is_behind_by_the_versions_it_missed_since_it_came() -> None:
    """A worker that comes late takes seconds to load, and is not to blame for the versions before."""
    offers = _offers("a")
    assert offers.num_behind == 0
    for version in (2, 3, 4):
        offers.publish(version)
    assert offers.num_behind == 3
    (begin,) = _begun(offers)
    offers.received("a", begin.offer_id, 7, number=1, now_s=0.1)
    assert offers.num_behind == 0
    for version in range(5, 100):
        offers.publish(version)
        (begin,) = _begun(offers, float(version))
        offers.received("a", begin.offer_id, 7, number=version, now_s=float(version))
    offers.join("b", 0, now_s=100.0)
    offers.join("a", 0, number=200, now_s=100.0)  # its server came again
    assert offers.num_behind == 0
    offers.publish(100)
    assert offers.num_behind == 1
    for worker_id in ("a", "b"):
        offers.leave(worker_id)
    assert offers.num_behind == 0
    offers.join("b", 0, now_s=101.0)
    assert offers.num_behind == 0


def test_a_heartbeat_from_before_the_swap_repeats_no_offer() -> None:
    offers = _offers("a")
    (begin,) = _begun(offers)
    offers.received("a", begin.offer_id, 7, number=60, now_s=0.1)
    _heard(offers, "a", 0, 0.2)
    assert _begun(offers, 0.2) == []


def test_a_departed_worker_may_still_read_its_offer() -> None:
    offers = _offers("a")
    (begin,) = _begun(offers)
    offers.leave("a")
    assert offers.poll(0.1) == [Answered(begin.offer_id, "a", taken=False), Over(begin.offer_id)]


# -- together ----------------------------------------------------------------------------------------------------------


def test_workers_are_called_before_a_collective_begins() -> None:
    offers = _offers("a", "b", together=True)
    call = _called(offers)
    assert call.workers == ("a", "b")
    offers.ready("a", call.offer_id)
    assert offers.poll(0.1) == []
    offers.ready("b", call.offer_id)
    assert offers.poll(0.2) == [Begin(call.offer_id, 1, ("a", "b"))]


def test_a_vanished_worker_costs_the_timeout_of_a_call_alone() -> None:
    """Not the timeout of a broadcast, in which all ranks would wait for the missing rank."""
    offers = _offers("a", "gone", "gone too", together=True)
    call = _called(offers)
    offers.ready("a", call.offer_id)
    assert offers.due_s() == 2.0
    assert offers.poll(2.0) == [Begin(call.offer_id, 1, ("a",))]
    assert offers.num_left_out == 2


def test_a_worker_that_leaves_during_the_call_is_not_awaited() -> None:
    offers = _offers("a", "b", together=True)
    call = _called(offers)
    offers.ready("a", call.offer_id)
    offers.leave("b")
    assert offers.poll(0.1) == [Begin(call.offer_id, 1, ("a",))]


def test_up_to_date_workers_take_part_in_a_collective() -> None:
    offers = _offers("a", together=True)
    offers.join("b", 1, now_s=0.0)
    assert _called(offers).workers == ("a", "b")


@pytest.mark.parametrize("comes_anew", [False, True])
def test_a_worker_that_hangs_in_collectives_delays_the_others_ever_less(comes_anew: bool) -> None:
    """The worker sends heartbeats, answers calls, and never takes a version; or it leaves and joins each time."""
    offers = _offers("a", "hangs", together=True)
    now_s, delays = 0.0, 0
    for version in range(1, 41):
        offers.publish(version)
        call = _called(offers, now_s)
        for worker_id in call.workers:
            offers.ready(worker_id, call.offer_id)
        (begin,) = offers.poll(now_s)
        assert isinstance(begin, Begin)
        offers.begun(begin.offer_id, 7)
        if "hangs" in begin.workers:
            now_s += 10.0
            delays += 1
        offers.received("a", begin.offer_id, 7, number=version, now_s=now_s)
        offers.poll(now_s)
        offers.sent(begin.offer_id)
        now_s += 1.0
        if comes_anew:
            offers.leave("hangs")
            offers.join("hangs", 0, now_s=now_s)
        _heard(offers, "hangs", 0, now_s)
        assert offers.members["a"].policy_version == version
    assert delays <= 5


@pytest.mark.parametrize("comes_anew", [False, True])
def test_a_worker_whose_version_falls_is_in_few_collectives(comes_anew: bool) -> None:
    """A version every 30 s for an hour; the other takes every version, and tells version 0 a second later."""
    offers = _offers("a", "falls", together=True)
    num_broadcasts, number = 0, 50
    for now_s in range(3600):
        if now_s % 30 == 0:
            offers.publish(1 + now_s // 30)
        if comes_anew:
            offers.leave("falls")
        offers.join("falls", 0, number=number, now_s=now_s)
        for command in offers.poll(now_s):
            if isinstance(command, Call):
                for worker_id in command.workers:
                    offers.ready(worker_id, command.offer_id)
        for begin in _begun(offers, now_s):
            num_broadcasts += 1
            number += 1
            for worker_id in begin.workers:
                offers.received(worker_id, begin.offer_id, 7, number=number, now_s=now_s)
        offers.poll(now_s)
        assert offers.members["a"].policy_version == offers.newest_version
    assert num_broadcasts <= 2.2 * offers.newest_version
    assert offers.members["falls"].again_s < now_s + 200.0, "the backoff is limited"


def test_a_worker_that_is_always_a_bit_late_does_not_wait_ever_longer() -> None:
    """Over shared memory, where it delays no other."""
    offers = _offers("slow")
    waits = []
    for number in range(1, 10):
        now_s = 100.0 * number
        offers.publish(number)
        (begin,) = _begun(offers, now_s)
        offers.poll(now_s + 10.0)
        waits.append(offers.members["slow"].again_s - now_s - 10.0)
        offers.received("slow", begin.offer_id, 7, number=number, now_s=now_s + 11.0)
    assert set(waits) == {2.0}


@pytest.mark.parametrize("together", [False, True])
def test_no_worker_and_no_version_need_no_offer(together: bool) -> None:
    assert Offers(together=together, timeout_s=1.0, call_timeout_s=1.0).poll(0.0) == []
    assert _offers(together=together).poll(0.0) == []
    assert _offers(together=together).due_s() == float("inf")
