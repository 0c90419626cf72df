"""Choose tokens and logprobs from logits, for many rows at once, without drawing random numbers in the loop.

A row's uniform numbers are drawn when the row starts, from the row's seed. Inverting the cumulative distribution gives
the token. So a completion does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_rloo.engines.base import SamplingParameters

_PART_TOKENS = 512  # of a vocabulary


@dataclass(frozen=True, slots=True)
class Shaping:
    """How the logits of rows change before a token is chosen; None if no row needs the change."""

    greedy: Tensor | None  # [num_rows] bool, rows that take the most likely token at temperature 1
    temperatures: Tensor | None  # [num_rows, 1] float32
    banned: Tensor | None  # [num_rows, vocab_size] bool, stop tokens of rows that may not end yet
    top_k: Tensor | None  # [num_rows] int64; 0 keeps all
    top_p: Tensor | None  # [num_rows] float32; 1 keeps all

    @classmethod
    def of(
        cls, rows: Sequence[SamplingParameters], banned: npt.NDArray[np.bool_] | None, device: torch.device
    ) -> Shaping:
        if banned is None and not any(r.greedy or r.temperature != 1 or r.top_p < 1 or r.top_k > 0 for r in rows):
            return cls(None, None, None, None, None)
        greedy = torch.tensor([row.greedy for row in rows])
        temperatures = torch.tensor([1.0 if row.greedy else row.temperature for row in rows])
        top_k = torch.tensor([0 if row.greedy else row.top_k for row in rows])
        top_p = torch.tensor([1.0 if row.greedy else row.top_p for row in rows])
        truncated = bool(((top_k > 0) | (top_p < 1)).any())
        return cls(
            greedy=greedy.to(device) if greedy.any() else None,
            temperatures=temperatures[:, None].to(device) if (temperatures != 1).any() else None,
            banned=None if banned is None else torch.from_numpy(banned).to(device),
            top_k=top_k.to(device) if truncated else None,
            top_p=top_p.to(device) if truncated else None,
        )

    def __call__(self, logits: Tensor) -> Tensor:
        """Change logits [num_rows, vocab_size] float32."""
        if self.temperatures is not None:
            logits = logits / self.temperatures
        if self.banned is not None:
            logits = logits.masked_fill(self.banned, -torch.inf)
        if self.top_k is not None and self.top_p is not None:
            logits = truncate(logits, self.top_k, self.top_p)
        return logits


def uniforms(seed: int, num: int) -> Tensor:
    """Return [num] float64 in [0, 1), a function of the seed."""
    bits = np.random.Philox(key=seed & (2**64 - 1))
    return torch.from_numpy(np.random.Generator(bits).random(num))


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top_k most likely tokens, and of these the fewest with a total probability of top_p.

    The logits, [num_rows, vocab_size] float32, are tempered; `Shaping` describes the limits. The result is -inf for a
    cut token; the most likely token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    limit = torch.where(top_k > 0, top_k, logits.shape[-1])
    kept = ordered.masked_fill(rank >= limit[:, None], -torch.inf)
    probabilities = kept.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
    cut = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    cut[:, 0] = False
    return torch.empty_like(logits).scatter_(-1, order, kept.masked_fill(cut, -torch.inf))


def choose(logits: Tensor, uniform: Tensor, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """Choose a token for each row; return tokens [num_rows] int64 and logprobs [num_rows] float32.

    `Shaping` has changed the logits, [num_rows, vocab_size] float32; `uniform` is [num_rows] float64 in [0, 1).
    """
    logprobs = logits.log_softmax(dim=-1)
    tokens = drawn(logprobs.exp(), uniform)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], logits.argmax(dim=-1, keepdim=True), tokens)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def drawn(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution of each row at `uniform` of its total: tokens, [num_rows, 1] int64.

    `probabilities` is [num_rows, vocab_size] float32. Sums are float64: in float32 they end at steps of 6e-8, and skip
    the tail. Of a large vocabulary, first a part is chosen, then a token of it: to cumulate all costs a GPU 1 ms and
    a GiB with 256 rows.
    """
    num_rows, num_tokens = probabilities.shape
    if num_tokens <= 2 * _PART_TOKENS:
        cumulated = _cumulated(probabilities)
        return place_above(cumulated, uniform[:, None] * cumulated[:, -1:])
    parts = F.pad(probabilities, (0, -num_tokens % _PART_TOKENS)).view(num_rows, -1, _PART_TOKENS)
    cumulated = _cumulated(parts.sum(dim=-1, dtype=torch.float64))
    threshold = uniform[:, None] * cumulated[:, -1:]
    part = place_above(cumulated, threshold)
    before = F.pad(cumulated, (1, 0)).gather(1, part)
    within = parts.gather(1, part[:, :, None].expand(-1, -1, _PART_TOKENS)).squeeze(1)
    return part * _PART_TOKENS + place_above(_cumulated(within), threshold - before)


def _cumulated(probabilities: Tensor) -> Tensor:
    """Return the sums of each row up to each place, [num_rows, num] float64, which rise with each number above 0."""
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    return rising(sums, probabilities) if sums.is_cuda else sums  # a CPU sums in order, a GPU sums parts


def rising(cumulated: Tensor, probabilities: Tensor) -> Tensor:
    """Return cumulative probabilities, [num_rows, num], that stay equal at a probability of 0."""
    return cumulated.masked_fill(probabilities == 0, 0).cummax(dim=-1).values


def place_above(cumulated: Tensor, threshold: Tensor) -> Tensor:
    """Return the first place whose sum is above the threshold, [num_rows, 1] int64; the threshold is at least 0.

    Both are float64; `cumulated`, [num_rows, num], rises. A threshold that rounding took to the total is lowered: it
    must not choose a last place of probability 0. Among NaN, the last place is as good as any: its logprob is NaN.
    """
    total = cumulated[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cumulated, torch.minimum(threshold, below), right=True).clamp_(
        max=cumulated.shape[-1] - 1
    )
