"""Synthetic rollout workers for `fleet.py`: a process of them, with the real protocol and the real wire.

A worker takes leases, "generates" random tokens of log-normal length, submits the trajectories, and takes every version
of the weights at once, without reading them. Only the engine is missing: with a rate, the samples of a worker end at
the ends of decode steps, as those of an engine. One loop serves all workers of the process, as the loop of `raw` does:
with tasks of asyncio, the workers of a core were busier than the learner. Leases and notices wait for the
acknowledgements of all workers: in a fleet, no worker waits for the leases of another.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from areal_rloo.decoding import from_msgpack
from areal_rloo.rollout.protocol import EngineState, WorkerProtocol
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.weights.manifest import Notice
from areal_rloo.wire.address import Address, Connection, make_socket, read_address
from areal_rloo.wire.codec import decode_learner, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Ack, Duty, Failed, LearnerMessage, Lease, Results, Work

_NUM_SHAPES = 64  # trajectories drawn before; samples take them in turn
_AHEAD = 256  # samples without an acknowledgement, beyond which a worker without a rate waits
_MOST_VERSIONS = 16  # of the shapes; a worker has one of the newest
_LONGEST = 4096
_SHORT_BYTES = 200  # an acknowledgement is shorter
_DECODE_STEP_S = 0.02
_PATIENCE_S = 60.0
_LONGEST_WAIT_S = 0.02  # then the pipe is looked at
_IN, _MORE = int(zmq.POLLIN), int(zmq.SNDMORE)  # an operation on pyzmq's flags takes as long as a message
_PER_POLL = 16  # the time for leases and notices, over that of a poll: else large fleets would mostly poll
_GATHER_S, _MOST_GATHER_S = 16e-6, 0.001  # from poll to poll: a poll looks at all sockets; for each, and at most


class Load(msgspec.Struct, frozen=True):
    """The workers of a process."""

    endpoint: str
    keys: str
    first: int  # number of the first worker
    num_workers: int
    capacity_samples: int
    median_tokens: int
    rate: float = 0.0  # samples a second of each worker; 0: as many as the learner takes
    failure_share: float = 0.0  # samples without a trajectory
    deaths_per_s: float = 0.0  # of a worker of this process, which is replaced at once


class Window(msgspec.Struct, frozen=True):
    """Measurements of a process since the last call."""

    acknowledged: int  # samples
    latencies_s: list[float]  # from the end of a sample to its acknowledgement
    busy_s: float  # processor time of the process
    deaths: int


@dataclass(slots=True)
class Measured:
    """Counts of all workers of the process."""

    latencies_s: list[float]
    deaths: int = 0


def gather_s(num_workers: int) -> float:
    """Return the time from poll to poll."""
    return min(_GATHER_S * num_workers, _MOST_GATHER_S)


class SyntheticWorker:
    """A worker without an engine."""

    def __init__(
        self, load: Load, context: Any, name: str, incarnation: int, shapes: Shapes, measured: Measured
    ) -> None:
        self._load, self._shapes, self._measured = load, shapes, measured
        address: Address = read_address(load.endpoint, keys=Path(load.keys), end="worker")
        identity = f"{name}#{incarnation}".encode()
        self._connection = Connection(make_socket(context, zmq.DEALER, address), address, identity)
        self.socket: Any = self._connection.socket
        self._protocol = WorkerProtocol(
            worker_id=name,
            incarnation=str(incarnation),
            capacity_samples=load.capacity_samples,
            heartbeat_s=1.0,
            heartbeat_timeout_s=60.0,
            max_batch_bytes=8 * 2**20,
        )
        self._limits = Limits()
        self._version, self._num_tokens = 0, 0
        self._inbox: deque[list[bytes]] = deque()  # frames of each message
        self._held: deque[tuple[Duty, Lease]] = deque()
        self._begun: tuple[Lease | None, Any] = (None, None)  # the lease of the last sample, and its prompt
        self._ended_s: dict[Duty, float] = {}
        self._sent_s: dict[int, list[float]] = {}  # ends of the samples in each message
        self._num_unacknowledged = 0
        self._random = random.Random(name)
        self._next = self._random.randrange(_NUM_SHAPES)
        self._first_step_s = time.perf_counter() + self._random.random() * _DECODE_STEP_S
        self._due_s = self._first_step_s + self._between_s()  # of the next sample
        self.wake_s = 0.0

    def read(self) -> bool:
        """Take all acknowledgements that are here; return True if other messages wait for `handle`."""
        while self.socket.get(zmq.EVENTS) & _IN:
            frames = self.socket.recv_multipart()
            if len(frames[0]) > _SHORT_BYTES or not self._acknowledged(decode_learner(frames, self._limits)):
                self._inbox.append(frames)
        return bool(self._inbox)

    def handle(self) -> bool:
        """Handle a message; return True if others wait."""
        orders = self._protocol.handle(decode_learner(self._inbox.popleft(), self._limits), self._engine)
        self._held.extend((duty, lease) for lease in orders.start for duty in lease.duties)
        if orders.receive is not None:
            notice = from_msgpack(orders.receive.body, Notice)
            self._version = max(self._version, notice.policy_version)
            self._protocol.weights_received(orders.receive, notice.checksum, self._engine)
        return bool(self._inbox)

    def act(self) -> None:
        """End the samples that are due, send the messages that are due, and say when to act again."""
        now_s = time.perf_counter()
        while self._held and self._held[0][1].min_version <= self._version and self._may_end(now_s):
            self._end(*self._held.popleft())
        for message in self._protocol.poll(time.monotonic(), self._engine):
            if isinstance(message, Results) and message.number not in self._sent_s:
                samples = [Duty(each.lease_id, *each.trajectories[0].sample_id) for each in message.finished]
                self._sent_s[message.number] = [self._ended_s.pop(sample) for sample in samples]
            *first, last = encode(message)
            for frame in first:
                self.socket.send(frame, _MORE)
            self.socket.send(last)
        self.wake_s = now_s + max(0.0, self._protocol.due_s() - time.monotonic())
        if self._load.rate and self._held:
            self.wake_s = min(self.wake_s, self._step_s(max(self._due_s, now_s)))

    def close(self) -> None:
        self._connection.close(0)

    def _acknowledged(self, message: LearnerMessage) -> bool:
        if not isinstance(message, Ack):
            return False
        now_s, ended_s = time.perf_counter(), self._sent_s.pop(message.number, ())
        self._measured.latencies_s += [now_s - each_s for each_s in ended_s]
        self._num_unacknowledged -= len(ended_s)
        self._protocol.handle(message, self._engine)
        return True

    @property
    def _engine(self) -> EngineState:
        return EngineState(self._version, self._version, Work(0.0, self._num_tokens))

    def _may_end(self, now_s: float) -> bool:
        """Return True if a sample can end now; with a rate, draw when the next one is due."""
        if not self._load.rate:
            return self._num_unacknowledged < _AHEAD
        if self._step_s(self._due_s) > now_s:
            return False
        self._due_s = max(self._due_s, now_s - _DECODE_STEP_S) + self._between_s()  # an engine does not catch up
        return True

    def _between_s(self) -> float:
        return self._random.expovariate(self._load.rate) if self._load.rate else 0.0

    def _step_s(self, time_s: float) -> float:
        """Return the end of the decode step in which a time falls."""
        return self._first_step_s + math.ceil((time_s - self._first_step_s) / _DECODE_STEP_S) * _DECODE_STEP_S

    def _end(self, duty: Duty, lease: Lease) -> None:
        if self._random.random() < self._load.failure_share:
            self._protocol.fail(Failed(*duty, "episode_error", "", "", 0), 0)
            return
        self._next = (self._next + 1) % _NUM_SHAPES
        completion = self._shapes.completion(self._next, self._version)
        if lease is not self._begun[0]:
            self._begun = lease, np.array(lease.prompt_tokens, np.int32)
        self._num_tokens += len(completion.tokens)
        self._num_unacknowledged += 1
        self._ended_s[duty] = time.perf_counter()
        made = Trajectory(*duty.sample_id, self._begun[1], completion, self._random.random())
        self._protocol.finish(duty, [made], 12 * len(completion.tokens))


class Shapes:
    """The completions that the samples of all workers take in turn, drawn before."""

    def __init__(self, median_tokens: int) -> None:
        self._shapes = [trajectory.completion for trajectory in _drawn_shapes(median_tokens)]
        self._of_versions: dict[int, list[Completion]] = {}

    def completion(self, index: int, version: int) -> Completion:
        """Return a shape, all tokens of this version."""
        if (made := self._of_versions.get(version)) is None:
            made = [
                msgspec.structs.replace(each, versions=np.full_like(each.versions, version)) for each in self._shapes
            ]
            if len(self._of_versions) == _MOST_VERSIONS:
                del self._of_versions[next(iter(self._of_versions))]
            self._of_versions[version] = made
        return made[index]


class Workers:
    """All workers of a process, and one loop for them."""

    def __init__(self, load: Load) -> None:
        self._load, self._measured = load, Measured([])
        self._shapes = Shapes(load.median_tokens)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 2 * load.num_workers + 64)  # the default is 1023
        self._poller = zmq.Poller()
        self._by_socket: dict[Any, SyntheticWorker] = {}
        self._waiting: dict[SyntheticWorker, None] = {}  # workers with messages to handle
        # When each worker acts, as a heap; only the newest entry of a worker counts.
        self._queue: list[tuple[float, int, SyntheticWorker]] = []
        self._chooser, self._num_deaths = random.Random(load.first), 0
        self._names: dict[SyntheticWorker, str] = {}
        for index in range(load.num_workers):
            self._join(f"w{load.first + index}", 0)

    def serve(self, pipe: Pipe) -> None:
        """Serve until the pipe says stop; answer every other word with a `Window`."""
        busy_s, dies_s, looks_s, polls_s = time.process_time(), self._next_death_s(), 0.0, 0.0
        while True:
            now_s = time.perf_counter()
            if now_s >= looks_s:
                looks_s = now_s + _LONGEST_WAIT_S
                if pipe.poll():
                    if pipe.recv() == "stop":
                        return
                    before_s, busy_s = busy_s, time.process_time()
                    latencies_s, self._measured.latencies_s = self._measured.latencies_s, []
                    deaths, self._measured.deaths = self._measured.deaths, 0
                    pipe.send(Window(len(latencies_s), latencies_s, busy_s - before_s, deaths))
            if now_s >= dies_s:
                dies_s = self._next_death_s()
                self._replace(self._chooser.choice(list(self._names)))
            next_s = self._queue[0][0] if self._queue else math.inf
            if now_s < polls_s:
                time.sleep(polls_s - now_s)
            wait_s = 0.0 if self._waiting else min(looks_s, next_s) - max(now_s, polls_s)
            began_s = time.perf_counter() + max(0.0, wait_s)
            polled = self._poller.poll(max(0, math.ceil(1000 * wait_s)))
            polled_s = time.perf_counter()
            polls_s = polled_s + gather_s(len(self._names))
            for socket, _ in polled:
                worker = self._by_socket[socket]
                if worker.read():
                    self._waiting[worker] = None
                self._act(worker)
            until_s = max(polls_s, time.perf_counter() + _PER_POLL * (polled_s - began_s))
            while self._waiting and time.perf_counter() < until_s:
                worker = next(iter(self._waiting))
                if not worker.handle():
                    del self._waiting[worker]
                self._act(worker)
            now_s = time.perf_counter()
            while self._queue and self._queue[0][0] <= now_s:
                wake_s, _, worker = heapq.heappop(self._queue)
                if wake_s == worker.wake_s and worker in self._names:
                    self._act(worker)

    def close(self) -> None:
        for worker in self._names:
            worker.close()
        self._context.destroy(0)

    def _act(self, worker: SyntheticWorker) -> None:
        before_s = worker.wake_s
        worker.act()
        if worker.wake_s != before_s:
            heapq.heappush(self._queue, (worker.wake_s, id(worker), worker))

    def _join(self, name: str, incarnation: int) -> None:
        worker = SyntheticWorker(self._load, self._context, name, incarnation, self._shapes, self._measured)
        if not worker.socket.poll(1000 * _PATIENCE_S, zmq.POLLOUT):
            raise RuntimeError(f"no learner for {_PATIENCE_S} s")
        self._names[worker], self._by_socket[worker.socket] = name, worker
        self._poller.register(worker.socket, zmq.POLLIN)
        self._act(worker)

    def _next_death_s(self) -> float:
        rate = self._load.deaths_per_s
        return time.perf_counter() + self._chooser.expovariate(rate) if rate else math.inf

    def _replace(self, worker: SyntheticWorker) -> None:
        """Let a worker die; another process takes its name."""
        name = self._names.pop(worker)
        self._waiting.pop(worker, None)
        self._poller.unregister(worker.socket)
        del self._by_socket[worker.socket]
        worker.close()
        self._num_deaths += 1
        self._measured.deaths += 1
        self._join(name, self._num_deaths)


def run(load: Load, pipe: Pipe) -> None:
    """Serve until the pipe says stop; answer every other word with a `Window`."""
    gc.disable()  # a collection of one worker in its own process does not stop the others
    workers = Workers(load)
    try:
        workers.serve(pipe)
    finally:
        workers.close()


def mean_tokens(median_tokens: int) -> int:
    """Return the mean length of the samples, in tokens."""
    return round(np.mean([len(shape.completion.tokens) for shape in _drawn_shapes(median_tokens)]))


def _drawn_shapes(median_tokens: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [_trajectory(rng, median_tokens) for _ in range(_NUM_SHAPES)]


def _trajectory(rng: np.random.Generator, median_tokens: int) -> Trajectory:
    num = int(np.clip(rng.lognormal(np.log(median_tokens), 0.6), 8, _LONGEST))
    tokens, logprobs = rng.integers(0, 32_000, num).astype(np.int32), -rng.random(num, dtype=np.float32)
    return Trajectory(0, 0, np.ones(1, np.int32), Completion(tokens, logprobs, np.zeros(num, np.int32), "stop"), 0.0)
