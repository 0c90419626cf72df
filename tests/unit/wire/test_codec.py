"""The codec: messages round-trip, and bad bytes raise only the two wire errors."""

import re
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.errors import DecodeError, WireVersionError
from areal_rloo.trajectory import Completion, Item, Message, Trajectory
from areal_rloo.wire.codec import decode_learner, decode_worker, encode
from areal_rloo.wire.columns import Frame, Limits, TrajectoryHeader, decode_columns
from areal_rloo.wire.envelope import sealed
from areal_rloo.wire.messages import (
    Abort,
    Ack,
    Drain,
    Duty,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Lease,
    Leases,
    Results,
    WeightsCall,
    WeightsFailed,
    WeightsNotice,
    WeightsReady,
    WeightsReceived,
    Welcome,
    Work,
    digest,
)

ITEM = Item((Message("user", "1+3=?"),), "#### 4", "mine", {"level": 3, "tags": ["a", None], "x": {"y": 0.5}})
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
        draw(spans(num)),
    )
    prompts = st.sampled_from([[5], [5, 6]]) | st.lists(st.integers(0, 1000), min_size=1, max_size=9)
    prompt = np.array(draw(prompts), np.int32)
    rewards = draw(st.none() | st.lists(st.floats(-9, 9, width=32), min_size=num, max_size=num))
    return Trajectory(
        draw(st.integers(-(2**40), 2**40)),
        draw(st.integers(0, 99)),
        prompt,
        completion,
        draw(st.floats(-9, 9)),
        draw(st.dictionaries(st.text(max_size=4), st.floats(-9, 9), max_size=3)),
        None if rewards is None else np.array(rewards, np.float32),
        draw(st.none() | st.text(max_size=5)),
    )


@st.composite
def spans(draw: st.DrawFn, num: int) -> tuple[int, ...]:
    """Nothing, or numbers above 0 that add up."""
    cuts = draw(st.lists(st.integers(1, num), max_size=4, unique=True))
    ends = sorted({*cuts, num}) if cuts else []
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


FAILED = (Failed(2, 5, 1, "reward_error", "ValueError: no", "3+5=9", 7),)


def _finished(batch: Sequence[Trajectory]) -> tuple[Finished, ...]:
    """Give each trajectory a lease, from 3 on."""
    return tuple(Finished(lease_id, (trajectory,)) for lease_id, trajectory in enumerate(batch, start=3))


def _same(one: Trajectory, other: Trajectory) -> bool:
    arrays = [(one.prompt_tokens, other.prompt_tokens)] + [
        (getattr(one.completion, name), getattr(other.completion, name))
        for name in ("tokens", "behaviour_logprobs", "versions")
    ]
    if one.token_rewards is not None and other.token_rewards is not None:
        arrays.append((one.token_rewards, other.token_rewards))
    return (
        one.sample_id == other.sample_id
        and one.reward == other.reward
        and one.reward_parts == other.reward_parts
        and one.answer == other.answer
        and (one.token_rewards is None) == (other.token_rewards is None)
        and one.completion.spans == other.completion.spans
        and one.completion.finish_reason == other.completion.finish_reason
        and all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in arrays)
    )


@given(st.lists(trajectories(), max_size=5))
def test_a_batch_of_trajectories_round_trips_bit_for_bit(batch: list[Trajectory]) -> None:
    message = decode_worker(encode(Results("learner", 7, _finished(batch), FAILED)), LIMITS)
    assert isinstance(message, Results)
    assert (message.learner_id, message.number, message.failed) == ("learner", 7, FAILED)
    assert [each.lease_id for each in message.finished] == [3 + index for index in range(len(batch))]
    assert all(_same(a, b.trajectories[0]) for a, b in zip(batch, message.finished, strict=True))


@given(trajectories(), st.integers(1, 4))
def test_all_trajectories_of_a_duty_stay_together(trajectory: Trajectory, num: int) -> None:
    message = decode_worker(encode(Results("learner", 7, (Finished(3, (trajectory,) * num),))), LIMITS)
    assert isinstance(message, Results)
    assert [len(each.trajectories) for each in message.finished] == [num]


@pytest.mark.parametrize(
    "message",
    [
        Hello("rollout-0", "abc", 128, 3, None, 1, 0, (Duty(3, 1, 2), Duty(4, -4, 0)), Work(0.5, 12345)),
        Heartbeat("learner", 3, 9, b"12345678", None, 2, True, Work(0.5, 12345)),
        WeightsReady("learner", 4),
        WeightsReceived("learner", 3, 4, 2**62),
        WeightsFailed("learner", 3, 4, "no"),
        Goodbye(None, Work()),
    ],
)
def test_worker_messages_round_trip(message: msgspec.Struct) -> None:
    assert decode_worker(encode(message), LIMITS) == message  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a b", "rollout-0\n", "\nrollout-0", "a\x1b[2J", "é", "/", "x" * 251])
def test_a_name_with_other_characters_is_refused(name: str) -> None:
    for message in (Hello(name, "1", 4, 0, None, 1, 0, (), Work()), WeightsReady(name, 4)):
        with pytest.raises(DecodeError, match="regex"):
            decode_worker(encode(message), LIMITS)


def test_an_engine_with_unknown_weights_is_heard() -> None:
    """A worker finds an external SGLang server before any version has been loaded."""
    for message in (
        Hello("w", "1", 4, -1, "learner", 1, 0, (), Work()),
        Heartbeat("learner", 2, 0, b"", -1, 0, False, Work()),
    ):
        assert decode_worker(encode(message), LIMITS) == message


@pytest.mark.parametrize(
    "message",
    [
        Welcome("learner", 3, (("before", 0), ("learner", 8))),
        Leases("learner", (Lease(1, 5, (0, 1), (7, 8), ITEM, 3, 2**45), Lease(2, -1, (0,), (7,), Item("?"), 0, 0))),
        Ack(2),
        HeartbeatReply("learner", 3, 12, True),
        WeightsCall("learner", 4),
        WeightsNotice("learner", 4, 7, b"\x00\xff"),
        Abort("learner", (Duty(3, 1, 2),)),
        Drain(),
    ],
)
def test_learner_messages_round_trip(message: msgspec.Struct) -> None:
    assert decode_learner(encode(message), LIMITS) == message  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_random_bytes_raise_only_wire_errors(frames: list[bytes]) -> None:
    for decode in (decode_worker, decode_learner):
        with pytest.raises((DecodeError, WireVersionError)):
            decode(frames, LIMITS)


@pytest.mark.parametrize("header", [sealed(b"\x91" * 100_000), sealed(b"\xa1\xff")])
def test_deep_nesting_and_broken_text_raise_only_wire_errors(header: bytes) -> None:
    for decode in (decode_worker, decode_learner):
        with pytest.raises(DecodeError):
            decode([header], LIMITS)


@given(st.lists(trajectories(), min_size=1, max_size=3), st.integers(0, 1), st.integers(0, 10**6), st.integers(1, 255))
def test_a_damaged_batch_raises_only_wire_errors(batch: list[Trajectory], number: int, place: int, flip: int) -> None:
    header, columns = encode(Results("learner", 1, _finished(batch), FAILED))
    frames = [bytearray(msgspec.msgpack.encode(_fields(header))), bytearray(columns)]
    frames[number][place % len(frames[number])] ^= flip
    try:
        message = decode_worker([sealed(bytes(frames[0]), frames[1]), bytes(frames[1])], LIMITS)
    except DecodeError:
        return
    assert isinstance(message, Results)  # the damage is in a value; the message is well-formed


def _decode_two(changes: dict[str, object]) -> tuple[Trajectory, ...]:
    """Trajectories (1, 0) of two tokens and (2, 3) of three, with changes to the second or to the columns."""
    columns = {
        "tokens": np.array([1, 2, 3, 4, 5, 6, 7, 8], "<i4"),
        "behaviour_logprobs": np.array([-1, -2, -3, -4, -5], "<f4"),
        "version_runs": np.array([0, 2, 4, 1, 6, 2], "<i4"),
        "token_rewards": np.array([0.5, 0, 1], "<f4"),
    }
    columns |= {name: value for name, value in changes.items() if name in columns}  # type: ignore[misc]
    fields: dict[str, object] = {
        **{"group_id": 2, "sample_index": 3, "reward": 0.5, "finish_reason": "length"},
        **{"num_prompt_tokens": 1, "num_tokens": 3, "num_version_runs": 2},
        **{"spans": (1, 1, 1), "reward_parts": {"a": 1.0}, "has_token_rewards": True},
    }
    fields |= {name: value for name, value in changes.items() if name in fields}
    headers = [TrajectoryHeader(1, 0, 1.0, "stop", 2, 2, 1), TrajectoryHeader(**fields)]  # type: ignore[arg-type]
    return decode_columns(headers, _joined(*columns.values()), LIMITS)[0]


def _joined(*columns: np.ndarray) -> bytes:
    return b"".join(column.tobytes() for column in columns)


def test_columns_are_split_at_the_lengths_of_the_headers() -> None:
    first, second = _decode_two({})
    assert (first.prompt_tokens.tolist(), first.completion.tokens.tolist()) == ([1, 2], [3, 4])
    assert (second.prompt_tokens.tolist(), second.completion.tokens.tolist()) == ([5], [6, 7, 8])
    assert second.completion.behaviour_logprobs.tolist() == [-3, -4, -5]
    assert (first.completion.versions.tolist(), second.completion.versions.tolist()) == ([0, 0], [4, 6, 6])
    assert (second.sample_id, second.reward, second.completion.finish_reason) == ((2, 3), 0.5, "length")
    assert (first.completion.spans, second.completion.spans) == ((), (1, 1, 1))
    assert first.token_rewards is None
    assert second.token_rewards is not None and second.token_rewards.tolist() == [0.5, 0, 1]
    assert (first.reward_parts, second.reward_parts) == ({}, {"a": 1.0})


def test_a_prompt_like_the_one_before_travels_once() -> None:
    prompts = [[5] * 100, [5] * 100, [6], [5] * 100, [5] * 100]
    columns = (np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32))
    completion = Completion(*columns, "stop")
    batch = [Trajectory(1, 0, np.array(prompt, np.int32), completion, 1.0) for prompt in prompts]
    frames = encode(Results("learner", 1, _finished(batch)))
    assert len(frames[1]) == 4 * (100 + 1 + 100 + 5 + 5 + 2 * 5), "tokens, logprobs, version runs"
    message = decode_worker(frames, LIMITS)
    assert isinstance(message, Results) and message.extremes is not None
    arrays = [each.trajectories[0].prompt_tokens for each in message.finished]
    assert [array.tolist() for array in arrays] == prompts
    assert arrays[0] is arrays[1] and arrays[3] is arrays[4]
    assert message.extremes.most_tokens == 101


def test_prompts_that_travel_once_count_in_the_size_of_a_message() -> None:
    """Else a small message costs the work of a large one."""
    completion = Completion(np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32), "stop")
    batch = [Trajectory(1, 0, np.full(1000, 5, np.int32), completion, 1.0)] * 8
    frames = encode(Results("learner", 1, _finished(batch)))
    assert sum(map(len, frames)) < 6000
    limits = Limits(max_message_bytes=32_000, max_trajectories=8, max_tokens=1000)
    with pytest.raises(DecodeError, match="tokens: expected at most 32000 bytes in all, got 32032"):
        decode_worker(frames, limits)


def test_the_first_trajectory_has_a_prompt() -> None:
    columns = _joined(np.ones(1, np.int32), -np.ones(1, np.float32), np.array([0, 1], np.int32))
    with pytest.raises(DecodeError, match=r"\(1, 0\): num_prompt_tokens: expected 1 to 1000, got 0"):
        decode_columns([TrajectoryHeader(1, 0, 1.0, "stop", 0, 1, 1)], columns, LIMITS)


INFINITY, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_tokens": 0}, "(2, 3): num_tokens: expected 1 to 1000, got 0"),
        ({"num_tokens": 1001}, "(2, 3): num_tokens: expected 1 to 1000, got 1001"),
        ({"num_tokens": 2**70}, "(2, 3): num_tokens: expected 1 to 1000"),
        ({"num_prompt_tokens": -1}, "(2, 3): num_prompt_tokens: expected 0 to 1000, got -1"),
        ({"num_prompt_tokens": 2}, "columns: expected 92 bytes, as the headers say, got 88"),
        ({"num_version_runs": 0}, "(2, 3): num_version_runs: expected 1 to 1000, got 0"),
        ({"num_version_runs": 3}, "columns: expected 96 bytes, as the headers say, got 88"),
        ({"tokens": np.array([1, 2, 3, 4, 5, 6, -7, 8], "<i4")}, "(2, 3): tokens: expected ids of at least 0, got -7"),
        ({"tokens": np.array([1, 2, -3, 4, 5, 6, 7, 8], "<i4")}, "(1, 0): tokens: expected ids of at least 0, got -3"),
        ({"behaviour_logprobs": np.zeros(4, "<f4")}, "columns: expected 88 bytes, as the headers say, got 84"),
        *(
            ({"behaviour_logprobs": np.array([-1, -2, -3, -4, value], "<f4")}, f"(2, 3): behaviour_logprobs: {words}")
            for value, words in (
                (NAN, "expected values from -1e+06 to 0, got nan"),
                (-INFINITY, "expected values from -1e+06 to 0, got -inf"),
                (INFINITY, "expected values from -1e+06 to 0, got inf"),
                (0.5, "expected values from -1e+06 to 0, got 0.5"),
            )
        ),
        *(
            ({"version_runs": np.array([*first, *second], "<i4")}, f"{words}")
            for first, second, words in (
                ((0, 2), (4, 1, 6, 3), "(2, 3): version_runs: expected counts for 3 tokens, got 4"),
                ((0, 1), (4, 1, 6, 2), "(1, 0): version_runs: expected counts for 2 tokens, got 1"),
                ((0, 2), (4, 3, 6, 0), "(2, 3): version_runs: expected counts above 0, got 0"),
                ((0, 2), (-4, 1, 6, 2), "(2, 3): version_runs: expected versions of at least 0, got -4"),
                ((0, 2), (6, 1, 4, 2), "(2, 3): version_runs: expected versions that only grow"),
                ((0, 2), (4, 1, 4, 2), "(2, 3): version_runs: expected versions that only grow"),
            )
        ),
        ({"reward": NAN}, "(2, 3): reward: expected a number up to 1e+12 in size, got nan"),
        ({"finish_reason": "tired"}, "(2, 3): finish_reason: expected abort, length, stop, got 'tired'"),
        ({"spans": (1, 1)}, "(2, 3): spans: expected numbers above 0 that add up to 3 tokens, got (1, 1)"),
        ({"spans": (4, -1)}, "(2, 3): spans: expected numbers above 0 that add up to 3 tokens, got (4, -1)"),
        ({"reward_parts": {"a": INFINITY}}, "(2, 3): reward_parts: expected numbers up to 1e+12 in size, got a inf"),
        ({"token_rewards": np.array([0, NAN, 0], "<f4")}, "(2, 3): token_rewards: expected numbers up to"),
        ({"has_token_rewards": False}, "columns: expected 76 bytes, as the headers say, got 88"),
        ({"sample_index": -1}, "(2, -1): sample_index: expected at least 0, got -1"),
    ],
)
def test_each_wrong_field_is_named_with_its_trajectory(changes: dict[str, object], words: str) -> None:
    with pytest.raises(DecodeError, match=re.escape(words)):
        _decode_two(changes)


def test_versions_may_decrease_between_trajectories() -> None:
    first, second = _decode_two({"version_runs": np.array([9, 2, 4, 1, 6, 2], "<i4")})
    assert (first.completion.versions.tolist(), second.completion.versions.tolist()) == ([9, 9], [4, 6, 6])


def test_too_many_trajectories_and_missing_columns_are_refused() -> None:
    with pytest.raises(DecodeError, match="trajectories: expected at most 8, got 9"):
        decode_columns([TrajectoryHeader(1, 0, 1.0, "stop", 1, 1, 1)] * 9, b"", LIMITS)
    header, columns = encode(Results("learner", 1, (), FAILED))
    for frames in ([header], [header, columns, columns]):
        with pytest.raises(DecodeError, match=f"results: expected 2 frames, got {len(frames)}"):
            decode_worker(frames, LIMITS)


@pytest.mark.parametrize("leases", [((3, 0), (4, 2)), ((3, 1),), ((3, 3),), ((3, 2),)])
def test_a_duty_without_trajectories_or_of_two_samples_is_refused(leases: tuple[tuple[int, int], ...]) -> None:
    arrays = (np.ones(1, np.int32), -np.ones(1, np.float32), np.zeros(1, np.int32))
    batch = [Trajectory(1, index, np.ones(1, np.int32), Completion(*arrays, "stop"), 1.0) for index in (0, 1)]
    header, columns = encode(Results("learner", 1, _finished(batch)))
    changed = msgspec.msgpack.encode(_fields(header) | {"leases": leases})
    with pytest.raises(DecodeError, match="results: expected"):
        decode_worker([sealed(changed, columns), columns], LIMITS)


def _fields(header: Frame) -> dict[str, object]:
    _, (_, fields) = msgspec.msgpack.decode(header)
    return dict(fields)


def test_the_digest_of_duties_does_not_depend_on_their_order() -> None:
    one, other = Duty(3, 1, 2), Duty(4, -4, 0)
    assert digest([one, other]) == digest({other, one}) != digest([one]) != digest([])


def test_another_wire_version_is_named_with_the_remedy() -> None:
    with pytest.raises(WireVersionError, match="peer speaks wire version 4, this process speaks 13; run the same"):
        decode_worker([msgspec.msgpack.encode((4, {}))], LIMITS)


def test_a_too_large_message_is_refused() -> None:
    with pytest.raises(DecodeError, match="expected at most 1048576 bytes"):
        decode_worker([bytes(2**20 + 1)], LIMITS)


HELLO = {
    "type": "hello", "worker_id": "w", "incarnation": "1", "capacity_samples": 4, "policy_version": 0,
    "learner_id": None, "number": 1, "newest_lease": 0, "duties": [], "work": [0.0, 0],
}  # fmt: skip
HEARTBEAT = {
    "type": "heartbeat", "learner_id": "l", "number": 1, "newest_lease": 0, "duties": b"", "policy_version": 0,
    "newest_offer": 0, "receiving": False, "work": [0.0, 0],
}  # fmt: skip
FAILURE = [1, 0, 0, "reward_error", "no", "", 3]


@pytest.mark.parametrize(
    ("message", "field", "value"),
    [
        *((HELLO, "capacity_samples", value) for value in (-1, 2**20, 2**64 - 1)),
        *((HELLO, "worker_id", value) for value in ("w" * 251, 7)),
        (HELLO, "duties", [[-1, 0, 0]]),
        *((HEARTBEAT, "policy_version", value) for value in (-2, 2**31)),
        *((HEARTBEAT, "work", [value, 0]) for value in (NAN, INFINITY, -1.0, 1e13)),
        *((HEARTBEAT, "work", [0.0, value]) for value in (-1, 2**53 + 1, 2**64 - 1)),
        *((HEARTBEAT, "newest_lease", value) for value in (-1, 2**64 - 1)),
    ],
)
def test_numbers_without_sense_are_refused(message: dict[str, object], field: str, value: object) -> None:
    """A sum of them overflowed in a checkpoint once."""
    assert decode_worker([sealed(msgspec.msgpack.encode(message))], LIMITS)
    with pytest.raises(DecodeError, match=rf"message: Expected .* at `\$\[?.*{field}"):
        decode_worker([sealed(msgspec.msgpack.encode({**message, field: value}))], LIMITS)


@pytest.mark.parametrize("reason", ["", "Reward Error", "a" * 41, "reward\nerror"])
def test_the_reason_of_a_failure_is_a_label(reason: str) -> None:
    def message(failure: list[object]) -> list[bytes]:
        header = {"type": "results", "learner_id": "l", "number": 1, "leases": [], "trajectories": []}
        return [sealed(msgspec.msgpack.encode({**header, "failed": [failure]})), b""]

    assert decode_worker(message(FAILURE), LIMITS)
    with pytest.raises(DecodeError, match="Expected `str` matching regex"):
        decode_worker(message([*FAILURE[:3], reason, *FAILURE[4:]]), LIMITS)
