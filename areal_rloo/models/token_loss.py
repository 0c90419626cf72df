"""A loss that is a sum over tokens, differentiated while each chunk of logits exists: one matrix product less.

    hidden [num_tokens, hidden_size] ─► logits of a chunk ─► logprobs, entropy ─► the chunk's loss and its derivative
                                              └──────► gradients of hidden and head, added up ◄──────┘

Recomputing a chunk in the backward pass (`chosen_logprobs`) costs a fourth product of hidden states and head. Where the
loss of a token depends on no other token's logprob, its derivative is known as soon as the chunk is, and three do, as
with whole logits. The [num_tokens, vocabulary] logits never exist whole.

With z = logits / temperature, p = softmax(z), H = -sum p log p, and g, e the loss's derivatives with respect to a
token's logprob and entropy:

    dloss / dz_j = g (1[j = target] - p_j) - e p_j (log p_j + H)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from areal_rloo.models.logprobs import CHUNK_LOGITS, Entropy, TokenLogprobs

TokenLoss = Callable[[TokenLogprobs, slice], Tensor]
"""The loss of the tokens of a slice, a scalar, from their logprobs and entropies alone."""


def loss_of_tokens(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    token_loss: TokenLoss,
    *,
    entropy: Entropy = "none",
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, TokenLogprobs]:
    """sum of token_loss(log softmax(hidden head^T / temperature) at `targets`) over chunks of tokens.

    Args:
        hidden: [num_targets, hidden_size].
        head: [vocabulary, hidden_size].
        targets: [num_targets] int64.
        temperature: above 0.
        token_loss: called once a chunk, with a graph; it must not read other tokens than those of the slice.
        entropy: whether it is wanted; with `gradient`, `token_loss` may be differentiated by it.
        chunk_logits: logits alive at once.

    Returns:
        The loss, a scalar with a gradient to `hidden` and `head` (once), and logprobs and entropies without one.
    """
    loss, logprobs, entropies = _LossOfTokens.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, temperature, token_loss, entropy, max(1, chunk_logits // head.shape[0])
    )
    return loss, TokenLogprobs(logprobs, entropies)


class _LossOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        token_loss: TokenLoss,
        entropy: Entropy,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = head.to(hidden.dtype)
        chunks = _Chunks(hidden, num_rows=min(chunk, len(targets)), vocabulary=len(head))
        logprobs = torch.empty(len(targets), dtype=chunks.wide, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        loss = logprobs.new_zeros(())
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = torch.empty_like(head, dtype=chunks.wide) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), chunk):
            part = slice(start, min(start + chunk, len(targets)))
            logits = chunks.logits(hidden[part], weights, temperature)
            logprobs[part] = chunks.logprobs(logits, targets[part])
            if entropy != "none":
                entropies[part] = chunks.entropies(logits)
            part_loss, by_logprob, by_entropy = _differentiated(
                token_loss, TokenLogprobs(logprobs[part], entropies[part]), part, with_entropy=entropy == "gradient"
            )
            loss += part_loss
            if by_hidden is None and by_head is None:
                continue
            if by_entropy is not None:
                by_entropy = by_entropy / temperature
            by_logits = chunks.by_logits(logits, targets[part], by_logprob / temperature, by_entropy)
            if by_hidden is not None:
                torch.mm(by_logits, weights, out=by_hidden[part])
            if by_head is not None:
                _add_product(by_head, by_logits.t(), hidden[part], first=start == 0)
        ctx.gradients = by_hidden, by_head
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(logprobs, entropies)
        return loss, logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_head = ctx.gradients
        del ctx.gradients
        return (
            None if by_hidden is None else by_hidden.mul_(by_loss),
            None if by_head is None else by_head.mul_(by_loss).to(ctx.head_dtype),
            *([None] * 5),
        )


class _Chunks:
    """A chunk of logits at a time, in memory that every chunk writes again: fresh memory costs more than arithmetic.

    Attributes:
        wide: float32, or wider as the hidden states are.
    """

    def __init__(self, hidden: Tensor, *, num_rows: int, vocabulary: int) -> None:
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self._product = torch.empty(num_rows, vocabulary, dtype=hidden.dtype, device=hidden.device)
        self._logits = self._product if hidden.dtype == self.wide else torch.empty_like(self._product, dtype=self.wide)
        self._powers = torch.empty_like(self._logits)
        self._total = self._normalizer = self._entropies = self._powers.new_empty(0)

    def logits(self, hidden: Tensor, weights: Tensor, temperature: float) -> Tensor:
        """z, [len(hidden), vocabulary]."""
        product = torch.mm(hidden, weights.t(), out=self._product[: len(hidden)])
        logits = product if product.dtype == self.wide else self._logits[: len(hidden)].copy_(product)
        return logits if temperature == 1 else logits.div_(temperature)

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """log p(target); p = powers / total, kept for what follows."""
        largest = logits.amax(-1, keepdim=True)
        powers = torch.sub(logits, largest, out=self._powers[: len(logits)]).exp_()
        self._total = powers.sum(-1)
        self._normalizer = largest[:, 0] + self._total.log()
        return logits.gather(1, targets[:, None])[:, 0] - self._normalizer

    def entropies(self, logits: Tensor) -> Tensor:
        """H = normalizer - sum p z."""
        self._entropies = self._normalizer - torch.linalg.vecdot(self._powers[: len(logits)], logits) / self._total
        return self._entropies

    def by_logits(self, logits: Tensor, targets: Tensor, by_logprob: Tensor, by_entropy: Tensor | None) -> Tensor:
        """The loss's derivative, [len(logits), vocabulary] in the dtype of the hidden states; the logits are gone."""
        powers = self._powers[: len(logits)]
        if by_entropy is None:
            derivative = powers.mul_((-by_logprob / self._total)[:, None])
        else:
            spread = logits.sub_((self._normalizer - self._entropies)[:, None])  # log p + H
            weight = spread.mul_(by_entropy[:, None]).add_(by_logprob[:, None])
            derivative = powers.mul_(weight).mul_(-1 / self._total[:, None])
        derivative.scatter_add_(1, targets[:, None], by_logprob[:, None])
        return derivative if derivative.dtype == self._product.dtype else self._product[: len(logits)].copy_(derivative)


def _differentiated(
    token_loss: TokenLoss, current: TokenLogprobs, part: slice, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The loss of a chunk's tokens, and its derivatives with respect to their logprobs, and to entropies if wanted."""
    with torch.enable_grad():
        logprobs = current.logprobs.detach().requires_grad_()
        entropies = current.entropy.detach().requires_grad_(with_entropy)
        loss = token_loss(TokenLogprobs(logprobs, entropies), part)
        wanted = [logprobs, entropies] if with_entropy else [logprobs]
        derivatives = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return loss.detach(), derivatives[0], derivatives[1] if with_entropy else None


def _add_product(total: Tensor, one: Tensor, other: Tensor, *, first: bool) -> None:
    """total += one @ other, in the total's dtype; at first the total is whatever its memory was."""
    if one.dtype != total.dtype:
        product = torch.mm(one, other)
        total.copy_(product) if first else total.add_(product)
    elif first:
        torch.mm(one, other, out=total)
    else:
        total.addmm_(one, other)
