"""Collectives that fail for all their workers because of a single worker; without transports and without a clock."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from areal_rloo.weights.commands import Begin, Call, Command
from areal_rloo.weights.offers import Offers


def _offers(*workers: str) -> Offers:
    """Return offers at version 1, with workers at version 0."""
    offers = Offers(together=True, timeout_s=10.0, call_timeout_s=2.0)
    offers.publish(1)
    for worker_id in workers:
        offers.join(worker_id, 0, now_s=0.0)
    return offers


@dataclass
class _Hour:
    """An hour of collectives with a version every 30 s; "x" never takes part, so each of its collectives breaks."""

    offers: Offers
    breaks: Callable[[Offers, Begin, int, float], None]  # x's doing a second after the notice; with a message's number
    late: Callable[[Offers, Begin, int, float], None]  # and after the end of the collective
    number: int = 50
    num_broken: int = 0
    most_behind: int = 0  # versions, of the honest workers

    def run(self, *honest: str) -> None:
        under_way: tuple[Begin, float] | None = None
        for second in range(3600):
            now_s = float(second)
            if second % 30 == 0:
                self.offers.publish(1 + second // 30)
            for command in self._commands(now_s):
                if isinstance(command, Begin):
                    self.offers.begun(command.offer_id, 7)
                    under_way = command, now_s
            if under_way is None:
                continue
            begin, began_s = under_way
            if "x" in begin.workers and now_s == began_s + 1:
                self.breaks(self.offers, begin, self._next(), now_s)
            if "x" not in begin.workers or now_s == began_s + 11:
                self._end(begin, now_s)
                under_way = None
            for worker_id in honest:
                behind = self.offers.newest_version - self.offers.members[worker_id].policy_version
                self.most_behind = max(self.most_behind, behind)

    def _end(self, begin: Begin, now_s: float) -> None:
        if "x" in begin.workers:
            self.num_broken += 1
            self.offers.broken(begin.offer_id, "no x", now_s)
        for worker_id in sorted({*begin.workers} - {"x"}):
            end = self.offers.failed if "x" in begin.workers else self.offers.received
            detail: Any = "no x" if "x" in begin.workers else 7
            end(worker_id, begin.offer_id, detail, number=self._next(), now_s=now_s)
        self.offers.sent(begin.offer_id)
        if "x" in begin.workers:
            self.late(self.offers, begin, self._next(), now_s)

    def _commands(self, now_s: float) -> list[Command]:
        for worker_id, member in list(self.offers.members.items()):
            version = 0 if worker_id == "x" else member.policy_version
            values = {"number": self._next(), "newest_offer": 2**60, "receiving": False, "now_s": now_s}
            self.offers.heard(worker_id, version, **values)  # type: ignore[arg-type]
        found = []
        while commands := self.offers.poll(now_s):
            found += commands
            for call in commands:
                for worker_id in call.workers if isinstance(call, Call) else ():
                    self.offers.ready(worker_id, call.offer_id)
        return found

    def _next(self) -> int:
        self.number += 1
        return self.number


def _leave(offers: Offers, begin: Begin, number: int, now_s: float) -> None:
    offers.leave("x")
    offers.join("x", 0, now_s=now_s)


def _flip(offers: Offers, begin: Begin, number: int, now_s: float) -> None:
    offers.join("x", None, number=number, now_s=now_s)
    offers.join("x", 0, number=number, now_s=now_s)


def _receive(offers: Offers, begin: Begin, number: int, now_s: float) -> None:
    offers.received("x", begin.offer_id, 7, number=number, now_s=now_s)


def _receive_and_leave(offers: Offers, begin: Begin, number: int, now_s: float) -> None:
    _receive(offers, begin, number, now_s)
    _leave(offers, begin, number, now_s)


def _fail(offers: Offers, begin: Begin, number: int, now_s: float) -> None:
    offers.failed("x", begin.offer_id, "no", number=number, now_s=now_s)


def _hang(offers: Offers, begin: Begin, number: int, now_s: float) -> None:
    pass


_DOINGS = [
    (_hang, _hang),
    (_leave, _hang),
    (_flip, _hang),
    (_hang, _receive),
    (_receive, _hang),
    (_receive_and_leave, _hang),
    (_fail, _hang),
    (_hang, _fail),
]


@pytest.mark.parametrize("honest", [("a",), ("a", "b", "c")])
@pytest.mark.parametrize(("breaks", "late"), _DOINGS)
def test_a_worker_that_breaks_collectives_is_soon_alone(honest: tuple[str, ...], breaks: Any, late: Any) -> None:
    """The collective fails for the honest, too: nothing shows who is to blame but collectives in smaller groups."""
    hour = _Hour(_offers(*honest, "x"), breaks, late)
    hour.run(*honest)
    assert hour.most_behind <= 2
    assert hour.num_broken <= 3600 / 126 + 12
    assert {hour.offers.members[worker_id].num_doublings for worker_id in honest} == {0}


def test_a_killed_worker_costs_the_others_a_collective_in_halves() -> None:
    """And the worker, which comes anew, is not kept out."""
    offers = _offers("a", "b", "c", "killed")
    (begin,) = _together(offers, 0.0)
    assert len(begin.workers) == 4
    offers.leave("killed")
    offers.broken(begin.offer_id, "connection closed", 1.0)
    offers.sent(begin.offer_id)
    sizes = []
    for now_s in (1.0, 2.0, 3.0, 4.0):
        if now_s == 3.0:
            offers.join("killed", 0, now_s=now_s)
        if now_s == 4.0:
            offers.publish(2)
        (begin,) = _together(offers, now_s)
        sizes.append((len(begin.workers), "killed" in begin.workers))
        for worker_id in begin.workers:
            offers.received(worker_id, begin.offer_id, 7, number=int(now_s), now_s=now_s)
        offers.sent(begin.offer_id)
    assert sizes == [(2, False), (2, False), (2, True), (4, True)]


def _together(offers: Offers, now_s: float) -> list[Begin]:
    """Begin the due collective; all workers answer the call."""
    (call,) = (command for command in offers.poll(now_s) if isinstance(command, Call))
    for worker_id in call.workers:
        offers.ready(worker_id, call.offer_id)
    begins = [command for command in offers.poll(now_s) if isinstance(command, Begin)]
    offers.begun(begins[0].offer_id, 7)
    return begins


def test_a_worker_that_fell_out_of_groups_joins_one_again_in_time() -> None:
    """The others, behind again after every collective, do not keep the weights from the worker."""
    offers = _offers("a", "b")
    offers.join("out", 0, now_s=0.0)
    offers.members["out"].most_together = offers.members["out"].newest_call = 1
    offers.members["a"].newest_call = offers.members["b"].newest_call = 1
    groups = []
    for version in range(1, 20):
        offers.publish(version)
        (begin,) = _together(offers, float(version))
        groups.append(begin.workers)
        for worker_id in begin.workers:
            offers.received(worker_id, begin.offer_id, 7, number=version, now_s=float(version))
        offers.sent(begin.offer_id)
    assert groups[0] == ("a", "b")
    assert ("a", "b", "out") in groups


@pytest.mark.parametrize("leaves", [False, True])
def test_a_worker_that_comes_and_goes_at_calls_holds_up_few(leaves: bool) -> None:
    """The worker leaves in the middle of every call, after an answer or without."""
    offers = _offers("x")
    num_calls = 0
    for second in range(600):
        for command in offers.poll(float(second)):
            if isinstance(command, Call):
                num_calls += 1
                if leaves:
                    offers.ready("x", command.offer_id)
                offers.leave("x")
                offers.join("x", 0, now_s=float(second))
    assert num_calls <= 12
