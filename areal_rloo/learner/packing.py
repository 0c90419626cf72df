"""From trajectories to microbatches: rows of tokens under a budget, without padding, as many for every rank.

Rows are made by first-fit decreasing, which says how many there must be; then every trajectory, the longest first, goes
into the row that holds the fewest tokens, so that no rank waits long for another. Which row a trajectory falls in
changes no number: the weights of its tokens come from the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal_rloo.models.layout import PackedLayout
from areal_rloo.trajectory import Trajectory


class Microbatch(msgspec.Struct, frozen=True):
    """Whole trajectories in one row, as it travels to a rank, in CPU memory.

    The last token of each is left out: it predicts nothing. Columns by token stand sequence after sequence.

    Attributes:
        lengths: tokens of each sequence.
        num_targets: of each sequence, how many of its last places predict a completion token.
        input_ids: [sum of lengths] int32.
        targets: [sum of num_targets] int32, the completion tokens.
        columns: what else is known of the targets, [sum of num_targets] each.
    """

    lengths: list[int]
    num_targets: list[int]
    input_ids: Tensor
    targets: Tensor
    columns: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Row:
    """A microbatch on the device that computes it.

    Attributes:
        input_ids: [num_tokens] int64.
        layout: where the sequences lie.
        predicts: [num_targets] int64, place in the row whose hidden state predicts each completion token.
        targets: [num_targets] int64, the completion tokens.
        sequence_index: [num_targets] int64, which of the row's sequences each target belongs to.
        columns: as of the microbatch.
    """

    input_ids: Tensor
    layout: PackedLayout
    predicts: Tensor
    targets: Tensor
    sequence_index: Tensor
    columns: dict[str, Tensor]

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device) -> Row:
        lengths, counts = np.array(microbatch.lengths), np.array(microbatch.num_targets)
        ends, first = np.cumsum(lengths), np.cumsum(counts) - counts
        predicts = np.arange(counts.sum()) + np.repeat(ends - counts - first, counts)
        return cls(
            input_ids=microbatch.input_ids.to(device, torch.int64),
            layout=PackedLayout.of_lengths(microbatch.lengths, device),
            predicts=torch.from_numpy(predicts).to(device),
            targets=microbatch.targets.to(device, torch.int64),
            sequence_index=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(device),
            columns={name: column.to(device) for name, column in microbatch.columns.items()},
        )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Trajectories dealt out to ranks.

    Attributes:
        microbatches: by rank, as many for each.
        indices: by rank and microbatch, which trajectories these are, in the order of the row; none in one that is
            there so that no rank waits for another.
    """

    microbatches: list[list[Microbatch]]
    indices: list[list[list[int]]]

    def sizes(self) -> tuple[list[int], list[int]]:
        """Lengths and numbers of targets of all trajectories, in no order."""
        rows = [
            (length, num)
            for microbatches, of_rank in zip(self.microbatches, self.indices, strict=True)
            for microbatch, indices in zip(microbatches, of_rank, strict=True)
            if indices
            for length, num in zip(microbatch.lengths, microbatch.num_targets, strict=True)
        ]
        return [length for length, _ in rows], [num for _, num in rows]

    def unpacked(self, rows: Sequence[Sequence[Tensor]], num_trajectories: int) -> list[Tensor]:
        """What the ranks said of the targets of their rows, by trajectory."""
        by_trajectory: list[Tensor] = [torch.empty(0)] * num_trajectories
        for rank, of_rank in enumerate(rows):
            for microbatch, indices, values in zip(self.microbatches[rank], self.indices[rank], of_rank, strict=True):
                if indices:
                    for index, part in zip(indices, values.split(microbatch.num_targets), strict=True):
                        by_trajectory[index] = part
        return by_trajectory


def plan_rows(lengths: Sequence[int], max_tokens: int, *, num_ranks: int = 1) -> list[list[list[int]]]:
    """By rank, the indices in each of its rows: as many rows for every rank, none over `max_tokens`.

    Row n holds about as many tokens on one rank as on another.
    """
    assert max(lengths, default=0) <= max_tokens, f"a sequence of {max(lengths)} tokens does not fit {max_tokens}"
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = _first_fit(order, lengths, max_tokens)
    num_rows = -(-len(rows) // num_ranks) * num_ranks
    rows = _evened(order, lengths, max_tokens, num_rows) or [*rows, *([] for _ in range(num_rows - len(rows)))]
    rows.sort(key=lambda row: sum(lengths[i] for i in row), reverse=True)
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def pack(
    trajectories: Sequence[Trajectory],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    columns: Mapping[str, Sequence[Tensor]] | None = None,
) -> PackedBatch:
    """All trajectories of a minibatch, in rows.

    Args:
        trajectories: at least one.
        max_tokens: most tokens of a row; each trajectory must fit.
        num_ranks: to deal them out to.
        columns: by name, of each trajectory [num_completion_tokens].
    """
    lengths = [trajectory.num_tokens - 1 for trajectory in trajectories]
    indices = plan_rows(lengths, max_tokens, num_ranks=num_ranks)
    columns = columns or {}
    microbatches = [[_microbatch(trajectories, row, columns) for row in rows] for rows in indices]
    return PackedBatch(microbatches, indices)


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    left = np.zeros(len(order), dtype=np.int64)
    for index in order:
        fits = np.flatnonzero(left[: len(rows)] >= lengths[index])
        if len(fits) == 0:
            left[len(rows)] = max_tokens
            rows.append([])
        place = int(fits[0]) if len(fits) else len(rows) - 1
        rows[place].append(index)
        left[place] -= lengths[index]
    return rows


def _evened(order: Sequence[int], lengths: Sequence[int], max_tokens: int, num_rows: int) -> list[list[int]] | None:
    """The longest first, each into the emptiest row; None where a row would be over the budget."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    used = np.zeros(num_rows, dtype=np.int64)
    for index in order:
        place = int(used.argmin())
        used[place] += lengths[index]
        if used[place] > max_tokens:
            return None
        rows[place].append(index)
    return rows


def _microbatch(
    trajectories: Sequence[Trajectory], indices: Sequence[int], columns: Mapping[str, Sequence[Tensor]]
) -> Microbatch:
    """A row; without trajectories, one token without a weight."""
    if not indices:
        zero = torch.zeros(1, dtype=torch.int32)
        empty = {name: torch.zeros(1, dtype=values[0].dtype) for name, values in columns.items()}
        return Microbatch([1], [1], zero, zero, empty)
    row = [trajectories[index] for index in indices]
    inputs = [part for t in row for part in (t.prompt_tokens, t.completion.tokens[:-1])]
    return Microbatch(
        lengths=[t.num_tokens - 1 for t in row],
        num_targets=[len(t.completion.tokens) for t in row],
        input_ids=torch.from_numpy(np.concatenate(inputs)),
        targets=torch.from_numpy(np.concatenate([t.completion.tokens for t in row])),
        columns={name: torch.cat([values[index] for index in indices]) for name, values in columns.items()},
    )
