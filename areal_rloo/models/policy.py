"""Policies as the learner uses them: packed rows in, logprobs or a loss out.

A policy is a single module with a single `forward`, so FSDP sees every use of the parameters. The logits of all tokens,
[num_targets, vocabulary], are never in memory together. `chosen_logprobs` returns logprobs with a graph and recomputes
each chunk in the backward pass: four matrix products of hidden states and head. `loss_of_tokens` differentiates a sum
over tokens while each chunk of logits exists: three. A `LogitForm` (`models/head.py`) gives the family's logits.

    hidden [num_targets, hidden_size] ─► logits of a chunk ─► logprobs, entropy ─► the chunk's loss and its derivative
                                              └──────► gradients of hidden and head, added up ◄──────┘

The second form needs a loss in which no token depends on the logprobs of another token. With logits z, p = softmax(z),
H = -sum p log p, and g, e the derivatives of the loss by logprob and entropy of a token:

    dloss / dz_j = g (1[j = target] - p_j) - e p_j (log p_j + H)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from areal_rloo.models.attention import PackedLayout
from areal_rloo.models.head import LogitChunks, LogitForm, add_product, head_product, with_bias
from areal_rloo.models.sizes import chunk_logits

Entropy = Literal["none", "value", "gradient"]
"""Whether to compute the entropy, and whether it needs a gradient."""


class TokenLogprobs(NamedTuple):
    """Logprobs and entropies of chosen tokens, each [num_targets] float32."""

    logprobs: Tensor  # log p(token), with a gradient to the weights
    entropy: Tensor  # -sum p log p over the vocabulary; 0 if not requested


TokenLoss = Callable[[TokenLogprobs, slice], Tensor]
"""Compute the loss of the tokens of a slice, a scalar, from only their logprobs and entropies."""


class Policy(torch.nn.Module):
    """A causal language model with packed attention."""

    def __init__(self, causal: PreTrainedModel, *, temperature: float, dtype: torch.dtype) -> None:
        """The temperature divides the logits, as in the engine.

        Matrix products have the dtype; residual stream, norms and logprobs are float32, or the dtype of wider weights.
        """
        super().__init__()
        self.causal = causal
        self._form = LogitForm.of(causal.config, temperature=temperature)
        self._dtype = dtype

    def forward(
        self,
        input_ids: Tensor,
        layout: PackedLayout,
        predicts: Tensor,
        targets: Tensor,
        *,
        entropy: Entropy = "none",
        token_loss: TokenLoss | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute logprobs and entropies of `targets`, [num_targets] float32 each, with a gradient to the weights.

        With a `token_loss` (see `loss_of_tokens`), return the summed loss, a scalar with a gradient, then logprobs and
        entropies without gradient.

        Args:
            input_ids: [num_tokens] int64, the packed row.
            predicts: [num_targets] int64, the place in the row whose hidden state predicts each target.
            targets: [num_targets] int64.
        """
        low = self._dtype == torch.bfloat16
        with torch.autocast(input_ids.device.type, dtype=torch.bfloat16, enabled=low):
            hidden = last_hidden(self.causal, input_ids, layout).index_select(0, predicts)
        hidden = hidden.to(torch.bfloat16) if low else hidden
        hidden, head = with_bias(hidden, self.causal.get_output_embeddings())
        if token_loss is None:
            return chosen_logprobs(hidden, head, targets, self._form, entropy=entropy)
        loss, of_targets = loss_of_tokens(hidden, head, targets, self._form, token_loss, entropy=entropy)
        return loss, *of_targets


def last_hidden(causal: PreTrainedModel, input_ids: Tensor, layout: PackedLayout) -> Tensor:
    """Return the last hidden states of a packed row: [num_tokens, hidden_size], float32 at least."""
    embedded = causal.get_input_embeddings()(input_ids[None])
    hidden: Tensor = causal.base_model(
        inputs_embeds=embedded.to(torch.promote_types(embedded.dtype, torch.float32)),
        position_ids=layout.position_ids[None],
        use_cache=False,
        packed=layout,
    ).last_hidden_state
    return hidden[0]


def chosen_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, form: LogitForm, *, entropy: Entropy = "none"
) -> TokenLogprobs:
    """Compute log softmax(z) at `targets`, and the entropy of that softmax; the form maps hidden head^T to z.

    `hidden` is [num_targets, hidden_size], `head` [vocabulary, hidden_size], `targets` [num_targets] int64.
    """
    chunk = _chunk_targets(hidden, head)
    head = head.to(hidden.dtype)
    if len(targets) <= chunk:
        return _chunk(hidden, head, targets, form, entropy)
    parts = [
        checkpoint(_chunk, h, head, t, form, entropy, use_reentrant=False)
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return TokenLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def _chunk_targets(hidden: Tensor, head: Tensor) -> int:
    return max(1, chunk_logits(on_gpu=hidden.is_cuda) // head.shape[0])


def _chunk(hidden: Tensor, head: Tensor, targets: Tensor, form: LogitForm, entropy: Entropy) -> TokenLogprobs:
    logits = form.logits(head_product(hidden, head))
    logprobs = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    if entropy == "none":
        return TokenLogprobs(logprobs, torch.zeros_like(logprobs))
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        all_logprobs = logits.log_softmax(-1)
        return TokenLogprobs(logprobs, -(all_logprobs.exp() * all_logprobs).sum(-1))


def loss_of_tokens(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    form: LogitForm,
    token_loss: TokenLoss,
    *,
    entropy: Entropy = "none",
) -> tuple[Tensor, TokenLogprobs]:
    """Sum token_loss(log softmax(z) at `targets`) over chunks of tokens; the form maps hidden head^T to z.

    Takes the arguments of `chosen_logprobs`, and a `token_loss` that reads only tokens of the slice and is
    differentiated by logprobs, and by entropies if `entropy` is `gradient`. Returns the loss, a scalar with a gradient
    to `hidden` and `head` (once), and logprobs and entropies without gradient.
    """
    loss, logprobs, entropies = _LossOfTokens.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, form, token_loss, entropy, _chunk_targets(hidden, head)
    )
    return loss, TokenLogprobs(logprobs, entropies)


class _LossOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        form: LogitForm,
        token_loss: TokenLoss,
        entropy: Entropy,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = head.to(hidden.dtype)
        chunks = LogitChunks(hidden, form, num_rows=min(chunk, len(targets)), vocabulary=len(head))
        logprobs = torch.empty(len(targets), dtype=chunks.wide, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        loss = logprobs.new_zeros(())
        by_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        by_head = torch.empty_like(head, dtype=chunks.wide) if ctx.needs_input_grad[1] else None
        for start in range(0, len(targets), chunk):
            part = slice(start, min(start + chunk, len(targets)))
            logits = chunks.logits(hidden[part], weights)
            logprobs[part] = chunks.logprobs(logits, targets[part])
            if entropy != "none":
                entropies[part] = chunks.entropies(logits)
            current = TokenLogprobs(logprobs[part], entropies[part])
            part_loss, derivatives = _differentiated(token_loss, current, part, with_entropy=entropy == "gradient")
            loss += part_loss
            if by_hidden is None and by_head is None:
                continue
            by_products = chunks.by_products(logits, targets[part], *derivatives)
            if by_hidden is not None:
                torch.mm(by_products, weights, out=by_hidden[part])
            if by_head is not None:
                add_product(by_head, by_products.t(), hidden[part], first=start == 0)
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


def _differentiated(
    token_loss: TokenLoss, current: TokenLogprobs, part: slice, *, with_entropy: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the loss of a chunk and the derivatives by logprobs, and by entropies if requested."""
    with torch.enable_grad():
        logprobs = current.logprobs.detach().requires_grad_()
        entropies = current.entropy.detach().requires_grad_(with_entropy)
        loss = token_loss(TokenLogprobs(logprobs, entropies), part)
        inputs = [logprobs, entropies] if with_entropy else [logprobs]
        return loss.detach(), torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
