"""From hidden states and head to logits: the product, then the scale and cap of the family, and the temperature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

_ROWS = 512  # of the head, converted to float32 at once on a CPU: small enough for the cache


@dataclass(frozen=True, slots=True)
class LogitForm:
    """The function from products p of hidden states and head to logits z, with scale s, cap c and temperature T.

    z = s p / T, or with a cap (Gemma 2, arXiv:2408.00118, section 2) z = c tanh(s p / c) / T.
    """

    temperature: float = 1.0
    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig, *, temperature: float) -> LogitForm:
        """Read scale and cap of a model; `models/equality.py` checks that these make the model's logits."""
        scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
        return cls(temperature, scale, getattr(config, "final_logit_softcapping", None))

    @property
    def divisor(self) -> float:
        """T / s: the derivative of p by z, without a cap or at 0."""
        return self.temperature / self.scale

    def logits(self, products: Tensor) -> Tensor:
        """Map products to logits of the same shape, with a gradient; overwrites the products."""
        if self.cap is None:
            return products if self.divisor == 1 else products.div_(self.divisor)
        return products.mul_(self.scale / self.cap).tanh_() * (self.cap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return the derivative of z by p, times `divisor`: 1 - tanh^2, or None without a cap."""
        return None if self.cap is None else 1 - (logits * (self.temperature / self.cap)).square_()


def with_bias(hidden: Tensor, head: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """Return hidden states and head such that the product of both includes a bias: as a column, times a column of 1.

    Most heads have no bias, and both are returned as they are: [num_targets, hidden_size], [vocabulary, hidden_size].
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor), "the head is a linear layer"
    if bias is None:
        return hidden, weight
    return torch.nn.functional.pad(hidden, (0, 1), value=1.0), torch.cat([weight, bias[:, None]], dim=1)


def head_product(hidden: Tensor, head: Tensor) -> Tensor:
    """Compute hidden head^T, [num_targets, vocabulary]; of bfloat16 factors in float32. Both may have a gradient.

    A logit of 8 rounded to bfloat16 is wrong by up to 0.03 nats, and by ten times as much at temperature 0.1.
    """
    product: Tensor = _HeadProduct.apply(hidden, head)  # type: ignore[no-untyped-call]
    return product


class _HeadProduct(torch.autograd.Function):
    """torch has no derivative of a product whose dtype is wider than the factors'."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, head)
        if hidden.dtype != torch.bfloat16:
            return hidden @ head.t()
        if hidden.is_cuda:
            return torch.mm(hidden, head.t(), out_dtype=torch.float32)
        wide = hidden.float()
        product = wide.new_empty(len(hidden), len(head))
        for rows, part in zip(head.split(_ROWS), product.split(_ROWS, 1), strict=True):
            torch.mm(wide, rows.float().t(), out=part)
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, by_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, head = ctx.saved_tensors
        by_logits = by_logits.to(hidden.dtype)
        of_hidden, of_head = ctx.needs_input_grad  # adapters freeze the head
        return by_logits @ head if of_hidden else None, by_logits.t() @ hidden if of_head else None


class LogitChunks:
    """Process a chunk of logits at a time in reused buffers: allocating fresh memory costs more than the arithmetic."""

    def __init__(self, hidden: Tensor, form: LogitForm, *, num_rows: int, vocabulary: int) -> None:
        self._form = form
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self._narrow = torch.empty(num_rows, vocabulary, dtype=hidden.dtype, device=hidden.device)
        self._logits = self._narrow if hidden.dtype == self.wide else None
        self._powers = torch.empty_like(self._narrow, dtype=self.wide)
        self._total = self._normalizer = self._entropies = self._powers.new_empty(0)

    def logits(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """Compute z, [len(hidden), vocabulary]."""
        if self._logits is None:
            return self._form.logits(head_product(hidden, weights))
        return self._form.logits(torch.mm(hidden, weights.t(), out=self._logits[: len(hidden)]))

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute log p(target); keep powers and total, with p = powers / total."""
        largest = logits.amax(-1, keepdim=True)
        powers = torch.sub(logits, largest, out=self._powers[: len(logits)]).exp_()
        self._total = powers.sum(-1)
        self._normalizer = largest[:, 0] + self._total.log()
        return logits.gather(1, targets[:, None])[:, 0] - self._normalizer

    def entropies(self, logits: Tensor) -> Tensor:
        """Compute H = normalizer - sum p z."""
        self._entropies = self._normalizer - torch.linalg.vecdot(self._powers[: len(logits)], logits) / self._total
        return self._entropies

    def by_products(
        self, logits: Tensor, targets: Tensor, by_logprob: Tensor, by_entropy: Tensor | None = None
    ) -> Tensor:
        """Compute the derivative of the loss by p, [len(logits), vocabulary] in the dtype of hidden states.

        `by_logprob` and `by_entropy` are its derivatives, [len(logits)]. Overwrites the logits.
        """
        powers, slope = self._powers[: len(logits)], self._form.slope(logits)
        by_logprob = by_logprob / self._form.divisor
        if by_entropy is None:
            derivative = powers.mul_((-by_logprob / self._total)[:, None])
        else:
            spread = logits.sub_((self._normalizer - self._entropies)[:, None])  # log p + H
            weight = spread.mul_((by_entropy / self._form.divisor)[:, None]).add_(by_logprob[:, None])
            derivative = powers.mul_(weight).mul_(-1 / self._total[:, None])
        derivative.scatter_add_(1, targets[:, None], by_logprob[:, None])
        if slope is not None:
            derivative.mul_(slope)
        return derivative if derivative.dtype == self._narrow.dtype else self._narrow[: len(logits)].copy_(derivative)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, first: bool) -> None:
    """Do total += left @ right in the dtype of `total`; if `first`, overwrite the uninitialized `total`."""
    if left.dtype == total.dtype:
        torch.mm(left, right, out=total) if first else total.addmm_(left, right)
    else:
        product = torch.mm(left, right)
        total.copy_(product) if first else total.add_(product)
