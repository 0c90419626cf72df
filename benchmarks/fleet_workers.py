"""Synthetic rollout workers for `fleet.py`: a process of them, with the real protocol and the real wire.

A worker takes leases, "generates" random tokens of log-normal length, submits the trajectories, and takes every version
of the weights at once, without reading them. Only the engine is missing: with a rate, the samples of a worker end at
the ends of decode steps, as those of an engine. A process has many workers on an event loop.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import zmq.asyncio

from areal_rloo.decoding import from_msgpack
from areal_rloo.rollout.protocol import EngineState, WorkerProtocol
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.waiting import cancel
from areal_rloo.weights.manifest import Notice
from areal_rloo.wire.address import read_address
from areal_rloo.wire.channels import WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Ack, Duty, Failed, Lease, Results, Work

_NUM_SHAPES = 64  # trajectories drawn before; samples take them in turn
_AHEAD = 256  # samples without an acknowledgement, beyond which a worker without a rate waits
_LONGEST = 4096
_DECODE_STEP_S = 0.02


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


class SyntheticWorker:
    """A worker without an engine."""

    def __init__(self, load: Load, name: str, incarnation: int, shapes: list[Trajectory], measured: Measured) -> None:
        self._load, self._shapes, self._measured = load, shapes, measured
        address = read_address(load.endpoint, keys=Path(load.keys), end="worker")
        limits = Limits()
        self._channel = WorkerChannel(address, worker_id=name, incarnation=str(incarnation), limits=limits)
        self._protocol = WorkerProtocol(
            worker_id=name,
            incarnation=str(incarnation),
            capacity_samples=load.capacity_samples,
            heartbeat_s=1.0,
            heartbeat_timeout_s=60.0,
            max_batch_bytes=8 * 2**20,
        )
        self._version, self._num_tokens = 0, 0
        self._held: deque[tuple[Duty, Lease]] = deque()
        self._ended_s: dict[Duty, float] = {}
        self._sent_s: dict[int, list[float]] = {}  # ends of the samples in each message
        self._due, self._leased = asyncio.Event(), asyncio.Event()
        self._random = random.Random(name)
        self._next = self._random.randrange(_NUM_SHAPES)

    async def run(self) -> None:
        tasks = [asyncio.create_task(work) for work in (self._serve(), self._generate(), self._send())]
        try:
            await asyncio.gather(*tasks)
        finally:
            await cancel(tasks)
            self._channel.close()

    @property
    def _engine(self) -> EngineState:
        return EngineState(self._version, self._version, Work(0.0, self._num_tokens))

    async def _serve(self) -> None:
        while True:
            message = await self._channel.receive()
            if isinstance(message, Ack):
                now_s = time.perf_counter()
                self._measured.latencies_s += [now_s - ended_s for ended_s in self._sent_s.pop(message.number, ())]
            orders = self._protocol.handle(message, self._engine)
            self._held.extend((duty, lease) for lease in orders.start for duty in lease.duties)
            if orders.receive is not None:
                notice = from_msgpack(orders.receive.body, Notice)
                self._version = max(self._version, notice.policy_version)
                self._protocol.weights_received(orders.receive, notice.checksum, self._engine)
            self._leased.set()
            self._due.set()

    async def _generate(self) -> None:
        step_s = time.perf_counter() + self._random.random() * _DECODE_STEP_S
        due_s = step_s + self._random.expovariate(self._load.rate or 1)
        while True:
            while not self._held or self._held[0][1].min_version > self._version:
                self._leased.clear()
                await self._leased.wait()
            if self._load.rate:
                while due_s > step_s:
                    step_s = max(step_s + _DECODE_STEP_S, time.perf_counter())
                    await asyncio.sleep(step_s - time.perf_counter())
                due_s = max(due_s, step_s - 1) + self._random.expovariate(self._load.rate)
            elif self._protocol.statistics().unacknowledged >= _AHEAD:
                self._leased.clear()
                await self._leased.wait()
                continue
            self._end(*self._held.popleft())
            self._due.set()

    def _end(self, duty: Duty, lease: Lease) -> None:
        if self._random.random() < self._load.failure_share:
            self._protocol.fail(Failed(*duty, "episode_error", "", "", 0), 0)
            return
        self._next = (self._next + 1) % _NUM_SHAPES
        shape = self._shapes[self._next].completion
        versions = np.full(len(shape.tokens), self._version, np.int32)
        completion = Completion(shape.tokens, shape.behaviour_logprobs, versions, "stop")
        prompt = np.array(lease.prompt_tokens, np.int32)
        self._num_tokens += len(versions)
        self._ended_s[duty] = time.perf_counter()
        made = Trajectory(*duty.sample_id, prompt, completion, self._random.random())
        self._protocol.finish(duty, [made], 12 * len(versions))

    async def _send(self) -> None:
        await self._channel.connected(60.0)
        while True:
            await asyncio.sleep(0)  # results of the same turn share a message
            self._due.clear()
            for message in self._protocol.poll(time.monotonic(), self._engine):
                if isinstance(message, Results) and message.number not in self._sent_s:
                    samples = [Duty(each.lease_id, *each.trajectories[0].sample_id) for each in message.finished]
                    self._sent_s[message.number] = [self._ended_s.pop(sample) for sample in samples]
                self._channel.send(message)
            try:
                async with asyncio.timeout(max(0.0, self._protocol.due_s() - time.monotonic())):
                    await self._due.wait()
            except TimeoutError:
                continue


def run(load: Load, pipe: Connection) -> None:
    """Serve until the pipe says stop; answer every other word with a `Window`."""
    gc.collect()
    gc.freeze()  # as a worker does
    asyncio.run(_run(load, pipe))


async def _run(load: Load, pipe: Connection) -> None:
    zmq.asyncio.Context.instance().set(zmq.MAX_SOCKETS, 2 * load.num_workers + 64)  # the default is 1023
    rng = np.random.default_rng(load.first)
    shapes = [_trajectory(rng, load.median_tokens) for _ in range(_NUM_SHAPES)]
    measured, names = Measured([]), [f"w{load.first + index}" for index in range(load.num_workers)]
    tasks = {name: asyncio.create_task(_worker(load, name, 0, shapes, measured)) for name in names}
    dying = asyncio.create_task(_deaths(load, tasks, shapes, measured))
    busy_s = time.process_time()
    while await asyncio.to_thread(pipe.recv) != "stop":
        now_s = time.process_time()
        pipe.send(Window(len(measured.latencies_s), measured.latencies_s, now_s - busy_s, measured.deaths))
        busy_s, measured.latencies_s, measured.deaths = now_s, [], 0
        for task in tasks.values():
            if task.done() and not task.cancelled():  # a dead worker may not be replaced yet
                task.result()
    await cancel([dying, *tasks.values()])


async def _worker(load: Load, name: str, incarnation: int, shapes: list[Trajectory], measured: Measured) -> None:
    await SyntheticWorker(load, name, incarnation, shapes, measured).run()


async def _deaths(
    load: Load, tasks: dict[str, asyncio.Task[None]], shapes: list[Trajectory], measured: Measured
) -> None:
    chooser, incarnation = random.Random(load.first), 0
    while load.deaths_per_s:
        await asyncio.sleep(chooser.expovariate(load.deaths_per_s))
        name, incarnation = chooser.choice(list(tasks)), incarnation + 1
        await cancel([tasks[name]])
        tasks[name] = asyncio.create_task(_worker(load, name, incarnation, shapes, measured))
        measured.deaths += 1


def _trajectory(rng: np.random.Generator, median_tokens: int) -> Trajectory:
    num = int(np.clip(rng.lognormal(np.log(median_tokens), 0.6), 8, _LONGEST))
    tokens, logprobs = rng.integers(0, 32_000, num).astype(np.int32), -rng.random(num, dtype=np.float32)
    return Trajectory(0, 0, np.ones(1, np.int32), Completion(tokens, logprobs, np.zeros(num, np.int32), "stop"), 0.0)
