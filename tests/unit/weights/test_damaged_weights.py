"""Weights that an engine must not load: damaged bytes, until they are whole again, and adapters of another model."""

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest
import torch
from support.broadcasting import MANIFEST, Broadcasting, Receiving, fill_with
from support.patience import eventually

from areal_rloo.errors import ModelError
from areal_rloo.weights.manifest import Notice, checksum
from areal_rloo.weights.receive import Receiver
from areal_rloo.weights.shared_memory import SharedMemorySender

pytestmark = pytest.mark.usefixtures("no_blocked_loop")


def test_damaged_weights_are_refused_and_offered_again(tmp_path: Path) -> None:
    notices: list[tuple[int, bytes]] = []
    loaded: list[int] = []
    failures: list[tuple[int, str]] = []
    received: list[tuple[int, int]] = []
    broadcaster = Broadcasting(
        manifest=MANIFEST,
        transport=SharedMemorySender(MANIFEST, tmp_path / "segments"),
        timeout_s=60.0,
        send_call=lambda *call: None,
        send_notice=lambda worker_id, offer_id, version, body: notices.append((offer_id, body)),
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
        on_received=lambda offer_id, total: received.append((offer_id, total)),
        on_failed=lambda offer_id, detail: failures.append((offer_id, detail)),
        device=torch.device("cpu"),
    )
    broadcaster.publish(1, fill_with(1))
    segment = next((tmp_path / "segments").rglob("segment-*"))
    broadcaster.tell(lambda offers: offers.join("a", 0, now_s=0.0))
    eventually(lambda: notices, "no offer came")
    with segment.open("r+b") as file:
        good = file.read(8)
        file.seek(0)
        file.write(b"damaged!")
    receiver.offer(*notices.pop())
    eventually(lambda: failures, "the damage went unseen")
    (offer_id, detail), *_ = failures
    assert "expected" in detail
    assert loaded == []
    with segment.open("r+b") as file:
        file.write(good)
    broadcaster.tell(lambda offers: offers.failed("a", offer_id, detail, number=1, now_s=time.monotonic()))
    eventually(lambda: notices, "the version was not offered again")
    receiver.offer(*notices.pop())
    eventually(lambda: received, "the good bytes were not taken")
    again, total = received[0]
    broadcaster.tell(lambda offers: offers.received("a", again, total, number=2, now_s=time.monotonic()))
    assert broadcaster.statistics().versions == {"a": 1}
    assert loaded == [1]
    receiver.close()
    broadcaster.close()


@pytest.mark.parametrize("present", [-1, 0, 1])
@pytest.mark.parametrize("of_worker", ["a1", "b2", None])
def test_adapters_need_the_model_of_the_learner(of_worker: str | None, present: int, tmp_path: Path) -> None:
    """Another model ends the worker, which no further version would mend; so does a version that the engine has.

    Whole weights (None) replace those of the files.
    """
    loaded: list[int] = []

    def load(version: int, weights: object) -> Future[int]:
        loaded.append(version)
        future: Future[int] = Future()
        future.set_result(version)
        return future

    async def receive() -> int:
        manifest = msgspec.structs.replace(MANIFEST, base="" if of_worker is None else "a1")
        sender = SharedMemorySender(manifest, tmp_path / "segments")
        buckets = await sender.stage()
        fill_with(1)(buckets)
        notice = Notice(1, manifest, checksum(buckets), await sender.offer(buckets, ["a"]))
        receiver = Receiver(
            worker_id="a",
            policy_version=lambda: present,
            load_weights=load,
            device=torch.device("cpu"),
            base=None if of_worker is None else (of_worker, tmp_path / "model"),
        )
        try:
            return await receiver.receive(msgspec.msgpack.encode(notice))
        finally:
            sender.close()

    if of_worker == "b2":
        with pytest.raises(ModelError, match=rf"model\.path: {tmp_path / 'model'} .*digest a1, got b2"):
            asyncio.run(receive())
    else:
        asyncio.run(receive())
    assert loaded == ([1] if of_worker != "b2" and present < 1 else [])
