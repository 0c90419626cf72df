"""A batch of trajectories as columns: four arrays for all of them together, and a few numbers for each.

    tokens        int32    prompt and completion of the first trajectory, then of the second, ...
    logprobs      float32  behaviour logprobs of the completions, one behind the other
    version_runs  int32    pairs: a policy version, and how many completion tokens in a row it made
    rewards       float32  rewards of single tokens, of the trajectories that have them

Checks are made once on a whole column, so that a trajectory costs a few microseconds however many checks there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from areal_rloo.errors import DecodeError
from areal_rloo.trajectory import Completion, FinishReason, Trajectory

Frame = bytes | memoryview
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_FINISH_REASONS = frozenset(get_args(FinishReason))
_LOGPROB_ROUNDING = 1e-3  # a logprob may exceed 0 by float32 rounding of a log-softmax, not by more
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may send: bytes in all frames of a message, trajectories in a batch, tokens in a trajectory."""

    max_message_bytes: int = 256 * 2**20
    max_trajectories: int = 4096
    max_tokens: int = 2**24


class TrajectoryHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A trajectory without its arrays; the counts say where those lie in the columns."""

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


def encode_columns(trajectories: Sequence[Trajectory]) -> tuple[tuple[TrajectoryHeader, ...], list[Frame]]:
    """Headers and columns of a batch; the columns of an empty one are empty."""
    headers = []
    tokens, logprobs, runs = [], [], []
    rewards = [np.zeros(0, dtype=_FLOAT32)]
    for trajectory in trajectories:
        completion = trajectory.completion
        version_runs = _version_runs(completion.versions)
        headers.append(
            TrajectoryHeader(
                trajectory.group_id,
                trajectory.sample_index,
                trajectory.reward,
                completion.finish_reason,
                len(trajectory.prompt_tokens),
                len(completion.tokens),
                len(version_runs) // 2,
                completion.spans,
                trajectory.reward_parts,
                trajectory.token_rewards is not None,
                trajectory.answer,
            )
        )
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


def decode_columns(
    headers: Sequence[TrajectoryHeader], frames: Sequence[Frame], limits: Limits
) -> tuple[Trajectory, ...]:
    """The trajectories, checked; tokens and logprobs are views of the frames.

    Raises:
        DecodeError: a column is of another size than the headers say, or holds a value that cannot be; names the
            trajectory and the field, what was expected and what came.
    """
    if len(headers) > limits.max_trajectories:
        raise DecodeError(f"trajectories: expected at most {limits.max_trajectories}, got {len(headers)}")
    if len(frames) != 4:
        raise DecodeError(f"trajectory_batch: expected 4 columns, got {len(frames)}")
    num_prompt, num_tokens, num_runs = (
        _counts(headers, name, limits) for name in ("num_prompt_tokens", "num_tokens", "num_version_runs")
    )
    tokens = _column(frames[0], _INT32, "tokens", int(num_prompt.sum() + num_tokens.sum()))
    logprobs = _column(frames[1], _FLOAT32, "behaviour_logprobs", int(num_tokens.sum()))
    runs = _column(frames[2], _INT32, "version_runs", 2 * int(num_runs.sum())).reshape(-1, 2)
    rewarded = np.array([header.num_tokens for header in headers if header.has_token_rewards], dtype=np.int64)
    rewards = _column(frames[3], _FLOAT32, "token_rewards", int(rewarded.sum()))
    if not headers:
        return ()
    if tokens.min() < 0:
        place = _owner(headers, tokens < 0, num_prompt + num_tokens)
        raise DecodeError(f"{place}: tokens: expected ids of at least 0, got {tokens.min()}")
    if not (logprobs.min() > -math.inf and logprobs.max() <= _LOGPROB_ROUNDING):  # NaN fails both
        wrong = ~((logprobs > -math.inf) & (logprobs <= _LOGPROB_ROUNDING))
        place = _owner(headers, wrong, num_tokens)
        raise DecodeError(
            f"{place}: behaviour_logprobs: expected finite values of at most 0, got {logprobs[wrong.argmax()]}"
        )
    if not np.isfinite(rewards).all():
        named = [header for header in headers if header.has_token_rewards]
        raise DecodeError(f"{_owner(named, ~np.isfinite(rewards), rewarded)}: token_rewards: expected finite numbers")
    return _cut(headers, tokens, logprobs, _versions(headers, runs, num_runs, num_tokens), rewards)


def _cut(
    headers: Sequence[TrajectoryHeader],
    tokens: Int32Array,
    logprobs: npt.NDArray[np.float32],
    versions: Int32Array,
    rewards: npt.NDArray[np.float32],
) -> tuple[Trajectory, ...]:
    """Slice the checked columns; check what stands in the headers."""
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


def _counts(headers: Sequence[TrajectoryHeader], field: str, limits: Limits) -> Int64Array:
    values = [getattr(header, field) for header in headers]
    for header, value in zip(headers, values, strict=True):
        if not 0 < value <= limits.max_tokens:
            raise DecodeError(f"{_name(header)}: {field}: expected 1 to {limits.max_tokens}, got {value}")
    return np.array(values, dtype=np.int64)


def _column(frame: Frame, dtype: np.dtype[Any], field: str, size: int) -> npt.NDArray[Any]:
    if len(frame) != size * dtype.itemsize:
        raise DecodeError(f"{field}: expected {size * dtype.itemsize} bytes, as the headers say, got {len(frame)}")
    return np.frombuffer(frame, dtype)


def _version_runs(versions: Int32Array) -> list[int]:
    """version, count, version, count, ... Versions never decrease, so equal ends mean one run."""
    num = len(versions)
    if num and versions[0] == versions[-1]:
        return [int(versions[0]), num]
    runs: list[int] = []
    start = 0
    while start < num:
        end = int(versions.searchsorted(versions[start], side="right"))
        runs += [int(versions[start]), end - start]
        start = end
    return runs


def _versions(
    headers: Sequence[TrajectoryHeader], runs: Int32Array, num_runs: Int64Array, num_tokens: Int64Array
) -> Int32Array:
    """A version for each completion token of the batch."""
    version, count = runs[:, 0], runs[:, 1].astype(np.int64)
    if count.min() <= 0:
        place = _owner(headers, count <= 0, num_runs)
        raise DecodeError(f"{place}: version_runs: expected counts above 0, got {count.min()}")
    if version.min() < 0:
        place = _owner(headers, version < 0, num_runs)
        raise DecodeError(f"{place}: version_runs: expected versions of at least 0, got {version.min()}")
    first = num_runs.cumsum() - num_runs
    shrinks = np.diff(version, prepend=-1) <= 0
    shrinks[first] = False
    if shrinks.any():
        raise DecodeError(f"{_owner(headers, shrinks, num_runs)}: version_runs: expected versions that only grow")
    total = np.add.reduceat(count, first)
    if (total != num_tokens).any():
        at = int((total != num_tokens).argmax())
        raise DecodeError(
            f"{_name(headers[at])}: version_runs: expected counts for {num_tokens[at]} tokens, got {total[at]}"
        )
    return np.repeat(version, count)


def _owner(headers: Sequence[TrajectoryHeader], wrong: npt.NDArray[np.bool_], sizes: Int64Array) -> str:
    """The trajectory whose part of a column holds the first wrong value."""
    return _name(headers[int(sizes.cumsum().searchsorted(wrong.argmax(), side="right"))])


def _name(header: TrajectoryHeader) -> str:
    return f"trajectory ({header.group_id}, {header.sample_index})"
