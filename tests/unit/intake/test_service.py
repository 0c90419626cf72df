"""The intake's event loop: errors of its tasks reach the training thread, and waits do not spin."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import zmq
from support.event_loops import BlockedLoops
from support.full_disk import disk_of
from support.intakes import MANIFEST, make_broadcaster, make_intake, make_offers
from support.patience import PATIENCE_S, eventually
from support.workers import fresh_address, make_channel, make_ends
from torch import Tensor
from zmq.auth.base import Authenticator

from areal_rloo.errors import WeightsError
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.service import IntakeService
from areal_rloo.loop_thread import LoopThread
from areal_rloo.tasks import Item, Source
from areal_rloo.weights.broadcast import Broadcaster, SendCall, SendNotice
from areal_rloo.weights.manifest import SharedMemoryOffer, checksum
from areal_rloo.weights.shared_memory import SharedMemorySender
from areal_rloo.wire.channels import LearnerChannel
from areal_rloo.wire.codec import encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Heartbeat, Hello, Work

pytestmark = pytest.mark.usefixtures("no_blocked_loop")


def _channel() -> LearnerChannel:
    return LearnerChannel.bind(fresh_address(), limits=Limits())


def test_a_call_returns_the_result_or_raises_the_error() -> None:
    loop = LoopThread("test")
    assert loop.call(lambda: threading.current_thread().name) == "test"
    with pytest.raises(ZeroDivisionError):
        loop.call(lambda: 1 / 0)
    loop.close()


def test_closing_a_loop_cancels_its_tasks() -> None:
    loop = LoopThread("test")
    ended: list[bool] = []
    loop.begin(asyncio.sleep(1000), lambda task: ended.append(task.cancelled()))
    loop.close()
    assert ended == [True]


def test_every_call_beside_a_close_returns_or_raises() -> None:
    """A scrape of the metrics at the end of a run is such a call."""

    def call_until_closed(loop: LoopThread, ended: list[str]) -> None:
        try:
            while True:
                loop.call(lambda: 1)
        except (RuntimeError, CancelledError) as error:
            ended.append(type(error).__name__)

    for _ in range(20):
        loop = LoopThread("test")
        ended: list[str] = []
        threads = [threading.Thread(target=call_until_closed, args=(loop, ended), daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        loop.close()
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
        assert len(ended) == 3, "a call hangs"


def test_a_signal_after_the_close_is_ignored() -> None:
    loop = LoopThread("test")
    loop.close()
    called: list[int] = []
    loop.soon(lambda: called.append(1))
    with pytest.raises(RuntimeError, match="the event loop test is closed"):
        loop.call(lambda: 1)
    assert not called


def test_a_broadcaster_that_crashes_ends_the_wait_for_a_batch(tmp_path: Path) -> None:
    class Crashing(Broadcaster):
        async def run(self, send_call: SendCall, send_notice: SendNotice) -> None:
            raise KeyError("a bug")

    transport = SharedMemorySender(MANIFEST, tmp_path / "segments")
    broadcaster = Crashing(manifest=MANIFEST, transport=transport, offers=make_offers())
    service = IntakeService(make_intake(broadcaster.offers), broadcaster, _channel, heartbeat_s=1)
    with pytest.raises(KeyError, match="a bug"):
        service.take_batch()
    assert service.statistics().num_workers == 0, "statistics outlive a failure"
    service.close()


def test_a_drain_ends_the_wait_for_partial_rollouts(tmp_path: Path) -> None:
    broadcaster = make_broadcaster(tmp_path)
    intake = make_intake(broadcaster.offers)
    service = IntakeService(intake, broadcaster, _channel, heartbeat_s=1)
    hello = Hello("w", "1", 4, 0, None, 1, 0, (), Work())
    service.call(lambda: intake.handle("00", hello, 0.0))
    assert service.call(lambda: intake.fleet.alive["w"].num_train) > 0
    gathering = threading.Thread(target=service.gather_partials, args=(100 * PATIENCE_S,), daemon=True)
    gathering.start()
    eventually(lambda: not intake.has_partials, "no worker was asked")
    assert gathering.is_alive()
    service.begin_drain()
    gathering.join(PATIENCE_S)
    assert not gathering.is_alive(), "the last checkpoint asks again"
    service.close()


def test_a_drain_ends_the_wait_for_shared_memory(tmp_path: Path) -> None:
    transport = SharedMemorySender(MANIFEST, tmp_path / "segments", look_every_s=0.01)
    broadcaster = Broadcaster(manifest=MANIFEST, transport=transport, offers=make_offers())
    intake = make_intake(broadcaster.offers)
    service = IntakeService(intake, broadcaster, _channel, heartbeat_s=1)
    with disk_of(1):
        committing = threading.Thread(target=service.commit, args=(1, lambda buckets: None), kwargs={"evaluate": True})
        committing.start()
        eventually(lambda: transport.missing_bytes > 0, "there is memory")
        assert committing.is_alive()
        service.begin_drain()
        committing.join(PATIENCE_S)
    assert not committing.is_alive()
    assert service.take_batch() is None
    assert intake._policy_version == 1, "a checkpoint of this version has the step"
    service.close()


@pytest.mark.parametrize("error", [None, asyncio.CancelledError()])
def test_a_broadcaster_that_ends_without_an_error_ends_the_wait(tmp_path: Path, error: BaseException | None) -> None:
    class Ending(Broadcaster):
        async def run(self, send_call: SendCall, send_notice: SendNotice) -> None:
            if error is not None:
                raise error

    transport = SharedMemorySender(MANIFEST, tmp_path / "segments")
    broadcaster = Ending(manifest=MANIFEST, transport=transport, offers=make_offers())
    service = IntakeService(make_intake(broadcaster.offers), broadcaster, _channel, heartbeat_s=1)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            service.take_batch()
        except RuntimeError as raised:
            errors.append(raised)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(5)
    service.begin_drain()
    waiting.join(PATIENCE_S)
    assert [str(raised).startswith("the broadcaster") for raised in errors] == [True]
    service.close()


def test_an_admission_of_workers_that_crashes_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def crash(self: Authenticator, message: list[bytes]) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Authenticator, "handle_zap_message", crash)
    ends = make_ends("tcp", tmp_path)
    broadcaster = make_broadcaster(tmp_path)
    bind = lambda: LearnerChannel.bind(ends.address, limits=Limits())  # noqa: E731
    service = IntakeService(make_intake(broadcaster.offers), broadcaster, bind, heartbeat_s=1)
    workers = LoopThread("workers")

    async def connect() -> None:
        with contextlib.closing(make_channel(ends.of_worker(service.channel.address))) as worker:
            await worker.connected(PATIENCE_S)

    workers.begin(connect(), lambda task: None)
    end = threading.Timer(PATIENCE_S, service.begin_drain)
    end.start()
    with pytest.raises(KeyError, match="a bug"):
        service.take_batch()
    end.cancel()
    workers.close()
    service.close()


def test_a_failed_checksum_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def flaky(buckets: Sequence[Tensor]) -> int:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return checksum(buckets)

    monkeypatch.setattr("areal_rloo.weights.broadcast.checksum", flaky)
    _offer_until_noticed(make_broadcaster(tmp_path))
    assert len(calls) == 2


@pytest.mark.parametrize("error", [WeightsError("no store"), OSError(24, "Too many open files"), KeyError("a bug")])
def test_a_failed_offer_is_repeated(tmp_path: Path, error: Exception) -> None:
    class Flaky(SharedMemorySender):
        failures = 1

        async def offer(self, buckets: Sequence[Tensor], worker_ids: Sequence[str]) -> SharedMemoryOffer:
            if self.failures:
                self.failures -= 1
                raise error
            return await super().offer(buckets, worker_ids)

    transport = Flaky(MANIFEST, tmp_path / "segments")
    broadcaster = Broadcaster(manifest=MANIFEST, transport=transport, offers=make_offers())
    assert _offer_until_noticed(broadcaster) == 1


def _offer_until_noticed(broadcaster: Broadcaster) -> int:
    """Publish version 1 and wait until a worker has the notice; return the number of failed offers."""
    notices: list[int] = []
    loop = LoopThread("broadcast")
    running = broadcaster.run(lambda *call: None, lambda worker_id, offer_id, version, body: notices.append(version))
    loop.begin(running, lambda task: None)

    async def publish() -> None:
        broadcaster.publish(1, await broadcaster.stage())

    loop.run(publish())
    loop.call(lambda: broadcaster.offers.join("w", 0, now_s=0.0))
    loop.call(broadcaster.changed)
    eventually(lambda: notices == [1], "the version was not offered again")
    num_failures = loop.call(broadcaster.statistics).failures
    loop.close()
    broadcaster.close()
    return num_failures


def test_the_wait_at_the_end_of_the_data_does_not_spin(tmp_path: Path) -> None:
    ledger = Ledger()
    stream = PromptStream([Source("all", [Item("1+1=?", "2")])], lambda *_: (1, 2), seed=0, num_epochs=1)
    prompt = stream.take()
    assert prompt is not None
    ledger.admit(prompt, group_size=2, admission_version=0, deadline=1)  # in flight until the drain
    broadcaster = make_broadcaster(tmp_path)
    intake = make_intake(broadcaster.offers, ledger=ledger, stream=stream)
    looks = 0
    take_batch = intake.take_batch

    def counted() -> object:
        nonlocal looks
        looks += 1
        return take_batch()

    intake.take_batch = counted  # type: ignore[method-assign, assignment]
    service = IntakeService(intake, broadcaster, _channel, heartbeat_s=100)
    waiting = threading.Thread(target=service.take_batch)
    waiting.start()
    waiting.join(0.5)
    service.begin_drain()
    waiting.join(60)
    assert not waiting.is_alive()
    assert looks < 10
    service.close()


def test_an_exit_inside_user_code_reaches_the_training_thread(tmp_path: Path) -> None:
    broadcaster = make_broadcaster(tmp_path)
    intake = make_intake(broadcaster.offers)

    def exits(now_s: float, *, late_s: float) -> list[Outgoing]:
        raise SystemExit(3)

    intake.tick = exits  # type: ignore[method-assign]
    service = IntakeService(intake, broadcaster, _channel, heartbeat_s=0.01)
    with pytest.raises(SystemExit):
        service.take_batch()
    service.close()


def test_queued_messages_do_not_block_the_training_thread(tmp_path: Path) -> None:
    broadcaster = make_broadcaster(tmp_path)
    service = IntakeService(make_intake(broadcaster.offers), broadcaster, _channel, heartbeat_s=100)
    num = 5_000

    def num_read() -> int:
        return service.channel.statistics().messages_in

    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.set_hwm(2 * num)
    peer.connect(service.channel.address.endpoint)
    frames = encode(Heartbeat(None, 1, 0, b"", 0, 0, False, Work()))
    for _ in range(num):
        peer.send_multipart(frames)
    eventually(lambda: num_read() > 0, "no message came")
    assert service.call(num_read) < num, "the call came before the last message"
    eventually(lambda: num_read() == num, "messages are missing")
    peer.close(0)
    service.close()


def test_a_hello_that_uses_up_the_data_ends_the_wait(tmp_path: Path) -> None:
    stream = PromptStream([Source("all", [Item("1+1=?", "2")])], lambda *_: (1, 2), seed=0, num_epochs=1)
    assert stream.take() is not None  # the only prompt is gone, and the stream does not know yet
    broadcaster = make_broadcaster(tmp_path)
    service = IntakeService(make_intake(broadcaster.offers, stream=stream), broadcaster, _channel, heartbeat_s=1000)
    waiting = threading.Thread(target=service.take_batch, daemon=True)
    waiting.start()
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.connect(service.channel.address.endpoint)
    peer.send_multipart(encode(Hello("w", "1", 4, 0, None, 1, 0, (), Work())))
    waiting.join(60)
    assert not waiting.is_alive()
    peer.close(0)
    service.close()


def test_no_worker_dies_of_a_pause_of_the_learner(tmp_path: Path, no_blocked_loop: BlockedLoops) -> None:
    """The messages of the workers wait in the socket meanwhile."""
    no_blocked_loop.limit_s = PATIENCE_S
    broadcaster = make_broadcaster(tmp_path)
    intake = make_intake(broadcaster.offers, "wire.heartbeat_s=0.2", "wire.heartbeat_timeout_s=1.5")
    service = IntakeService(intake, broadcaster, _channel, heartbeat_s=0.2)
    hello = Hello("w", "1", 4, 0, None, 1, 0, (), Work())
    service.call(lambda: intake.handle("00", hello, time.monotonic()))
    service.call(lambda: time.sleep(3.0))  # the loop stands still for longer than a worker may be silent
    looks = service.call(lambda: intake.tick(time.monotonic()))
    assert list(service.fleet.alive) == ["w"], looks
    eventually(lambda: not service.call(lambda: list(service.fleet.alive)), "a worker that stays silent is dead")
    service.close()


def test_workers_are_looked_at_each_second_with_rare_heartbeats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A dead worker's samples go elsewhere two heartbeats and a second after the death."""
    ticks: list[float] = []

    def tick(self: Intake, now_s: float, *, late_s: float) -> list[Outgoing]:
        ticks.append(now_s)
        return []

    monkeypatch.setattr(Intake, "tick", tick)
    broadcaster = make_broadcaster(tmp_path)
    intake = make_intake(broadcaster.offers)
    service = IntakeService(intake, broadcaster, _channel, heartbeat_s=8 * PATIENCE_S)
    try:
        eventually(lambda: len(ticks) >= 3, "the timer looks at the workers")
    finally:
        service.close()
    assert ticks == sorted(ticks), "each look has the time of its moment"
