"""Offers of a version that a worker refuses: repeated until the worker takes the weights."""

import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from support.broadcasting import MANIFEST, Broadcasting, Receiving, fill_with
from support.patience import eventually

from areal_rloo.weights.shared_memory import SharedMemorySender

pytestmark = pytest.mark.usefixtures("no_blocked_loop")


def test_damaged_weights_are_refused_and_offered_again(tmp_path: Path) -> None:
    bodies: list[tuple[int, bytes]] = []
    loaded: list[int] = []
    failures: list[str] = []
    broadcaster = Broadcasting(
        manifest=MANIFEST,
        transport=SharedMemorySender(MANIFEST, tmp_path / "segments"),
        timeout_s=60.0,
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
    broadcaster.publish(1, fill_with(1))
    segment = next((tmp_path / "segments").glob("*/segment-*"))
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
    broadcaster = Broadcasting(
        manifest=MANIFEST,
        transport=SharedMemorySender(MANIFEST, tmp_path / "segments"),
        timeout_s=60.0,
        send_notice=lambda worker_id, version, body: offers.append(version),
    )
    broadcaster.publish(1, fill_with(1))
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
