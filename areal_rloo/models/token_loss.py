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

from areal_rloo.models.logprobs import Entropy, TokenLogprobs

_CHUNK_LOGITS = 2**26  # logits alive at once: 256 MiB of float32, and as much again while they are differentiated

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
    chunk_logits: int = _CHUNK_LOGITS,
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
    loss, logprobs, entropies = _LossOfTokens.apply(
        hidden, head, targets, temperature, token_loss, entropy, max(1, chunk_logits // head.shape[0])
    )
    return loss, TokenLogprobs(logprobs, entropies)


class _LossOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        temperature: float,
        token_loss: TokenLoss,
        entropy: Entropy,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weights = head.to(hidden.dtype)
        logprobs = torch.empty(len(targets), dtype=wide, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        loss = logprobs.new_zeros(())
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), chunk):
            part = slice(start, min(start + chunk, len(targets)))
            logits = torch.mm(hidden[part], weights.t()).to(wide).div_(temperature)
            normalizer = logits.logsumexp(-1, keepdim=True)
            logits.sub_(normalizer)  # log p from here on
            place = targets[part, None]
            logprobs[part] = logits.gather(1, place)[:, 0]
            probabilities = logits.exp()
            if entropy != "none":
                entropies[part] = -torch.linalg.vecdot(probabilities, logits)
            with torch.enable_grad():
                given = TokenLogprobs(
                    logprobs[part].detach().requires_grad_(),
                    entropies[part].detach().requires_grad_(entropy == "gradient"),
                )
                part_loss = token_loss(given, part)
                wanted = [given.logprobs, *([given.entropy] if entropy == "gradient" else [])]
                by_logprob, *by_entropy = torch.autograd.grad(
                    part_loss, wanted, allow_unused=True, materialize_grads=True
                )
            loss += part_loss.detach()
            if by_hidden is None and by_head is None:
                continue
            if by_entropy:
                weight = by_logprob[:, None] + by_entropy[0][:, None] * logits.add_(entropies[part, None])
                by_logits = probabilities.mul_(weight).neg_()
            else:
                by_logits = probabilities.mul_(-by_logprob[:, None])
            by_logits.scatter_add_(1, place, by_logprob[:, None])
            by_logits = by_logits.div_(temperature).to(hidden.dtype)
            if by_hidden is not None:
                torch.mm(by_logits, weights, out=by_hidden[part])
            if by_head is not None and hidden.dtype == wide:
                by_head.addmm_(by_logits.t(), hidden[part])
            elif by_head is not None:
                by_head.add_(torch.mm(by_logits.t(), hidden[part]))
        ctx.save_for_backward(by_hidden, by_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(logprobs, entropies)
        return loss, logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        by_hidden, by_head = ctx.saved_tensors
        return (
            None if by_hidden is None else by_hidden * by_loss,
            None if by_head is None else (by_head * by_loss).to(ctx.head_dtype),
            *([None] * 5),
        )
