"""How many samples a second does a learner take from 1 to 1,024 workers, over the rate of raw acknowledged messages?

This process is the learner without a model: intake, ledger, buffer, wire and broadcaster are those of a run, and a
train step takes no time. Synthetic workers (`fleet_workers.py`) live in another process. A step has 8 groups of 16
samples for each worker, at least 64 groups and at most 1,024, and as much again is in flight. The named alternative,
`raw`, is a ROUTER that acknowledges every message of as many DEALERs: a sample of mean size in each, and nothing is
decoded or recorded. (A worker's message has several samples; `raw` has 16 messages in flight.) `half`: the workers make
half of the last full rate; `faults`: likewise, with 2 % failed samples and a worker that dies each second; `quarter`: a
quarter. The line of facts has the medians of all windows, with the wait from the end of a sample to its
acknowledgement. Both ends share two cores: `intake_busy` and `workers_busy` tell which end is the limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq

from areal_rloo.config import Config, load_config
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.service import IntakeService
from areal_rloo.learner.collector import collect_rarely
from areal_rloo.tasks import Item, Source
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.manifest import build_manifest
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.shared_memory import SharedMemorySender
from areal_rloo.wire.address import SocketFile, read_address
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.security import make_keys
from benchmarks import fleet_workers, hardware
from benchmarks.fleet_workers import Load, Window
from benchmarks.harness import Benchmark, Case, forking_from

SIZES = (1, 8, 64, 256, 1024)
_WITH_LATENCY = 64
_GROUP_SIZE = 16
_GROUPS_PER_WORKER, _LEAST_GROUPS, _MOST_GROUPS = 8, 64, 1024  # a step: a worker has 256 samples, if not too many
_MEDIAN_TOKENS = 500
_WINDOW = 16  # messages in flight of a raw sender, as of a worker
_PATIENCE_S = 120  # the first process imports torch, on a machine that may be busy
_FAULTS = {"failure_share": 0.02, "deaths_per_s": 1.0}


def cases(quick: bool) -> Generator[Case]:
    torch.set_num_threads(1)
    collect_rarely()  # as a learner does
    logging.disable(logging.WARNING)  # a line for each failed sample
    rounds = 2 if quick else 5
    for num_workers in (4,) if quick else SIZES:
        fleet = Fleet(num_workers, 0.5 if quick else max(3.0, num_workers / 128))  # a step takes up to a second
        rates = {"intake": fleet.full, "raw": fleet.raw}
        pair = [("intake", "raw")]
        options: dict[str, Any] = {"larger_is_better": True, "warm_up": not quick}
        yield Case(f"rate_{num_workers}", "samples/s", rates, pair, rounds, facts=fleet.facts, **options)
        if num_workers != _WITH_LATENCY and not quick:
            continue
        fleet.forget()
        loads = {"full": fleet.full, "half": fleet.half, "faults": fleet.faults}
        loads |= {} if quick else {"quarter": fleet.quarter}
        name, pair = f"latency_{num_workers}", [("faults", "half")]
        more = rounds if quick else 2 * rounds - 1
        yield Case(name, "samples/s", loads, pair, more, facts=fleet.facts, **options)
    logging.disable(logging.NOTSET)


class Fleet:
    """A number of workers, and the facts of the last measurements."""

    def __init__(self, num_workers: int, seconds: float) -> None:
        self.facts: dict[str, Any] = {"median_tokens": _MEDIAN_TOKENS}
        self._num_workers, self._seconds = num_workers, seconds
        self._windows: defaultdict[str, list[Served]] = defaultdict(list)

    def forget(self) -> None:
        """Begin with the facts anew."""
        self.facts = {}
        self._windows.clear()

    def raw(self) -> float:
        """Return messages a second."""
        return _raw(self._num_workers, self._seconds)

    def full(self) -> float:
        """Return samples a second of workers that wait for nothing but the learner."""
        return self._served("full").samples_per_s

    def half(self) -> float:
        """Return samples a second of workers that make half of the full rate."""
        return self._served("half", rate=self._rate(1 / 2)).samples_per_s

    def faults(self) -> float:
        """Return likewise with failed samples and deaths."""
        return self._served("faults", rate=self._rate(1 / 2), **_FAULTS).samples_per_s

    def quarter(self) -> float:
        """Return likewise at a quarter of the full rate."""
        return self._served("quarter", rate=self._rate(1 / 4)).samples_per_s

    def _rate(self, share: float) -> float:
        """Return a share of the newest full rate, of each worker: the speed of a machine changes within minutes."""
        return share * self._windows["full"][-1].samples_per_s / self._num_workers

    def _served(self, name: str, **load: float) -> Served:
        """Measure a window, and keep the medians of all windows of this name as facts."""
        windows = self._windows[name]
        windows.append(serve(self._num_workers, self._seconds, **load))
        values = zip(*map(dataclasses.astuple, windows), strict=True)
        names = [field.name for field in dataclasses.fields(Served)]
        self.facts[name] = dict(zip(names, map(statistics.median, values), strict=True))
        return windows[-1]


@dataclass(frozen=True)
class Served:
    """Measurements of a window."""

    samples_per_s: float
    p50_ms: float  # from the end of a sample to its acknowledgement
    p99_ms: float
    intake_busy: float  # share of the time of the loop's thread
    workers_busy: float  # processor time of their process, over the time
    learner_gib: float  # of memory
    deaths: int
    dropped: int  # samples


def serve(num_workers: int, seconds: float, **load: float) -> Served:
    """Serve a fleet; measure a window after a warm-up of half its length."""
    groups_per_step = min(max(_GROUPS_PER_WORKER * num_workers, _LEAST_GROUPS), _MOST_GROUPS)
    config = _config(groups_per_step)
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        make_keys(Path(folder) / "keys")
        service = _service(config, Path(folder))
        stop = threading.Event()
        training = threading.Thread(target=_train, args=(service, stop))
        workers = Load(
            endpoint=service.channel.address.endpoint,
            keys=f"{folder}/keys",
            first=0,
            num_workers=num_workers,
            capacity_samples=-(-2 * groups_per_step * _GROUP_SIZE // num_workers),
            median_tokens=_MEDIAN_TOKENS,
            **load,
        )
        with _process(partial(fleet_workers.run, workers)) as pipe:
            training.start()
            _ask(pipe)  # all workers are there
            time.sleep(seconds / 2)
            _ask(pipe)
            before_s, began_s = service.call(time.thread_time), time.perf_counter()
            time.sleep(seconds)
            window, after_s, ended_s = _ask(pipe), service.call(time.thread_time), time.perf_counter()
            dropped = sum(service.statistics().ledger.dropped.values())
            memory = hardware.status_bytes("VmRSS")
            stop.set()
            service.begin_drain()
            training.join()
            pipe.send("stop")
        service.close()
    gc.collect()  # here, and not in the next window
    p50, p99 = 1000 * np.quantile(window.latencies_s or [np.nan], [0.5, 0.99])
    elapsed_s = ended_s - began_s
    return Served(
        samples_per_s=round(window.acknowledged / elapsed_s, 1),
        p50_ms=round(float(p50), 2),
        p99_ms=round(float(p99), 2),
        intake_busy=round((after_s - before_s) / elapsed_s, 2),
        workers_busy=round(window.busy_s / elapsed_s, 2),
        learner_gib=round(memory / 2**30, 2),
        deaths=window.deaths,
        dropped=dropped,
    )


def _train(service: IntakeService, stop: threading.Event) -> None:
    service.commit(0, lambda _: None, evaluate=False)
    version = 0
    while not stop.is_set() and service.take_batch() is not None:
        version += 1
        service.commit(version, lambda _: None, evaluate=False)


def _config(groups_per_step: int) -> Config:
    return load_config(
        "quickstart.yaml",
        [
            f"algorithm.group_size={_GROUP_SIZE}",
            "algorithm.max_staleness=4",
            f"learner.groups_per_step={groups_per_step}",
            "learner.num_minibatches=1",
            "learner.num_train_steps=1000000",
            "learner.microbatch_tokens=8192",
            "rollout.sampling.max_new_tokens=4096",
            "rollout.max_reward_failure_share=0.9",
        ],
    )


def _service(config: Config, folder: Path) -> IntakeService:
    manifest = build_manifest([("weight", torch.zeros(256))], bucket_bytes=1024)
    offers = Offers(together=False, timeout_s=300.0, call_timeout_s=2.0)
    memory = folder / "memory"
    memory.mkdir()
    broadcaster = Broadcaster(manifest=manifest, transport=SharedMemorySender(manifest, memory), offers=offers)
    intake = Intake(
        config,
        ledger=Ledger(),
        stream=PromptStream([Source("all", [Item("1+1=?", "2")] * 1000)], lambda *_: (1, 2), seed=0, num_epochs=None),
        evaluation=Evaluation([], lambda _: None),
        offers=offers,
        policy_version=0,
        history=(("learner", 0),),
        lies=Lies(config, vocab_size=32_000),
    )
    address = read_address(SocketFile.inside(folder).endpoint, keys=folder / "keys", end="learner")
    bind = lambda: LearnerChannel.bind(address, limits=Limits())  # noqa: E731
    return IntakeService(intake, broadcaster, bind, heartbeat_s=1.0)


@contextmanager
def _process(target: Callable[[Connection], None]) -> Iterator[Connection]:
    context = forking_from("benchmarks.fleet")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there,))
    process.start()
    try:
        yield here
    finally:
        process.join(30)
        process.kill()


def _ask(pipe: Connection) -> Window:
    pipe.send("window")
    window: Window = pipe.recv()
    return window


def _raw(num_workers: int, seconds: float) -> float:
    """Return the messages a second that a ROUTER receives and acknowledges."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/raw"
        router = context.socket(zmq.ROUTER)
        router.bind(endpoint)
        num_bytes = 12 * fleet_workers.mean_tokens(_MEDIAN_TOKENS)
        with _process(partial(_send_raw, endpoint, num_workers, num_bytes)) as pipe:
            _acknowledge(router, seconds / 2)  # the first message may come late, and the first ones are few
            rate = _acknowledge(router, seconds)
            pipe.send("stop")
        router.close(0)
    return rate


def _acknowledge(router: zmq.Socket[bytes], seconds: float) -> float:
    """Acknowledge messages for a while from the next one on; return how many a second."""
    number, began_s = 0, 0.0
    while not began_s or time.perf_counter() < began_s + seconds:
        if not router.poll(1000 * _PATIENCE_S):
            raise RuntimeError(f"no raw message for {_PATIENCE_S} s")
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, b"1"])
        began_s, number = began_s or time.perf_counter(), number + 1
    return number / (time.perf_counter() - began_s)


def _send_raw(endpoint: str, num_workers: int, num_bytes: int, pipe: Connection) -> None:
    message, poller = bytes(num_bytes), zmq.Poller()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, 4096)
    for _ in range(num_workers):
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        poller.register(socket, zmq.POLLIN)
        for _ in range(_WINDOW):
            socket.send(message)
    while not pipe.poll():
        for socket, _ in poller.poll(100):
            with contextlib.suppress(zmq.Again):
                while True:
                    socket.recv(zmq.NOBLOCK)
                    socket.send(message)
        time.sleep(fleet_workers.gather_s(num_workers))  # as the workers of the other contestant
    context.destroy(0)


BENCHMARK = Benchmark("fleet", __doc__, cases)
