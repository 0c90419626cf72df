"""From logits to tokens and their logprobs, many rows at once, without a random number drawn in the loop.

A row's uniform numbers are drawn when it starts, from its own seed; a token is chosen by inverting the cumulated
distribution. So a completion does not depend on which others it was decoded with.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uniforms(seed: int | None, num: int) -> Tensor:
    """[num] float32 in [0, 1), a function of the seed; without one, fresh."""
    bits = np.random.Philox(seed) if seed is None else np.random.Philox(key=seed & (2**64 - 1))
    return torch.from_numpy(np.random.Generator(bits).random(num, dtype=np.float32))


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top_k most likely tokens, and of those the fewest that hold top_p of the probability.

    Args:
        logits: [num_rows, vocab_size] float32, tempered.
        top_k: [num_rows] int64; 0 keeps all.
        top_p: [num_rows] float32; 1 keeps all.

    Returns:
        The logits, -inf where a token was cut; the most likely token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    kept = ordered.masked_fill(rank >= limit[:, None], -torch.inf)
    probabilities = kept.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    cut = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    cut[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, order, kept.masked_fill(cut, -torch.inf))


def choose(logits: Tensor, uniform: Tensor, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """A token a row, and its logprob.

    Args:
        logits: [num_rows, vocab_size] float32, tempered, masked and truncated as wanted.
        uniform: [num_rows] float32 in [0, 1).
        greedy: [num_rows] bool, rows that take the most likely token; None if no row does.

    Returns:
        Tokens [num_rows] int64 and logprobs [num_rows] float32.
    """
    logprobs = logits.log_softmax(dim=-1)
    cumulated = logprobs.exp().cumsum(dim=-1)
    total = cumulated[:, -1:]
    # Strictly below the total, so that rounding cannot choose a token of probability 0 behind the last real one.
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulated, threshold, right=True)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
