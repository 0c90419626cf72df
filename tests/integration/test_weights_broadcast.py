"""Broadcasts between real processes, over both transports, with receivers that die, stop, and come late."""

import asyncio
import contextlib
import gc
import os
import queue
import signal
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch
from support.broadcasting import Broadcasting, Receiving
from support.patience import PATIENCE_S, eventually
from support.processes import quickly_started

from areal_rloo.errors import WeightsError
from areal_rloo.weights.broadcast import SendTransport
from areal_rloo.weights.collective import CollectiveSender
from areal_rloo.weights.manifest import build_manifest, gather
from areal_rloo.weights.shared_memory import SharedMemoryReader, SharedMemorySender

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

TIMEOUT_S = 60.0
SHORT_TIMEOUT_S = 2.0  # where somebody is killed or stopped
START_ANEW = b"start anew"  # instead of an offer: the engine is back at its first weights
processes = quickly_started()


def _tensors(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer.{i}", torch.full((64, 128 + i), float(version))) for i in range(5)]


def _fill(version: int) -> Callable[[Sequence[torch.Tensor]], None]:
    return partial(gather, build_manifest(_tensors(version), bucket_bytes=100_000), _tensors(version))


def _receive(worker_id: str, offers: "Queue[bytes | None]", answers: "Queue[tuple[Any, ...]]", device: str) -> None:
    """A rollout worker's half: loads what is offered, and says when something is not wholly of one version."""

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
        on_received=lambda version, total: answers.put(("received", worker_id, version, total)),
        on_failed=lambda version, detail: answers.put(("failed", worker_id, version, detail)),
        device=torch.device(device),
    )
    answers.put(("ready", worker_id))
    while (body := offers.get()) is not None:
        if body == START_ANEW:
            running[0] = 0
        else:
            receiver.offer(body)
    receiver.close()


class Cluster:
    """A broadcaster here, receivers in processes of their own, queues instead of the wire."""

    def __init__(self, transport: Callable[[Any], SendTransport], device: str, timeout_s: float) -> None:
        self.answers: dict[str, Queue[tuple[Any, ...]]] = {}  # one each: a killed process may die holding its lock
        self.offers: dict[str, Queue[bytes | None]] = {}
        self.processes: dict[str, BaseProcess] = {}
        self.torn: list[tuple[Any, ...]] = []
        self.silent: set[str] = set()  # killed or stopped: no heartbeat comes from there
        self.device = device
        manifest = build_manifest(_tensors(0), bucket_bytes=100_000)
        self.broadcaster = Broadcasting(
            manifest=manifest, transport=transport(manifest), timeout_s=timeout_s, send_notice=self.send
        )

    def send(self, worker_id: str, version: int, body: bytes) -> None:
        self.offers[worker_id].put(body)

    def start(self, worker_id: str) -> None:
        self.offers[worker_id] = processes.Queue()
        self.answers[worker_id] = processes.Queue()
        arguments = (worker_id, self.offers[worker_id], self.answers[worker_id], self.device)
        self.processes[worker_id] = processes.Process(target=_receive, args=arguments, daemon=True)
        self.processes[worker_id].start()
        assert self.answers[worker_id].get(timeout=60) == ("ready", worker_id)
        self.broadcaster.join(worker_id, 0)

    def pump(self, until: Callable[[], bool]) -> None:
        """Carry answers and heartbeats back, as the intake would."""
        ends_s = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < ends_s, self.broadcaster.statistics()
            for worker_id, version in self.broadcaster.statistics().versions.items():
                if worker_id not in self.silent:
                    self.broadcaster.heard(worker_id, version)
            for answers in list(self.answers.values()):
                with contextlib.suppress(queue.Empty):
                    self.carry(*answers.get(timeout=0.005))

    def carry(self, kind: str, worker_id: str, version: int, detail: Any) -> None:
        match kind:
            case "received":
                self.broadcaster.acknowledge(worker_id, version, detail)
            case "failed":
                self.broadcaster.fail(worker_id, version, detail)
                self.broadcaster.heard(worker_id, self.broadcaster.statistics().versions[worker_id])  # its heartbeat
            case "torn":
                self.torn.append((worker_id, version, detail))

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


@pytest.fixture(params=["shared_memory", "collective", pytest.param("nccl", marks=pytest.mark.gpu)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    short = request.node.get_closest_marker("short_timeout") is not None
    timeout_s = SHORT_TIMEOUT_S if short else TIMEOUT_S
    device = "cuda" if request.param == "nccl" else "cpu"

    def transport(manifest: Any) -> SendTransport:
        if request.param == "shared_memory":
            return SharedMemorySender(manifest, tmp_path / "segments")
        return CollectiveSender(manifest, host="127.0.0.1", device=torch.device(device), timeout_s=timeout_s)

    made = Cluster(transport, device, timeout_s)
    yield made
    made.close()
    assert made.torn == []


def test_every_receiver_gets_version_after_version_whole(cluster: Cluster) -> None:
    for worker_id in ("a", "b"):
        cluster.start(worker_id)
    for version in range(1, 31):
        cluster.broadcaster.publish(version, _fill(version))
        cluster.pump(lambda v=version: cluster.at("a", v)() and cluster.at("b", v)())  # type: ignore[misc]
    assert cluster.broadcaster.statistics().failures == 0


def test_versions_published_faster_than_they_are_taken_end_at_the_newest(cluster: Cluster) -> None:
    cluster.start("a")
    for version in range(1, 41):
        cluster.broadcaster.publish(version, _fill(version))
    cluster.pump(cluster.at("a", 40))
    assert cluster.broadcaster.statistics().broadcasts < 40


def test_a_heartbeat_from_before_the_swap_repeats_no_broadcast(cluster: Cluster) -> None:
    cluster.start("a")
    for version in range(1, 4):
        cluster.broadcaster.publish(version, _fill(version))
        cluster.pump(cluster.at("a", version))
        cluster.broadcaster.heard("a", version - 1)
    time.sleep(0.2)
    assert cluster.broadcaster.statistics().broadcasts == 3


def test_a_late_joiner_gets_the_newest_version(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.broadcaster.publish(3, _fill(3))
    cluster.pump(cluster.at("a", 3))
    cluster.start("b")
    cluster.pump(cluster.at("b", 3))


def test_an_engine_that_started_anew_gets_the_version_it_had_again(cluster: Cluster) -> None:
    for worker_id in ("a", "b"):
        cluster.start(worker_id)
    cluster.broadcaster.publish(3, _fill(3))
    cluster.pump(lambda: cluster.at("a", 3)() and cluster.at("b", 3)())
    cluster.offers["a"].put(START_ANEW)
    cluster.broadcaster.join("a", 0)
    assert cluster.broadcaster.statistics().versions["a"] == 0
    cluster.pump(cluster.at("a", 3))
    assert cluster.torn == []


def test_a_worker_with_a_starting_engine_is_offered_no_weights(cluster: Cluster) -> None:
    for worker_id in ("a", "b"):
        cluster.start(worker_id)
    cluster.broadcaster.publish(1, _fill(1))
    cluster.pump(lambda: cluster.at("a", 1)() and cluster.at("b", 1)())
    cluster.offers["b"].put(START_ANEW)
    cluster.broadcaster.heard("b", None)
    cluster.broadcaster.publish(2, _fill(2))
    cluster.pump(cluster.at("a", 2))
    assert "b" not in cluster.broadcaster.statistics().versions
    cluster.broadcaster.heard("b", 0)
    cluster.pump(cluster.at("b", 2))


@pytest.mark.short_timeout
def test_a_killed_receiver_holds_nobody_up(cluster: Cluster) -> None:
    for worker_id in ("a", "b"):
        cluster.start(worker_id)
    cluster.broadcaster.publish(1, _fill(1))
    cluster.pump(lambda: cluster.at("a", 1)() and cluster.at("b", 1)())
    cluster.signal("b", signal.SIGKILL)
    cluster.broadcaster.publish(2, _fill(2))
    cluster.pump(cluster.at("a", 2))
    cluster.broadcaster.leave("b")
    cluster.broadcaster.publish(3, _fill(3))
    cluster.pump(cluster.at("a", 3))


@pytest.mark.short_timeout
def test_a_stopped_receiver_is_left_out_and_comes_back_to_whole_weights(cluster: Cluster) -> None:
    for worker_id in ("a", "b"):
        cluster.start(worker_id)
    cluster.signal("b", signal.SIGSTOP)
    cluster.broadcaster.publish(1, _fill(1))
    cluster.pump(lambda: cluster.broadcaster.statistics().left_out > 0)
    for version in range(2, 8):
        cluster.broadcaster.publish(version, _fill(version))
        cluster.pump(cluster.at("a", version))
    cluster.signal("b", signal.SIGCONT)

    def both_are_there_and_heartbeats_go_on() -> bool:
        cluster.broadcaster.heard("b", 0)
        return cluster.at("a", 7)() and cluster.at("b", 7)()

    cluster.pump(both_are_there_and_heartbeats_go_on)


def test_publish_does_not_wait_for_a_broadcast_that_hangs(cluster: Cluster) -> None:
    cluster.start("a")
    cluster.signal("a", signal.SIGSTOP)
    for version in range(1, 6):
        cluster.broadcaster.publish(version, _fill(version))
    assert cluster.broadcaster.statistics().newest_version == 5
    assert cluster.broadcaster.statistics().broadcasts == 0
    cluster.signal("a", signal.SIGCONT)
    cluster.pump(cluster.at("a", 5))


def test_damaged_weights_are_refused_and_offered_again(tmp_path: Path) -> None:
    bodies: list[tuple[int, bytes]] = []
    loaded: list[int] = []
    failures: list[str] = []
    tensors = _tensors(1)
    manifest = build_manifest(tensors, bucket_bytes=100_000)
    broadcaster = Broadcasting(
        manifest=manifest,
        transport=SharedMemorySender(manifest, tmp_path / "segments"),
        timeout_s=TIMEOUT_S,
        send_notice=lambda worker_id, version, body: bodies.append((version, body)),
    )

    def load(version: int, weights: object) -> Future[int]:
        loaded.append(version)
        future: Future[int] = Future()
        future.set_result(version)
        return future

    receiver = Receiving(
        worker_id="a",
        policy_version=lambda: max(loaded, default=0),
        load_weights=load,
        on_received=lambda version, total: broadcaster.acknowledge("a", version, total),
        on_failed=lambda version, detail: failures.append(detail),
        device=torch.device("cpu"),
    )
    broadcaster.publish(1, partial(gather, manifest, tensors))
    segment = next((tmp_path / "segments").iterdir())
    broadcaster.join("a", 0)
    eventually(lambda: bodies, "no offer came")
    with segment.open("r+b") as file:
        good = file.read(8)
        file.seek(0)
        file.write(b"damaged!")
    receiver.offer(bodies.pop()[1])
    eventually(lambda: failures, "the damage went unseen")
    assert "expected" in failures[0]
    assert loaded == []
    with segment.open("r+b") as file:
        file.write(good)
    broadcaster.fail("a", 1, failures[0])
    broadcaster.heard("a", 0)  # its next heartbeat
    eventually(lambda: bodies, "no offer came")
    receiver.offer(bodies.pop()[1])
    eventually(lambda: broadcaster.statistics().versions == {"a": 1}, "the good bytes were not taken")
    assert loaded == [1]
    receiver.close()
    broadcaster.close()


def test_offers_to_a_worker_that_keeps_failing_back_off(tmp_path: Path) -> None:
    offers: list[int] = []
    manifest = build_manifest(_tensors(1), bucket_bytes=100_000)
    broadcaster = Broadcasting(
        manifest=manifest,
        transport=SharedMemorySender(manifest, tmp_path / "segments"),
        timeout_s=TIMEOUT_S,
        send_notice=lambda worker_id, version, body: offers.append(version),
    )
    broadcaster.publish(1, _fill(1))
    broadcaster.join("a", 0)
    eventually(lambda: len(offers) == 1, "no offer came")
    broadcaster.fail("a", 1, "no room")
    broadcaster.heard("a", 0)
    eventually(lambda: len(offers) == 2, "it was not offered again")
    broadcaster.fail("a", 1, "no room")
    for _ in range(20):
        broadcaster.heard("a", 0)
    time.sleep(0.2)
    assert len(offers) == 2

    def heartbeats_go_on() -> bool:
        broadcaster.heard("a", 0)
        return len(offers) == 3

    eventually(heartbeats_go_on, "it was not offered again")
    broadcaster.close()


def test_a_reader_reads_the_segments_of_a_restarted_learner(tmp_path: Path) -> None:
    """The reader maps the segments of the first learner under their names."""
    manifest = build_manifest(_tensors(0), bucket_bytes=100_000)
    reader = SharedMemoryReader()
    for version in (1, 2):
        sender = SharedMemorySender(manifest, tmp_path / "segments")
        buckets = asyncio.run(sender.stage())
        gather(manifest, _tensors(version), buckets)
        taken = reader.take(asyncio.run(sender.offer(buckets, ["w"])), manifest)
        assert all(torch.equal(one, other) for one, other in zip(taken, buckets, strict=True))


def test_a_member_lost_during_setup_leaves_no_group_of_one_rank() -> None:
    manifest = build_manifest(_tensors(1), bucket_bytes=100_000)
    sender = CollectiveSender(manifest, host="127.0.0.1", device=torch.device("cpu"), timeout_s=1.0)

    async def scenario() -> None:
        buckets = await sender.stage()
        offer = await sender.offer(buckets, ["a"])
        sender.lost("a")
        assert offer.world_size == 2
        with pytest.raises(WeightsError):
            await sender.send(buckets)

    asyncio.run(scenario())
    sender.close()


def test_a_worker_of_several_devices_has_as_many_ranks() -> None:
    manifest = build_manifest(_tensors(1), bucket_bytes=100_000)
    sender = CollectiveSender(manifest, host="127.0.0.1", device=torch.device("cpu"), timeout_s=1.0, ranks_per_worker=2)
    offer = asyncio.run(sender.offer([], ["b", "a"]))
    assert (offer.ranks, offer.world_size) == ({"a": 1, "b": 3}, 5)
    sender.close()


def test_a_failed_broadcast_closes_its_store_at_once() -> None:
    """Other ranks wait in the store until it closes; the garbage collector may come much later."""
    manifest = build_manifest(_tensors(1), bucket_bytes=100_000)
    sender = CollectiveSender(manifest, host="127.0.0.1", device=torch.device("cpu"), timeout_s=1.0)

    async def fail() -> int:
        buckets = await sender.stage()
        offer = await sender.offer(buckets, ["a"])
        with pytest.raises(WeightsError):
            await sender.send(buckets)
        return offer.port

    gc.disable()
    try:
        port = asyncio.run(fail())

        def is_closed() -> bool:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                return True
            return False

        eventually(is_closed, "the store still listens")
    finally:
        gc.enable()
    sender.close()


def test_a_segment_given_up_is_unmapped_before_the_next_offer(tmp_path: Path) -> None:
    manifest = build_manifest(_tensors(1), bucket_bytes=100_000)
    sender = SharedMemorySender(manifest, tmp_path / "segments")

    async def give_up() -> "weakref.ref[torch.Tensor]":
        buckets = await sender.stage()
        await sender.offer(buckets, ["w"])
        sender.lost("w")
        sender.release(buckets)
        return weakref.ref(buckets[0])

    assert asyncio.run(give_up())() is None
    sender.close()
