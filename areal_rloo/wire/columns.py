"""A batch of trajectories as columns: four arrays for the whole batch, and a small header for each trajectory.

    tokens        int32    prompt and completion of the first trajectory, then of the second, ...
    logprobs      float32  behaviour logprobs of the completions, one after the other
    version_runs  int32    pairs: a policy version, and how many completion tokens in a row it sampled
    rewards       float32  rewards of single tokens, for the trajectories that have them

The rules of a valid trajectory are the `_check_*` functions here, each written once. `decode_columns` applies each rule
to a whole column, so a trajectory costs a few microseconds. `check_trajectories` applies the same rules to trajectories
that are not encoded: a rollout worker calls it, because an episode may be the user's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from areal_rloo.errors import DecodeError
from areal_rloo.trajectory import Completion, FinishReason, Trajectory

Frame = bytes | memoryview
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Where = Callable[[npt.NDArray[np.bool_]], str]
"""Names the trajectory of the first True of a mask."""

_FINISH_REASONS = frozenset(get_args(FinishReason))
_LOGPROB_ROUNDING = 1e-3  # a logprob may exceed 0 by the float32 rounding of a log-softmax
_HEADER_BYTES, _FIELD_BYTES = 128, 9  # upper bounds: a header and the message around it; one field in msgpack
_COUNTED = ("num_prompt_tokens", "num_tokens", "num_version_runs")
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a message: bytes in all frames, trajectories in a batch, tokens in a trajectory."""

    max_message_bytes: int = 256 * 2**20
    max_trajectories: int = 4096
    max_tokens: int = 2**24


class TrajectoryHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A trajectory without its arrays; the counts locate the arrays in the columns."""

    group_id: int
    sample_index: int
    reward: float
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    num_version_runs: int
    spans: tuple[int, ...] = ()
    reward_parts: dict[str, float] = {}
    has_token_rewards: bool = False
    answer: str | None = None


class _Arrays(NamedTuple):
    """The arrays of one trajectory with the dtypes of the wire."""

    prompt_tokens: Int32Array
    tokens: Int32Array
    logprobs: npt.NDArray[np.float32]
    version_runs: list[int]
    token_rewards: npt.NDArray[np.float32] | None


def encode_columns(trajectories: Sequence[Trajectory]) -> tuple[tuple[TrajectoryHeader, ...], list[Frame]]:
    """Encode a checked batch as headers and columns; the columns of an empty batch are empty."""
    headers = []
    tokens, logprobs = [], []
    runs: list[int] = []
    rewards = [np.zeros(0, dtype=_FLOAT32)]
    for trajectory in trajectories:
        completion = trajectory.completion
        version_runs = _version_runs(completion.versions)
        headers.append(_header(trajectory, len(version_runs) // 2))
        if trajectory.token_rewards is not None:
            rewards.append(trajectory.token_rewards)
        tokens += [trajectory.prompt_tokens, completion.tokens]
        logprobs.append(completion.behaviour_logprobs)
        runs += version_runs
    if not headers:
        return (), [b"", b"", b"", b""]
    columns = (
        np.concatenate(tokens, dtype=_INT32),
        np.concatenate(logprobs, dtype=_FLOAT32),
        np.array(runs, dtype=_INT32),
        np.concatenate(rewards, dtype=_FLOAT32),
    )
    return tuple(headers), [column.data.cast("B") for column in columns]


def check_trajectories(trajectories: Sequence[Trajectory], limits: Limits) -> None:
    """Refuse every batch that would not arrive at the learner as it is, without encoding the batch.

    Raises:
        DecodeError: names the trajectory and the field, the expected and the actual value.
    """
    _check_num_trajectories(len(trajectories), limits)
    num_bytes = 0
    for trajectory in trajectories:
        try:
            arrays = _arrays(trajectory)
            header = _header(trajectory, len(arrays.version_runs) // 2)
            num_bytes += _encoded_bytes(header)
            header = msgspec.convert(msgspec.structs.astuple(header), TrajectoryHeader)  # checks the types
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DecodeError(str(error)) from error
        _check_arrays(header, arrays, limits)
        _check_header(header)
    if num_bytes > limits.max_message_bytes:
        raise DecodeError(f"message: expected at most {limits.max_message_bytes} bytes, got {num_bytes}")


def _arrays(trajectory: Trajectory) -> _Arrays:
    completion, rewards = trajectory.completion, trajectory.token_rewards
    num = len(completion.tokens)
    return _Arrays(
        _vector("prompt_tokens", trajectory.prompt_tokens, _INT32, len(trajectory.prompt_tokens)),
        _vector("tokens", completion.tokens, _INT32, num),
        _vector("behaviour_logprobs", completion.behaviour_logprobs, _FLOAT32, num),
        _version_runs(_vector("versions", completion.versions, _INT32, num)),
        None if rewards is None else _vector("token_rewards", rewards, _FLOAT32, num),
    )


def _vector(field: str, values: npt.ArrayLike, dtype: np.dtype[Any], num: int) -> npt.NDArray[Any]:
    """Return values as an array of shape [num] with this dtype.

    Raises:
        TypeError, ValueError: the values have another kind or shape, or an integer does not fit.
    """
    array = np.asarray(values)
    if array.shape != (num,):
        raise ValueError(f"{field}: expected shape [{num}], got {list(array.shape)}")
    if array.dtype is dtype or array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):  # becomes an infinity, which the rules refuse
        converted = array.astype(dtype, casting="same_kind")
    if dtype == _INT32 and (converted != array).any():
        raise ValueError(f"{field}: expected integers of 32 bits, got {array[(converted != array).argmax()]}")
    return converted


def _header(trajectory: Trajectory, num_version_runs: int) -> TrajectoryHeader:
    completion = trajectory.completion
    return TrajectoryHeader(
        trajectory.group_id,
        trajectory.sample_index,
        trajectory.reward,
        completion.finish_reason,
        len(trajectory.prompt_tokens),
        len(completion.tokens),
        num_version_runs,
        completion.spans,
        trajectory.reward_parts,
        trajectory.token_rewards is not None,
        trajectory.answer,
    )


def _encoded_bytes(header: TrajectoryHeader) -> int:
    """Return the size of a trajectory in bytes, with an upper bound for the header.

    Raises:
        TypeError, OverflowError, UnicodeEncodeError: msgpack cannot encode a text or a number.
    """
    texts = [header.finish_reason, *header.reward_parts, header.answer or ""]
    for text in texts:
        if type(text) is not str:  # msgpack encodes no subclass, such as numpy's
            raise TypeError(f"{_name(header)}: expected texts of type str, got {type(text).__name__}")
    for number in (header.group_id, header.sample_index, header.reward, *header.reward_parts.values()):
        if isinstance(number, int) and not -(2**63) <= number < 2**64:
            raise OverflowError(f"{_name(header)}: expected integers of 64 bits, got {number}")
    num_header = _HEADER_BYTES + _FIELD_BYTES * (len(header.spans) + 2 * len(header.reward_parts))
    num_values = header.num_prompt_tokens + header.num_tokens * (3 if header.has_token_rewards else 2)
    num_values += 2 * header.num_version_runs
    return num_header + sum(len(text.encode()) for text in texts) + 4 * num_values


def _check_arrays(header: TrajectoryHeader, arrays: _Arrays, limits: Limits) -> None:
    """Apply the rules of the columns to the arrays of one trajectory."""

    def where(wrong: npt.NDArray[np.bool_]) -> str:
        return _name(header)

    for field in _COUNTED:
        _check_count(header, field, limits)
    _check_tokens(arrays.prompt_tokens, where)
    _check_tokens(arrays.tokens, where)
    _check_logprobs(arrays.logprobs, where)
    if arrays.token_rewards is not None:
        _check_token_rewards(arrays.token_rewards, where)
    runs = np.array(arrays.version_runs, dtype=_INT32).reshape(-1, 2)
    _check_version_runs(runs, np.zeros(1, dtype=np.int64), where)


def decode_columns(
    headers: Sequence[TrajectoryHeader], frames: Sequence[Frame], limits: Limits
) -> tuple[Trajectory, ...]:
    """Decode and check a batch; tokens and logprobs are views of the frames.

    Raises:
        DecodeError: a column has another size than the headers say, or a value breaks a rule; names the trajectory and
            the field, the expected and the actual value.
    """
    _check_num_trajectories(len(headers), limits)
    if len(frames) != 4:
        raise DecodeError(f"trajectory_batch: expected 4 columns, got {len(frames)}")
    num_prompt, num_tokens, num_runs = (
        np.array([_check_count(header, field, limits) for header in headers], dtype=np.int64) for field in _COUNTED
    )
    tokens = _column(frames[0], _INT32, "tokens", int(num_prompt.sum() + num_tokens.sum()))
    logprobs = _column(frames[1], _FLOAT32, "behaviour_logprobs", int(num_tokens.sum()))
    runs = _column(frames[2], _INT32, "version_runs", 2 * int(num_runs.sum())).reshape(-1, 2)
    rewarded = [header for header in headers if header.has_token_rewards]
    num_rewards = np.array([header.num_tokens for header in rewarded], dtype=np.int64)
    rewards = _column(frames[3], _FLOAT32, "token_rewards", int(num_rewards.sum()))
    if not headers:
        return ()
    _check_tokens(tokens, partial(_owner, headers, num_prompt + num_tokens))
    _check_logprobs(logprobs, partial(_owner, headers, num_tokens))
    _check_token_rewards(rewards, partial(_owner, rewarded, num_rewards))
    first_runs = num_runs.cumsum() - num_runs
    _check_version_runs(runs, first_runs, partial(_owner, headers, num_runs))
    versions = _versions(headers, runs, first_runs, num_tokens)
    return _cut(headers, tokens, logprobs, versions, rewards)


def _cut(
    headers: Sequence[TrajectoryHeader],
    tokens: Int32Array,
    logprobs: npt.NDArray[np.float32],
    versions: Int32Array,
    rewards: npt.NDArray[np.float32],
) -> tuple[Trajectory, ...]:
    """Slice the checked columns; check the headers."""
    trajectories = []
    at_token = at = at_reward = 0
    for header in headers:
        _check_header(header)
        start, at_completion = at, at_token + header.num_prompt_tokens
        at += header.num_tokens
        completion = Completion(
            tokens[at_completion : at_completion + header.num_tokens],
            logprobs[start:at],
            versions[start:at],
            header.finish_reason,  # type: ignore[arg-type]
            header.spans,
        )
        of_tokens = None
        if header.has_token_rewards:
            of_tokens = rewards[at_reward : at_reward + header.num_tokens]
            at_reward += header.num_tokens
        trajectories.append(
            Trajectory(
                header.group_id,
                header.sample_index,
                tokens[at_token:at_completion],
                completion,
                header.reward,
                header.reward_parts,
                of_tokens,
                header.answer,
            )
        )
        at_token = at_completion + header.num_tokens
    return tuple(trajectories)


def _check_num_trajectories(num: int, limits: Limits) -> None:
    if num > limits.max_trajectories:
        raise DecodeError(f"trajectories: expected at most {limits.max_trajectories}, got {num}")


def _check_tokens(tokens: Int32Array, where: Where) -> None:
    if tokens.min() < 0:
        raise DecodeError(f"{where(tokens < 0)}: tokens: expected ids of at least 0, got {tokens.min()}")


def _check_logprobs(logprobs: npt.NDArray[np.float32], where: Where) -> None:
    if not (logprobs.min() > -math.inf and logprobs.max() <= _LOGPROB_ROUNDING):  # NaN fails both
        wrong = ~((logprobs > -math.inf) & (logprobs <= _LOGPROB_ROUNDING))
        raise DecodeError(
            f"{where(wrong)}: behaviour_logprobs: expected finite values of at most 0, got {logprobs[wrong.argmax()]}"
        )


def _check_token_rewards(rewards: npt.NDArray[np.float32], where: Where) -> None:
    wrong = ~np.isfinite(rewards)
    if wrong.any():
        raise DecodeError(f"{where(wrong)}: token_rewards: expected finite numbers")


def _check_version_runs(runs: Int32Array, first_runs: Int64Array, where: Where) -> None:
    """Check runs of shape [num_runs, 2]; `first_runs`: index of the first run of each trajectory."""
    version, count = runs[:, 0], runs[:, 1]
    if count.min() <= 0:
        raise DecodeError(f"{where(count <= 0)}: version_runs: expected counts above 0, got {count.min()}")
    if version.min() < 0:
        raise DecodeError(f"{where(version < 0)}: version_runs: expected versions of at least 0, got {version.min()}")
    shrinks = np.empty(len(version), dtype=np.bool_)
    shrinks[1:] = version[1:] <= version[:-1]
    shrinks[first_runs] = False
    if shrinks.any():
        raise DecodeError(f"{where(shrinks)}: version_runs: expected versions that only grow")


def _check_header(header: TrajectoryHeader) -> None:
    if not math.isfinite(header.reward):
        raise DecodeError(f"{_name(header)}: reward: expected a finite number, got {header.reward}")
    for label, value in header.reward_parts.items():
        if not math.isfinite(value):
            raise DecodeError(f"{_name(header)}: reward_parts: expected finite numbers, got {label} {value}")
    if header.finish_reason not in _FINISH_REASONS:
        expected = ", ".join(sorted(_FINISH_REASONS))
        raise DecodeError(f"{_name(header)}: finish_reason: expected {expected}, got {header.finish_reason!r}")
    if header.sample_index < 0:
        raise DecodeError(f"{_name(header)}: sample_index: expected at least 0, got {header.sample_index}")
    if header.spans and (min(header.spans) <= 0 or sum(header.spans) != header.num_tokens):
        raise DecodeError(
            f"{_name(header)}: spans: expected numbers above 0 that add up to {header.num_tokens} tokens, got "
            f"{header.spans}"
        )


def _check_count(header: TrajectoryHeader, field: str, limits: Limits) -> int:
    value: int = getattr(header, field)
    if not 0 < value <= limits.max_tokens:
        raise DecodeError(f"{_name(header)}: {field}: expected 1 to {limits.max_tokens}, got {value}")
    return value


def _column(frame: Frame, dtype: np.dtype[Any], field: str, size: int) -> npt.NDArray[Any]:
    if len(frame) != size * dtype.itemsize:
        raise DecodeError(f"{field}: expected {size * dtype.itemsize} bytes, as the headers say, got {len(frame)}")
    return np.frombuffer(frame, dtype)


def _version_runs(versions: Int32Array) -> list[int]:
    """Return version, count, version, count, ... of the runs of equal versions."""
    if not len(versions):
        return []
    changes = (versions[1:] != versions[:-1]).nonzero()[0]
    if not len(changes):
        return [int(versions[0]), len(versions)]
    runs: list[int] = []
    starts = [0, *(changes + 1).tolist()]
    for start, end in pairwise([*starts, len(versions)]):
        runs += (int(versions[start]), end - start)
    return runs


def _versions(
    headers: Sequence[TrajectoryHeader], runs: Int32Array, first_runs: Int64Array, num_tokens: Int64Array
) -> Int32Array:
    """Return a version for each completion token of the batch."""
    count = runs[:, 1].astype(np.int64)
    total = np.add.reduceat(count, first_runs)
    if (total != num_tokens).any():
        at = int((total != num_tokens).argmax())
        raise DecodeError(
            f"{_name(headers[at])}: version_runs: expected counts for {num_tokens[at]} tokens, got {total[at]}"
        )
    return np.repeat(runs[:, 0], count)


def _owner(headers: Sequence[TrajectoryHeader], sizes: Int64Array, wrong: npt.NDArray[np.bool_]) -> str:
    """Name the trajectory whose part of a column holds the first wrong value; `sizes`: length of each part."""
    return _name(headers[int(sizes.cumsum().searchsorted(wrong.argmax(), side="right"))])


def _name(header: TrajectoryHeader) -> str:
    return f"trajectory ({header.group_id}, {header.sample_index})"
