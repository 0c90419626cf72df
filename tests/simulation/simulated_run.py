"""A run in virtual time: a learner, workers, a network and faults, with the invariants checked after every event.

Once the faults have ended, the run must finish within `_PATIENCE_S` of virtual time.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
from simulation.simulated_learner import Checkpoint, SimulatedLearner
from simulation.simulated_worker import SimulatedWorker
from simulation.world import FAULTS_END_S, HEARTBEAT_S, Clock, Fault, Network, Schedule, Story, ViolationError

from areal_rloo.config import (
    AlgorithmConfig,
    Config,
    EpisodeConfig,
    LearnerConfig,
    RolloutConfig,
    WeightsConfig,
    WireConfig,
)
from areal_rloo.errors import UserError
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.tasks import Item, Source
from areal_rloo.wire import messages as wire

_PATIENCE_S = 60.0
_MOST_EVENTS = 20_000  # some hundreds are usual
_START_S = (0.3, 1.5)  # of a process
_NUM_STEPS = 6
_LAST_OUTCOMES, _SET_ASIDE_S = 6, 2.0  # far below those of real runs, which complete thousands of samples


def _config(eta: int, policy: Any, groups: int, max_attempts: int, depth: int = 2, every: int = 1) -> Config:
    algorithm = AlgorithmConfig(group_size=2, max_staleness=eta, pipeline_depth=depth, stale_tokens=policy)
    return Config(
        algorithm=algorithm,
        learner=LearnerConfig(groups_per_step=groups, num_minibatches=1, num_train_steps=_NUM_STEPS),
        rollout=RolloutConfig(max_reward_failure_share=1.0),
        weights=WeightsConfig(publish_every_n_steps=every),
        wire=WireConfig(
            heartbeat_s=HEARTBEAT_S, heartbeat_timeout_s=4.0, stall_timeout_s=15.0, max_attempts=max_attempts
        ),
    )


def _with(config: Config, section: str, **options: Any) -> Config:
    changed = msgspec.structs.replace(getattr(config, section), **options)
    return msgspec.structs.replace(config, **{section: changed})


CONFIGS = [
    _config(0, "mask", 2, 3), _config(1, "mask", 1, 3), _config(2, "mask", 2, 9),
    _config(3, "mask", 2, 3, depth=1, every=4), _config(1, "drop", 2, 3), _config(1, "wait", 2, 9, every=2),
    _config(0, "wait", 1, 9),
]  # fmt: skip
PATIENT = [_with(config, "wire", stall_timeout_s=1000.0) for config in CONFIGS]
_SOURCE = Source("all", [Item(str(index)) for index in range(200)])


class Simulation:
    """One schedule, run to its end by `run`."""

    def __init__(self, schedule: Schedule, *, tells: bool = False) -> None:
        # Without a hang, no deadline of progress may hide that something was lost.
        kinds = {fault.kind for fault in schedule.faults}
        self.schedule = schedule
        self.config = (CONFIGS if "hang_for_good" in kinds else PATIENT)[schedule.config_index]
        if "holds_for_good" in kinds:  # within seconds instead of hours
            self.config = _with(self.config, "wire", stall_timeout_s=6.0)
            self.config = _with(self.config, "rollout", episode=EpisodeConfig(timeout_s=4.0))
        if "fail_rewards" in kinds and "fail_samples" not in kinds:  # all workers with this one
            self.config = _with(self.config, "rollout", max_reward_failure_share=0.5)
        self.clock = Clock()
        self.draw = random.Random(f"{schedule.seed}/learner")
        self.story = Story(self.clock, tells=tells)
        self.network = Network(self.clock, random.Random(f"{schedule.seed}/network"), schedule)
        self.checkpoint: Checkpoint | None = None
        self.workers: dict[int, SimulatedWorker] = {}
        self.seconds: dict[str, SimulatedWorker] = {}  # by peer: processes under the name of another
        self.learner: SimulatedLearner | None = None
        self.num_continued = 0  # leases with a partial rollout that a worker began
        self.num_begun_again = 0  # samples of dead workers that others began in time
        self.num_set_aside = self.num_refused = 0  # workers, and Hellos under the name of another process
        self._num_learners = self._num_incarnations = self._num_contents = 0
        self._waiting: list[Callable[[], None]] = []  # messages that came while there was no learner
        self._collectives: dict[tuple[str, int], _Collective] = {}
        self._start_learner()
        for number in range(schedule.num_workers):
            self.clock.after(self.draw.uniform(0.0, 1.0), functools.partial(self._start_worker, number))
        for fault in schedule.faults:
            self.clock.at(fault.at_s, functools.partial(self._begin_fault, fault))

    def run(self) -> None:
        """Run to the end of the training.

        Raises:
            ViolationError: an invariant does not hold, or the run does not end.
        """
        with (
            patch("areal_rloo.intake.worker.LAST_OUTCOMES", _LAST_OUTCOMES),
            patch("areal_rloo.intake.reward_failures.LAST_OUTCOMES", _LAST_OUTCOMES),
            patch("areal_rloo.intake.fleet.SET_ASIDE_S", _SET_ASIDE_S),
        ):
            try:
                self._run()
            except UserError as error:  # the rewards of worker 1 fail
                if self.learner is None or self.learner.has_met("rollout-0"):
                    raise ViolationError(f"a single worker ends the run: {error}") from error

    def _run(self) -> None:
        num_events = 0
        while self.learner is None or not self.learner.done:
            num_events += 1
            if not self.clock.step():
                raise ViolationError("nothing happens any more")
            if num_events > _MOST_EVENTS:
                raise ViolationError(f"{num_events} events until {self.clock.now_s:.3f} s: something spins")
            if self.clock.now_s > FAULTS_END_S + _PATIENCE_S:
                learner = self.learner
                state = learner.intake.describe(self.clock.now_s) if learner is not None else "there is no learner"
                raise ViolationError(f"the run stands still at version {learner and learner.version}: {state}")

    def stream(self) -> PromptStream:
        return PromptStream([_SOURCE], lambda item, _: (int(item.text) + 1,), seed=0, num_epochs=1)

    def config_of(self, learner: int) -> Config:
        """Return the config of a learner: in a third of the schedules, each restart is a resume with other options."""
        if learner == 1 or self.schedule.seed % 3:
            return self.config
        draw = random.Random(f"{self.schedule.seed}/options/{learner}")
        policy, groups = draw.choice(("mask", "drop", "wait")), draw.randint(1, 3)
        changed = _config(draw.randint(0, 2), policy, groups, self.config.wire.max_attempts)
        return msgspec.structs.replace(changed, wire=self.config.wire, rollout=self.config.rollout)

    def fails(self, worker: SimulatedWorker, draw: random.Random) -> bool:
        """Return True if a completion of a worker gets no reward."""
        if self.config.rollout.max_reward_failure_share < 1.0:  # a single failure could make a worker one of many
            return worker.number == 1 and self.is_on("fail_rewards", 1)
        return draw.random() < (0.5 if self.is_on("fail_samples", worker.number) else 0.03)

    def new_content(self) -> int:
        self._num_contents += 1
        return self._num_contents

    # -- faults --------------------------------------------------------------------------------------------------------

    def is_on(self, kind: str, who: int | None) -> bool:
        return self.ends_s(kind, who) > self.clock.now_s

    def ends_s(self, kind: str, who: int | None) -> float:
        """Return the end of a fault that is on now; else 0."""
        now_s = self.clock.now_s
        ends = [
            fault.at_s + fault.lasts_s
            for fault in self.schedule.faults
            if fault.kind == kind and who in (None, fault.who) and fault.at_s <= now_s < fault.at_s + fault.lasts_s
        ]
        return max(ends, default=0.0)

    def _begin_fault(self, fault: Fault) -> None:
        self.story.tell("fault: %s", fault)
        worker = self.workers.get(fault.who)
        ends_s = fault.at_s + fault.lasts_s
        match fault.kind:
            case "kill_worker" if worker is not None:
                self.end_worker(worker, restarts=True)
            case "lose_host" if worker is not None:
                self.end_worker(worker, restarts=True, after_s=FAULTS_END_S)
            case "drain_worker" if worker is not None:
                worker.drain(restarts=True)
            case "hang_for_good" if worker is not None and fault.who > 0:  # worker 0 can finish the run alone
                worker.hangs = True
            case "holds_for_good" if worker is not None and fault.who > 0:
                worker.hangs = worker.claims_progress = True
            case "stop_worker" if worker is not None:
                worker.stop(ends_s)
            case "second_process" if worker is not None:
                self._num_incarnations += 1
                second = SimulatedWorker(self, fault.who, self._num_incarnations)
                self.seconds[second.peer] = second
                self.clock.at(ends_s, functools.partial(self._end_second, second))
            case "restart_engine" if worker is not None:
                worker.restart_engine()
            case "kill_learner" if self.learner is not None:
                self.learner.alive = False
                self.learner = None
                self.clock.after(self.draw.uniform(*_START_S), self._start_learner)
            case "stop_learner" if self.learner is not None:
                self.learner.stopped_until_s = ends_s

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start_learner(self) -> None:
        self._num_learners += 1
        self.story.tell("learner %d starts from %s", self._num_learners, self.checkpoint and self.checkpoint.version)
        self.learner = SimulatedLearner(self, self._num_learners, self.checkpoint)
        waiting, self._waiting = self._waiting, []
        for deliver in waiting:
            self.clock.after(self.draw.uniform(0.0, 0.02), deliver)

    def _start_worker(self, number: int) -> None:
        self._num_incarnations += 1
        self.story.tell("worker %d starts as incarnation %d", number, self._num_incarnations)
        self.workers[number] = SimulatedWorker(self, number, self._num_incarnations)

    def end_worker(self, worker: SimulatedWorker, *, restarts: bool, after_s: float = 0.0) -> None:
        """End a process; the kernel closes its connection, and the launcher starts another."""
        if worker.peer in self.seconds:
            self._end_second(worker)
            return
        worker.alive = False
        del self.workers[worker.number]
        peer, learner = worker.peer, self.learner

        def disconnected() -> None:
            if self.learner is not None:
                self.learner.disconnected(peer)

        lost = learner.duties_of(peer) if learner is not None else frozenset()

        def forgotten() -> None:
            if learner is not None and learner is self.learner:
                if learner.intake.fleet.at(peer) is not None:
                    raise ViolationError(f"{peer} is dead, and its samples are leased to no other worker")
                learner.check_leased_again(lost)
                if len(self.schedule.faults) == 1:  # else the next worker may be cut off, or die, too
                    self.num_begun_again += learner.check_begun_again(lost)

        silence_s = self.config.wire.heartbeat_timeout_s
        if self.draw.random() < 0.7:  # else the host is gone, and nothing closes the connection
            self.clock.after(0.01, disconnected)
            silence_s = 2 * HEARTBEAT_S
        calm = {"slow_network", "reorder", "repeat", "stop_learner"}.isdisjoint(f.kind for f in self.schedule.faults)
        if calm:  # else messages of the dead process may come late
            self.clock.after(silence_s + 1.0, forgotten)
        if restarts or not (learner is not None and learner.done):
            start_s = after_s + self.draw.uniform(*_START_S)
            self.clock.after(start_s, functools.partial(self._start_worker, worker.number))

    def _end_second(self, second: SimulatedWorker) -> None:
        """Kill a second process, which may have the name by now."""
        if self.seconds.pop(second.peer, None) is not None:
            second.alive = False
            self.clock.after(0.01, lambda: self.learner and self.learner.disconnected(second.peer))

    # -- network -------------------------------------------------------------------------------------------------------

    def to_learner(self, worker: SimulatedWorker, message: wire.WorkerMessage) -> None:
        peer = worker.peer

        def deliver() -> None:
            if self.learner is None:
                if self.draw.random() < 0.5:  # waits in a socket until a learner is there
                    self._waiting.append(deliver)
            else:
                if not isinstance(message, wire.Heartbeat):
                    self.story.tell("%s -> learner: %s", peer, message)
                self.learner.deliver(peer, message)

        self.network.carry(worker.number, (peer, "up"), deliver)

    def to_worker(self, peer: str, message: wire.LearnerMessage) -> None:
        number = int(peer.partition("#")[0].removeprefix("rollout-"))

        def deliver() -> None:
            worker = self.seconds.get(peer) or self.workers.get(number)
            if worker is not None and worker.peer == peer:
                if not isinstance(message, wire.HeartbeatReply) or message.say_hello:
                    self.story.tell("learner -> %s: %s", peer, message)
                worker.deliver(message)

        self.network.carry(number, (peer, "down"), deliver)

    # -- collectives ---------------------------------------------------------------------------------------------------

    def begin_collective(
        self, learner: SimulatedLearner, offer_id: int, workers: Sequence[str], timeout_s: float
    ) -> None:
        collective = self._collective(learner.learner_id, offer_id)
        collective.expected, collective.learner = frozenset(workers), learner
        self.clock.after(timeout_s, lambda: collective.end(is_whole=False))
        collective.end_if_complete()

    def join_collective(self, worker: SimulatedWorker, notice: wire.WeightsNotice) -> None:
        collective = self._collective(notice.learner_id, notice.offer_id)
        if collective.ended:
            worker.end_receive(notice, is_whole=False)
            return
        collective.joined[worker.name] = (worker, notice)
        self.clock.after(5.0, lambda: collective.end(is_whole=False))
        collective.end_if_complete()

    def _collective(self, learner_id: str, offer_id: int) -> _Collective:
        return self._collectives.setdefault((learner_id, offer_id), _Collective(offer_id))


class _Collective:
    """Ranks that meet: all get the weights, or none."""

    def __init__(self, offer_id: int) -> None:
        self.offer_id = offer_id
        self.expected: frozenset[str] | None = None
        self.learner: SimulatedLearner | None = None
        self.joined: dict[str, tuple[SimulatedWorker, wire.WeightsNotice]] = {}
        self.ended = False

    def end_if_complete(self) -> None:
        if self.expected is not None and self.expected <= self.joined.keys():
            self.end(is_whole=all(worker.alive for worker, _ in self.joined.values()))

    def end(self, *, is_whole: bool) -> None:
        if self.ended:
            return
        self.ended = True
        for worker, notice in self.joined.values():
            worker.end_receive(notice, is_whole=is_whole)
        if self.learner is not None:
            self.learner.end_collective(self.offer_id, is_whole=is_whole)
