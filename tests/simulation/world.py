"""A virtual clock, a network that loses, delays, repeats and cuts, and a supervisor, for simulated processes.

Everything random comes from the seed of the schedule, so a schedule can be repeated exactly. `Schedule.faults` is drawn
before the start; a failing schedule is shortened by leaving out faults.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

FAULTS_END_S = 8.0  # later everything goes well
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong from `at_s` on, for `lasts_s`."""

    at_s: float
    kind: str
    who: int  # number of the worker, where that matters
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:6.3f} s  {self.kind} (worker {self.who}, {self.lasts_s:.1f} s)"


KINDS = (
    "kill_worker", "kill_worker", "lose_host", "drain_worker", "kill_learner", "kill_learner", "stop_worker",
    "stop_learner", "restart_engine", "cut", "cut", "lossy", "reorder", "repeat", "slow_network", "hang_receive",
    "fail_receive", "hang_engine", "hang_for_good", "fail_samples", "slow_samples", "no_descriptors", "full_disk",
    "fail_rewards", "second_process",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run: its shape, and its faults."""

    seed: int
    num_workers: int
    config_index: int
    together: bool
    evaluates: bool
    faults: tuple[Fault, ...]

    @classmethod
    def drawn(cls, seed: int, num_configs: int) -> Schedule:
        draw = random.Random(seed)
        faults = []
        num_workers = draw.choice((1, 2, 2, 3))
        for _ in range(draw.choice((0, 1, 2, 3, 5, 8))):
            at_s = draw.uniform(0.0, 0.8 * FAULTS_END_S)
            lasts_s = min(draw.choice((0.1, 1.0, 3.0, 8.0)), FAULTS_END_S - at_s)
            faults.append(Fault(at_s, draw.choice(KINDS), draw.randrange(num_workers), lasts_s))
        if draw.random() < 0.15:  # learners that come and go while a worker is away: their versions have equal numbers
            faults += [Fault(draw.uniform(0.5, 6.0), "kill_learner", 0, 0.1) for _ in range(draw.choice((2, 3)))]
            faults.append(Fault(draw.uniform(0.5, 3.0), "stop_worker", draw.randrange(num_workers), 4.0))
        shape = (draw.randrange(num_configs), draw.random() < 0.5, draw.random() < 0.3)
        if draw.random() < 0.05:
            faults.append(Fault(draw.uniform(0.5, 6.0), "holds_for_good", draw.randrange(num_workers), 0.1))
        faults.sort(key=lambda fault: fault.at_s)
        return cls(seed, num_workers, *shape, tuple(faults))

    def without(self, faults: Sequence[Fault]) -> Schedule:
        return replace(self, faults=tuple(fault for fault in self.faults if fault not in faults))


class Clock:
    """Virtual time: events in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # the number breaks ties
        self._number = 0

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (max(at_s, self.now_s), self._number, act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, act)

    def step(self) -> bool:
        """Run the next event; returns False if there is none."""
        if not self._events:
            return False
        self.now_s, _, act = heapq.heappop(self._events)
        act()
        return True


class Network:
    """Carries messages between the learner and the workers, in order unless a fault says otherwise."""

    def __init__(self, clock: Clock, draw: random.Random, schedule: Schedule) -> None:
        self._clock, self._draw = clock, draw
        self._faults = [f for f in schedule.faults if f.kind in ("cut", "lossy", "reorder", "repeat", "slow_network")]
        self._last_s: dict[tuple[str, str], float] = {}
        self.num_lost = 0

    def carry(self, worker: int, link: tuple[str, str], deliver: Callable[[], None]) -> None:
        """Carry a message over a link of a worker: call `deliver` when it arrives, perhaps never, perhaps twice."""
        now_s, draw = self._clock.now_s, self._draw
        kinds = {fault.kind for fault in self._faults if fault.who == worker and self._is_on(fault, now_s)}
        if "cut" in kinds or ("lossy" in kinds and draw.random() < 0.3):
            self.num_lost += 1
            return
        delay_s = draw.uniform(0.001, 0.01)
        if "slow_network" in kinds:
            delay_s += draw.uniform(0.2, 2.0)
        arrives_s = now_s + delay_s
        if "reorder" in kinds:
            arrives_s += draw.uniform(0.0, 1.5)
        else:
            arrives_s = max(arrives_s, self._last_s.get(link, 0.0))
            self._last_s[link] = arrives_s
        self._clock.at(arrives_s, lambda: self._arrive(worker, deliver))
        if "repeat" in kinds and draw.random() < 0.5:
            self._clock.at(arrives_s + draw.uniform(0.0, 3.0), deliver)

    def _arrive(self, worker: int, deliver: Callable[[], None]) -> None:
        now_s = self._clock.now_s
        if any(f.kind == "cut" and f.who == worker and self._is_on(f, now_s) for f in self._faults):
            self.num_lost += 1  # was on its way when the network was cut
            return
        deliver()

    @staticmethod
    def _is_on(fault: Fault, now_s: float) -> bool:
        return fault.at_s <= now_s < fault.at_s + fault.lasts_s


class ViolationError(AssertionError):
    """An invariant does not hold."""


class Story:
    """The last lines of a schedule, told only if it fails."""

    def __init__(self, clock: Clock, *, tells: bool) -> None:
        self._clock, self._tells = clock, tells
        self.lines: list[str] = []

    def tell(self, text: str, *values: Any) -> None:
        if self._tells:
            self.lines.append(f"{self._clock.now_s:7.3f}  {text % values if values else text}")
