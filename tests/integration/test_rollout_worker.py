"""A rollout worker with the real engine, driven over the wire by a scripted learner: the outcome of every lease."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from support.driven_learner import DrivenLearner, play, work
from support.intakes import make_offers
from support.model_versions import model_of
from support.told_server import engine_on_fake

from areal_rloo.config import load_config
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.errors import EngineError, WentBackError
from areal_rloo.rollout.episode import Rewards, Sample, SingleTurn, TurnEngine
from areal_rloo.rollout.worker import RolloutWorker
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Item, Trajectory
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.manifest import build_manifest, gather
from areal_rloo.weights.shared_memory import SharedMemorySender
from areal_rloo.wire.messages import (
    Abort,
    Goodbye,
    Hello,
    Lease,
    Leases,
    WeightsFailed,
    WeightsNotice,
    WeightsReceived,
    WorkerMessage,
)

pytestmark = pytest.mark.usefixtures("no_blocked_loop")


def test_samples_aborted_and_leased_again_at_once_are_generated(tiny_folders: dict[str, Path]) -> None:
    """This happens to a worker that missed heartbeats and returns."""

    async def scenario(learner: DrivenLearner) -> None:
        duties = learner.lease(1, min_version=99)  # waits for weights that never come
        await asyncio.sleep(0.3)
        learner.send(Abort("learner", tuple(duties)))
        learner.lease(2)
        await learner.until(lambda: len(learner.finished) == 2)
        assert sorted(learner.finished) == [(7, 0), (7, 1)]
        assert learner.failed == []

    assert play(tiny_folders["qwen2"], SingleTurn(), scenario) is None


def test_heartbeats_tell_the_time_with_work_and_in_decoding(tiny_folders: dict[str, Path]) -> None:
    async def scenario(learner: DrivenLearner) -> None:
        learner.lease(1)
        await learner.until(lambda: learner.beat is not None and learner.beat.work.generated_tokens > 0)
        assert learner.beat is not None
        told = learner.beat.work
        assert 0 < told.busy_s < told.decoding_s <= 2 * told.busy_s, "of two samples"

    assert play(tiny_folders["qwen2"], SingleTurn(), scenario) is None


class _Odd(SingleTurn):
    """A user's episode that fails for sample 0 and succeeds for sample 1."""

    def __init__(self, wrong: Callable[[Sequence[Trajectory]], Awaitable[Sequence[Trajectory]]]) -> None:
        self._wrong = wrong

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        trajectories = await super().run(sample, engine, rewards, chat)
        return await self._wrong(trajectories) if sample.sample_id[1] == 0 else trajectories


class _OneAtATime(SingleTurn):
    """Each episode takes half a second, and the others wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        async with self._lock:
            await asyncio.sleep(0.5)
            return await super().run(sample, engine, rewards, chat)


def test_a_long_evaluation_does_not_run_out_of_time(tiny_folders: dict[str, Path]) -> None:
    """All its samples together take twice `rollout.episode.timeout_s`."""
    options = ["rollout.sampling.max_new_tokens=16", "wire.heartbeat_s=0.1", "rollout.episode.timeout_s=4"]

    async def scenario(learner: DrivenLearner) -> None:
        lease = Lease(1, -1, tuple(range(16)), (5, 6, 7), Item("?", source="arithmetic"), 0, 3)
        learner.send(Leases("learner", (lease,)))
        await learner.until(lambda: len(learner.finished) + len(learner.failed) == 16)
        assert learner.failed == []

    config = load_config("quickstart.yaml", options)
    assert play(tiny_folders["qwen2"], _OneAtATime(), scenario, config=config) is None


def _running_worker() -> RolloutWorker:
    (sending,) = (task for task in asyncio.all_tasks() if "_send_due" in str(task.get_coro()))
    worker: RolloutWorker = sending.get_coro().cr_frame.f_locals["self"]  # type: ignore[union-attr]
    return worker


def test_a_stopped_worker_sends_the_results_that_wait(tiny_folders: dict[str, Path]) -> None:
    async def scenario(learner: DrivenLearner) -> None:
        learner.acknowledges = False
        learner.lease(1)
        await learner.until(lambda: len(learner.finished) == 1)
        worker = _running_worker()
        while worker.statistics().unacknowledged < 2:  # noqa: ASYNC110 - the second sample has no event
            await asyncio.sleep(0.01)
        worker.stop()
        await learner.until(lambda: False)
        assert isinstance(learner.last, Goodbye)
        assert sorted(learner.finished) == [(7, 0), (7, 1)]

    assert play(tiny_folders["qwen2"], _OneAtATime(), scenario) is None


async def _cancelled(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    inner = asyncio.ensure_future(asyncio.sleep(100))
    inner.cancel()
    await inner
    return trajectories


async def _exited(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    sys.exit(0)


async def _crashed(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    raise KeyError("no such thing: \ud83d")


async def _unsendable(trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
    trajectories[0].reward_parts["mine"] = np.datetime64("now")  # type: ignore[assignment]
    return trajectories


def test_a_failing_episode_drops_only_its_sample(tiny_folders: dict[str, Path]) -> None:
    words_of = {_cancelled: "cancelled itself", _crashed: "no such thing", _exited: "Exit", _unsendable: "can be sent"}
    for wrong, words in words_of.items():

        async def scenario(learner: DrivenLearner, words: str = words) -> None:
            learner.lease(1)
            await learner.until(lambda: len(learner.finished) == len(learner.failed) == 1)
            assert learner.finished == [(7, 1)]
            (failure,) = learner.failed
            assert (failure.sample_index, failure.reason) == (0, "episode_error")
            assert words in failure.detail
            assert failure.num_tokens > 0

        assert play(tiny_folders["qwen2"], _Odd(wrong), scenario) is None


class _Hanging(SingleTurn):
    """Sample 0 hangs after its completion; sample 1 ends."""

    num_tokens = 0

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        trajectories = await super().run(sample, engine, rewards, chat)
        if sample.sample_id[1] == 0:
            self.num_tokens = len(trajectories[0].completion.tokens)
            await asyncio.sleep(1000)
        return trajectories


def test_a_timeout_tells_the_tokens_that_are_lost(tiny_folders: dict[str, Path]) -> None:
    config, hanging = load_config("quickstart.yaml", ["rollout.episode.timeout_s=2"]), _Hanging()

    async def scenario(learner: DrivenLearner) -> None:
        learner.lease(1)
        await learner.until(lambda: len(learner.finished) == len(learner.failed) == 1)
        (failure,) = learner.failed
        assert (failure.reason, failure.num_tokens) == ("episode_timeout", hanging.num_tokens)
        assert hanging.num_tokens > 0

    assert play(tiny_folders["qwen2"], hanging, scenario, config=config) is None


def test_a_protocol_that_breaks_ends_the_worker_with_the_reason(tiny_folders: dict[str, Path]) -> None:
    """A task that serves others must not die unnoticed."""
    broke = asyncio.Event()

    class Broken(SingleTurn):
        async def run(
            self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat
        ) -> Sequence[Trajectory]:
            _running_worker()._protocol._ready.append(("not", "a", "sample"))  # type: ignore[arg-type]
            broke.set()
            return await super().run(sample, engine, rewards, chat)

    async def scenario(learner: DrivenLearner) -> None:
        learner.lease(1)
        await broke.wait()
        await learner.until(lambda: False)
        assert isinstance(learner.last, Goodbye)

    assert isinstance(play(tiny_folders["qwen2"], Broken(), scenario), TypeError)


def test_a_learner_of_another_history_ends_the_worker(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    """Tokens of our version 1 would count as fresh under the new learner's version 1, which has other weights."""

    async def scenario(learner: DrivenLearner) -> None:
        await _give_version_1(learner, tiny_folders["qwen2"], tmp_path)
        await learner.restart(("another-from-the-beginning", 0))
        await learner.until(lambda: False)
        assert isinstance(learner.last, Goodbye)
        assert not learner.last.failed, "three such workers would use up the attempts of the samples that they get"

    error = play(tiny_folders["qwen2"], SingleTurn(), scenario)
    assert isinstance(error, WentBackError)
    assert "the two histories have diverged" in str(error)


def test_another_learner_gets_a_hello_and_no_old_samples(tiny_folders: dict[str, Path]) -> None:
    """Group 7 of the new learner may have another prompt."""

    async def scenario(learner: DrivenLearner) -> None:
        learner.acknowledges = False
        learner.lease(1)
        await learner.until(lambda: bool(learner.finished))  # the other sample's result waits, perhaps
        learner.acknowledges = True
        learner.finished.clear()
        await learner.restart(("learner", 0), ("another", 57))
        assert isinstance(learner.last, Hello)
        assert (learner.last.learner_id, learner.last.duties) == (None, ())
        learner.lease(1)
        await learner.until(lambda: len(learner.finished) >= 2)
        assert sorted(learner.finished) == [(7, 0), (7, 1)]

    assert play(tiny_folders["qwen2"], SingleTurn(), scenario, policy_version=57) is None


class _FirstVersionLost(EmbeddedEngine):
    """Restarts right after the first version has arrived, as a server may: the version is gone."""

    first: Callable[[Future[int], int], None] = staticmethod(lambda future, version: future.set_result(version))
    num_loads = 0

    def load_weights(self, policy_version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Future[int]:
        self.num_loads += 1
        if self.num_loads > 1:
            return super().load_weights(policy_version, weights)
        future: Future[int] = Future()
        self.first(future, policy_version)
        return future


class _FirstVersionFails(_FirstVersionLost):
    """Cannot take the first version."""

    first = staticmethod(lambda future, version: future.set_exception(EngineError("no room")))


async def _until_version(learner: DrivenLearner, broadcaster: Broadcaster, version: int) -> list[WorkerMessage]:
    """Carry messages between the worker and the offers as the intake does; return the answers to offers."""
    offers, told = broadcaster.offers, []
    while broadcaster.statistics().versions != {"w": version}:
        _, message = await learner.channel.receive()
        now_s = time.monotonic()
        match message:
            case WeightsReceived():
                offers.received("w", message.offer_id, message.checksum, number=message.number, now_s=now_s)
                told.append(message)
            case WeightsFailed():
                offers.failed("w", message.offer_id, message.detail, number=message.number, now_s=now_s)
                told.append(message)
        broadcaster.changed()
    return told


async def _give_version_1(learner: DrivenLearner, folder: Path, scratch: Path) -> list[WorkerMessage]:
    """Broadcast a version; return the worker's answers to the offers."""
    weights = list(model_of(folder, factor=1.5).named_parameters())
    manifest = build_manifest(weights, bucket_bytes=100_000)
    transport = SharedMemorySender(manifest, scratch / "segments")
    broadcaster = Broadcaster(manifest=manifest, transport=transport, offers=make_offers())

    def send_notice(worker_id: str, offer_id: int, version: int, body: bytes) -> None:
        learner.send(WeightsNotice("learner", offer_id, version, body))

    broadcasting = asyncio.create_task(broadcaster.run(lambda *call: None, send_notice))
    buckets = await broadcaster.stage()
    with torch.no_grad():
        gather(manifest, weights, buckets)
    broadcaster.offers.join("w", 0, now_s=0.0)
    broadcaster.publish(1, buckets)
    told = await _until_version(learner, broadcaster, 1)
    broadcasting.cancel()
    await asyncio.gather(broadcasting, return_exceptions=True)
    broadcaster.close()
    return told


@pytest.mark.parametrize("engine_type", [_FirstVersionLost, _FirstVersionFails])
def test_a_lost_first_version_is_reported_and_offered_again(
    tiny_folders: dict[str, Path], tmp_path: Path, engine_type: type[EmbeddedEngine]
) -> None:
    async def scenario(learner: DrivenLearner) -> None:
        lost, received = await _give_version_1(learner, tiny_folders["qwen2"], tmp_path)
        assert isinstance(lost, WeightsFailed), "the worker tells of the loss itself, before any timeout of the offer"
        assert isinstance(received, WeightsReceived)

    assert play(tiny_folders["qwen2"], SingleTurn(), scenario, engine_type=engine_type) is None


def test_a_server_that_fails_for_good_ends_the_worker(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folders["qwen2"]

    def ended() -> str | None:
        raise EngineError("gave up after 3 restarts")

    async def main() -> BaseException | None:
        async with engine_on_fake(folder) as (engine, server):
            server.reads.set()
            await asyncio.wrap_future(engine.load_weights(0, model_of(folder).named_parameters()))
            server.asked.clear()

            async def scenario(learner: DrivenLearner) -> None:
                learner.lease(1)
                await server.asked.wait()
                monkeypatch.setattr(engine._server, "ended", ended)
                await learner.until(lambda: False)
                assert isinstance(learner.last, Goodbye)

            return await work(engine, folder, SingleTurn(), scenario)

    error = asyncio.run(main())
    assert isinstance(error, EngineError)
    assert "the engine stopped: gave up after 3 restarts" in str(error)
