"""A rollout worker of the simulation: the real protocol, a pretended engine and receiver."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
from simulation.world import HEARTBEAT_S

from areal_rloo.errors import WentBackError
from areal_rloo.rollout.protocol import EngineState, Orders, WorkerProtocol
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire import messages as wire
from areal_rloo.wire.messages import Duty
from areal_rloo.wire.turns import RecordedTurn, decode_turns, encode_turns

if TYPE_CHECKING:
    from simulation.simulated_run import Simulation

_CAPACITY = 4
_RESULT_BYTES = 300


class SimulatedWorker:
    """One process. A token is the id of the weights that sampled it, so a wrong tag is seen."""

    def __init__(self, simulation: Simulation, number: int, incarnation: int) -> None:
        self.simulation, self.number, self.incarnation = simulation, number, incarnation
        self.name = f"rollout-{number}"
        self.peer = f"{self.name}#{incarnation}"
        self.alive, self.hangs = True, False  # `hangs`: sends heartbeats, and samples no token any more
        self.claims_progress = False
        self.stopped_until_s = 0.0
        self._draw = random.Random(f"{simulation.schedule.seed}/{self.peer}")
        self.protocol = WorkerProtocol(
            worker_id=self.name,
            incarnation=str(incarnation),
            capacity_samples=_CAPACITY,
            heartbeat_s=HEARTBEAT_S,
            heartbeat_timeout_s=simulation.config.wire.heartbeat_timeout_s,
            max_batch_bytes=1000,
        )
        self.version, self.content = 0, 0
        self._num_tokens = 0
        self._idle_s = 0.0
        self._left: dict[Duty, int] = {}  # tokens to sample
        self._made: dict[Duty, tuple[wire.Lease, list[int], list[int]]] = {}  # with versions and contents
        self._parked: list[Duty] = []  # wait for newer weights
        self._notice: wire.WeightsNotice | None = None
        self._receives = False
        self._timer_s = float("inf")
        self.poll()

    # -- wire ----------------------------------------------------------------------------------------------------------

    def deliver(self, message: wire.LearnerMessage) -> None:
        if not self.alive:
            return
        if self._is_stopped():
            self.simulation.clock.at(self.stopped_until_s, lambda: self.deliver(message))
            return
        try:
            orders = self.protocol.handle(message, self._state())
        except WentBackError as error:
            self.simulation.story.tell("%s restarts: %s", self.peer, error)
            self.simulation.end_worker(self, restarts=True)
            return
        self._obey(orders)
        if self.alive:
            self.poll()

    def has(self, duty: Duty) -> bool:
        """Return True if this worker has begun a sample."""
        return duty in self.protocol.duties

    def poll(self) -> None:
        if not self.alive or self._is_stopped():
            return
        clock = self.simulation.clock
        for message in self.protocol.poll(clock.now_s, self._state()):
            self.simulation.to_learner(self, message)
        due_s = self.protocol.due_s()
        if due_s < self._timer_s or self._timer_s <= clock.now_s:
            self._timer_s = due_s
            clock.at(due_s, self._on_timer)

    def stop(self, until_s: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        self.stopped_until_s = max(self.stopped_until_s, until_s)
        self.simulation.clock.at(until_s, self.poll)

    def drain(self, *, restarts: bool) -> None:
        """Give all samples back and end, as after SIGTERM."""
        self.protocol.tell_partials(self._partials())
        self.poll()
        self.simulation.to_learner(self, self.protocol.goodbye(self._state(), failed=False))
        self.simulation.end_worker(self, restarts=restarts)

    def restart_engine(self) -> None:
        """The engine loses its weights and all running completions begin again."""
        self.version, self.content = 0, 0
        self._parked = list(self._left)
        for _, versions, contents in self._made.values():
            versions.clear()
            contents.clear()
        self.poll()

    def _on_timer(self) -> None:
        if self.alive and self._is_stopped():
            self.simulation.clock.at(self.stopped_until_s, self._on_timer)
        elif self.alive:
            self.poll()

    def _is_stopped(self) -> bool:
        return self.simulation.clock.now_s < self.stopped_until_s

    def _state(self) -> EngineState:
        self._num_tokens += self.claims_progress
        return EngineState(self.version, self.version, wire.Work(self._idle_s, self._num_tokens))

    def _obey(self, orders: Orders) -> None:
        for duty in orders.cancel:
            del self._left[duty], self._made[duty]
            self._parked = [parked for parked in self._parked if parked != duty]
        for lease in orders.start:
            for duty in lease.duties:
                assert duty not in self._left, f"{self.peer} starts {duty} twice"
                self._left[duty] = self._draw.choice((1, 1, 2, 3))
                self._made[duty] = (lease, *_turn_so_far(lease.partial))
                self.simulation.num_continued += bool(lease.partial)
                self._decode_soon(duty)
        if orders.tell_partials is not None:
            self.simulation.clock.after(self._draw.uniform(0.0, 0.3), self._tell_partials)
        if orders.receive is not None:
            self._notice = orders.receive
            self._receive_next()
        if orders.drain:
            self.drain(restarts=False)

    def _tell_partials(self) -> None:
        if not self.alive:
            return
        until_s = max(self.stopped_until_s, self.simulation.ends_s("hang_engine", self.number))
        if self.simulation.clock.now_s < until_s:
            self.simulation.clock.at(until_s, self._tell_partials)
            return
        self.protocol.tell_partials(self._partials())
        self.poll()

    def _partials(self) -> dict[Duty, bytes]:
        made = ((duty, versions, contents) for duty, (_, versions, contents) in self._made.items())
        return {duty: _as_partial(v, c) for duty, v, c in made if v and duty.purpose == "train"}

    # -- engine --------------------------------------------------------------------------------------------------------

    def _decode_soon(self, duty: Duty) -> None:
        delay_s = self._draw.uniform(0.01, 0.4)
        if self.simulation.is_on("slow_samples", self.number):
            delay_s += self._draw.uniform(0.0, 6.0)
        self.simulation.clock.after(delay_s, lambda: self._decode(duty))

    def _decode(self, duty: Duty) -> None:
        """Sample a token, or park until newer weights come."""
        if not self.alive or duty not in self._left:
            return
        until_s = max(self.stopped_until_s, self.simulation.ends_s("hang_engine", self.number))
        if self.hangs:
            return
        if self.simulation.clock.now_s < until_s:
            self.simulation.clock.at(until_s, lambda: self._decode(duty))
            return
        lease, versions, contents = self._made[duty]
        if self.version < max([lease.min_version, *versions]):
            self._parked.append(duty)
            return
        versions.append(self.version)
        contents.append(self.content)
        self._num_tokens += 1
        self._left[duty] -= 1
        if self._left[duty] > 0:
            self._decode_soon(duty)
            return
        del self._left[duty], self._made[duty]
        if self.simulation.fails(self, self._draw):
            self.protocol.fail(wire.Failed(*duty, "reward_error", "no", "", 3), _RESULT_BYTES)
        else:
            self.protocol.finish(duty, [_trajectory(lease, duty, versions, contents)], _RESULT_BYTES)
        self.poll()

    # -- weights -------------------------------------------------------------------------------------------------------

    def _receive_next(self) -> None:
        if not self._receives and self._notice is not None:
            self._receives = True
            notice, self._notice = self._notice, None
            self.simulation.clock.after(self._draw.uniform(0.005, 0.1), lambda: self._receive(notice))

    def _receive(self, notice: wire.WeightsNotice) -> None:
        """Take the version of a notice, unless a fault is in the way."""
        if not self.alive:
            return
        until_s = max(self.stopped_until_s, self.simulation.ends_s("hang_receive", self.number))
        if self.simulation.clock.now_s < until_s:
            self.simulation.clock.at(until_s, lambda: self._receive(notice))
        elif self.simulation.schedule.together:
            self.simulation.join_collective(self, notice)
        else:
            self.end_receive(notice, is_whole=not self.simulation.is_on("fail_receive", self.number))

    def end_receive(self, notice: wire.WeightsNotice, *, is_whole: bool) -> None:
        if not self.alive:
            return
        if self._is_stopped():
            self.simulation.clock.at(self.stopped_until_s, lambda: self.end_receive(notice, is_whole=is_whole))
            return
        content = int(notice.body)
        try:
            if is_whole:
                if notice.policy_version > self.version:
                    self.version, self.content = notice.policy_version, content
                self.protocol.weights_received(notice, content, self._state())
            else:
                self.protocol.weights_failed(notice, "a fault")
        except WentBackError as error:
            self.simulation.story.tell("%s restarts: %s", self.peer, error)
            self.simulation.end_worker(self, restarts=True)
            return
        self._receives = False
        parked, self._parked = self._parked, []
        for duty in parked:
            self._decode_soon(duty)
        self._receive_next()
        self.poll()


def _trajectory(lease: wire.Lease, duty: Duty, versions: list[int], contents: list[int]) -> Trajectory:
    """Make a trajectory whose tokens are the contents of the weights that sampled them."""
    prompt = np.array(lease.prompt_tokens, np.int32)
    return Trajectory(*duty.sample_id, prompt, _completion(versions, contents), float(duty.sample_index))


def _completion(versions: list[int], contents: list[int]) -> Completion:
    logprobs = np.zeros(len(contents), np.float32)
    return Completion(np.array(contents, np.int32), logprobs, np.array(versions, np.int32), "stop")


def _as_partial(versions: list[int], contents: list[int]) -> bytes:
    return encode_turns([RecordedTurn(b"", _completion(versions, contents))])


def _turn_so_far(partial: bytes) -> tuple[list[int], list[int]]:
    """Return versions and contents of a partial rollout."""
    turns = [turn.completion for turn in decode_turns(partial)]
    return (turns[0].versions.tolist(), turns[0].tokens.tolist()) if turns else ([], [])
