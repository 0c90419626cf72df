"""Test how trajectories are packed into rows for the ranks."""

import numpy as np

from areal_rloo.learner.packing import plan_rows


def test_rows_hold_each_sequence_once_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths, num_ranks = rng.integers(1, 100, rng.integers(1, 60)).tolist(), int(rng.integers(1, 5))
        by_rank = plan_rows(lengths, 128, num_ranks=num_ranks)
        assert len({len(rows) for rows in by_rank}) == 1, "all ranks need the same number of rows"
        rows = [row for rows in by_rank for row in rows]
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        sizes = sorted(sum(lengths[index] for index in row) for row in rows)
        assert sizes[-1] <= 128
        least = -(-sum(lengths) // 128)  # first-fit decreasing is within 11/9 of the fewest
        assert len(rows) <= -(-(11 * least // 9 + 1) // num_ranks) * num_ranks


def test_rows_of_all_ranks_hold_similar_numbers_of_tokens() -> None:
    lengths = np.random.default_rng(1).lognormal(5, 1, 256).astype(int).clip(1, 4000).tolist()
    for num_ranks in (2, 4, 8):
        by_rank = plan_rows(lengths, 8192, num_ranks=num_ranks)
        for rows in zip(*by_rank, strict=True):
            sizes = [sum(lengths[index] for index in row) for row in rows]
            assert max(sizes) <= 1.05 * min(sizes)
