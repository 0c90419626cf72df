"""Messages to frames and back. Bytes from outside are checked here, once; behind this line messages are trusted.

A message is a list of frames: a header (wire version, message), and for a TrajectoryBatch one frame a trajectory.
Arrays travel as raw little-endian bytes (int32 tokens, float32 logprobs), versions as run lengths (int32 pairs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from areal_rloo.errors import DecodeError, WireVersionError
from areal_rloo.trajectory import Completion, FinishReason, Trajectory
from areal_rloo.wire.messages import (
    WIRE_VERSION,
    Abort,
    Drain,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LearnerMessage,
    Leases,
    Refusal,
    SampleFailed,
    TrajectoryAck,
    TrajectoryBatch,
    WeightsFailed,
    WeightsNotice,
    WeightsReceived,
    Welcome,
    WorkerMessage,
)

Int32Array = npt.NDArray[np.int32]

_FINISH_REASONS = frozenset(get_args(FinishReason))
_LOGPROB_ROUNDING = 1e-3  # a logprob may exceed 0 by float32 rounding of a log-softmax, not by more


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may send: bytes in all frames of a message, trajectories in a batch, tokens in a trajectory."""

    max_message_bytes: int = 256 * 2**20
    max_trajectories: int = 4096
    max_tokens: int = 2**24


class _BatchHeader(msgspec.Struct, frozen=True, tag="trajectory_batch"):
    worker_id: str
    batch_id: int
    num_trajectories: int


class _TrajectoryFrame(msgspec.Struct, frozen=True, array_like=True):
    group_id: int
    sample_index: int
    reward: float
    finish_reason: str
    prompt_tokens: bytes
    tokens: bytes
    behaviour_logprobs: bytes
    version_runs: bytes


_WorkerHeader = Hello | Heartbeat | _BatchHeader | SampleFailed | WeightsReceived | WeightsFailed | Goodbye
_LearnerHeader = Welcome | Leases | TrajectoryAck | HeartbeatReply | WeightsNotice | Abort | Drain | Refusal

_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_worker_decoder = msgspec.msgpack.Decoder(_WorkerHeader)
_learner_decoder = msgspec.msgpack.Decoder(_LearnerHeader)
_frame_decoder = msgspec.msgpack.Decoder(_TrajectoryFrame)


def encode(message: WorkerMessage | LearnerMessage) -> list[bytes]:
    """The frames of a message."""
    if not isinstance(message, TrajectoryBatch):
        return [_encoder.encode((WIRE_VERSION, message))]
    header = _BatchHeader(message.worker_id, message.batch_id, len(message.trajectories))
    frames = [encode_trajectory(trajectory) for trajectory in message.trajectories]
    return [_encoder.encode((WIRE_VERSION, header)), *frames]


def encode_trajectory(trajectory: Trajectory) -> bytes:
    """One trajectory as a frame; a checkpoint keeps trajectories in the same form."""
    completion = trajectory.completion
    return _encoder.encode(
        _TrajectoryFrame(
            trajectory.group_id,
            trajectory.sample_index,
            trajectory.reward,
            completion.finish_reason,
            trajectory.prompt_tokens.astype("<i4", copy=False).tobytes(),
            completion.tokens.astype("<i4", copy=False).tobytes(),
            completion.behaviour_logprobs.astype("<f4", copy=False).tobytes(),
            _runs(completion.versions).astype("<i4", copy=False).tobytes(),
        )
    )


def decode_worker(frames: Sequence[bytes], limits: Limits) -> WorkerMessage:
    """What a worker sent.

    Raises:
        WireVersionError: it speaks another wire version.
        DecodeError: anything else is wrong with it; says which field and why. No other exception, whatever the bytes.
    """
    header = _header(frames, limits, _worker_decoder)
    if not isinstance(header, _BatchHeader):
        _require(len(frames) == 1, "message", f"expected 1 frame, got {len(frames)}")
        return header  # type: ignore[no-any-return]
    _require(
        header.num_trajectories == len(frames) - 1 <= limits.max_trajectories,
        "trajectory_batch",
        f"expected {header.num_trajectories} frames, at most {limits.max_trajectories}, got {len(frames) - 1}",
    )
    trajectories = tuple(decode_trajectory(frame, limits) for frame in frames[1:])
    return TrajectoryBatch(header.worker_id, header.batch_id, trajectories)


def decode_learner(frames: Sequence[bytes], limits: Limits) -> LearnerMessage:
    """What the learner sent; raises as `decode_worker`."""
    header = _header(frames, limits, _learner_decoder)
    _require(len(frames) == 1, "message", f"expected 1 frame, got {len(frames)}")
    return header  # type: ignore[no-any-return]


def decode_trajectory(frame: bytes, limits: Limits) -> Trajectory:
    """One trajectory, checked; its arrays are read-only views of the frame.

    Raises:
        DecodeError: a field is missing, of another type or length, or holds a value that cannot be.
    """
    try:
        raw = _frame_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"trajectory: {error}") from error
    name = f"trajectory ({raw.group_id}, {raw.sample_index})"
    prompt = _array(raw.prompt_tokens, "<i4", f"{name}: prompt_tokens", limits)
    tokens = _array(raw.tokens, "<i4", f"{name}: tokens", limits)
    logprobs = _array(raw.behaviour_logprobs, "<f4", f"{name}: behaviour_logprobs", limits)
    _require(len(prompt) > 0 and prompt.min() >= 0, f"{name}: prompt_tokens", "expected non-negative ids, at least one")
    _require(len(tokens) > 0 and tokens.min() >= 0, f"{name}: tokens", "expected non-negative ids, at least one")
    _require(
        len(logprobs) == len(tokens),
        f"{name}: behaviour_logprobs",
        f"expected {len(tokens)}, one a token, got {len(logprobs)}",
    )
    _require(
        bool(np.isfinite(logprobs).all()) and logprobs.max() <= _LOGPROB_ROUNDING,
        f"{name}: behaviour_logprobs",
        "expected finite values of at most 0",
    )
    versions = _versions(raw.version_runs, len(tokens), f"{name}: version_runs", limits)
    _require(math.isfinite(raw.reward), f"{name}: reward", f"expected a finite number, got {raw.reward}")
    _require(raw.finish_reason in _FINISH_REASONS, f"{name}: finish_reason", f"got {raw.finish_reason!r}")
    _require(raw.sample_index >= 0, f"{name}: sample_index", "expected at least 0")
    completion = Completion(tokens, logprobs, versions, raw.finish_reason)  # type: ignore[arg-type]
    return Trajectory(raw.group_id, raw.sample_index, prompt, completion, raw.reward)


def _header(frames: Sequence[bytes], limits: Limits, decoder: Any) -> Any:
    size = sum(len(frame) for frame in frames)
    _require(len(frames) > 0, "message", "no frame")
    _require(
        size <= limits.max_message_bytes, "message", f"expected at most {limits.max_message_bytes} bytes, got {size}"
    )
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
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DecodeError(f"message: {error}") from error


def _array(raw: bytes, dtype: str, field: str, limits: Limits) -> npt.NDArray[Any]:
    _require(len(raw) % 4 == 0, field, f"{len(raw)} bytes are not a whole number of 4-byte values")
    _require(len(raw) // 4 <= limits.max_tokens, field, f"expected at most {limits.max_tokens} values")
    return np.frombuffer(raw, dtype)


def _runs(versions: Int32Array) -> Int32Array:
    """[num_runs, 2]: a version and how many tokens in a row it made."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    return np.stack([versions[starts], np.diff(starts, append=len(versions))], axis=1).astype(np.int32)


def _versions(raw: bytes, num_tokens: int, field: str, limits: Limits) -> Int32Array:
    runs = _array(raw, "<i4", field, limits)
    _require(len(runs) % 2 == 0, field, "expected pairs of version and count")
    version, count = runs[0::2], runs[1::2]
    _require(len(count) > 0 and count.min() > 0, field, "expected counts above 0")
    total = int(count.sum(dtype=np.int64))
    _require(total == num_tokens, field, f"expected counts for {num_tokens} tokens, got {total}")
    _require(version.min() >= 0 and bool((np.diff(version) > 0).all()), field, "expected versions that only grow")
    return np.repeat(version, count)


def _require(condition: bool, field: str, detail: str) -> None:
    if not condition:
        raise DecodeError(f"{field}: {detail}")
