"""From trajectories to microbatches: rows of tokens under a budget, without padding.

Trajectories are sorted by length and cut into rows, so that a row holds similar lengths (attention pads to the longest
of a row) and no row is over the budget. Which row a trajectory falls in changes no number: the weights of its tokens
come from the whole minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from areal_rloo.models.attention import PackedLayout
from areal_rloo.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """A microbatch: whole trajectories in one row of tokens, the last token of each left out (it predicts nothing).

    Attributes:
        trajectory_index: [num_sequences] which trajectories of the minibatch these are, in order.
        input_ids: [num_tokens] int64.
        layout: where the sequences lie.
        predicts: [num_targets] int64, place in the row whose hidden state predicts each completion token.
        targets: [num_targets] int64, the completion tokens.
        sequence_index: [num_targets] int64, which of the row's sequences each target belongs to.
    """

    trajectory_index: tuple[int, ...]
    input_ids: Tensor
    layout: PackedLayout
    predicts: Tensor
    targets: Tensor
    sequence_index: Tensor


def plan_rows(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut the indices of `lengths`, sorted by length, into as few rows of at most `max_tokens` as that order allows."""
    rows: list[list[int]] = []
    used = max_tokens
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        assert lengths[index] <= max_tokens, f"a sequence of {lengths[index]} tokens does not fit {max_tokens}"
        if used + lengths[index] > max_tokens:
            rows.append([])
            used = 0
        rows[-1].append(index)
        used += lengths[index]
    return rows


def pack(trajectories: Sequence[Trajectory], *, max_tokens: int, device: torch.device) -> list[Row]:
    """All trajectories of a minibatch, in rows."""
    lengths = [trajectory.num_tokens - 1 for trajectory in trajectories]
    return [_row(trajectories, indices, device) for indices in plan_rows(lengths, max_tokens)]


def _row(trajectories: Sequence[Trajectory], indices: list[int], device: torch.device) -> Row:
    tokens, predicts, lengths = [], [], []
    start = 0
    for index in indices:
        prompt, completion = trajectories[index].prompt_tokens, trajectories[index].completion.tokens
        tokens += [prompt, completion[:-1]]
        predicts.append(np.arange(len(completion)) + start + len(prompt) - 1)
        lengths.append(len(prompt) + len(completion) - 1)
        start += lengths[-1]
    targets = np.concatenate([trajectories[index].completion.tokens for index in indices])
    return Row(
        trajectory_index=tuple(indices),
        input_ids=torch.from_numpy(np.concatenate(tokens)).long().to(device),
        layout=PackedLayout.of_lengths(lengths, device),
        predicts=torch.from_numpy(np.concatenate(predicts)).to(device),
        targets=torch.from_numpy(targets).long().to(device),
        sequence_index=torch.from_numpy(np.repeat(np.arange(len(indices)), [len(p) for p in predicts])).to(device),
    )
