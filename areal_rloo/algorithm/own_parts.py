"""The user's functions in place of parts of the algorithm, each tried on random numbers before the first step.

    algorithm.loss.kind        the loss of each token     current, proximal and behaviour logprobs, advantages, config
    algorithm.advantages       in place of adv_norm       rewards, group ids and numbers of tokens of all samples
    algorithm.sample_weights   a factor for each sample   likewise, and the mean staleness

Every rank imports the loss; rank 0 imports all. A launcher tries the functions before a start, in a process, because
they import torch: `python -m areal_rloo.algorithm.own_parts JSON`, the section `algorithm`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from areal_rloo.algorithm.own_function import OwnFunction
from areal_rloo.config import AlgorithmConfig, LossConfig, import_entry
from areal_rloo.decoding import from_json
from areal_rloo.errors import UserError
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_LOSS = ("current_logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages", "config")
_SAMPLES = ("rewards", "group_ids", "num_tokens")
_NUM_TOKENS, _NUM_SAMPLES = 12, 14
_REST_OF_A_GROUP = 3  # a group in the trial has this many samples, the last group fewer
_RELATIVE = 1e-4  # more than rounding
_WEIGHED_TWICE = (
    "reads behaviour_logprobs, and the loss is multiplied by proximal / behaviour, too; if one of the two is enough, "
    "set algorithm.loss.behaviour_weight.rule=ignore"
)
_REPEATED = "a replay repeats a step to the bit: use no random numbers"


class OwnLoss(Protocol):
    """Gives the loss of each token, [num_tokens] float32, to be minimized; all tensors are [num_tokens] float32."""

    def __call__(
        self,
        *,
        current_logprobs: Tensor,
        proximal_logprobs: Tensor,
        behaviour_logprobs: Tensor,
        advantages: Tensor,
        config: LossConfig,
    ) -> Tensor: ...


OwnAdvantages = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rewards [num_samples] float64, group ids and numbers of tokens in the loss, both int64, to [num_samples]."""

OwnWeights = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Likewise, and from the mean staleness of the tokens in the loss, [num_samples] float64."""


class OwnParts(NamedTuple):
    """The functions of rank 0, for a whole batch; None: the built-in part."""

    advantages: OwnAdvantages | None = None
    sample_weights: OwnWeights | None = None


def load_own_loss(config: LossConfig) -> OwnLoss | None:
    """Import the user's loss and try it; None for a built-in kind.

    Raises:
        ConfigError: the function cannot be imported or called.
        UserError: the function raised, or returned anything but a loss of each token by itself.
    """
    if config.built_in:
        return None
    own = OwnFunction("algorithm.loss.kind", config.kind, _LOSS, passes=(torch.OutOfMemoryError,))

    def loss(*, current_logprobs: Tensor, **others: Tensor | LossConfig) -> Tensor:
        returned = own(current_logprobs=current_logprobs, **others)
        return _tensor(own, returned, len(current_logprobs), "num_tokens", floats=(torch.float32,))

    _try_loss(own, loss, config)
    return loss


def load_own_parts(algorithm: AlgorithmConfig) -> OwnParts:
    """Import the user's functions of samples, and try each; raises like `load_own_loss`."""
    advantages: OwnAdvantages | None = None
    weights: OwnWeights | None = None
    if algorithm.advantages is not None:
        advantages = _of_samples(OwnFunction("algorithm.advantages", algorithm.advantages, _SAMPLES), _SAMPLES)
    if algorithm.sample_weights is not None:
        names = (*_SAMPLES, "staleness")
        weights = _of_samples(OwnFunction("algorithm.sample_weights", algorithm.sample_weights, names), names, least=0)
    return OwnParts(advantages, weights)


def _of_samples(own: OwnFunction, names: Sequence[str], *, least: float | None = None) -> Callable[..., Tensor]:
    """Wrap a function of samples with a check of every result, and try it."""

    def of_samples(*values: Tensor) -> Tensor:
        # Copies: the function may change its arguments.
        returned = own(**{name: value.clone() for name, value in zip(names, values, strict=True)})
        found = _tensor(own, returned, len(values[0]), "num_samples", floats=(torch.float32, torch.float64))
        if not bool(found.isfinite().all()):
            own.refuse(f"returned {_first(found, ~found.isfinite())}, expected finite numbers")
        if least is not None and bool((found < least).any()):
            own.refuse(f"returned {_first(found, found < least)}, expected numbers of at least {least:g}")
        return found.detach()

    _try_samples(own, of_samples, num_values=len(names))
    return of_samples


def _tensor(own: OwnFunction, returned: object, length: int, what: str, *, floats: Sequence[torch.dtype]) -> Tensor:
    """Check the form of a result; the numbers would be on a GPU."""
    expected = f"expected a tensor [{what}={length}] of {' or '.join(_name(dtype) for dtype in floats)}"
    if not isinstance(returned, Tensor):
        own.refuse(f"returned a value of the type {type(returned).__name__}, {expected}")
    if returned.shape != (length,) or returned.dtype not in floats:
        own.refuse(f"returned a tensor {list(returned.shape)} of {_name(returned.dtype)}, {expected}")
    return returned


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first(values: Tensor, wrong: Tensor) -> str:
    return f"{values[wrong][0].item():g}"


def _try_loss(own: OwnFunction, loss: OwnLoss, config: LossConfig) -> None:
    """Call a loss with random tokens of two sequences, and look at the values and gradients."""
    random = torch.Generator().manual_seed(0)
    current = -torch.randn(_NUM_TOKENS, generator=random).abs() - 0.1
    near = [current + 0.3 * torch.randn(_NUM_TOKENS, generator=random) for _ in range(2)]
    inputs = {
        "proximal_logprobs": near[0],
        "behaviour_logprobs": near[1],
        "advantages": torch.randn(_NUM_TOKENS, generator=random),
    }

    def of(part: slice) -> tuple[Tensor, Tensor]:
        leaf = current[part].clone().requires_grad_()
        given = {name: value[part].clone() for name, value in inputs.items()}
        found = loss(current_logprobs=leaf, **given, config=config)
        if not all(torch.equal(value, inputs[name][part]) for name, value in given.items()):
            own.refuse("changes its arguments; clone them first")
        return leaf, found

    leaf, whole = of(slice(None))
    if not bool(whole.isfinite().all()):
        own.refuse(f"returned {_first(whole, ~whole.isfinite())} for random logprobs, expected finite numbers")
    if not torch.equal(whole, of(slice(None))[1]):
        own.refuse(f"returned other numbers for the same tokens; {_REPEATED}")
    if not whole.requires_grad:
        own.refuse("returned a loss without a gradient to current_logprobs; compute with current_logprobs itself")
    gradient = torch.stack(
        [
            torch.autograd.grad(token, leaf, retain_graph=True, allow_unused=True, materialize_grads=True)[0]
            for token in whole
        ]
    )
    if not bool(gradient.isfinite().all()):
        own.refuse("has a gradient that is not finite, for random logprobs")
    if not bool((gradient != 0).any()):
        own.refuse("has the gradient 0 for every token")
    halves = (slice(0, _NUM_TOKENS // 2), slice(_NUM_TOKENS // 2, None))
    apart = torch.cat([of(part)[1].detach() for part in halves])
    other = inputs["behaviour_logprobs"] - 1
    if config.decoupled and config.behaviour_weight.rule != "ignore":
        logprobs = {"current_logprobs": current, **inputs, "behaviour_logprobs": other}
        if not torch.equal(whole.detach(), loss(**logprobs, config=config)):
            logger.warning("%s", own.error(_WEIGHED_TWICE))
    if bool((gradient - gradient.diag().diag()).any()) or not _close(whole.detach(), apart):
        own.refuse(
            "gives a token a loss that depends on other tokens; rows are packed and cut, so the tokens nearby are of "
            "other samples; return the loss of each token alone, whose mean algorithm.loss.aggregation takes"
        )


def _try_samples(own: OwnFunction, function: Callable[..., Tensor], *, num_values: int) -> None:
    """Call a function of samples with random groups, in two orders, and with equal rewards."""
    random = torch.Generator().manual_seed(0)
    values = [
        torch.randn(_NUM_SAMPLES, generator=random, dtype=torch.float64),
        7 + torch.arange(_NUM_SAMPLES) // _REST_OF_A_GROUP,  # the ids of a run are not from 0
        torch.randint(1, 50, (_NUM_SAMPLES,), generator=random),
        torch.rand(_NUM_SAMPLES, generator=random, dtype=torch.float64),
    ][:num_values]
    found = function(*values)
    if not torch.equal(found, function(*values)):
        own.refuse(f"returned other numbers for the same samples; {_REPEATED}")
    order = torch.randperm(_NUM_SAMPLES, generator=random)
    if not _close(function(*(value[order] for value in values)), found[order]):
        own.refuse("depends on the order of the samples; find the samples of a group by group_ids")
    function(torch.ones_like(values[0]), *values[1:])


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.double(), second.double(), rtol=_RELATIVE, atol=_RELATIVE)


def main(arguments: Sequence[str]) -> int:
    """Try the functions of a section `algorithm`; print the error in a line."""
    try:
        import_entry()
        algorithm = from_json(arguments[0].encode(), AlgorithmConfig)
        load_own_loss(algorithm.loss)
        load_own_parts(algorithm)
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
