"""What a policy says of a packed row of tokens: logprobs, logits, or the loss itself."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.models.attention import PackedLayout
from areal_rloo.models.logprobs import Entropy, TokenLogprobs, chosen_logprobs
from areal_rloo.models.token_loss import TokenLoss, loss_of_tokens


def packed_logprobs(
    model: PreTrainedModel,
    *,
    input_ids: Tensor,
    layout: PackedLayout,
    predicts: Tensor,
    targets: Tensor,
    temperature: float,
    dtype: torch.dtype,
    entropy: Entropy = "none",
) -> TokenLogprobs:
    """Logprobs of `targets` under the policy at the temperature they were sampled with, and its entropy.

    Args:
        model: a causal language model with packed attention.
        input_ids: [num_tokens] int64, the packed row.
        layout: where its sequences lie.
        predicts: [num_targets] int64, the place in the row whose hidden state predicts each target.
        targets: [num_targets] int64.
        temperature: divides the logits, as the engine did.
        dtype: of the computation; bfloat16 runs under autocast, the weights stay float32.
        entropy: whether it is wanted.
    """
    with torch.autocast(input_ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = _hidden(model, input_ids, layout, predicts)
        head = model.get_output_embeddings().weight
        return chosen_logprobs(hidden, head, targets, temperature, entropy=entropy)


def packed_loss(
    model: PreTrainedModel,
    *,
    input_ids: Tensor,
    layout: PackedLayout,
    predicts: Tensor,
    targets: Tensor,
    temperature: float,
    dtype: torch.dtype,
    token_loss: TokenLoss,
    entropy: Entropy = "none",
) -> tuple[Tensor, TokenLogprobs]:
    """A sum over tokens of a loss that reads their own logprobs alone, and those logprobs; see `loss_of_tokens`.

    Args: as `packed_logprobs`, and `token_loss`.
    """
    with torch.autocast(input_ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = _hidden(model, input_ids, layout, predicts)
    head = model.get_output_embeddings().weight
    return loss_of_tokens(hidden, head, targets, temperature, token_loss, entropy=entropy)


def packed_logits(model: PreTrainedModel, *, input_ids: Tensor, layout: PackedLayout, predicts: Tensor) -> Tensor:
    """All logits at `predicts`: [num_targets, vocab_size]; for small vocabularies. Arguments as `packed_logprobs`."""
    logits: Tensor = _hidden(model, input_ids, layout, predicts) @ model.get_output_embeddings().weight.T
    return logits


def _hidden(model: PreTrainedModel, input_ids: Tensor, layout: PackedLayout, predicts: Tensor) -> Tensor:
    """Last hidden states at `predicts`: [num_targets, hidden_size]."""
    hidden: Tensor = model.base_model(
        input_ids=input_ids[None], position_ids=layout.position_ids[None], use_cache=False, packed=layout
    ).last_hidden_state[0]
    return hidden.index_select(0, predicts)
