"""The queue of workers behind: equal to a look at all workers after any events, and as cheap for many as for one."""

import math
import random
import sys
from types import FrameType

import pytest

from areal_rloo.weights.commands import Begin, Call, Command
from areal_rloo.weights.offers import Offers

NAMES = ("a", "b", "c")


def _due_by_looking_at_all(offers: Offers) -> float:
    """Return when the next change without an event is due."""
    times = [offer.deadline_s for offer in offers._offers.values()]
    if not offers._together or not offers._offers:
        behind = [m for m in offers.members.values() if m.policy_version < offers.newest_version]
        times += [member.again_s for member in behind if member.offer_id is None]
    return min(times, default=math.inf)


def _happen(offers: Offers, rng: random.Random, open_offers: list[int], number: int, now_s: float) -> None:
    """Let something happen: anything that workers, transport or training thread can do."""
    name, offer_id = rng.choice(NAMES), rng.choice(open_offers or [1])
    version = rng.choice((None, *range(offers.newest_version + 1)) if rng.random() < 0.3 else (offers.newest_version,))
    match rng.randrange(9):
        case 0:
            offers.publish(offers.newest_version + 1)
        case 1:
            offers.join(name, version, number=number, now_s=now_s)
        case 2:
            offers.leave(name)
        case 3:
            newest, receiving = rng.choice((0, 10_000)), rng.random() < 0.3
            offers.heard(name, version, number=number, newest_offer=newest, receiving=receiving, now_s=now_s)
        case 4:
            offers.ready(name, offer_id)
        case 5:
            offers.received(name, offer_id, rng.choice((7, 7, 8)), number=number, now_s=now_s)
        case 6:
            offers.failed(name, offer_id, "x", number=number, now_s=now_s)
        case 7:
            offers.broken(offer_id, "x", now_s)
        case _:
            if offer_id in offers._offers:
                offers.sent(offer_id)


def _ids(commands: list[Command]) -> list[int]:
    return [command.offer_id for command in commands if isinstance(command, Begin | Call)]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("seed", range(50))
def test_the_queue_finds_what_a_look_at_all_workers_finds(seed: int, together: bool) -> None:
    offers = Offers(together=together, timeout_s=10.0, call_timeout_s=2.0)
    rng, now_s, open_offers = random.Random(seed), 0.0, list[int]()
    offers.publish(0)
    for number in range(1000):
        now_s += rng.choice((0.0, 0.0, 0.5, 3.0, 12.0))
        _happen(offers, rng, open_offers, number, now_s)
        assert offers.due_s() == _due_by_looking_at_all(offers)
        if rng.random() < 0.5:
            commands = offers.poll(now_s)
            for command in commands:
                if isinstance(command, Begin):
                    offers.begun(command.offer_id, 7)
            open_offers = [*open_offers, *_ids(commands)][-4:]
            assert offers.due_s() == _due_by_looking_at_all(offers)
            assert offers.due_s() > now_s, "all that was due has begun"
    assert len(offers._queue) == len(offers._queued) <= 2 * len(NAMES) * 8


def _calls(offers: Offers) -> int:
    """Count the calls of our functions in a wake-up of the broadcaster; a collection of garbage may call others."""
    number = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal number
        number += event == "call" and frame.f_code.co_filename == Offers.poll.__code__.co_filename

    sys.setprofile(count)
    try:
        offers.poll(1.0)
        offers.due_s()
    finally:
        sys.setprofile(None)
    return number


@pytest.mark.parametrize("together", [False, True])
def test_a_wake_up_does_not_look_at_all_workers(together: bool) -> None:
    calls = []
    for num_workers in (1, 256):
        offers = Offers(together=together, timeout_s=10.0, call_timeout_s=2.0)
        offers.publish(1)
        for index in range(num_workers):
            offers.join(f"w{index}", 1, now_s=0.0)
        calls.append(_calls(offers))
    assert calls[0] == calls[1]


def test_a_worker_of_a_broken_collective_is_called_for_the_next() -> None:
    offers = Offers(together=True, timeout_s=10.0, call_timeout_s=2.0)
    offers.publish(1)
    for name in ("a", "b"):
        offers.join(name, 0, now_s=0.0)
    (offer_id,) = _ids(offers.poll(0.0))
    for name in ("a", "b"):
        offers.ready(name, offer_id)
    offers.poll(0.0)
    offers.begun(offer_id, 7)
    for name in ("a", "b"):
        offers.received(name, offer_id, 7, number=1, now_s=1.0)
    offers.publish(2)
    offers.broken(offer_id, "x", 3.0)
    offers.sent(offer_id)
    assert offers.due_s() == _due_by_looking_at_all(offers) == 3.0
