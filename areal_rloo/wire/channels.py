"""The two ends of the wire, for asyncio: `LearnerChannel` (ROUTER) and `WorkerChannel` (DEALER).

A worker pushes trajectories into a bounded outbox; whatever is ready goes out as one message, with others still on
their way, and is kept until its acknowledgement is here. A full outbox makes `push` wait: that is the
backpressure. The learner's sends never block: a peer that is gone or full loses the message, which the protocol mends.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import cast

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from areal_rloo.config import is_loopback
from areal_rloo.errors import DecodeError, PreflightError, WireError, WireVersionError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.wire.codec import decode_learner, decode_worker, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import (
    LearnerMessage,
    Refusal,
    TrajectoryAck,
    TrajectoryBatch,
    WorkerMessage,
)
from areal_rloo.wire.security import CurveKeys

logger = get_logger(__name__)

_HIGH_WATER_MARK = 100_000
_BATCH_TRAJECTORIES = 64  # most that are sent as one message: more gain nothing and delay the first
_BATCH_BYTES = 8 * 2**20  # a message is not made larger than this by a further trajectory
_MESSAGES_IN_FLIGHT = 16  # not acknowledged; what is ready beyond waits, and goes together
_BYTES_PER_TOKEN = 8  # a token id and a logprob


class ChannelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the channel was made. `refused` could not be read; `unroutable` had no peer to go to."""

    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    refused: int
    unroutable: int
    unacknowledged: int
    resent: int


class LearnerChannel:
    """The learner's end: receives from every worker, sends to one by its peer id."""

    def __init__(self, socket: zmq.asyncio.Socket, authenticator: AsyncioAuthenticator | None, limits: Limits) -> None:
        self._socket = socket
        self._authenticator = authenticator
        self._limits = limits
        self._inbox: deque[tuple[str, WorkerMessage]] = deque()
        self._counts = dict.fromkeys(("in", "out", "bytes_in", "bytes_out", "refused", "unroutable"), 0)
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @classmethod
    def bind(cls, host: str, port: int, *, limits: Limits, keys: CurveKeys | None) -> LearnerChannel:
        """Bind a socket; port 0 takes a free one. Call on the event loop that will use it.

        Raises:
            PreflightError: the port is taken, or the address is open to the network without keys.
        """
        if keys is None and not is_loopback(host):
            raise PreflightError(f"wire.host: {host} is not loopback, so it needs CURVE; set wire.curve=true")
        context = zmq.asyncio.Context.instance()
        socket = _socket(context, zmq.ROUTER, limits)
        socket.router_mandatory = 1
        socket.router_handover = 1
        authenticator = None
        if keys is not None:
            authenticator = AsyncioAuthenticator(context)
            authenticator.start()
            authenticator.configure_curve_callback("*", _OnlyThis(keys.peer_public))
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close(0)
            if authenticator is not None:
                authenticator.stop()
            raise PreflightError(f"wire.port: cannot bind {host}:{port}: {error}; choose another, or 0") from error
        return cls(socket, authenticator, limits)

    async def receive(self) -> tuple[str, WorkerMessage]:
        """The next message and its sender. What cannot be read is counted, logged and answered, never raised."""
        while not self._inbox:
            self._take(await self._socket.recv_multipart(copy=False))
            self._take_what_is_there()
        return self._inbox.popleft()

    def send(self, peer: str, message: LearnerMessage) -> bool:
        """Send without waiting; False where the peer is gone or its queue is full."""
        frames = encode(message)
        # Through the asyncio socket although the future is done at once: it re-arms the receiver's edge-triggered poll.
        done = cast(asyncio.Future[object], self._socket.send_multipart([bytes.fromhex(peer), *frames], zmq.NOBLOCK))
        error = done.exception()
        if error is not None:
            self._counts["unroutable"] += 1
            logger.info("%s to %s is lost: %s", type(message).__name__, peer, error)
            return False
        self._counts["out"] += 1
        self._counts["bytes_out"] += sum(map(len, frames))
        return True

    def acknowledge(self, peer: str, batch_ids: Sequence[int]) -> None:
        """Tell a worker that these batches are in the ledger."""
        self.send(peer, TrajectoryAck(tuple(batch_ids)))

    def statistics(self) -> ChannelStatistics:
        return _statistics(self._counts, unacknowledged=0, resent=0)

    def close(self) -> None:
        self._socket.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()

    def _take_what_is_there(self) -> None:
        """Everything that lies ready, up to a bound that leaves the loop time for others."""
        direct: zmq.Socket[zmq.Frame] = zmq.Socket.shadow(self._socket.underlying)
        for _ in range(256):
            try:
                self._take(direct.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        identity, body = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        self._counts["in"] += 1
        self._counts["bytes_in"] += sum(map(len, body))
        peer = identity.hex()
        try:
            self._inbox.append((peer, decode_worker(body, self._limits)))
        except (DecodeError, WireVersionError) as error:
            self._counts["refused"] += 1
            logger.warning("a message from %s is refused: %s", identity[:64], error)
            self.send(peer, Refusal(str(error)[:1000]))


class WorkerChannel:
    """A rollout worker's end. Make it on the event loop that will use it."""

    def __init__(
        self,
        address: str,
        *,
        worker_id: str,
        incarnation: str,
        limits: Limits,
        max_unacked: int,
        keys: CurveKeys | None,
        resend_after_s: float = 10.0,
    ) -> None:
        self._worker_id = worker_id
        self._limits = limits
        self._max_unacked = max_unacked
        self._max_batch_bytes = min(_BATCH_BYTES, limits.max_message_bytes // 2)
        self._resend_after_s = resend_after_s
        self._socket = _socket(zmq.asyncio.Context.instance(), zmq.DEALER, limits)
        self._socket.setsockopt(zmq.IDENTITY, f"{worker_id}#{incarnation}".encode()[:255])
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.curve_serverkey = keys.peer_public
        self._socket.connect(address)
        self._ready: deque[tuple[Trajectory, ...]] = deque()
        self._unacked: OrderedDict[int, tuple[float, tuple[Trajectory, ...]]] = OrderedDict()
        self._num_unacked = 0
        self._next_batch_id = 0
        self._resent = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Condition()
        self._counts = dict.fromkeys(("in", "out", "bytes_in", "bytes_out", "refused", "unroutable"), 0)
        self._sender = asyncio.get_running_loop().create_task(self._send_ready())

    async def send(self, message: WorkerMessage) -> None:
        """Send any message but trajectories; waits while the socket's queue is full.

        Raises:
            Exception: what ended the sending of trajectories; nothing more would leave.
        """
        if self._sender.done() and not self._sender.cancelled():
            self._sender.result()
        frames = encode(message)
        self._counts["out"] += 1
        self._counts["bytes_out"] += sum(map(len, frames))
        await self._socket.send_multipart(frames, copy=False)

    async def push(self, *trajectories: Trajectory) -> None:
        """Give the trajectories of one sample to the sender, which keeps them in one message; waits while `max_unacked`
        trajectories are not acknowledged."""
        if self._num_unacked >= self._max_unacked:
            async with self._room:
                await self._room.wait_for(lambda: self._num_unacked < self._max_unacked)
        self._num_unacked += len(trajectories)
        self._ready.append(trajectories)
        self._wake.set()

    async def receive(self) -> LearnerMessage:
        """The next message; acknowledgements are taken in on the way.

        Raises:
            WireError: the learner speaks another wire version, or what it sent cannot be read.
        """
        while True:
            frames = await self._socket.recv_multipart()
            self._counts["in"] += 1
            self._counts["bytes_in"] += sum(map(len, frames))
            try:
                message = decode_learner(frames, self._limits)
            except WireError:
                self._counts["refused"] += 1
                raise
            if not isinstance(message, TrajectoryAck):
                return message
            await self._acknowledged(message)

    def unacknowledged(self) -> list[SampleId]:
        """Samples that are finished and not known to be in the ledger."""
        sent = [trajectory.sample_id for _, batch in self._unacked.values() for trajectory in batch]
        return sent + [sample[0].sample_id for sample in self._ready]

    async def resend_unacknowledged(self) -> None:
        """Send everything that is not acknowledged again: the connection or the learner is another one."""
        for batch_id in list(self._unacked):
            await self._resend(batch_id)

    def forget(self) -> None:
        """Nobody wants what is not acknowledged."""
        self._ready.clear()
        self._unacked.clear()
        self._num_unacked = 0
        self._wake.set()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until all is acknowledged; False when the timeout came first. `receive` must go on meanwhile."""
        try:
            async with asyncio.timeout(timeout_s), self._room:
                await self._room.wait_for(lambda: self._num_unacked == 0)
        except TimeoutError:
            return False
        return True

    def statistics(self) -> ChannelStatistics:
        return _statistics(self._counts, unacknowledged=self._num_unacked, resent=self._resent)

    async def close(self) -> None:
        """Stop sending; what is queued gets a second to leave."""
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        self._socket.close(1000)

    async def _acknowledged(self, ack: TrajectoryAck) -> None:
        done = [self._unacked.pop(batch_id, None) for batch_id in ack.batch_ids]
        self._wake.set()
        async with self._room:
            self._num_unacked -= sum(len(batch[1]) for batch in done if batch is not None)
            self._room.notify_all()

    async def _send_ready(self) -> None:
        """Send whatever is ready as one message, again and again; resend what waits too long for its ack."""
        while True:
            try:
                async with asyncio.timeout(self._resend_after_s / 2):
                    await self._wake.wait()
            except TimeoutError:
                await self._resend_overdue()
            self._wake.clear()
            while self._ready and len(self._unacked) < _MESSAGES_IN_FLIGHT:
                batch = self._take_ready()
                self._next_batch_id += 1
                self._unacked[self._next_batch_id] = (time.monotonic(), batch)
                await self.send(TrajectoryBatch(self._worker_id, self._next_batch_id, batch))

    def _take_ready(self) -> tuple[Trajectory, ...]:
        """As much of what is ready as goes in one message."""
        batch: list[Trajectory] = []
        num_bytes = 0
        while self._ready and len(batch) < _BATCH_TRAJECTORIES:
            num_bytes += _BYTES_PER_TOKEN * sum(trajectory.num_tokens for trajectory in self._ready[0])
            if batch and num_bytes > self._max_batch_bytes:
                break
            batch += self._ready.popleft()
        return tuple(batch)

    async def _resend_overdue(self) -> None:
        now_s = time.monotonic()
        for batch_id, (sent_s, _) in list(self._unacked.items()):
            if now_s - sent_s > self._resend_after_s:
                await self._resend(batch_id)

    async def _resend(self, batch_id: int) -> None:
        batch = self._unacked.get(batch_id)
        if batch is not None:
            self._unacked[batch_id] = (time.monotonic(), batch[1])
            self._resent += len(batch[1])
            await self.send(TrajectoryBatch(self._worker_id, batch_id, batch[1]))


class _OnlyThis:
    """Credentials provider that admits one client key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """True for the key of this run's workers. The signature is pyzmq's."""
        return key == self._public


def _socket(context: zmq.asyncio.Context, kind: int, limits: Limits) -> zmq.asyncio.Socket:
    socket: zmq.asyncio.Socket = context.socket(kind)
    socket.set_hwm(_HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket


def _statistics(counts: dict[str, int], *, unacknowledged: int, resent: int) -> ChannelStatistics:
    return ChannelStatistics(
        messages_in=counts["in"],
        messages_out=counts["out"],
        bytes_in=counts["bytes_in"],
        bytes_out=counts["bytes_out"],
        refused=counts["refused"],
        unroutable=counts["unroutable"],
        unacknowledged=unacknowledged,
        resent=resent,
    )
