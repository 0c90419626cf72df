"""The two ends of the wire, for asyncio: `LearnerChannel` (ROUTER) and `WorkerChannel` (DEALER).

A worker pushes trajectories into a bounded outbox. All ready trajectories leave as a single message, several
messages may be in flight, and each is kept until the learner acknowledges it. A full outbox makes `push` wait: this is
the backpressure. The learner's sends never block: a peer that is gone or full loses the message, and the protocol
recovers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated, ClassVar, cast

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from areal_rloo.config import is_loopback
from areal_rloo.errors import DecodeError, PreflightError, WireError, WireVersionError
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import Metric
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.waiting import cancel
from areal_rloo.wire.codec import decode_learner, decode_worker, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.messages import LearnerMessage, Refusal, TrajectoryAck, TrajectoryBatch, WorkerMessage
from areal_rloo.wire.security import CurveKeys

logger = get_logger(__name__)

_HIGH_WATER_MARK = 100_000
_BATCH_TRAJECTORIES = 64  # per message: more gain nothing and delay the first
_BATCH_BYTES = 8 * 2**20  # soft limit of a message
_MESSAGES_IN_FLIGHT = 16  # not acknowledged; further trajectories wait and leave together
_BYTES_PER_TOKEN = 8  # a token id and a logprob


class ChannelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the channel was made."""

    metrics_prefix: ClassVar[str] = "wire_"

    messages_in: Annotated[int, Metric("Messages received", kind="counter")] = 0
    messages_out: Annotated[int, Metric("Messages sent", kind="counter")] = 0
    bytes_in: Annotated[int, Metric("Bytes received", "bytes", "counter")] = 0
    bytes_out: Annotated[int, Metric("Bytes sent", "bytes", "counter")] = 0
    refused: Annotated[int, Metric("Messages that were unreadable or not allowed", kind="counter", healthy=(0, 0))] = 0
    unroutable: Annotated[int, Metric("Messages whose peer was gone", kind="counter")] = 0
    unacknowledged: Annotated[int, Metric("Trajectories sent and not acknowledged yet")] = 0
    resent: Annotated[int, Metric("Batches of trajectories sent again because no ack came", kind="counter")] = 0


class LearnerChannel:
    """The learner's end: receives from every worker, and sends to a worker by peer id."""

    def __init__(self, socket: zmq.asyncio.Socket, authenticator: AsyncioAuthenticator | None, limits: Limits) -> None:
        self._socket = socket
        self._authenticator = authenticator
        self._limits = limits
        self._inbox: deque[tuple[str, WorkerMessage]] = deque()
        self._counts: Counter[str] = Counter()
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    @classmethod
    def bind(cls, host: str, port: int, *, limits: Limits, keys: CurveKeys | None) -> LearnerChannel:
        """Bind a socket; port 0 takes a free port. Call this on the event loop of the channel.

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
            only = keys.peer_public  # the key of this run's workers
            authenticator.configure_curve_callback("*", SimpleNamespace(callback=lambda domain, key: key == only))
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
        """Return the next message and the sender. Unreadable messages are counted, logged and answered."""
        if not self._inbox:
            await asyncio.sleep(0)  # reading a queued message does not suspend; let other tasks run
        while not self._inbox:
            self._take(await self._socket.recv_multipart(copy=False))
            self._take_what_is_there()
        return self._inbox.popleft()

    def send(self, peer: str, message: LearnerMessage) -> bool:
        """Send without waiting; returns False if the peer is gone or the queue is full."""
        frames = encode(message)
        # Use the asyncio socket, although the future is done at once: the send re-arms the edge-triggered poll.
        done = cast(asyncio.Future[object], self._socket.send_multipart([bytes.fromhex(peer), *frames], zmq.NOBLOCK))
        if (error := done.exception()) is not None:
            self._counts["unroutable"] += 1
            logger.info("%s to %s is lost: %s", type(message).__name__, peer, error)
            return False
        self._counts["messages_out"] += 1
        self._counts["bytes_out"] += sum(map(len, frames))
        return True

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(**self._counts)

    def close(self) -> None:
        self._socket.close(0)
        if self._authenticator is not None:
            self._authenticator.stop()

    def _take_what_is_there(self) -> None:
        """Read all queued messages, up to a bound that leaves time for other tasks."""
        direct: zmq.Socket[zmq.Frame] = zmq.Socket.shadow(self._socket.underlying)
        for _ in range(256):
            try:
                self._take(direct.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                return

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        identity, body = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        self._counts["messages_in"] += 1
        self._counts["bytes_in"] += sum(map(len, body))
        peer = identity.hex()
        try:
            self._inbox.append((peer, decode_worker(body, self._limits)))
        except (DecodeError, WireVersionError) as error:
            self._counts["refused"] += 1
            logger.warning("a message from %s is refused: %s", identity[:64], error)
            self.send(peer, Refusal(str(error)[:1000]))


class WorkerChannel:
    """A rollout worker's end. Create the channel on the event loop that uses it."""

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
        self._unacked: dict[int, tuple[float, tuple[Trajectory, ...]]] = {}  # by batch id, with the time of sending
        self._num_unacked = 0  # trajectories in `_ready` and `_unacked`
        self._last_batch_id = 0
        self._wake = asyncio.Event()  # for the sender
        self._room = asyncio.Event()  # for `push`
        self._counts: Counter[str] = Counter()
        self._sender = asyncio.get_running_loop().create_task(self._send_ready())

    async def send(self, message: WorkerMessage) -> None:
        """Send any message but trajectories; waits while the socket's queue is full.

        Raises:
            Exception: the error that ended the sender of trajectories; no trajectory would leave any more.
        """
        if self._sender.done() and not self._sender.cancelled():
            self._sender.result()
        frames = encode(message)
        self._counts["messages_out"] += 1
        self._counts["bytes_out"] += sum(map(len, frames))
        await self._socket.send_multipart(frames, copy=False)

    async def push(self, *trajectories: Trajectory) -> None:
        """Queue the trajectories of a sample; they travel in the same message. Waits while `max_unacked` trajectories
        are not acknowledged."""
        while self._num_unacked >= self._max_unacked:
            self._room.clear()
            await self._room.wait()
        self._num_unacked += len(trajectories)
        self._ready.append(trajectories)
        self._wake.set()

    async def receive(self) -> LearnerMessage:
        """Return the next message; acknowledgements are applied here.

        Raises:
            WireError: the learner speaks another wire version, or a message is unreadable.
        """
        while True:
            frames = await self._socket.recv_multipart()
            self._counts["messages_in"] += 1
            self._counts["bytes_in"] += sum(map(len, frames))
            try:
                message = decode_learner(frames, self._limits)
            except WireError:
                self._counts["refused"] += 1
                raise
            if not isinstance(message, TrajectoryAck):
                return message
            for batch_id in message.batch_ids:
                _, batch = self._unacked.pop(batch_id, (0.0, ()))
                self._num_unacked -= len(batch)
            self._wake.set()
            self._room.set()

    def unacknowledged(self) -> list[SampleId]:
        """List the finished samples that the learner has not acknowledged."""
        sent = [trajectory.sample_id for _, batch in self._unacked.values() for trajectory in batch]
        return sent + [sample[0].sample_id for sample in self._ready]

    async def resend_unacknowledged(self, after_s: float = 0.0) -> None:
        """Send again all trajectories unacknowledged for `after_s`; for example after a restart of the learner."""
        for batch_id, (sent_s, batch) in list(self._unacked.items()):
            if time.monotonic() - sent_s >= after_s and batch_id in self._unacked:
                self._counts["resent"] += len(batch)
                await self._send_batch(batch_id, batch)

    def forget(self) -> None:
        """Discard all unacknowledged trajectories."""
        self._ready.clear()
        self._unacked.clear()
        self._num_unacked = 0
        self._wake.set()
        self._room.set()

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(**self._counts, unacknowledged=self._num_unacked)

    async def close(self) -> None:
        """Stop sending; queued messages get a second to leave."""
        await cancel([self._sender])
        self._socket.close(1000)

    async def _send_ready(self) -> None:
        """Send all ready trajectories as a message, forever; resend messages whose acknowledgement is overdue."""
        while True:
            try:
                async with asyncio.timeout(self._resend_after_s / 2):
                    await self._wake.wait()
            except TimeoutError:
                await self.resend_unacknowledged(self._resend_after_s)
            self._wake.clear()
            while self._ready and len(self._unacked) < _MESSAGES_IN_FLIGHT:
                self._last_batch_id += 1
                await self._send_batch(self._last_batch_id, self._take_ready())

    async def _send_batch(self, batch_id: int, batch: tuple[Trajectory, ...]) -> None:
        self._unacked[batch_id] = (time.monotonic(), batch)
        await self.send(TrajectoryBatch(self._worker_id, batch_id, batch))

    def _take_ready(self) -> tuple[Trajectory, ...]:
        """Take as many ready trajectories as fit into a message."""
        batch: list[Trajectory] = []
        num_bytes = 0
        while self._ready and len(batch) < _BATCH_TRAJECTORIES:
            num_bytes += _BYTES_PER_TOKEN * sum(trajectory.num_tokens for trajectory in self._ready[0])
            if batch and num_bytes > self._max_batch_bytes:
                break
            batch += self._ready.popleft()
        return tuple(batch)


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
