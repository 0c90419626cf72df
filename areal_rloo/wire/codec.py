"""Messages to frames and back. Bytes from outside are checked here, once; the rest of the code trusts messages.

A message is a list of frames: a header in an envelope (`envelope`), and for Results the columns, raw little-endian
numbers (`columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import DecodeError, shown
from areal_rloo.trajectory import Trajectory
from areal_rloo.wire.columns import MOST_TRAJECTORIES, Frame, Limits, TrajectoryHeader, decode_columns, encode_columns
from areal_rloo.wire.envelope import opened, sealed
from areal_rloo.wire.messages import (
    MOST_DUTIES,
    Count,
    Failed,
    Finished,
    LearnerMessage,
    Name,
    PlainWorkerMessage,
    Results,
    WorkerMessage,
)

_IN_A_BATCH = Meta(max_length=MOST_TRAJECTORIES)


class _ResultsHeader(msgspec.Struct, frozen=True, tag="results"):
    learner_id: Name
    number: Count
    leases: Annotated[tuple[tuple[Count, Count], ...], _IN_A_BATCH]  # finished duties: lease id, number of trajectories
    trajectories: Annotated[tuple[TrajectoryHeader, ...], _IN_A_BATCH]
    failed: Annotated[tuple[Failed, ...], Meta(max_length=MOST_DUTIES)]


WorkerHeader = PlainWorkerMessage | _ResultsHeader
_encoder = msgspec.msgpack.Encoder()


def encode(message: WorkerMessage | LearnerMessage) -> list[Frame]:
    """Encode a message as frames."""
    if not isinstance(message, Results):
        return [sealed(_encoder.encode(message))]
    headers, columns = encode_columns([*chain.from_iterable(each.trajectories for each in message.finished)])
    leases = tuple((each.lease_id, len(each.trajectories)) for each in message.finished)
    header = _ResultsHeader(message.learner_id, message.number, leases, headers, message.failed)
    return [sealed(_encoder.encode(header), columns), columns]


def decode_worker(frames: Sequence[Frame], limits: Limits) -> WorkerMessage:
    """Decode a message of a worker.

    Raises:
        WireVersionError: the worker speaks another wire version.
        DecodeError: anything else is wrong; names the field and the reason. No bytes raise any other exception.
    """
    header = _header(frames, limits, WorkerHeader)
    if isinstance(header, _ResultsHeader):
        if len(frames) != 2:
            raise DecodeError(f"results: expected 2 frames, got {len(frames)}")
        trajectories, extremes = decode_columns(header.trajectories, frames[1], limits)
        num_bytes = 4 * extremes.num_tokens  # equal prompts travel once
        if num_bytes > limits.max_message_bytes:
            raise DecodeError(f"tokens: expected at most {limits.max_message_bytes} bytes in all, got {num_bytes}")
        finished = _by_duty(header.leases, trajectories)
        return Results(header.learner_id, header.number, finished, header.failed, extremes)
    return header  # type: ignore[no-any-return]


def decode_learner(frames: Sequence[Frame], limits: Limits) -> LearnerMessage:
    """Decode a message of the learner; raises as `decode_worker` does."""
    return _header(frames, limits, LearnerMessage)  # type: ignore[no-any-return]


def _by_duty(leases: Sequence[tuple[int, int]], trajectories: Sequence[Trajectory]) -> tuple[Finished, ...]:
    """Give each finished duty its trajectories.

    Raises:
        DecodeError: a duty has no trajectory, or trajectories of two samples, or the numbers do not add up.
    """
    numbers = [num for _, num in leases]
    if min(numbers, default=1) < 1 or sum(numbers) != len(trajectories):
        raise DecodeError(
            f"results: expected {len(trajectories)} trajectories, at least 1 for each duty, got {shown(leases)}"
        )
    rest, finished = iter(trajectories), []
    for lease_id, num in leases:
        made = tuple(islice(rest, num))
        if num > 1 and len({trajectory.sample_id for trajectory in made}) > 1:
            raise DecodeError(f"results: expected trajectories of the same sample under lease {lease_id}")
        finished.append(Finished(lease_id, made))
    return tuple(finished)


def _header(frames: Sequence[Frame], limits: Limits, kind: Any) -> Any:
    size = sum(map(len, frames))
    if size > limits.max_message_bytes:
        raise DecodeError(f"message: expected at most {limits.max_message_bytes} bytes, got {size}")
    if not frames:
        raise DecodeError("message: no frame")
    header: Any = from_msgpack(opened(frames), kind, name="message")
    if len(frames) > 1 and not isinstance(header, _ResultsHeader):
        raise DecodeError(f"message: expected 1 frame, got {len(frames)}")
    return header
