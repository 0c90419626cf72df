"""A rollout worker's end of the wire without an engine: the real protocol and channel, driven by a test."""

import asyncio
import atexit
import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from areal_rloo.rollout.protocol import EngineState, Orders, WorkerProtocol
from areal_rloo.trajectory import Trajectory
from areal_rloo.wire import messages as wire
from areal_rloo.wire.address import Address, SocketFile, TcpAddress
from areal_rloo.wire.channels import LearnerChannel, WorkerChannel
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import Duty
from areal_rloo.wire.security import CurveKeys, load_keys, make_keys

LIMITS = Limits()
ENGINE = EngineState(0, 0, wire.Work())


def fresh_address() -> SocketFile:
    """Return an address in a private folder, which is removed at the end of this process.

    The folder is in pytest's folder of the session, so pytest removes what a killed process leaves.
    """
    folder = Path(tempfile.mkdtemp(prefix="wire-", dir=os.environ.get("AREAL_RLOO_TEST_SOCKETS")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return SocketFile.inside(folder)


def make_channel(
    address: Address, worker_id: str = "w", incarnation: str = "1", *, limits: Limits = LIMITS
) -> WorkerChannel:
    return WorkerChannel(address, worker_id=worker_id, incarnation=incarnation, limits=limits)


@dataclass(frozen=True)
class Ends:
    """The address for the learner to bind, and the keys of the workers if the address is TCP."""

    address: Address
    worker_keys: CurveKeys | None = None

    def of_worker(self, bound: Address) -> Address:
        """Return the address that the learner has bound, with the keys of a worker."""
        if isinstance(bound, SocketFile):
            return bound
        assert self.worker_keys is not None, "TCP has keys"
        return dataclasses.replace(bound, keys=self.worker_keys)

    def run(self, scenario: Callable[[LearnerChannel, Address], Awaitable[None]], *, limits: Limits = LIMITS) -> None:
        """Run a scenario with a learner, and the address for workers."""

        async def main() -> None:
            learner = LearnerChannel.bind(self.address, limits=limits)
            try:
                async with asyncio.timeout(30):
                    await scenario(learner, self.of_worker(learner.address))
            finally:
                learner.close()

        asyncio.run(main())


async def connected_channel(address: Address, *, incarnation: str = "1", limits: Limits = LIMITS) -> WorkerChannel:
    channel = make_channel(address, incarnation=incarnation, limits=limits)
    assert await channel.connected(30), "the learner does not answer"
    return channel


def make_ends(kind: Literal["ipc", "tcp", "tcp6"], folder: Path) -> Ends:
    """Make a socket file, or a TCP address and keys in this folder."""
    if kind == "ipc":
        return Ends(fresh_address())
    make_keys(folder / "keys")
    host = "::1" if kind == "tcp6" else "127.0.0.1"
    return Ends(
        TcpAddress(host, 0, load_keys(folder / "keys", end="learner")), load_keys(folder / "keys", end="worker")
    )


def make_protocol(
    worker_id: str = "w",
    incarnation: str = "1",
    *,
    capacity_samples: int = 8,
    heartbeat_s: float = 0.2,
    heartbeat_timeout_s: float = 2.0,
    max_batch_bytes: int = 2**20,
) -> WorkerProtocol:
    return WorkerProtocol(
        worker_id=worker_id,
        incarnation=incarnation,
        capacity_samples=capacity_samples,
        heartbeat_s=heartbeat_s,
        heartbeat_timeout_s=heartbeat_timeout_s,
        max_batch_bytes=max_batch_bytes,
    )


@dataclass
class Played:
    """A worker that answers as the test says."""

    channel: WorkerChannel
    protocol: WorkerProtocol

    @classmethod
    def at(
        cls, address: Address, worker_id: str = "w", incarnation: str = "1", *, capacity_samples: int = 8
    ) -> "Played":
        protocol = make_protocol(worker_id, incarnation, capacity_samples=capacity_samples)
        return cls(make_channel(address, worker_id, incarnation), protocol)

    def send_due(self) -> None:
        if self.protocol.is_deaf():
            self.channel.connect_anew()
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
