"""The check of trajectories that are not encoded has the rules of the codec, no more and no fewer."""

import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.errors import DecodeError
from areal_rloo.files import in_pieces, of_pieces
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.wire.codec import decode_worker, encode
from areal_rloo.wire.columns import Limits, check_trajectories, decode_columns, encode_columns
from areal_rloo.wire.messages import Finished, Results

LIMITS = Limits(max_message_bytes=2**20, max_trajectories=3, max_tokens=6)
INFINITY = float("inf")

ODD_NUMBERS = [0, 1, -1, 0.5, -0.5, True, None, "1", 2**31, 2**40, 2**63, 2**64, -(2**63) - 1, -(2**31) - 1, INFINITY]
ODD_NUMBERS += [
    -INFINITY,
    float("nan"),
    1e300,
    -1e300,
    np.float64(1),
    np.float32(1),
    np.int64(1),
    np.bool_(True),
    1j,
    b"1",
]
ODD_TEXTS = ["stop", "length", "abort", "tired", "", "\ud800", "\x00", np.str_("stop"), b"stop", None, 3]
ARRAYS = ("tokens", "behaviour_logprobs", "versions")
DTYPES = ["<i4", ">i4", "i8", "u4", "u8", "i2", "?", "<f4", "f2", "f8", "c8", "O", "U3"]


@st.composite
def arrays(draw: st.DrawFn, num: int, good: list[float], dtype: str) -> Any:
    """Values as they should be, or anything else that a user's code may put in their place."""
    length = draw(st.sampled_from([num] * 9 + [0, num + 1]))
    values = draw(st.lists(st.sampled_from(good), min_size=length, max_size=length))
    if draw(st.integers(0, 5)):
        return np.array(values, dtype)
    values = [draw(st.sampled_from([*good, *ODD_NUMBERS])) for _ in values]
    kind = draw(st.sampled_from([*DTYPES, "list", "2d", "0d", "text", "none", "tuple"]))
    try:
        with np.errstate(all="ignore"):
            return {
                "list": lambda: values,
                "tuple": lambda: tuple(values),
                "2d": lambda: np.array(values, dtype).reshape(-1, 1),
                "0d": lambda: np.array(values[0] if values else 1, dtype),
                "text": lambda: "abc",
                "none": lambda: None,
            }.get(kind, lambda: np.array(values, kind))()
    except (TypeError, ValueError, OverflowError):
        return np.array(good[:1] * length, draw(st.sampled_from(["i8", "u8", "f8", "?"])))


@st.composite
def anything(draw: st.DrawFn) -> Trajectory:
    """A trajectory, most of its fields valid."""

    def rarely(good: Any, odd: Any) -> Any:
        return draw(good if draw(st.integers(0, 7)) else odd)

    num, odd_number = draw(st.integers(1, 6)), st.sampled_from(ODD_NUMBERS)
    versions = draw(arrays(num, [0, 1, 3], "<i4"))
    if draw(st.integers(0, 3)) and getattr(versions, "dtype", None) == np.int32 and versions.ndim == 1:
        versions = np.sort(versions)
    completion = Completion(
        draw(arrays(num, [0, 7, 2**31 - 1], "<i4")),
        draw(arrays(num, [0.0, -1.0, 5e-4], "<f4")),
        versions,
        rarely(st.just("stop"), st.sampled_from(ODD_TEXTS)),
        rarely(st.just(()), st.sampled_from([(num,), [num], (1, num - 1), (num, 0), (-1, num + 1), (num + 1,), None])),
    )
    return Trajectory(
        rarely(st.integers(-9, 9), odd_number),
        rarely(st.integers(0, 9), odd_number),
        draw(arrays(2, [0, 5], "<i4")),
        completion,
        rarely(st.just(1.0), odd_number),
        rarely(st.just({}), st.dictionaries(st.sampled_from(ODD_TEXTS), odd_number, max_size=2) | st.none()),
        draw(st.none() | arrays(num, [0.0, 1.0], "<f4")),
        rarely(st.none(), st.sampled_from(ODD_TEXTS)),
    )


def _decoded(trajectories: list[Trajectory], limits: Limits = LIMITS) -> tuple[Trajectory, ...] | None:
    """Return the trajectories that arrive at the learner; None if the codec refuses or changes a trajectory."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            finished = tuple(Finished(1, (trajectory,)) for trajectory in trajectories)
            message = decode_worker(encode(Results("learner", 0, finished)), limits)
    except (DecodeError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    assert isinstance(message, Results)
    arrived = tuple(each.trajectories[0] for each in message.finished)
    unchanged = all(_same(sent, got) for sent, got in zip(trajectories, arrived, strict=True))
    return arrived if unchanged else None


def _same(sent: Trajectory, got: Trajectory) -> bool:
    pairs = [(sent.prompt_tokens, got.prompt_tokens), (sent.token_rewards, got.token_rewards)]
    pairs += [(getattr(sent.completion, name), getattr(got.completion, name)) for name in ARRAYS]
    for given_array, array in pairs:
        if (given_array is None) != (array is None):
            return False
        if given_array is None or array is None:
            continue
        if np.asarray(given_array).dtype.kind not in ("iub" if array.dtype == np.int32 else "iubf"):
            return False  # the codec would drop fractions
        with np.errstate(over="ignore"):
            rounded = np.asarray(given_array).astype(array.dtype)
        if rounded.shape != array.shape or not np.array_equal(rounded, array):
            return False
        if array.dtype == np.int32 and not np.array_equal(np.asarray(given_array), array):
            return False  # an integer that does not fit
    return True


def _accepted(trajectories: list[Trajectory], limits: Limits = LIMITS) -> bool:
    try:
        check_trajectories(trajectories, limits)
    except DecodeError:
        return False
    return True


@given(st.lists(anything(), max_size=4))
def test_the_check_accepts_exactly_the_batches_that_the_codec_accepts(batch: list[Trajectory]) -> None:
    assert _accepted(batch) == (_decoded(batch) is not None)


class _Integer(int):
    """A subclass, as user code may have."""


VALID = Trajectory(
    3, 1, np.array([5], np.int32), Completion(*(np.zeros(2, dtype) for dtype in ("i4", "f4", "i4")), "stop"), 1.0
)


def _changed(**changes: Any) -> Trajectory:
    return msgspec.structs.replace(VALID, **changes)


def _completion(**changes: Any) -> Trajectory:
    return _changed(completion=msgspec.structs.replace(VALID.completion, **changes))


@pytest.mark.parametrize("container", [list, tuple, torch.tensor, np.array, lambda values: np.array(values, object)])
@pytest.mark.parametrize("field", [*ARRAYS, "prompt_tokens", "token_rewards"])
def test_numbers_in_any_container_arrive_or_are_refused(field: str, container: Callable[[list[int]], object]) -> None:
    for values in ([0, 0], [0, -1], [0, 1]):
        change = _completion if field in ARRAYS else _changed
        odd = change(**{field: container(values)})
        assert _accepted([odd]) == (_decoded([odd]) is not None), values


@pytest.mark.parametrize(
    "change",
    [
        {"answer": np.str_("")},
        {"answer": ""},
        {"group_id": _Integer(3)},
        {"sample_index": True},
        {"reward": _Integer(1)},
    ],
)
def test_subclasses_of_plain_types_arrive_or_are_refused(change: dict[str, Any]) -> None:
    odd = _changed(**change)
    assert _accepted([odd]) == (_decoded([odd]) is not None)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (_completion(tokens=np.array([1, -2], "<i4")), "(3, 1): tokens: expected ids of at least 0, got -2"),
        (_changed(prompt_tokens=np.array([-1])), "(3, 1): tokens: expected ids of at least 0, got -1"),
        (_changed(prompt_tokens=np.array([1, 2, -3])), "(3, 1): tokens: expected ids of at least 0, got -3"),
        (_changed(prompt_tokens=np.array([2**32])), "prompt_tokens: expected integers of 32 bits, got 4294967296"),
        (_completion(versions=np.array([2, 1])), "(3, 1): version_runs: expected versions that only grow"),
        (_completion(versions=np.array([-2, 1])), "(3, 1): version_runs: expected versions of at least 0, got -2"),
        (_completion(behaviour_logprobs=np.array([0, 0.5])), "(3, 1): behaviour_logprobs: expected values"),
        (_completion(spans=(1,)), "(3, 1): spans: expected numbers above 0 that add up to 2 tokens, got (1,)"),
        (_changed(token_rewards=np.array([0, INFINITY])), "(3, 1): token_rewards: expected numbers up to"),
        (_changed(token_rewards=np.zeros((2, 1))), "token_rewards: expected shape [2], got [2, 1]"),
        (_changed(sample_index=-1), "(3, -1): sample_index: expected at least 0, got -1"),
        (_changed(group_id=2**70), "expected integers of 64 bits"),
    ],
)
def test_a_refused_trajectory_is_named_with_its_field(wrong: Trajectory, words: str) -> None:
    assert _decoded([VALID, wrong]) is None
    with pytest.raises(DecodeError) as caught:
        check_trajectories([VALID, wrong], LIMITS)
    assert words in str(caught.value)


def test_decreasing_versions_are_refused_and_not_rewritten() -> None:
    falling = _changed(completion=Completion(*(np.zeros(3, d) for d in ("i4", "f4")), np.array([3, 1, 3]), "stop"))
    assert _decoded([falling]) is None
    assert not _accepted([falling])


def test_wrong_lengths_of_two_trajectories_do_not_cancel_out() -> None:
    long, short = _completion(versions=np.zeros(3, "i4")), _completion(versions=np.zeros(1, "i4"))
    assert _decoded([long, short]) is None
    assert not _accepted([long, short])


def test_a_batch_that_is_too_large_or_too_long_is_refused() -> None:
    assert _accepted([VALID] * 3)
    assert _decoded([VALID] * 4) is None
    assert not _accepted([VALID] * 4)
    small = Limits(max_message_bytes=400)
    answer = _changed(answer="x" * 400)
    assert _accepted([VALID], small)
    assert _decoded([answer], small) is None
    assert not _accepted([answer], small)


class _ArrayOfALibrary:
    """Becomes an array of numpy, and has no other way to its values."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._values)


@pytest.mark.parametrize("kind", [_ArrayOfALibrary, list, tuple, np.array])
@pytest.mark.parametrize("versions", [[3, 3], [3, 4]])
def test_versions_that_the_check_allows_can_be_encoded(kind: Callable[[list[int]], Any], versions: list[int]) -> None:
    """An episode may be the user's code; an error while a message is encoded would end the worker."""
    numbers = np.array([1, 2], np.int32)
    completion = Completion(numbers, -np.ones(2, np.float32), kind(versions), "stop")
    given = Trajectory(1, 0, numbers, completion, 1.0)
    check_trajectories([given], LIMITS)
    (decoded,), _ = decode_columns(*encode_columns([given]), LIMITS)
    assert decoded.completion.versions.tolist() == versions


@pytest.mark.parametrize(("size", "sizes"), [(0, []), (4, [4]), (8, [8]), (9, [8, 1]), (24, [8, 8, 8])])
def test_the_columns_of_a_file_are_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int, sizes: list[int]) -> None:
    """msgpack cannot encode 4 GiB as a single value."""
    monkeypatch.setattr("areal_rloo.files._PIECE_BYTES", 8)
    columns = bytes(range(size))
    pieces = in_pieces(memoryview(columns))
    assert [len(piece) for piece in pieces] == sizes
    assert of_pieces(pieces) == columns
