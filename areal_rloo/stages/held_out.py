"""Measure a policy on held-out examples: rows without a gradient in, mean loss and token accuracy out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from areal_rloo.config import Config
from areal_rloo.learner.advantages import policy_tokens
from areal_rloo.learner.packing import Row, pack
from areal_rloo.models.files import computation_dtype
from areal_rloo.models.head import LogitForm, head_product, with_bias
from areal_rloo.models.policy import Policy, last_hidden
from areal_rloo.models.sizes import chunk_logits
from areal_rloo.trajectory import Trajectory


class HeldOut(NamedTuple):
    """Means over the learned tokens of a set."""

    loss: float  # nats a token
    token_accuracy: float  # share of tokens that are the most likely token, given the tokens before
    example_accuracy: float  # share of examples whose tokens all are: greedy decoding reproduces these
    num_examples: int
    num_tokens: int

    def words(self) -> str:
        return (
            f"held-out loss {self.loss:.4f}, token accuracy {self.token_accuracy:.3f}, "
            f"{self.example_accuracy:.3f} of {self.num_examples:,} examples whole"
        )


@torch.no_grad()
def measure(policy: Policy, examples: Sequence[Trajectory], config: Config, device: torch.device) -> HeldOut:
    """Measure the policy on examples at temperature 1; each fits a row of `learner.microbatch_tokens`."""
    packed = pack(examples, max_tokens=config.learner.microbatch_tokens)
    (microbatches,) = packed.microbatches
    scores = [_scores(policy, Row.of(each, device), computation_dtype(config.model)) for each in microbatches]
    logprobs, right = (packed.unpacked([[each[part] for each in scores]]) for part in (0, 1))
    learned = [policy_tokens(example) for example in examples]
    loss = -sum(float(each[mask].double().sum()) for each, mask in zip(logprobs, learned, strict=True))
    num_right = sum(int(each[mask].sum()) for each, mask in zip(right, learned, strict=True))
    num_whole = sum(bool(each[mask].all()) for each, mask in zip(right, learned, strict=True))
    num_tokens = sum(int(mask.sum()) for mask in learned)
    return HeldOut(loss / num_tokens, num_right / num_tokens, num_whole / len(examples), len(examples), num_tokens)


def _scores(policy: Policy, row: Row, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give the logprob of each target, and True where it is the most likely token, on the CPU; both [num_targets]."""
    causal, low = policy.causal, dtype == torch.bfloat16
    with torch.autocast(row.input_ids.device.type, dtype=torch.bfloat16, enabled=low):
        hidden = last_hidden(causal, row.input_ids, row.layout).index_select(0, row.predicts)
    hidden, head = with_bias(hidden.to(dtype) if low else hidden, causal.get_output_embeddings())
    head, form = head.to(hidden.dtype), LogitForm.of(causal.config, temperature=1.0)
    num = max(1, chunk_logits(on_gpu=hidden.is_cuda) // len(head))
    logprobs, right = [], []
    for part, targets in zip(hidden.split(num), row.targets.split(num), strict=True):
        logits = form.logits(head_product(part, head))
        logprobs.append(-torch.nn.functional.cross_entropy(logits, targets, reduction="none").cpu())
        right.append((logits.argmax(-1) == targets).cpu())
    return torch.cat(logprobs), torch.cat(right)
