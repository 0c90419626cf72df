"""Weights of tokens as the definition says them, for comparisons with other systems."""

from torch import Tensor

from areal_rloo.algorithm.loss import sample_weights
from areal_rloo.config import LossConfig


def token_weights(loss_mask: Tensor, sample_index: Tensor, *, max_new_tokens: int, config: LossConfig) -> Tensor:
    """Give [num_tokens] float32, zeros outside the mask; `sample_index` [num_tokens] numbers the samples from 0."""
    mask = loss_mask.double()
    in_loss = mask.new_zeros(int(sample_index.max()) + 1).scatter_add(0, sample_index, mask)
    return (mask * sample_weights(in_loss, max_new_tokens=max_new_tokens, config=config)[sample_index]).float()
