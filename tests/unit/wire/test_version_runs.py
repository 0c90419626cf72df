"""The check of all version runs of a message at once finds what the check of one trajectory after the other finds."""

import tracemalloc
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from areal_rloo.errors import DecodeError
from areal_rloo.wire.columns import MOST_RUNS, Limits, TrajectoryHeader, decode_columns
from areal_rloo.wire.token_rules import broken_by_version_runs, check_version_runs

Run = tuple[int, int]


def _first_refused(batch: Sequence[Sequence[Run]], num_tokens: Sequence[int]) -> tuple[int, str] | None:
    for number, (runs, num) in enumerate(zip(batch, num_tokens, strict=True)):
        try:
            check_version_runs(runs, num)
        except ValueError as error:
            return number, str(error)
    return None


def _all_of(batch: Sequence[Sequence[Run]], num_tokens: Sequence[int]) -> tuple[int, str] | None:
    runs = np.array([run for each in batch for run in each], np.int32).reshape(-1, 2)
    return broken_by_version_runs(runs, [len(each) for each in batch], list(num_tokens))


RUNS = [*product((-1, 0, 1), (-1, 0, 1, 2))]
PAIRS = [*product(((0, 1), (1, 1), (1, 2), (2, -1)), repeat=2)]


def test_every_small_trajectory_is_judged_alike() -> None:
    found = set()
    for num_runs in (1, 2):
        for runs, num in product(product(RUNS, repeat=num_runs), (1, 2, 3)):
            expected = _first_refused([runs], [num])
            assert _all_of([runs], [num]) == expected, (runs, num)
            found.add(expected)
    assert None in found
    assert len(found) > 5, "all rules were broken"


def test_every_small_batch_is_judged_alike() -> None:
    """A version may decrease from trajectory to trajectory, and the first wrong trajectory is named."""
    found = set()
    for batch in product([*PAIRS, *((run,) for run in RUNS)], repeat=2):
        for num_tokens in ((1, 1), (2, 3), (1, 2)):
            expected = _first_refused(batch, num_tokens)
            assert _all_of(batch, num_tokens) == expected, (batch, num_tokens)
            found.add(None if expected is None else expected[0])
    assert found == {None, 0, 1}


@pytest.mark.parametrize("num_runs", [MOST_RUNS, MOST_RUNS + 1])
def test_a_trajectory_has_a_limited_number_of_version_runs(num_runs: int) -> None:
    columns = _columns(1, num_runs)
    if num_runs == MOST_RUNS:
        (trajectory,), extremes = decode_columns(_headers(1, num_runs), columns, Limits())
        assert trajectory.completion.versions.tolist() == list(range(num_runs))
        assert (extremes.lowest_version, extremes.highest_version) == (0, num_runs - 1)
    else:
        with pytest.raises(DecodeError, match=f"num_version_runs: expected 1 to {MOST_RUNS}, got {num_runs}"):
            decode_columns(_headers(1, num_runs), columns, Limits())


def test_a_message_of_many_version_runs_takes_little_memory() -> None:
    """A list of Python's numbers took twenty times as much, and the loop for as long as a heartbeat may be late."""
    headers, columns = _headers(64, MOST_RUNS), _columns(64, MOST_RUNS)
    tracemalloc.start()
    try:
        trajectories, _ = decode_columns(headers, columns, Limits())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trajectories) == 64
    assert peak_bytes < 2 * len(columns)


def _headers(num: int, num_runs: int) -> list[TrajectoryHeader]:
    """A batch in which each token has a version of its own."""
    return [TrajectoryHeader(0, index, 1.0, "stop", 1, num_runs, num_runs) for index in range(num)]


def _columns(num: int, num_runs: int) -> bytes:
    runs = np.stack([np.arange(num_runs), np.ones(num_runs)], axis=1).astype(np.int32)
    tokens, logprobs = np.ones((num_runs + 1) * num, np.int32), np.full(num_runs * num, -1, np.float32)
    return tokens.tobytes() + logprobs.tobytes() + num * runs.tobytes()
