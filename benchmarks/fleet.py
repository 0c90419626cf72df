"""Load a learner's intake with a fleet of synthetic rollout workers, over the real wire.

    python benchmarks/fleet.py [--seconds 5] [--workers 1 8 64 256 1024] [--output benchmarks/results/fleet.json]

How many samples a second does a learner take from 1 to 1,024 workers, and how long does a worker wait for an
acknowledgement? This process is the learner without a model: intake, ledger, buffer, wire and broadcaster are those of
a run, and a train step takes no time. Workers (`fleet_workers.py`) live in another process. Each case is measured at
saturation, then at half of that rate, then at half with 2 % failed samples and a worker that dies each second. The
named alternative is `raw`: a ROUTER that acknowledges every message of as many DEALERs, with the same bytes in each
message, and neither decodes nor records anything. A step has a group of 16 samples for each worker, at least 64.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fleet_workers
import hardware
import numpy as np
import torch
import zmq
from fleet_workers import Load, Window

from areal_rloo.config import Config, load_config
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.service import IntakeService
from areal_rloo.tasks import Item, Source
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.manifest import build_manifest
from areal_rloo.weights.offers import Offers
from areal_rloo.weights.shared_memory import SharedMemorySender
from areal_rloo.wire.address import SocketFile, read_address
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.security import make_keys

_GROUP_SIZE = 16
_LEAST_GROUPS = 64  # a step
_MEDIAN_TOKENS = 500
_WINDOW = 16  # messages in flight of a raw sender, as of a worker
_FAULTS = {"failure_share": 0.02, "deaths_per_s": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0, help="of a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 64, 256, 1024])
    parser.add_argument("--output")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # a line for each failed sample
    rows = []
    for num_workers in arguments.workers:
        row = _measured(num_workers, arguments.seconds, arguments.rounds)
        print(row, flush=True)
        rows.append(row)
    hardware.write(arguments.output, {"median_tokens": _MEDIAN_TOKENS, "group_size": _GROUP_SIZE, "cases": rows})


def _measured(num_workers: int, seconds: float, rounds: int) -> dict[str, Any]:
    raw, full = [], []
    for _ in range(rounds):  # interleaved: a slow moment of the machine meets both
        raw.append(_raw(num_workers, seconds))
        full.append(_loaded(num_workers, seconds))
    rate = statistics.median(each["samples_per_s"] for each in full)
    half = _loaded(num_workers, seconds, rate=rate / 2 / num_workers)
    faulty = _loaded(num_workers, seconds, rate=rate / 2 / num_workers, **_FAULTS)
    ratios = [each["samples_per_s"] / of_raw for each, of_raw in zip(full, raw, strict=True)]
    return {
        "num_workers": num_workers,
        "raw_per_s": round(statistics.median(raw)),
        "of_raw": round(statistics.median(ratios), 2),
        "of_raw_spread": round(max(ratios) - min(ratios), 2),
        "full": min(full, key=lambda each: abs(each["samples_per_s"] - rate)),
        "half": half,
        "half_with_faults": faulty,
    }


def _loaded(num_workers: int, seconds: float, **load: float) -> dict[str, Any]:
    """Serve a fleet; return the measurements of a window after a warm-up of half its length."""
    groups_per_step = max(_LEAST_GROUPS, num_workers)
    capacity = -(-2 * groups_per_step * _GROUP_SIZE // num_workers)
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
            capacity_samples=capacity,
            median_tokens=_MEDIAN_TOKENS,
            **load,
        )
        with _process(partial(fleet_workers.run, workers)) as pipe:
            training.start()
            time.sleep(seconds / 2)
            _ask(pipe)
            before_s, began_s = service.call(time.thread_time), time.perf_counter()
            time.sleep(seconds)
            window, after_s, ended_s = _ask(pipe), service.call(time.thread_time), time.perf_counter()
            memory = hardware.status_bytes("VmRSS")
            ledger = service.statistics().ledger
            stop.set()
            service.begin_drain()
            training.join()
            pipe.send("stop")
        service.close()
    latencies_ms = 1000 * np.quantile(window.latencies_s or [np.nan], [0.5, 0.99])
    return {
        "samples_per_s": round(window.acknowledged / (ended_s - began_s)),
        "acknowledgement_ms_p50": round(float(latencies_ms[0]), 2),
        "acknowledgement_ms_p99": round(float(latencies_ms[1]), 2),
        "intake_busy_share": round((after_s - before_s) / (ended_s - began_s), 2),
        "workers_busy_share": round(window.busy_s / (ended_s - began_s), 2),
        "learner_gib": round(memory / 2**30, 2),
        "deaths": window.deaths,
        "trained": ledger.trained,
        "dropped": dict(ledger.dropped),
    }


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
    context = multiprocessing.get_context("spawn")
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
        with _process(partial(_send_raw, endpoint, num_workers, 12 * _MEDIAN_TOKENS)) as pipe:
            number, began_s = 0, 0.0
            while not began_s or time.perf_counter() < began_s + 1.5 * seconds:
                if not router.poll(10_000):
                    raise RuntimeError("no raw message for 10 s")
                peer, _ = router.recv_multipart()
                router.send_multipart([peer, b"1"])
                began_s, number = began_s or time.perf_counter(), number + 1
            pipe.send("stop")
            elapsed_s = time.perf_counter() - began_s
        router.close(0)
    return number / elapsed_s


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
            socket.recv()
            socket.send(message)
    context.destroy(0)


if __name__ == "__main__":
    main()
