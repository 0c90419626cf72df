"""A rollout worker with the real engine, driven over the wire by a scripted learner: the outcome of every lease."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from support.model_versions import model_of
from support.sglang_support import engine_on_fake

from areal_rloo.config import load_config
from areal_rloo.engines.base import Engine
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.errors import EngineError, WentBackError
from areal_rloo.models.files import load_tokenizer
from areal_rloo.rewards.request import RewardRequest, Scored
from areal_rloo.rollout.episode import Episode, Rewards, Sample, SingleTurn, TurnEngine
from areal_rloo.rollout.worker import RolloutWorker
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Item, SampleId, Trajectory
from areal_rloo.weights.broadcast import Broadcaster
from areal_rloo.weights.manifest import build_manifest, gather
from areal_rloo.weights.receive import Receiver
from areal_rloo.weights.shared_memory import SharedMemorySender
from areal_rloo.wire.channels import LearnerChannel, WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import (
    Abort,
    Drain,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Lease,
    Leases,
    SampleFailed,
    TrajectoryAck,
    TrajectoryBatch,
    WeightsFailed,
    WeightsNotice,
    WeightsReceived,
    Welcome,
    WorkerMessage,
)

pytestmark = pytest.mark.usefixtures("no_blocked_loop")

LIMITS = Limits()
CONFIG = load_config("quickstart.yaml", ["rollout.sampling.max_new_tokens=16", "wire.heartbeat_s=0.1"])


class _Right:
    """Give every completion the reward 1."""

    async def score(self, request: RewardRequest) -> Scored:
        return Scored(reward=1.0, parts={})


class _Learner:
    """The learner's end of the wire, driven by a test."""

    acknowledges = True

    def __init__(self, channel: LearnerChannel) -> None:
        self.channel = channel
        self.peer = ""
        self.finished: list[SampleId] = []
        self.failed: list[SampleFailed] = []
        self.last: Hello | Goodbye | None = None

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.peer, message = await self.channel.receive()
            if isinstance(message, TrajectoryBatch):
                self.finished += [trajectory.sample_id for trajectory in message.trajectories]
                if self.acknowledges:
                    self.channel.send(self.peer, TrajectoryAck((message.batch_id,)))
            elif isinstance(message, SampleFailed):
                self.failed.append(message)
            elif isinstance(message, Hello | Goodbye):
                self.last = message
                return

    def lease(self, *, sequence: int, min_version: int = 0) -> None:
        lease = Lease(7, (0, 1), (5, 6, 7), Item("?", source="arithmetic"), min_version, 3)
        self.channel.send(self.peer, Leases(sequence, (lease,)))


def _play(
    folder: Path,
    episode: Episode,
    scenario: Callable[[_Learner], Awaitable[None]],
    *,
    policy_version: int = 0,
    engine_type: type[EmbeddedEngine] = EmbeddedEngine,
) -> BaseException | None:
    """Run a worker with the embedded engine against the scenario; return the error that ended the worker."""

    async def main() -> BaseException | None:
        engine = engine_type(
            folder,
            device=torch.device("cpu"),
            dtype=torch.float32,
            num_slots=8,
            context_tokens=CONFIG.context_tokens,
            policy_version=policy_version,
        )
        with contextlib.closing(engine):
            return await _work(engine, folder, episode, scenario)

    return asyncio.run(main())


async def _work(
    engine: Engine, folder: Path, episode: Episode, scenario: Callable[[_Learner], Awaitable[None]]
) -> BaseException | None:
    """Run a worker with this engine against the scenario; return the error that ended the worker."""
    learner = _Learner(LearnerChannel.bind("127.0.0.1", 0, limits=LIMITS, keys=None))
    channel = WorkerChannel(
        f"tcp://127.0.0.1:{learner.channel.port}",
        worker_id="w", incarnation="1", limits=LIMITS, max_unacked=64, keys=None,
    )  # fmt: skip
    rewards: Rewards = _Right()
    receiver = Receiver(
        worker_id="w",
        policy_version=lambda: engine.statistics().policy_version,
        load_weights=engine.load_weights,
        device=torch.device("cpu"),
    )
    worker = RolloutWorker(
        CONFIG,
        worker_id="w",
        incarnation="1",
        channel=channel,
        engine=engine,
        receiver=receiver,
        episode=episode,
        rewards=rewards,
        chat=ChatFormat(load_tokenizer(str(folder)), CONFIG.data),
        stop_token_ids=(1,),
    )
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(60):
            await learner.until(lambda: False)  # Hello
            learner.channel.send(learner.peer, Welcome("learner", 0))
            await scenario(learner)
            learner.channel.send(learner.peer, Drain())
            await asyncio.wait([running])
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await channel.close()
        learner.channel.close()
    return None if running.cancelled() else running.exception()


def test_samples_aborted_and_leased_again_at_once_are_generated(tiny_folders: dict[str, Path]) -> None:
    """This happens to a worker that missed heartbeats and returns."""

    async def scenario(learner: _Learner) -> None:
        learner.lease(sequence=1, min_version=99)  # waits for weights that never come
        await asyncio.sleep(0.3)
        learner.channel.send(learner.peer, Abort(((7, 0), (7, 1))))
        learner.lease(sequence=2)
        await learner.until(lambda: len(learner.finished) == 2)
        assert sorted(learner.finished) == [(7, 0), (7, 1)]
        assert learner.failed == []

    assert _play(tiny_folders["qwen2"], SingleTurn(), scenario) is None


class _Odd(SingleTurn):
    """A user's episode that fails for sample 0 and succeeds for sample 1."""

    def __init__(self, wrong: Callable[[Sequence[Trajectory]], Awaitable[Sequence[Trajectory]]]) -> None:
        self._wrong = wrong

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        trajectories = await super().run(sample, engine, rewards, chat)
        return await self._wrong(trajectories) if sample.sample_id[1] == 0 else trajectories


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

        async def scenario(learner: _Learner, words: str = words) -> None:
            learner.lease(sequence=1)
            await learner.until(lambda: len(learner.finished) == len(learner.failed) == 1)
            assert learner.finished == [(7, 1)]
            (failure,) = learner.failed
            assert (failure.sample_index, failure.reason) == (0, "episode_error")
            assert words in failure.detail

        assert _play(tiny_folders["qwen2"], _Odd(wrong), scenario) is None


def test_a_worker_that_cannot_send_ends_with_the_reason(tiny_folders: dict[str, Path]) -> None:
    sending: list[asyncio.Task[object]] = []
    broke = asyncio.Event()

    class Broken(SingleTurn):
        async def run(
            self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat
        ) -> Sequence[Trajectory]:
            sending.extend(one for one in asyncio.all_tasks() if "_send_ready" in str(one.get_coro()))
            sending[0].get_coro().cr_frame.f_locals["self"]._ready.append(("not", "a sample"))  # type: ignore[union-attr]
            broke.set()
            return await super().run(sample, engine, rewards, chat)

    async def scenario(learner: _Learner) -> None:
        learner.lease(sequence=1)
        await broke.wait()
        await asyncio.wait(sending)

    error = _play(tiny_folders["qwen2"], Broken(), scenario)
    assert isinstance(error, AttributeError)


def test_a_learner_with_an_older_version_ends_the_worker(
    tiny_folders: dict[str, Path],
) -> None:
    """Tokens of our version 57 would count as fresh under the new learner's version 57, which has other weights."""

    async def scenario(learner: _Learner) -> None:
        learner.channel.send(learner.peer, Welcome("the same, from a checkpoint", 50))
        await learner.until(lambda: False)  # Goodbye

    error = _play(tiny_folders["qwen2"], SingleTurn(), scenario, policy_version=57)
    assert isinstance(error, WentBackError)
    assert "went back to version 50" in str(error)


def test_a_reconnect_of_the_learner_changes_nothing(tiny_folders: dict[str, Path]) -> None:
    async def scenario(learner: _Learner) -> None:
        learner.channel.send(learner.peer, Welcome("learner", 0))
        learner.channel.send(learner.peer, Welcome("another, further on", 60))
        learner.lease(sequence=1)
        await learner.until(lambda: len(learner.finished) == 2)

    assert _play(tiny_folders["qwen2"], SingleTurn(), scenario, policy_version=57) is None


def test_a_learner_with_an_older_version_gets_no_hello(
    tiny_folders: dict[str, Path],
) -> None:
    """The new learner receives heartbeats addressed to the previous learner, and answers each."""

    async def scenario(learner: _Learner) -> None:
        for _ in range(3):
            learner.channel.send(learner.peer, HeartbeatReply("the same, from a checkpoint", 50, -1))
        await learner.until(lambda: False)
        assert isinstance(learner.last, Goodbye)

    error = _play(tiny_folders["qwen2"], SingleTurn(), scenario, policy_version=57)
    assert isinstance(error, WentBackError)


def test_another_learner_gets_one_hello_and_no_old_samples(
    tiny_folders: dict[str, Path],
) -> None:
    """Group 7 of the new learner may have another prompt. A second Hello would lose the leases in flight."""

    async def scenario(learner: _Learner) -> None:
        learner.acknowledges = False
        learner.lease(sequence=1)
        await learner.until(lambda: len(learner.finished) == 2)
        for _ in range(3):
            learner.channel.send(learner.peer, HeartbeatReply("another", 60, -1))
        await learner.until(lambda: False)
        assert isinstance(learner.last, Hello)
        assert learner.last.held == ()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(learner.until(lambda: False), 1)
            raise AssertionError("a second Hello")
        learner.channel.send(learner.peer, Welcome("another", 60))
        learner.acknowledges = True
        learner.lease(sequence=1)
        await learner.until(lambda: len(learner.finished) == 4)

    assert _play(tiny_folders["qwen2"], SingleTurn(), scenario, policy_version=57) is None


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


async def _until_version(learner: _Learner, broadcaster: Broadcaster, version: int) -> list[WorkerMessage]:
    """Carry messages between the worker and the broadcaster as the intake does; return those about weights."""
    told: list[WorkerMessage] = []
    while broadcaster.statistics().versions != {"w": version}:
        _, message = await learner.channel.receive()
        match message:
            case Hello():
                broadcaster.join("w", message.policy_version)
            case Heartbeat():
                broadcaster.heard("w", message.policy_version)
                continue
            case WeightsReceived():
                broadcaster.acknowledge("w", message.policy_version, message.checksum)
            case WeightsFailed():
                broadcaster.fail("w", message.policy_version, message.detail)
        told.append(message)
    return told


@pytest.mark.parametrize(("engine_type", "tells"), [(_FirstVersionLost, Hello), (_FirstVersionFails, WeightsFailed)])
def test_a_lost_first_version_is_reported_and_offered_again(
    tiny_folders: dict[str, Path], tmp_path: Path, engine_type: type[EmbeddedEngine], tells: type[WorkerMessage]
) -> None:
    async def scenario(learner: _Learner) -> None:
        weights = list(model_of(tiny_folders["qwen2"], factor=1.5).named_parameters())
        manifest = build_manifest(weights, bucket_bytes=100_000)
        transport = SharedMemorySender(manifest, tmp_path / "segments")
        broadcaster = Broadcaster(manifest=manifest, transport=transport, timeout_s=1.0)

        def send_notice(worker_id: str, version: int, body: bytes) -> None:
            learner.channel.send(learner.peer, WeightsNotice(version, body))

        broadcasting = asyncio.create_task(broadcaster.run(send_notice))
        buckets = await broadcaster.stage()
        with torch.no_grad():
            gather(manifest, weights, buckets)
        broadcaster.publish(1, buckets)
        broadcaster.join("w", 0)
        lost, received = await _until_version(learner, broadcaster, 1)
        assert isinstance(lost, tells), "the worker tells of the loss itself, before any timeout of the broadcast"
        assert isinstance(received, WeightsReceived)
        broadcasting.cancel()
        await asyncio.gather(broadcasting, return_exceptions=True)
        broadcaster.close()

    assert _play(tiny_folders["qwen2"], SingleTurn(), scenario, engine_type=engine_type) is None


def test_a_server_that_fails_for_good_ends_the_worker(tiny_folders: dict[str, Path]) -> None:
    folder = tiny_folders["qwen2"]

    async def main() -> BaseException | None:
        async with engine_on_fake(folder) as (engine, server):
            server.reads.set()
            await asyncio.wrap_future(engine.load_weights(0, model_of(folder).named_parameters()))
            server.asked.clear()

            async def scenario(learner: _Learner) -> None:
                learner.lease(sequence=1)
                await server.asked.wait()
                server.refuses_the_key = True
                await learner.until(lambda: False)
                assert isinstance(learner.last, Goodbye)

            return await _work(engine, folder, SingleTurn(), scenario)

    error = asyncio.run(main())
    assert isinstance(error, EngineError)
    assert "the engine stopped: rollout.sglang.api_key_env" in str(error)
