"""The loss of a row as a function of the current policy's logprobs: everything else of it is known beforehand.

A row's columns, each [num_targets]: `behaviour` (logprobs), `advantages`, `weights` (of a token in its minibatch's
mean), `staleness` (versions), and with a KL in the loss `reference` (logprobs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from areal_rloo.algorithm.behaviour import interpolated_proximal
from areal_rloo.algorithm.kl import kl_estimate
from areal_rloo.algorithm.loss import LossOutput, policy_loss
from areal_rloo.config import AlgorithmConfig
from areal_rloo.learner.packing import Row
from areal_rloo.models.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RowLoss:
    """Called with the logprobs of a whole row, or of some of its tokens where the loss is a sum over tokens.

    Attributes:
        row: with its columns.
        proximal: [num_targets] float32; None where the current logprobs are, or anchor, the proximal ones.
        interpolates: whether they anchor it: proximal logprobs between the behaviour policy's and the current ones.
        kl_coefficient: of a KL in the loss; read where the row has reference logprobs.
        config: of the algorithm.
    """

    row: Row
    proximal: Tensor | None
    interpolates: bool
    kl_coefficient: float
    config: AlgorithmConfig

    def __call__(self, current: TokenLogprobs, part: slice = slice(None)) -> LossOutput:
        column = {name: values[part] for name, values in self.row.columns.items()}
        anchor = current.logprobs.detach() if self.proximal is None else self.proximal[part]
        if self.interpolates:
            anchor = interpolated_proximal(column["behaviour"], anchor, column["staleness"])
        output = policy_loss(
            behaviour_logprobs=column["behaviour"],
            proximal_logprobs=anchor,
            current_logprobs=current.logprobs,
            entropy=current.entropy,
            advantages=column["advantages"],
            token_weights=column["weights"],
            staleness=column["staleness"],
            sequence_index=self.row.sequence_index[part],
            config=self.config.loss,
        )
        if "reference" not in column:
            return output
        estimate = kl_estimate(current.logprobs, column["reference"], self.config.kl.estimator)
        divergence = torch.where(column["weights"] != 0, estimate, 0.0)
        return replace(output, loss=output.loss + self.kl_coefficient * (column["weights"] * divergence).sum())

    def of_tokens(self, current: TokenLogprobs, part: slice) -> Tensor:
        """The loss alone."""
        return self(current, part).loss
