"""Messages to frames and back. Bytes from outside are checked here, once; the rest of the code trusts messages.

A message is a list of frames: a header (wire version, message), and for a TrajectoryBatch four columns of raw
little-endian numbers (`columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from areal_rloo.errors import DecodeError, WireVersionError
from areal_rloo.wire.columns import Frame, Limits, TrajectoryHeader, decode_columns, encode_columns
from areal_rloo.wire.messages import WIRE_VERSION, LearnerMessage, PlainWorkerMessage, TrajectoryBatch, WorkerMessage


class _BatchHeader(msgspec.Struct, frozen=True, tag="trajectory_batch"):
    worker_id: str
    batch_id: int
    trajectories: tuple[TrajectoryHeader, ...]


_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_worker_decoder = msgspec.msgpack.Decoder(PlainWorkerMessage | _BatchHeader)
_learner_decoder = msgspec.msgpack.Decoder(LearnerMessage)


def encode(message: WorkerMessage | LearnerMessage) -> list[Frame]:
    """Encode a message as frames."""
    if not isinstance(message, TrajectoryBatch):
        return [_encoder.encode((WIRE_VERSION, message))]
    headers, columns = encode_columns(message.trajectories)
    header = _BatchHeader(message.worker_id, message.batch_id, headers)
    return [_encoder.encode((WIRE_VERSION, header)), *columns]


def decode_worker(frames: Sequence[Frame], limits: Limits) -> WorkerMessage:
    """Decode a message of a worker.

    Raises:
        WireVersionError: the worker speaks another wire version.
        DecodeError: anything else is wrong; names the field and the reason. No bytes raise any other exception.
    """
    header = _header(frames, limits, _worker_decoder)
    if isinstance(header, _BatchHeader):
        trajectories = decode_columns(header.trajectories, frames[1:], limits)
        return TrajectoryBatch(header.worker_id, header.batch_id, trajectories)
    return header  # type: ignore[no-any-return]


def decode_learner(frames: Sequence[Frame], limits: Limits) -> LearnerMessage:
    """Decode a message of the learner; raises as `decode_worker` does."""
    return _header(frames, limits, _learner_decoder)  # type: ignore[no-any-return]


def _header(frames: Sequence[Frame], limits: Limits, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    size = sum(map(len, frames))
    if size > limits.max_message_bytes:
        raise DecodeError(f"message: expected at most {limits.max_message_bytes} bytes, got {size}")
    if not frames:
        raise DecodeError("message: no frame")
    try:
        version, body = _version_decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"header: {error}") from error
    if version != WIRE_VERSION:
        raise WireVersionError(
            f"peer speaks wire version {version}, this process speaks {WIRE_VERSION}; "
            "run the same areal_rloo version on every node"
        )
    try:
        header = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"message: {error}") from error
    if len(frames) > 1 and not isinstance(header, _BatchHeader):
        raise DecodeError(f"message: expected 1 frame, got {len(frames)}")
    return header
