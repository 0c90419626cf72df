"""Test how trajectories are packed into rows for the ranks."""

import numpy as np
import torch

from areal_rloo.learner.packing import Row, pack
from areal_rloo.learner.parallel.rows import plan_rows
from areal_rloo.trajectory import Completion, Trajectory


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


def _obvious_plan(lengths: list[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Search all rows for each sequence."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])

    def used(row: list[int]) -> int:
        return sum(lengths[index] for index in row)

    fitted: list[list[int]] = []
    for index in order:
        free = (row for row in fitted if used(row) + lengths[index] <= max_tokens)
        row = next(free, None)
        if row is None:
            fitted.append(row := [])
        row.append(index)
    fitted += [[] for _ in range(-len(fitted) % num_ranks)]
    evened: list[list[int]] = [[] for _ in fitted]
    for index in order:
        min(evened, key=used).append(index)
    rows = fitted if max(map(used, evened)) > max_tokens else evened
    rows = sorted(rows, key=used, reverse=True)
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def test_a_plan_equals_a_search_through_all_rows() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        lengths, num_ranks = rng.integers(1, 100, rng.integers(1, 40)).tolist(), int(rng.integers(1, 5))
        assert plan_rows(lengths, 100, num_ranks=num_ranks) == _obvious_plan(lengths, 100, num_ranks)


def test_a_row_has_each_token_its_place_and_its_target() -> None:
    rng = np.random.default_rng(3)
    trajectories = []
    for index in range(9):
        num = int(rng.integers(1, 6))
        completion = Completion(
            rng.integers(0, 99, num).astype(np.int32),
            -rng.random(num, dtype=np.float32),
            np.zeros(num, np.int32),
            "stop",
        )
        trajectories.append(Trajectory(index, 0, rng.integers(0, 99, 1 + index % 3).astype(np.int32), completion, 0.0))
    columns = {"behaviour": [trajectory.completion.behaviour_logprobs for trajectory in trajectories]}
    packed = pack(trajectories, max_tokens=12, num_ranks=2, columns=columns)
    for microbatches, of_rows in zip(packed.microbatches, packed.indices, strict=True):
        for microbatch, indices in zip(microbatches, of_rows, strict=True):
            row = Row.of(microbatch, torch.device("cpu"))
            chosen = [trajectories[index] for index in indices]
            prompts_and_completions = [(t.prompt_tokens.tolist(), t.completion.tokens.tolist()) for t in chosen]
            inputs, predicts, targets, sequence = [], [], [], []
            for number, (prompt, completion) in enumerate(prompts_and_completions):
                predicts += [len(inputs) + len(prompt) - 1 + place for place in range(len(completion))]
                inputs += [*prompt, *completion[:-1]]
                targets += completion
                sequence += [number] * len(completion)
            assert row.input_ids.tolist() == inputs
            assert (row.predicts.tolist(), row.targets.tolist()) == (predicts, targets)
            assert row.sequence_index.tolist() == sequence
            assert row.columns["behaviour"].tolist() == [x for t in chosen for x in t.completion.behaviour_logprobs]


def test_a_filler_row_has_a_place_and_a_target() -> None:
    completion = Completion(np.ones(3, np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32), "stop")
    trajectory = Trajectory(0, 0, np.ones(2, np.int32), completion, 0.0)
    packed = pack([trajectory], max_tokens=4, num_ranks=2, columns={"weights": [np.ones(3, np.float32)]})
    filler = Row.of(packed.microbatches[1][0], torch.device("cpu"))
    assert (filler.input_ids.tolist(), filler.predicts.tolist(), filler.targets.tolist()) == ([0], [0], [0])
    assert filler.columns["weights"].tolist() == [0.0]
