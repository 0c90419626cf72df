"""Broadcasts between real processes, over both transports, with receivers that are killed, stopped or late."""

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
from support.broadcasting import MANIFEST, Broadcasting, Receiving, fill_with
from support.patience import PATIENCE_S
from support.processes import quickly_started

from areal_rloo.weights.broadcast import SendTransport
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.shared_memory import SharedMemorySender

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

TIMEOUT_S = 60.0
SHORT_TIMEOUT_S = 2.0  # where somebody is killed or stopped
START_ANEW = (0, b"start anew")  # instead of an offer: the engine is back at its first weights
CALL = b"call"  # instead of a notice: do you take part?
processes = quickly_started()


def _receive(
    worker_id: str, offers: "Queue[tuple[int, bytes] | None]", answers: "Queue[tuple[Any, ...]]", device: str
) -> None:
    """Load every offered version, as a rollout worker does, and report tensors that mix versions."""

    running = [0]  # version

    def load(version: int, weights: Any) -> Future[int]:
        future: Future[int] = Future()
        running[0] = version
        torn = [name for name, tensor in weights if not bool((tensor == version).all())]
        if torn:
            answers.put(("torn", worker_id, version, torn))
        future.set_result(version)
        return future

    receiver = Receiving(
        worker_id=worker_id,
        policy_version=lambda: running[0],
        load_weights=load,
        on_received=lambda offer_id, total: answers.put(("received", worker_id, offer_id, total)),
        on_failed=lambda offer_id, detail: answers.put(("failed", worker_id, offer_id, detail)),
        device=torch.device(device),
    )
    answers.put(("started", worker_id))
    while (offer := offers.get()) is not None:
        if offer == START_ANEW:
            running[0] = 0
        elif offer[1] == CALL:
            answers.put(("ready", worker_id, offer[0], None))
        else:
            receiver.offer(*offer)
    receiver.close()


class Cluster:
    """A broadcaster in this process and receivers in other processes, with queues instead of the wire."""

    def __init__(self, transport: SendTransport, device: str, timeout_s: float) -> None:
        self.answers: dict[str, Queue[tuple[Any, ...]]] = {}  # one each: a killed process may die holding its lock
        self.offers: dict[str, Queue[tuple[int, bytes] | None]] = {}
        self.number = 0  # of the last message carried
        self.processes: dict[str, BaseProcess] = {}
        self.torn: list[tuple[Any, ...]] = []
        self.silent: set[str] = set()  # killed or stopped: no heartbeat comes from there
        self.device = device
        self.broadcaster = Broadcasting(
            manifest=MANIFEST,
            transport=transport,
            timeout_s=timeout_s,
            send_call=lambda worker_id, offer_id: self.offers[worker_id].put((offer_id, CALL)),
            send_notice=lambda worker_id, offer_id, version, body: self.offers[worker_id].put((offer_id, body)),
        )

    def start(self, *worker_ids: str) -> None:
        for worker_id in worker_ids:
            self.offers[worker_id] = processes.Queue()
            self.answers[worker_id] = processes.Queue()
            # NCCL refuses two ranks on a GPU; the sender has the first.
            device = f"cuda:{1 + len(self.processes)}" if self.device == "cuda" else self.device
            arguments = (worker_id, self.offers[worker_id], self.answers[worker_id], device)
            self.processes[worker_id] = processes.Process(target=_receive, args=arguments, daemon=True)
            self.processes[worker_id].start()
            assert self.answers[worker_id].get(timeout=60) == ("started", worker_id)
            self.join(worker_id, 0)

    def join(self, worker_id: str, version: int) -> None:
        self.number += 1
        number = self.number
        self.broadcaster.tell(lambda offers: offers.join(worker_id, version, number=number, now_s=time.monotonic()))

    def leave(self, worker_id: str) -> None:
        self.broadcaster.tell(lambda offers: offers.leave(worker_id))

    def beat(self, worker_id: str, version: int | None) -> None:
        """Carry a heartbeat."""
        self.number += 1
        values = {"number": self.number, "newest_offer": 2**60, "receiving": False, "now_s": time.monotonic()}
        self.broadcaster.tell(lambda offers: offers.heard(worker_id, version, **values))

    def pump(self, until: Callable[[], bool]) -> None:
        """Carry answers and heartbeats back, as the intake would."""
        ends_s = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < ends_s, self.broadcaster.statistics()
            for worker_id, version in self.broadcaster.statistics().versions.items():
                if worker_id not in self.silent:
                    self.beat(worker_id, version)
            for answers in list(self.answers.values()):
                with contextlib.suppress(queue.Empty):
                    self.carry(*answers.get(timeout=0.005))

    def carry(self, kind: str, worker_id: str, offer_id: int, detail: Any) -> None:
        self.number += 1
        values = {"number": self.number, "now_s": time.monotonic()}
        match kind:
            case "ready":
                self.broadcaster.tell(lambda offers: offers.ready(worker_id, offer_id))
            case "received":
                self.broadcaster.tell(lambda offers: offers.received(worker_id, offer_id, detail, **values))
            case "failed":
                self.broadcaster.tell(lambda offers: offers.failed(worker_id, offer_id, detail, **values))
            case "torn":
                self.torn.append((worker_id, offer_id, detail))

    def at(self, worker_id: str, version: int) -> Callable[[], bool]:
        return lambda: self.broadcaster.statistics().versions.get(worker_id) == version

    def signal(self, worker_id: str, number: int) -> None:
        pid = self.processes[worker_id].pid
        assert pid is not None
        os.kill(pid, number)
        (self.silent.discard if number == signal.SIGCONT else self.silent.add)(worker_id)

    def close(self) -> None:
        for worker_id, process in self.processes.items():
            self.offers[worker_id].put(None)
            process.join(timeout=2)
            process.kill()
            process.join()
        self.broadcaster.close()


@pytest.fixture(params=["shared_memory", "collective", pytest.param("nccl", marks=pytest.mark.gpu(3))])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    short = request.node.get_closest_marker("short_timeout") is not None
    timeout_s = SHORT_TIMEOUT_S if short else TIMEOUT_S
    device = "cuda" if request.param == "nccl" else "cpu"

    transport: SendTransport
    if request.param == "shared_memory":
        transport = SharedMemorySender(MANIFEST, tmp_path / "segments")
    else:
        transport = CollectiveSender(MANIFEST, host="127.0.0.1", device=torch.device(device), timeout_s=timeout_s)
    made = Cluster(transport, device, timeout_s)
    yield made
    made.close()
    assert made.torn == []


def test_every_receiver_gets_whole_weights_of_every_version(cluster: Cluster) -> None:
    cluster.start("a", "b")
    for version in range(1, 31):
        cluster.broadcaster.publish(version, fill_with(version))
        cluster.pump(lambda v=version: cluster.at("a", v)() and cluster.at("b", v)())  # type: ignore[misc]
    assert cluster.broadcaster.statistics().failures == 0


def test_a_slow_receiver_skips_to_the_newest_version(cluster: Cluster) -> None:
    cluster.start("a")
    for version in range(1, 41):
        cluster.broadcaster.publish(version, fill_with(version))
    cluster.pump(cluster.at("a", 40))
    assert cluster.broadcaster.statistics().broadcasts < 40


def test_a_late_joiner_gets_the_newest_version(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.broadcaster.publish(3, fill_with(3))
    cluster.pump(cluster.at("a", 3))
    cluster.start("b")
    cluster.pump(cluster.at("b", 3))
    assert cluster.broadcaster.statistics().versions == {"a": 3, "b": 3}


def test_a_restarted_engine_gets_its_version_again(cluster: Cluster) -> None:
    cluster.start("a", "b")
    cluster.broadcaster.publish(3, fill_with(3))
    cluster.pump(lambda: cluster.at("a", 3)() and cluster.at("b", 3)())
    cluster.offers["a"].put(START_ANEW)
    cluster.join("a", 0)
    assert cluster.broadcaster.statistics().versions["a"] == 0
    cluster.pump(cluster.at("a", 3))
    assert cluster.torn == []


def test_a_worker_with_a_starting_engine_is_offered_no_weights(cluster: Cluster) -> None:
    cluster.start("a", "b")
    cluster.broadcaster.publish(1, fill_with(1))
    cluster.pump(lambda: cluster.at("a", 1)() and cluster.at("b", 1)())
    cluster.offers["b"].put(START_ANEW)
    cluster.beat("b", None)
    cluster.broadcaster.publish(2, fill_with(2))
    cluster.pump(cluster.at("a", 2))
    assert "b" not in cluster.broadcaster.statistics().versions
    cluster.beat("b", 0)
    cluster.pump(cluster.at("b", 2))


@pytest.mark.short_timeout
def test_a_killed_receiver_does_not_block_the_others(cluster: Cluster) -> None:
    cluster.start("a", "b")
    cluster.broadcaster.publish(1, fill_with(1))
    cluster.pump(lambda: cluster.at("a", 1)() and cluster.at("b", 1)())
    cluster.signal("b", signal.SIGKILL)
    cluster.broadcaster.publish(2, fill_with(2))
    cluster.pump(cluster.at("a", 2))
    cluster.leave("b")
    cluster.broadcaster.publish(3, fill_with(3))
    cluster.pump(cluster.at("a", 3))
    assert cluster.broadcaster.statistics().versions == {"a": 3}


@pytest.mark.short_timeout
def test_a_stopped_receiver_is_left_out_and_later_gets_whole_weights(cluster: Cluster) -> None:
    cluster.start("a", "b")
    cluster.signal("b", signal.SIGSTOP)
    cluster.broadcaster.publish(1, fill_with(1))
    cluster.pump(lambda: cluster.broadcaster.statistics().left_out > 0)
    for version in range(2, 8):
        cluster.broadcaster.publish(version, fill_with(version))
        cluster.pump(cluster.at("a", version))
    cluster.signal("b", signal.SIGCONT)
    cluster.pump(lambda: cluster.at("a", 7)() and cluster.at("b", 7)())
    assert cluster.broadcaster.statistics().versions == {"a": 7, "b": 7}


def test_publish_does_not_wait_for_a_broadcast_that_hangs(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.signal("a", signal.SIGSTOP)
    for version in range(1, 6):
        cluster.broadcaster.publish(version, fill_with(version))
    assert cluster.broadcaster.statistics().newest_version == 5
    assert cluster.broadcaster.statistics().broadcasts <= 1
    cluster.signal("a", signal.SIGCONT)
    cluster.pump(cluster.at("a", 5))
