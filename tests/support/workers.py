"""A rollout worker's end of the wire without an engine: the real protocol and channel, driven by a test."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_rloo.rollout.protocol import EngineState, Orders, WorkerProtocol
from areal_rloo.trajectory import Trajectory
from areal_rloo.wire import messages as wire
from areal_rloo.wire.channels import WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Duty
from areal_rloo.wire.security import CurveKeys

LIMITS = Limits()
ENGINE = EngineState(0, 0, wire.Work())


def make_channel(
    port: int, worker_id: str = "w", incarnation: str = "1", *, limits: Limits = LIMITS, keys: CurveKeys | None = None
) -> WorkerChannel:
    return WorkerChannel(
        f"tcp://127.0.0.1:{port}", worker_id=worker_id, incarnation=incarnation, limits=limits, keys=keys
    )


def make_protocol(
    worker_id: str = "w",
    incarnation: str = "1",
    *,
    capacity_samples: int = 8,
    heartbeat_s: float = 0.2,
    max_batch_bytes: int = 2**20,
) -> WorkerProtocol:
    return WorkerProtocol(
        worker_id=worker_id,
        incarnation=incarnation,
        capacity_samples=capacity_samples,
        heartbeat_s=heartbeat_s,
        max_batch_bytes=max_batch_bytes,
    )


@dataclass
class Played:
    """A worker that answers as the test says."""

    channel: WorkerChannel
    protocol: WorkerProtocol

    @classmethod
    def at(cls, port: int, worker_id: str = "w", incarnation: str = "1", *, capacity_samples: int = 8) -> "Played":
        protocol = make_protocol(worker_id, incarnation, capacity_samples=capacity_samples)
        return cls(make_channel(port, worker_id, incarnation), protocol)

    def send_due(self) -> None:
        for message in self.protocol.poll(time.monotonic(), ENGINE):
            self.channel.send(message)

    async def serve(self, on_orders: Callable[[Orders], object], until: Callable[[], bool] = lambda: False) -> None:
        """Serve, with `on_orders` called for every message of the learner, until the condition is true."""
        await self.channel.connected(30)
        while not until():
            self.send_due()
            try:
                async with asyncio.timeout(0.05):
                    message = await self.channel.receive()
            except TimeoutError:
                continue
            on_orders(self.protocol.handle(message, ENGINE))

    def finish(self, duty: Duty, trajectories: Sequence[Trajectory]) -> None:
        self.protocol.finish(duty, trajectories, num_bytes=1000)
