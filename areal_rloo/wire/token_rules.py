"""The rules for sampled tokens, each written once: for trajectories on the wire, partial rollouts, and checkpoints.

`columns.py` applies them to whole batches, and `turns.py` to the turns of a partial rollout. So a worker can send all
tokens of a partial rollout again. At the end of this file: the values of an episode as arrays, and versions as runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_HIGHEST_INT32 = 2**31 - 1
_LOGPROB_ROUNDING = 1e-3  # a logprob may exceed 0 by the float32 rounding of a log-softmax
_LEAST_LOGPROB = -1e6  # no token of a lower probability is ever sampled, and sums stay finite in float32


class Broken(NamedTuple):
    """A rule, and which values break the rule."""

    rule: str
    wrong: npt.NDArray[np.bool_]


def highest_token(tokens: npt.NDArray[np.int32]) -> int | Broken:
    """Return the highest id, -1 without tokens; or a broken rule. A single pass: a batch has many tokens."""
    unsigned = tokens.view(np.uint32)  # a negative id is higher than all others
    highest = int(np.maximum.reduce(unsigned)) if len(tokens) else -1
    return highest if highest <= _HIGHEST_INT32 else Broken("tokens: expected ids of at least 0", tokens < 0)


def broken_by_logprobs(logprobs: npt.NDArray[np.float32]) -> Broken | None:
    """Find a broken rule of behaviour logprobs; None if they keep all."""
    if not len(logprobs):
        return None
    if np.minimum.reduce(logprobs) >= _LEAST_LOGPROB and np.maximum.reduce(logprobs) <= _LOGPROB_ROUNDING:
        return None
    wrong = ~((logprobs >= _LEAST_LOGPROB) & (logprobs <= _LOGPROB_ROUNDING))  # NaN, too
    return Broken(f"behaviour_logprobs: expected values from {_LEAST_LOGPROB:g} to 0", wrong)


def check_version_runs(runs: Iterable[Sequence[int]], num_tokens: int) -> None:
    """Check pairs of a version, and how many tokens in a row the version sampled.

    Raises:
        ValueError: names the rule, the expected and the actual value.
    """
    total, before = 0, -1
    for version, count in runs:
        if count <= 0:
            raise ValueError(f"version_runs: expected counts above 0, got {count}")
        if version < 0:
            raise ValueError(f"version_runs: expected versions of at least 0, got {version}")
        if version <= before:
            raise ValueError("version_runs: expected versions that only grow")
        total, before = total + count, version
    if total != num_tokens:
        raise ValueError(f"version_runs: expected counts for {num_tokens} tokens, got {total}")


def broken_by_version_runs(
    runs: npt.NDArray[np.int32], num_runs: list[int], num_tokens: list[int]
) -> tuple[int, str] | None:
    """Find the first trajectory whose runs `check_version_runs` refuses, and why; None if there is none.

    Args:
        runs: shape [n, 2], those of a trajectory after those of the last. A message can have a run for each token.
        num_runs: of each trajectory, at least 1.
        num_tokens: of each trajectory, at least 1.
    """
    versions, counts = runs[:, 0], runs[:, 1]
    if len(runs) == len(num_runs) and counts.tolist() == num_tokens and versions.min() >= 0:
        return None  # a single version sampled each trajectory, as in most messages
    starts = np.cumsum([0, *num_runs[:-1]])
    is_wrong = (versions < 0) | (counts <= 0)
    falls = versions[1:] <= versions[:-1]
    falls[starts[1:] - 1] = False  # from trajectory to trajectory
    is_wrong[1:] |= falls
    is_wrong = np.logical_or.reduceat(is_wrong, starts)
    is_wrong |= np.add.reduceat(counts, starts, dtype=np.int64) != num_tokens
    if not is_wrong.any():
        return None
    number = int(is_wrong.argmax())
    try:
        check_version_runs(runs[starts[number] :][: num_runs[number]].tolist(), num_tokens[number])
    except ValueError as error:
        return number, str(error)
    raise AssertionError("both checks have the same rules")


def first_wrong(broken: Broken, values: npt.NDArray[Any]) -> str:
    """Name the rule and the first wrong value."""
    return f"{broken.rule}, got {values[int(broken.wrong.argmax())]}"


def version_runs(versions: npt.ArrayLike) -> list[tuple[int, int]]:
    """Return version and count of each run of equal versions."""
    versions = np.asarray(versions)
    if not len(versions):
        return []
    last_of_runs = (versions[1:] != versions[:-1]).nonzero()[0].tolist()
    runs, start = [], 0
    for last in (*last_of_runs, len(versions) - 1):
        runs.append((int(versions[last]), last + 1 - start))
        start = last + 1
    return runs


def runs_of_checked(versions: npt.ArrayLike) -> list[tuple[int, int]]:
    """Return the runs of versions without a decrease: a single one if the last is the first."""
    versions = np.asarray(versions)  # an episode may give any array
    if len(versions) and versions[0] == versions[-1]:
        return [(int(versions[0]), len(versions))]
    return version_runs(versions)


def vector(field: str, values: npt.ArrayLike, dtype: np.dtype[Any], num: int) -> npt.NDArray[Any]:
    """Return values as an array of shape [num] with this dtype.

    Raises:
        TypeError, ValueError: the values have another kind or shape, or an integer does not fit.
    """
    array = np.asarray(values)
    if array.shape != (num,):
        raise ValueError(f"{field}: expected shape [{num}], got {list(array.shape)}")
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):  # becomes an infinity, which the rules refuse
        converted = array.astype(dtype, casting="same_kind")
    if dtype == np.int32 and (converted != array).any():
        raise ValueError(f"{field}: expected integers of 32 bits, got {array[(converted != array).argmax()]}")
    return converted
