"""A rollout worker with a real engine against a learner driven by a test, over a real wire."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from support.workers import fresh_address, make_channel

from areal_rloo.config import Config, load_config
from areal_rloo.engines.base import Engine
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.models.files import load_tokenizer
from areal_rloo.rewards.request import RewardRequest, Scored
from areal_rloo.rollout.episode import Episode, Rewards
from areal_rloo.rollout.worker import RolloutWorker
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Item, SampleId
from areal_rloo.weights.receive import Receiver
from areal_rloo.wire.channels import LearnerChannel, WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import (
    Ack,
    Drain,
    Duty,
    Failed,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    History,
    LearnerMessage,
    Lease,
    Leases,
    Results,
    Welcome,
)

LIMITS = Limits()
CONFIG = load_config("quickstart.yaml", ["rollout.sampling.max_new_tokens=16", "wire.heartbeat_s=0.1"])


class _Right:
    """Give every completion the reward 1."""

    async def score(self, request: RewardRequest) -> Scored:
        return Scored(reward=1.0, parts={})


class DrivenLearner:
    """The learner's end of the wire, driven by a test."""

    acknowledges = True
    learner_id = "learner"
    history: History = (("learner", 0),)

    def __init__(self, channel: LearnerChannel) -> None:
        self.channel = channel
        self.peer = ""
        self.finished: list[SampleId] = []
        self.failed: list[Failed] = []
        self.last: Hello | Goodbye | None = None
        self.beat: Heartbeat | None = None

    def send(self, message: LearnerMessage) -> None:
        assert self.channel.send(self.peer, message)

    async def until(self, done: Callable[[], bool]) -> None:
        """Take messages until the condition is true, or until a Hello or Goodbye comes."""
        while not done():
            self.peer, message = await self.channel.receive()
            if isinstance(message, Results):
                self.finished += [each.trajectories[0].sample_id for each in message.finished]
                self.failed += message.failed
                if self.acknowledges:
                    self.send(Ack(message.number))
            elif isinstance(message, Heartbeat):
                self.beat = message
            elif isinstance(message, Hello | Goodbye):
                self.last = message
                return

    async def meet(self) -> None:
        await self.until(lambda: False)
        assert isinstance(self.last, Hello)
        self.send(Welcome(self.learner_id, self.last.number, self.history))

    def lease(self, lease_id: int, min_version: int = 0) -> list[Duty]:
        lease = Lease(lease_id, 7, (0, 1), (5, 6, 7), Item("?", source="arithmetic"), min_version, 3)
        self.send(Leases(self.learner_id, (lease,)))
        return lease.duties

    async def restart(self, *history: tuple[str, int]) -> None:
        """Answer a heartbeat as another learner, with this history, and meet the worker."""
        self.history, (self.learner_id, _) = history, history[-1]
        await self.until(lambda: self.beat is not None)
        assert self.beat is not None
        self.send(HeartbeatReply(self.learner_id, self.beat.number, 0, True))
        await self.meet()


def play(
    folder: Path,
    episode: Episode,
    scenario: Callable[[DrivenLearner], Awaitable[None]],
    *,
    config: Config = CONFIG,
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
            context_tokens=config.context_tokens,
            policy_version=policy_version,
        )
        with contextlib.closing(engine):
            return await work(engine, folder, episode, scenario, config)

    return asyncio.run(main())


def make_worker(
    config: Config,
    engine: Engine,
    channel: WorkerChannel,
    episode: Episode,
    rewards: Rewards,
    chat: ChatFormat,
    stop_token_ids: tuple[int, ...],
) -> RolloutWorker:
    """Make the worker "w", which takes weights on the CPU. Call on an event loop."""
    receiver = Receiver(
        worker_id="w",
        policy_version=lambda: engine.statistics().policy_version,
        load_weights=engine.load_weights,
        device=torch.device("cpu"),
    )
    return RolloutWorker(
        config,
        worker_id="w",
        incarnation="1",
        channel=channel,
        engine=engine,
        receiver=receiver,
        episode=episode,
        rewards=rewards,
        chat=chat,
        stop_token_ids=stop_token_ids,
    )


async def work(
    engine: Engine,
    folder: Path,
    episode: Episode,
    scenario: Callable[[DrivenLearner], Awaitable[None]],
    config: Config = CONFIG,
) -> BaseException | None:
    """Run a worker with this engine against the scenario; return the error that ended the worker."""
    learner = DrivenLearner(LearnerChannel.bind(fresh_address(), limits=LIMITS))
    channel = make_channel(learner.channel.address, limits=LIMITS)
    rewards: Rewards = _Right()
    chat = ChatFormat(load_tokenizer(str(folder)), config.data)
    worker = make_worker(config, engine, channel, episode, rewards, chat, (1,))
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(60):
            await learner.meet()
            await scenario(learner)
            learner.channel.send(learner.peer, Drain())
            await asyncio.wait([running])
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        channel.close()
        learner.channel.close()
    return None if running.cancelled() else running.exception()
