"""The codec: everything comes back, and nothing but the two wire errors ever comes out of bad bytes."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.errors import DecodeError, WireVersionError
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.codec import Limits, decode_learner, decode_trajectory, decode_worker, encode, encode_trajectory
from areal_rloo.wire.messages import (
    Abort,
    Drain,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Lease,
    Leases,
    SampleFailed,
    TrajectoryAck,
    TrajectoryBatch,
    WeightsNotice,
    WeightsReceived,
    Welcome,
)

LIMITS = Limits(max_message_bytes=2**20, max_trajectories=8, max_tokens=1000)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    num = draw(st.integers(1, 40))
    logprobs = draw(st.lists(st.floats(-1e4, 0, width=32), min_size=num, max_size=num))
    versions = sorted(draw(st.lists(st.integers(0, 9), min_size=num, max_size=num)))
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=num, max_size=num))
    completion = Completion(
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        draw(st.sampled_from(["stop", "length"])),
    )
    prompt = np.array(draw(st.lists(st.integers(0, 1000), min_size=1, max_size=9)), np.int32)
    return Trajectory(
        draw(st.integers(-(2**40), 2**40)), draw(st.integers(0, 99)), prompt, completion, draw(st.floats(-9, 9))
    )


def _same(one: Trajectory, other: Trajectory) -> bool:
    arrays = [(one.prompt_tokens, other.prompt_tokens)] + [
        (getattr(one.completion, name), getattr(other.completion, name))
        for name in ("tokens", "behaviour_logprobs", "versions")
    ]
    return (
        one.sample_id == other.sample_id
        and one.reward == other.reward
        and one.completion.finish_reason == other.completion.finish_reason
        and all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in arrays)
    )


@given(st.lists(trajectories(), max_size=5))
def test_a_batch_of_trajectories_comes_back_bit_for_bit(batch: list[Trajectory]) -> None:
    message = decode_worker(encode(TrajectoryBatch("rollout-0", 7, tuple(batch))), LIMITS)
    assert isinstance(message, TrajectoryBatch)
    assert (message.worker_id, message.batch_id) == ("rollout-0", 7)
    assert all(_same(a, b) for a, b in zip(batch, message.trajectories, strict=True))


@pytest.mark.parametrize(
    "message",
    [
        Hello("rollout-0", "abc", 128, 3, ((1, 2), (-4, 0))),
        Heartbeat("rollout-0", 3, 0.5, 9.0, 12345, 64, 3),
        SampleFailed("rollout-0", 5, 1, "reward_error", "ValueError: no"),
        WeightsReceived("rollout-0", 4, 2**62),
    ],
)
def test_worker_messages_come_back(message: msgspec.Struct) -> None:
    assert decode_worker(encode(message), LIMITS) == message  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "message",
    [
        Welcome("learner", 3),
        Leases(1, (Lease(5, (0, 1), (7, 8), "#### 4", "train", 3, 2**45), Lease(-1, (0,), (7,), "", "eval", 0, 0))),
        TrajectoryAck((1, 2)),
        HeartbeatReply("learner", 3, 9),
        WeightsNotice(4, b"\x00\xff"),
        Abort(((1, 2),)),
        Drain(True),
    ],
)
def test_learner_messages_come_back(message: msgspec.Struct) -> None:
    assert decode_learner(encode(message), LIMITS) == message  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_bytes_raise_nothing_but_wire_errors(frames: list[bytes]) -> None:
    for decode in (decode_worker, decode_learner):
        with pytest.raises((DecodeError, WireVersionError)):
            decode(frames, LIMITS)


@given(trajectories(), st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_trajectory_raises_nothing_but_a_decode_error(trajectory: Trajectory, place: int, flip: int) -> None:
    frame = bytearray(encode_trajectory(trajectory))
    frame[place % len(frame)] ^= flip
    try:
        decode_trajectory(bytes(frame), LIMITS)
    except DecodeError:
        return  # refused; what is not refused is at least well-formed


def _fields(**changes: object) -> bytes:
    values: dict[str, object] = {
        "group_id": 1,
        "sample_index": 0,
        "reward": 1.0,
        "finish_reason": "stop",
        "prompt_tokens": np.array([1, 2], "<i4").tobytes(),
        "tokens": np.array([3, 4], "<i4").tobytes(),
        "behaviour_logprobs": np.array([-1, -2], "<f4").tobytes(),
        "version_runs": np.array([0, 2], "<i4").tobytes(),
    }
    return msgspec.msgpack.encode(list({**values, **changes}.values()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": b"abc"}, "tokens: 3 bytes"),
        ({"tokens": b""}, "tokens: expected non-negative ids, at least one"),
        ({"tokens": np.array([-1, 4], "<i4").tobytes()}, "tokens: expected non-negative"),
        ({"prompt_tokens": b""}, "prompt_tokens: expected"),
        ({"behaviour_logprobs": np.array([-1], "<f4").tobytes()}, "behaviour_logprobs: expected 2, one a token, got 1"),
        ({"behaviour_logprobs": np.array([-1, np.nan], "<f4").tobytes()}, "behaviour_logprobs: expected finite"),
        ({"behaviour_logprobs": np.array([-1, 0.5], "<f4").tobytes()}, "behaviour_logprobs: expected finite"),
        ({"version_runs": np.array([0, 3], "<i4").tobytes()}, "version_runs: expected counts for 2 tokens, got 3"),
        ({"version_runs": np.array([3, 1, 2, 1], "<i4").tobytes()}, "version_runs: expected versions that only grow"),
        ({"version_runs": np.array([0, 0, 1, 2], "<i4").tobytes()}, "version_runs: expected counts above 0"),
        ({"reward": float("nan")}, "reward: expected a finite number"),
        ({"finish_reason": "tired"}, "finish_reason: got 'tired'"),
        ({"sample_index": -1}, "sample_index: expected at least 0"),
        ({"tokens": bytes(4004)}, "tokens: expected at most 1000 values"),
    ],
)
def test_each_wrong_field_is_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decode_trajectory(_fields(**changes), LIMITS)


def test_another_wire_version_is_named_with_the_remedy() -> None:
    with pytest.raises(WireVersionError, match="peer speaks wire version 2, this process speaks 1; run the same"):
        decode_worker([msgspec.msgpack.encode((2, {}))], LIMITS)


def test_too_large_a_message_is_refused() -> None:
    with pytest.raises(DecodeError, match="expected at most 1048576 bytes"):
        decode_worker([bytes(2**20 + 1)], LIMITS)
