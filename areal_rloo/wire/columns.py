"""A batch of trajectories as columns: four arrays for the whole batch, end to end, and a small header for each.

    tokens        int32    prompt and completion of the first trajectory, then of the second, ...; of a prompt that
                           equals the one before, as in a group, nothing
    logprobs      float32  behaviour logprobs of the completions, one after the other
    version_runs  int32    pairs: a policy version, and how many completion tokens in a row it sampled
    rewards       float32  rewards of single tokens, for the trajectories that have them

The rules of a valid trajectory are the `_check_*` functions here and those of `token_rules.py`, each written once.
`decode_columns` applies them to the batch of a peer, most of them to a whole column, so a trajectory costs a few
microseconds. `check_trajectories` applies them to trajectories that are not encoded: a rollout worker calls it, because
an episode may be the user's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from areal_rloo.decoding import from_msgpack
from areal_rloo.errors import DecodeError, shown
from areal_rloo.trajectory import MOST_REWARD, Completion, FinishReason, Trajectory, is_reward
from areal_rloo.wire import token_rules as rules

Frame = bytes | memoryview
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

_FINISH_REASONS = frozenset(get_args(FinishReason))
_MESSAGE_BYTES = 256  # upper bound: a message without the headers and columns
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_NO_REWARDS = np.zeros(0, dtype=_FLOAT32)
_ITEM_BYTES = 4  # of each number

MOST_TRAJECTORIES, MOST_TOKENS = 4096, 2**24
MOST_RUNS = 2**12  # of a version, in a trajectory: more policy versions than any sample lives through
_MOST_SPANS = 2**13  # of a trajectory: 4096 turns


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a message: bytes in all frames, trajectories in a batch, tokens in a trajectory."""

    max_message_bytes: int = 256 * 2**20
    max_trajectories: int = MOST_TRAJECTORIES
    max_tokens: int = MOST_TOKENS


RewardParts = Annotated[dict[Annotated[str, Meta(max_length=200)], float], Meta(max_length=100)]


class TrajectoryHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A trajectory without its arrays; the counts locate the arrays in the columns."""

    group_id: int
    sample_index: int
    reward: float
    finish_reason: Annotated[str, Meta(max_length=20)]
    num_prompt_tokens: int  # in the columns; 0: the prompt of the trajectory before
    num_tokens: int
    num_version_runs: int
    spans: Annotated[tuple[int, ...], Meta(max_length=_MOST_SPANS)] = ()
    reward_parts: RewardParts = {}
    has_token_rewards: bool = False
    answer: Annotated[str, Meta(max_length=100_000)] | None = None


Headers = Sequence[TrajectoryHeader]


class Extremes(NamedTuple):
    """Extreme values of a batch, for rules that the codec does not know; -1 for an empty batch."""

    highest_token: int = -1
    lowest_version: int = -1
    highest_version: int = -1
    most_tokens: int = -1  # of a trajectory, with the prompt
    num_tokens: int = 0  # of all trajectories, each with the prompt
    has_spans: bool = False
    has_even_spans: bool = False  # an even number of spans: the last tokens are not the policy's


_header_encoder = msgspec.msgpack.Encoder()


def encode_columns(trajectories: Sequence[Trajectory]) -> tuple[tuple[TrajectoryHeader, ...], Frame]:
    """Encode a checked batch as headers and the bytes of the columns."""
    headers = []
    tokens, logprobs = [], []
    runs: list[int] = []
    rewards = [_NO_REWARDS]
    prompt: Int32Array | None = None
    for trajectory in trajectories:
        completion = trajectory.completion
        runs_here = rules.runs_of_checked(completion.versions)
        before, prompt = prompt, trajectory.prompt_tokens
        repeats = before is not None and (prompt is before or np.array_equal(prompt, before))
        headers.append(_header(trajectory, runs_here, 0 if repeats else len(prompt)))
        tokens += [completion.tokens] if repeats else [prompt, completion.tokens]
        logprobs.append(completion.behaviour_logprobs)
        runs += chain.from_iterable(runs_here)
        if trajectory.token_rewards is not None:
            rewards.append(trajectory.token_rewards)
    if not headers:
        return (), b""
    return tuple(headers), _joined(tokens, logprobs, runs, rewards).data.cast("B")


def _joined(
    tokens: list[Int32Array], logprobs: list[Float32Array], runs: list[int], rewards: list[Float32Array]
) -> Int32Array:
    """Write the columns into the same array, each part once."""
    at_logprobs = sum(map(len, tokens))
    at_runs = at_logprobs + sum(map(len, logprobs))
    at_rewards = at_runs + len(runs)
    columns = np.empty(at_rewards + sum(map(len, rewards)), _INT32)
    floats = columns.view(_FLOAT32)
    np.concatenate(tokens, out=columns[:at_logprobs])
    np.concatenate(logprobs, out=floats[at_logprobs:at_runs])
    columns[at_runs:at_rewards] = runs
    np.concatenate(rewards, out=floats[at_rewards:])
    return columns


def decode_columns(headers: Headers, columns: Frame, limits: Limits) -> tuple[tuple[Trajectory, ...], Extremes]:
    """Decode and check a batch; tokens and logprobs are views of the columns, and equal prompts are the same view.

    Raises:
        DecodeError: the columns have another size than the headers say, or a value breaks a rule; names the trajectory
            and the field, the expected and the actual value.
    """
    _check_num_trajectories(len(headers), limits)
    for number, header in enumerate(headers):
        _check_header(header, limits, may_repeat=number > 0)
    num_tokens, num_runs = [each.num_tokens for each in headers], [each.num_version_runs for each in headers]
    sizes = [header.num_prompt_tokens + header.num_tokens for header in headers]
    rewarded = [header for header in headers if header.has_token_rewards]
    num_rewards = [header.num_tokens for header in rewarded]
    at_logprobs = sum(sizes)
    at_runs = at_logprobs + sum(num_tokens)
    at_rewards = at_runs + 2 * sum(num_runs)
    num_bytes = _ITEM_BYTES * (at_rewards + sum(num_rewards))
    if len(columns) != num_bytes:
        raise DecodeError(f"columns: expected {num_bytes} bytes, as the headers say, got {len(columns)}")
    if not headers:
        return (), Extremes()
    integers, floats = np.frombuffer(columns, _INT32), np.frombuffer(columns, _FLOAT32)
    tokens, logprobs, rewards = integers[:at_logprobs], floats[at_logprobs:at_runs], floats[at_rewards:]
    runs = integers[at_runs:at_rewards].reshape(-1, 2)
    highest = _check_tokens(tokens, headers, sizes)
    _check_logprobs(logprobs, headers, num_tokens)
    _check_token_rewards(rewards, rewarded, num_rewards)
    _check_version_runs(runs, headers, num_runs, num_tokens)
    num_spans = [len(header.spans) for header in headers if header.spans]
    trajectories = _cut(headers, tokens, logprobs, runs[:, 0].repeat(runs[:, 1]), rewards)
    sizes = [trajectory.num_tokens for trajectory in trajectories]
    lowest, newest = int(runs[:, 0].min()), int(runs[:, 0].max())
    has_even = any(num % 2 == 0 for num in num_spans)
    return trajectories, Extremes(highest, lowest, newest, max(sizes), sum(sizes), bool(num_spans), has_even)


def _cut(
    headers: Headers, tokens: Int32Array, logprobs: Float32Array, versions: Int32Array, rewards: Float32Array
) -> tuple[Trajectory, ...]:
    """Slice the checked columns."""
    trajectories = []
    at_token = at = at_reward = 0
    prompt = tokens[:0]
    for header in headers:
        at_completion, end = at_token + header.num_prompt_tokens, at + header.num_tokens
        completion = Completion(
            tokens[at_completion : at_completion + header.num_tokens],
            logprobs[at:end],
            versions[at:end],
            header.finish_reason,  # type: ignore[arg-type]
            header.spans,
        )
        if header.num_prompt_tokens:
            prompt = tokens[at_token:at_completion]
        of_tokens = None
        if header.has_token_rewards:
            of_tokens = rewards[at_reward : at_reward + header.num_tokens]
            at_reward += header.num_tokens
        trajectories.append(
            Trajectory(
                header.group_id,
                header.sample_index,
                prompt,
                completion,
                header.reward,
                header.reward_parts,
                of_tokens,
                header.answer,
            )
        )
        at_token, at = at_completion + header.num_tokens, end
    return tuple(trajectories)


def check_trajectories(trajectories: Sequence[Trajectory], limits: Limits) -> int:
    """Refuse every batch that would not arrive at the learner as it is, without encoding the arrays.

    Returns an upper bound of the size of a message with the batch, in bytes.

    Raises:
        DecodeError: names the trajectory and the field, the expected and the actual value.
    """
    _check_num_trajectories(len(trajectories), limits)
    num_bytes = _MESSAGE_BYTES
    for trajectory in trajectories:
        completion = trajectory.completion
        try:
            num = len(completion.tokens)
            prompt = rules.vector("prompt_tokens", trajectory.prompt_tokens, _INT32, len(trajectory.prompt_tokens))
            tokens = rules.vector("tokens", completion.tokens, _INT32, num)
            logprobs = rules.vector("behaviour_logprobs", completion.behaviour_logprobs, _FLOAT32, num)
            runs = rules.version_runs(rules.vector("versions", completion.versions, _INT32, num))
            rewards = _NO_REWARDS
            if trajectory.token_rewards is not None:
                rewards = rules.vector("token_rewards", trajectory.token_rewards, _FLOAT32, num)
            encoded = _header_encoder.encode(_header(trajectory, runs, len(prompt)))
            header = from_msgpack(encoded, TrajectoryHeader)  # checks the types
        except OverflowError as error:
            raise DecodeError(f"trajectory {trajectory.sample_id}: expected integers of 64 bits: {error}") from error
        except (DecodeError, TypeError, ValueError, AttributeError) as error:
            raise DecodeError(f"trajectory {trajectory.sample_id}: {error}") from error
        _check_header(header, limits, may_repeat=False)
        _check_version_runs(np.array(runs, _INT32), [header], [len(runs)], [num])
        _check_tokens(prompt, [header], [len(prompt)])
        _check_tokens(tokens, [header], [num])
        _check_logprobs(logprobs, [header], [num])
        _check_token_rewards(rewards, [header], [num])
        num_bytes += len(encoded) + 4 * (len(prompt) + 2 * num + 2 * len(runs) + len(rewards))
    if num_bytes > limits.max_message_bytes:
        raise DecodeError(f"message: expected at most {limits.max_message_bytes} bytes, got {num_bytes}")
    return num_bytes


def _header(trajectory: Trajectory, runs: Sequence[tuple[int, int]], num_prompt_tokens: int) -> TrajectoryHeader:
    completion = trajectory.completion
    return TrajectoryHeader(
        trajectory.group_id,
        trajectory.sample_index,
        trajectory.reward,
        completion.finish_reason,
        num_prompt_tokens,
        len(completion.tokens),
        len(runs),
        completion.spans,
        trajectory.reward_parts,
        trajectory.token_rewards is not None,
        trajectory.answer,
    )


# The rules. `sizes`: the length of each trajectory's part of a column.


def _check_num_trajectories(num: int, limits: Limits) -> None:
    if num > limits.max_trajectories:
        raise DecodeError(f"trajectories: expected at most {limits.max_trajectories}, got {num}")


def _check_tokens(tokens: Int32Array, headers: Headers, sizes: list[int]) -> int:
    """Return the highest id."""
    highest = rules.highest_token(tokens)
    if isinstance(highest, rules.Broken):
        raise _refused(highest, tokens, headers, sizes)
    return highest


def _check_logprobs(logprobs: Float32Array, headers: Headers, sizes: list[int]) -> None:
    if (broken := rules.broken_by_logprobs(logprobs)) is not None:
        raise _refused(broken, logprobs, headers, sizes)


def _check_token_rewards(rewards: Float32Array, headers: Headers, sizes: list[int]) -> None:
    if len(rewards) and not np.abs(rewards).max() <= MOST_REWARD:  # NaN, too
        wrong = ~(np.abs(rewards) <= MOST_REWARD)
        broken = rules.Broken(f"token_rewards: expected numbers up to {MOST_REWARD:g} in size", wrong)
        raise _refused(broken, rewards, headers, sizes)


def _refused(broken: rules.Broken, values: npt.NDArray[Any], headers: Headers, sizes: list[int]) -> DecodeError:
    """Name the rule, the first wrong value of a column, and its trajectory."""
    header = headers[int(np.cumsum(sizes).searchsorted(int(broken.wrong.argmax()), side="right"))]
    return DecodeError(f"{_name(header)}: {rules.first_wrong(broken, values)}")


def _check_version_runs(runs: Int32Array, headers: Headers, num_runs: list[int], num_tokens: list[int]) -> None:
    if (broken := rules.broken_by_version_runs(runs, num_runs, num_tokens)) is not None:
        raise DecodeError(f"{_name(headers[broken[0]])}: {broken[1]}")


def _check_header(header: TrajectoryHeader, limits: Limits, *, may_repeat: bool) -> None:
    for field, least, most in (
        ("num_prompt_tokens", int(not may_repeat), limits.max_tokens),
        ("num_tokens", 1, limits.max_tokens),
        ("num_version_runs", 1, min(limits.max_tokens, MOST_RUNS)),
    ):
        if not least <= (num := getattr(header, field)) <= most:
            raise DecodeError(f"{_name(header)}: {field}: expected {least} to {most}, got {num}")
    if not is_reward(header.reward):
        raise DecodeError(
            f"{_name(header)}: reward: expected a number up to {MOST_REWARD:g} in size, got {header.reward}"
        )
    for label, value in header.reward_parts.items():
        if not is_reward(value):
            expected = f"expected numbers up to {MOST_REWARD:g} in size"
            raise DecodeError(f"{_name(header)}: reward_parts: {expected}, got {label} {value}")
    if header.finish_reason not in _FINISH_REASONS:
        expected = ", ".join(sorted(_FINISH_REASONS))
        raise DecodeError(f"{_name(header)}: finish_reason: expected {expected}, got {header.finish_reason!r}")
    if header.sample_index < 0:
        raise DecodeError(f"{_name(header)}: sample_index: expected at least 0, got {header.sample_index}")
    if header.spans and (min(header.spans) <= 0 or sum(header.spans) != header.num_tokens):
        raise DecodeError(
            f"{_name(header)}: spans: expected numbers above 0 that add up to {header.num_tokens} tokens, got "
            f"{shown(header.spans)}"
        )


def _name(header: TrajectoryHeader) -> str:
    return f"trajectory ({header.group_id}, {header.sample_index})"
