"""A policy as the learner uses it: asked about packed rows of tokens, for logprobs or for the loss itself.

It is one module with one `forward`, so that whoever shards its parameters finds every use of them inside.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_rloo.models.layout import PackedLayout
from areal_rloo.models.logprobs import Entropy, chosen_logprobs
from areal_rloo.models.token_loss import TokenLoss, loss_of_tokens


class Policy(torch.nn.Module):
    """A causal language model with packed attention.

    Attributes:
        causal: the model; its parameters are the policy's.
    """

    def __init__(self, causal: PreTrainedModel, *, temperature: float, dtype: torch.dtype) -> None:
        """
        Args:
            causal: the model.
            temperature: divides the logits, as the engine did.
            dtype: of matrix products; the residual stream, norms and logprobs are float32, or wider as the weights are.
        """
        super().__init__()
        self.causal = causal
        self._temperature = temperature
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
        """What the policy says of `targets`.

        Args:
            input_ids: [num_tokens] int64, the packed row.
            layout: where its sequences lie.
            predicts: [num_targets] int64, the place in the row whose hidden state predicts each target.
            targets: [num_targets] int64.
            entropy: whether it is wanted.
            token_loss: a loss that reads each token's own logprob and entropy alone (`loss_of_tokens`).

        Returns:
            Logprobs and entropies, [num_targets] float32 each, with a gradient to the weights. With a `token_loss`:
            its sum, a scalar with a gradient, and the two without one.
        """
        low = self._dtype == torch.bfloat16
        with torch.autocast(input_ids.device.type, dtype=torch.bfloat16, enabled=low):
            hidden = last_hidden(self.causal, input_ids, layout).index_select(0, predicts)
        hidden = hidden.to(torch.bfloat16) if low else hidden
        head = self.causal.get_output_embeddings().weight
        if token_loss is None:
            of_targets = chosen_logprobs(hidden, head, targets, self._temperature, entropy=entropy)
            return of_targets.logprobs, of_targets.entropy
        loss, of_targets = loss_of_tokens(hidden, head, targets, self._temperature, token_loss, entropy=entropy)
        return loss, of_targets.logprobs, of_targets.entropy


def last_hidden(causal: PreTrainedModel, input_ids: Tensor, layout: PackedLayout) -> Tensor:
    """The last hidden states of a packed row: [num_tokens, hidden_size], float32 at least."""
    embedded = causal.get_input_embeddings()(input_ids[None])
    hidden: Tensor = causal.base_model(
        inputs_embeds=embedded.to(torch.promote_types(embedded.dtype, torch.float32)),
        position_ids=layout.position_ids[None],
        use_cache=False,
        packed=layout,
    ).last_hidden_state
    return hidden[0]


def packed_logits(causal: PreTrainedModel, *, input_ids: Tensor, layout: PackedLayout, predicts: Tensor) -> Tensor:
    """All logits at `predicts`: [num_targets, vocab_size]; for small vocabularies."""
    hidden = last_hidden(causal, input_ids, layout).index_select(0, predicts)
    logits: Tensor = hidden @ causal.get_output_embeddings().weight.T
    return logits
