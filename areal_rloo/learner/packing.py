"""Pack trajectories into microbatches (rows of tokens without padding), and compute the loss of a row.

Takes the trajectories of a minibatch; returns the same number of rows for every rank, each within a token budget.
Packing does not change the gradient: token weights come from the whole minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_rloo.algorithm.behaviour_weight import interpolated_proximal
from areal_rloo.algorithm.kl import KLTerm
from areal_rloo.algorithm.loss import LossOutput, policy_loss
from areal_rloo.algorithm.own_parts import OwnLoss
from areal_rloo.config import AlgorithmConfig
from areal_rloo.learner.parallel.rows import plan_rows
from areal_rloo.models.attention import PackedLayout
from areal_rloo.models.policy import TokenLogprobs
from areal_rloo.trajectory import Trajectory


class Microbatch(msgspec.Struct, frozen=True):
    """Whole trajectories for a row, in CPU memory, as sent to a rank."""

    lengths: list[int]  # places of each sequence in the row: the tokens but the last, which predicts nothing
    num_targets: list[int]  # of each sequence, the number of last tokens that are the completion
    tokens: Tensor  # [sum of lengths + 1] int32, of each sequence the prompt and the completion
    columns: dict[str, Tensor]  # further values of the completion tokens, [sum of num_targets] each


@dataclass(frozen=True, slots=True)
class Row:
    """A microbatch on the compute device."""

    input_ids: Tensor  # [num_tokens] int64
    layout: PackedLayout
    predicts: Tensor  # [num_targets] int64, the place in the row whose hidden state predicts each completion token
    targets: Tensor  # [num_targets] int64, the completion tokens
    sequence_index: Tensor  # [num_targets] int64, the sequence of each target
    columns: dict[str, Tensor]  # as in the microbatch

    @property
    def inputs(self) -> tuple[Tensor, PackedLayout, Tensor, Tensor]:
        """The arguments of `Policy.forward`."""
        return self.input_ids, self.layout, self.predicts, self.targets

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device) -> Row:
        lengths, counts = np.array(microbatch.lengths), np.array(microbatch.num_targets)
        ends, first = np.cumsum(lengths), np.cumsum(counts) - counts
        predicts = np.arange(counts.sum()) + np.repeat(ends - counts - first, counts)
        sequence_index, tokens = np.repeat(np.arange(len(counts)), counts), microbatch.tokens.numpy()
        lasts = ends + np.arange(len(lengths))  # in `tokens`, which have another place for each sequence
        return cls(
            input_ids=torch.from_numpy(np.delete(tokens, lasts)).to(device, torch.int64),
            layout=PackedLayout.of_lengths(microbatch.lengths, device),
            predicts=torch.from_numpy(predicts).to(device),
            targets=torch.from_numpy(tokens[predicts + sequence_index + 1]).to(device, torch.int64),
            sequence_index=torch.from_numpy(sequence_index).to(device),
            columns={name: column.to(device) for name, column in microbatch.columns.items()},
        )


@dataclass(frozen=True, slots=True)
class RowLoss:
    """The loss of a row as a function of the current logprobs; everything else is known before the forward pass.

    The row's columns, each [num_targets]: `behaviour` (logprobs), `advantages`, `weights` (share of a token in the mean
    of the minibatch), `staleness` (versions), and with a KL in the loss `reference` (logprobs).
    """

    row: Row
    proximal: Tensor | None  # [num_targets] float32; None: equal to, or interpolated from, the current logprobs
    progress: float  # share of the step's minibatches behind the current policy; 0: it is the proximal policy
    kl_coefficient: float  # of a KL in the loss; read if the row has reference logprobs
    config: AlgorithmConfig
    own: OwnLoss | None = None  # the user's function, if `loss.kind` names one

    def __call__(self, current: TokenLogprobs, part: slice = slice(None)) -> LossOutput:
        """Compute the loss of a whole row, or of a slice of the tokens if the loss is a sum over tokens."""
        column = {name: values[part] for name, values in self.row.columns.items()}
        anchor = current.logprobs.detach() if self.proximal is None else self.proximal[part]
        loss = self.config.loss
        if self.progress > 0 and loss.decoupled and loss.proximal == "interpolate":
            anchor = interpolated_proximal(column["behaviour"], anchor, column["staleness"], progress=self.progress)
        output = policy_loss(
            behaviour_logprobs=column["behaviour"],
            proximal_logprobs=anchor,
            current_logprobs=current.logprobs,
            entropy=current.entropy,
            advantages=column["advantages"],
            token_weights=column["weights"],
            staleness=column["staleness"],
            sequence_index=self.row.sequence_index[part],
            config=loss,
            kl=KLTerm(column["reference"], self.kl_coefficient, self.config.kl) if "reference" in column else None,
            own=self.own,
        )
        if self.proximal is not None or self.progress == 0:
            return output
        unknown = torch.full_like(output.tokens.proximal_logprobs, math.nan)
        return output._replace(tokens=output.tokens._replace(proximal_logprobs=unknown))


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Trajectories distributed to ranks.

    A filler row has no trajectory; it keeps the number of rows equal on all ranks.
    """

    trajectories: Sequence[Trajectory]
    microbatches: list[list[Microbatch]]  # by rank, the same number for each
    indices: list[list[list[int]]]  # by rank and microbatch, the indices of the trajectories in row order

    def unpacked(self, rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Split values of row targets, by rank and row, into values by trajectory."""
        by_trajectory: dict[int, Tensor] = {}
        of_rows = zip(chain(*self.microbatches), chain(*self.indices), chain(*rows), strict=True)
        for microbatch, indices, values in of_rows:
            if indices:
                by_trajectory |= zip(indices, values.split(microbatch.num_targets), strict=True)
        return [by_trajectory[index] for index in range(len(by_trajectory))]


def pack(
    trajectories: Sequence[Trajectory],
    *,
    max_tokens: int,
    num_ranks: int = 1,
    columns: Mapping[str, Sequence[npt.NDArray[Any]]] | None = None,
) -> PackedBatch:
    """Pack all trajectories of a minibatch into rows; each column is, of each trajectory, [num_completion_tokens]."""
    indices = plan_rows([trajectory.num_tokens - 1 for trajectory in trajectories], max_tokens, num_ranks=num_ranks)
    microbatches = [[_microbatch(trajectories, row, columns or {}) for row in rows] for rows in indices]
    return PackedBatch(trajectories, microbatches, indices)


def _microbatch(
    trajectories: Sequence[Trajectory], indices: Sequence[int], columns: Mapping[str, Sequence[npt.NDArray[Any]]]
) -> Microbatch:
    """Build a row; without trajectories, a filler row of a single token with weight 0."""
    if not indices:
        empty = {name: torch.from_numpy(np.zeros(1, values[0].dtype)) for name, values in columns.items()}
        return Microbatch([1], [1], torch.zeros(2, dtype=torch.int32), empty)
    row = [trajectories[index] for index in indices]
    tokens = np.concatenate([part for t in row for part in (t.prompt_tokens, t.completion.tokens)])
    return Microbatch(
        lengths=[t.num_tokens - 1 for t in row],
        num_targets=[len(t.completion.tokens) for t in row],
        tokens=torch.from_numpy(tokens),
        columns={
            name: torch.from_numpy(np.concatenate([values[index] for index in indices]))
            for name, values in columns.items()
        },
    )
