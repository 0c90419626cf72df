"""Logprobs of chosen tokens from hidden states, without the [tokens, vocabulary] logits of a whole microbatch.

In: hidden states at the places that predict a token, and those tokens. Out: their logprobs under the tempered policy.
Chunks are recomputed in the backward pass, so that one chunk of logits exists at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from areal_rloo.models.attention import PackedLayout

_CHUNK_LOGITS = 2**24  # logits alive at once: 64 MiB of float32


def packed_logprobs(
    model: PreTrainedModel,
    *,
    input_ids: Tensor,
    layout: PackedLayout,
    predicts: Tensor,
    targets: Tensor,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Logprobs of `targets` under the policy at the temperature they were sampled with.

    Args:
        model: a causal language model with packed attention.
        input_ids: [num_tokens] int64, the packed row.
        layout: where its sequences lie.
        predicts: [num_targets] int64, the place in the row whose hidden state predicts each target.
        targets: [num_targets] int64.
        temperature: divides the logits, as the engine did.
        dtype: of the computation; bfloat16 runs under autocast, the weights stay float32.

    Returns:
        [num_targets] float32, with a gradient to the weights.
    """
    with torch.autocast(input_ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = _hidden(model, input_ids, layout, predicts)
        return chosen_logprobs(hidden, model.get_output_embeddings().weight, targets, temperature)


def packed_logits(model: PreTrainedModel, *, input_ids: Tensor, layout: PackedLayout, predicts: Tensor) -> Tensor:
    """All logits at `predicts`: [num_targets, vocab_size]; for small vocabularies. Arguments as `packed_logprobs`."""
    logits: Tensor = _hidden(model, input_ids, layout, predicts) @ model.get_output_embeddings().weight.T
    return logits


def chosen_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log softmax(hidden head^T / temperature) at `targets`, chunk by chunk.

    Args:
        hidden: [num_targets, hidden_size].
        head: [vocabulary, hidden_size].
        targets: [num_targets] int64.
        temperature: above 0.

    Returns:
        [num_targets] float32.
    """
    chunk = max(1, _CHUNK_LOGITS // head.shape[0])
    if len(targets) <= chunk:
        return _chunk_logprobs(hidden, head, targets, temperature)
    parts = [
        checkpoint(_chunk_logprobs, h, head, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts)


def _hidden(model: PreTrainedModel, input_ids: Tensor, layout: PackedLayout, predicts: Tensor) -> Tensor:
    """Last hidden states at `predicts`: [num_targets, hidden_size]."""
    hidden: Tensor = model.base_model(
        input_ids=input_ids[None], position_ids=layout.position_ids[None], use_cache=False, packed=layout
    ).last_hidden_state[0]
    return hidden.index_select(0, predicts)


def _chunk_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = (hidden @ head.T).float() / temperature
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
