"""Fuzz the messages of the wire, and the turns in them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from fuzz.targets import Target

from areal_rloo.errors import DecodeError, WireVersionError
from areal_rloo.trajectory import Completion, Item, Trajectory
from areal_rloo.wire import messages as wire
from areal_rloo.wire.codec import decode_learner, decode_worker, encode
from areal_rloo.wire.columns import Limits
from areal_rloo.wire.envelope import sealed
from areal_rloo.wire.turns import RecordedTurn, decode_turns, encode_turns

_LIMITS = Limits(max_message_bytes=2**20, max_trajectories=64, max_tokens=2**16)
_MOST_FRAMES = 8
_ANY = b"\x92\x00"  # before a message that `_frames` gives today's version and the right checksum


def joined(frames: Sequence[bytes]) -> bytes:
    """Join frames as `_frames` cuts them: the lengths of all but the last, then the frames."""
    _, (_, message) = msgspec.msgpack.decode(frames[0], type=tuple[int, tuple[int, msgspec.Raw]])
    frames = [_ANY + bytes(message), *frames[1:]]
    lengths = b"".join(len(frame).to_bytes(2, "little") for frame in frames[:-1])
    return bytes([len(frames) - 1]) + lengths + b"".join(frames)


def _frames(content: bytes) -> list[bytes]:
    num = content[0] % _MOST_FRAMES if content else 0
    at, frames = 1 + 2 * num, []
    for index in range(num):
        length = int.from_bytes(content[1 + 2 * index : 3 + 2 * index], "little")
        frames.append(content[at : at + length])
        at += length
    first, *rest = *frames, content[at:]
    return [sealed(first[2:], *rest) if first.startswith(_ANY) else first, *rest]


def _try_worker_message(content: bytes) -> None:
    try:
        message = decode_worker(_frames(content), _LIMITS)
    except (DecodeError, WireVersionError):
        return
    again = decode_worker([bytes(frame) for frame in encode(message)], _LIMITS)
    assert [bytes(frame) for frame in encode(again)] == [bytes(frame) for frame in encode(message)]
    if isinstance(message, wire.Results) and message.finished:
        made = [trajectory for _, trajectories in message.finished for trajectory in trajectories]
        assert message.extremes is not None, "the codec notes the extremes"
        assert message.extremes.highest_token == max(_highest_token(trajectory) for trajectory in made)
        assert message.extremes.lowest_version == min(int(each.completion.versions.min()) for each in made)
        assert message.extremes.highest_version == max(int(each.completion.versions.max()) for each in made)
        assert message.extremes.most_tokens == max(trajectory.num_tokens for trajectory in made)


def _highest_token(trajectory: Trajectory) -> int:
    return int(max(trajectory.prompt_tokens.max(), trajectory.completion.tokens.max()))


def _try_learner_message(content: bytes) -> None:
    try:
        message = decode_learner(_frames(content), _LIMITS)
    except (DecodeError, WireVersionError):
        return
    assert decode_learner([bytes(frame) for frame in encode(message)], _LIMITS) == message


def _try_turns(content: bytes) -> None:
    try:
        turns = decode_turns(content)
    except DecodeError:
        return
    if any(len(turn.completion.tokens) for turn in turns):
        assert decode_turns(encode_turns(turns))[0].prompt == turns[0].prompt


def _completion(num_tokens: int, spans: tuple[int, ...] = ()) -> Completion:
    ids = np.arange(num_tokens, dtype=np.int32)
    logprobs = np.full(num_tokens, -1.5, np.float32)
    return Completion(ids, logprobs, np.array([3] * (num_tokens - 1) + [4], np.int32), "stop", spans)


def _worker_messages() -> list[bytes]:
    duty, work = wire.Duty(7, 3, 1), wire.Work(2.5, 1000)
    prompt = np.array([5, 6], np.int32)
    plain = Trajectory(3, 1, prompt, _completion(4), 0.5)
    rich = Trajectory(3, 2, prompt, _completion(5, (2, 1, 2)), -1.0, {"math": 1.0}, np.ones(5, np.float32), "42")
    failed = wire.Failed(*duty, "reward_timeout", "no result", "some text", 7)
    messages: list[wire.WorkerMessage] = [
        wire.Hello("rollout-0", "1", 64, 3, "learner", 1, 7, (duty,), work),
        wire.Heartbeat("learner", 2, 7, wire.digest([duty]), 3, 1, False, work),
        wire.Results("learner", 3, (wire.Finished(7, (plain,)), wire.Finished(7, (rich,))), (failed,)),
        wire.Results("learner", 3, (), (failed,)),
        wire.Partials("learner", 1, (wire.Partial(*duty, b"turns"),), True),
        wire.WeightsReady("learner", 5),
        wire.WeightsReceived("learner", 6, 5, 2**63),
        wire.WeightsFailed("learner", 7, 5, "checksum"),
        wire.Goodbye("learner", work, failed=True),
    ]
    return [joined([bytes(frame) for frame in encode(message)]) for message in messages]


def _learner_messages() -> list[bytes]:
    lease = wire.Lease(7, 3, (0, 1), (5, 6), Item("1+1=?", "2"), 3, 2**40, b"turns")
    messages: list[wire.LearnerMessage] = [
        wire.Welcome("learner", 1, (("before", 0), ("learner", 3))),
        wire.Leases("learner", (lease,)),
        wire.Ack(3),
        wire.HeartbeatReply("learner", 2, 7, say_hello=True),
        wire.WeightsCall("learner", 5),
        wire.WeightsNotice("learner", 5, 4, b"body"),
        wire.PartialsCall("learner", 1),
        wire.Abort("learner", (wire.Duty(7, 3, 1),)),
        wire.Drain(),
        wire.Refusal("unreadable", final=True),
    ]
    return [joined([bytes(frame) for frame in encode(message)]) for message in messages]


TARGETS = {
    "worker_messages": Target(_try_worker_message, _worker_messages),
    "learner_messages": Target(_try_learner_message, _learner_messages),
    "turns": Target(_try_turns, lambda: [encode_turns([RecordedTurn(b"digest", _completion(4))] * 2)]),
}
