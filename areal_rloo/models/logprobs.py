"""Logprobs of chosen tokens from hidden states, without the [tokens, vocabulary] logits of a whole microbatch.

In: hidden states at the places that predict a token, and those tokens. Out: their logprobs under the tempered policy,
and its entropy there.
Chunks are recomputed in the backward pass, so that one chunk of logits exists at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_LOGITS = 2**25  # logits alive at once: 128 MiB of float32, and as much again while they are differentiated


Entropy = Literal["none", "value", "gradient"]
"""Whether the entropy is wanted, and whether it is to be differentiated."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of chosen tokens, each [num_targets] float32.

    Attributes:
        logprobs: log p(token), with a gradient to the weights.
        entropy: -sum p log p over the vocabulary; 0 where it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor


def chosen_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, *, entropy: Entropy = "none"
) -> TokenLogprobs:
    """log softmax(hidden head^T / temperature) at `targets`, chunk by chunk, and the entropy of that softmax.

    Args:
        hidden: [num_targets, hidden_size].
        head: [vocabulary, hidden_size].
        targets: [num_targets] int64.
        temperature: above 0.
        entropy: whether it is wanted.
    """
    chunk = max(1, CHUNK_LOGITS // head.shape[0])
    head = head.to(hidden.dtype)
    if len(targets) <= chunk:
        return TokenLogprobs(*_chunk(hidden, head, targets, temperature, entropy))
    parts = [
        checkpoint(_chunk, h, head, t, temperature, entropy, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return TokenLogprobs(torch.cat(logprobs), torch.cat(entropies))


def _chunk(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, entropy: Entropy
) -> tuple[Tensor, Tensor]:
    logits = _wide(hidden @ head.T) / temperature
    logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    match entropy:
        case "none":
            return logprobs, torch.zeros_like(logprobs)
        case "value":
            with torch.no_grad():
                return logprobs, _entropy(logits)
        case "gradient":
            return logprobs, _entropy(logits)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _entropy(logits: Tensor) -> Tensor:
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
