"""How much time and memory does the loss from hidden states take, compared with full logits?

A microbatch forward and backward, with gradients for hidden states and head, as in a train step. The named alternative
is `whole`: [tokens, vocabulary] logits, like `log_softmax` of a model's output. `recomputed` is `chosen_logprobs`, and
`at_once` is `loss_of_tokens`. Memory is the peak of a process of its own above the level before, by token: the memory
of `whole` grows with the tokens, so fewer tokens are enough there.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import Tensor

from areal_rloo.models.head import LogitForm
from areal_rloo.models.policy import TokenLogprobs, chosen_logprobs, loss_of_tokens
from benchmarks.harness import Benchmark, Case, timed
from benchmarks.peaks import Peak

TEMPERATURE = 0.9
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # hidden, head, targets, weights


def cases(quick: bool) -> Generator[Case]:
    torch.set_num_threads(2)
    vocabulary, hidden = (1000, 32) if quick else (151_936, 896)
    tokens, most_tokens = (64, 256) if quick else (512, 4096)
    facts = {"vocabulary": vocabulary, "hidden": hidden, "tokens": tokens}
    inputs = _inputs(tokens, vocabulary, hidden)
    contestants = {name: partial(timed, partial(_run, loss, *inputs)) for name, loss in SYSTEMS.items()}
    ratios = [("recomputed", "whole"), ("at_once", "whole")]
    yield Case("time", "s", contestants, ratios, 2 if quick else 5, facts=facts)
    del inputs, contestants
    memory = {
        "whole": partial(_in_a_process, "whole", tokens, vocabulary, hidden),
        "at_once": partial(_in_a_process, "at_once", most_tokens, vocabulary, hidden),
    }
    facts = {"vocabulary": vocabulary, "hidden": hidden, "tokens_whole": tokens, "tokens_at_once": most_tokens}
    yield Case("memory", "bytes/token", memory, [("at_once", "whole")], 2, warm_up=False, exact=True, facts=facts)


def _whole(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    logprobs = ((hidden @ head.to(hidden.dtype).T).float() / TEMPERATURE).log_softmax(-1)
    return (weights * logprobs.gather(1, targets[:, None])[:, 0]).sum()


def _recomputed(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (weights * chosen_logprobs(hidden, head.to(hidden.dtype), targets, LogitForm(TEMPERATURE)).logprobs).sum()


def _at_once(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    def token_loss(given: TokenLogprobs, part: slice) -> Tensor:
        return (weights[part] * given.logprobs).sum()

    return loss_of_tokens(hidden, head, targets, LogitForm(TEMPERATURE), token_loss)[0]


SYSTEMS: dict[str, Loss] = {"whole": _whole, "recomputed": _recomputed, "at_once": _at_once}


def _inputs(num: int, vocabulary: int, hidden_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(num, hidden_size).requires_grad_()
    head = (torch.randn(vocabulary, hidden_size) / 30).requires_grad_()
    return hidden, head, torch.randint(0, vocabulary, (num,)), torch.randn(num)


def _run(loss: Loss, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> None:
    hidden.grad = head.grad = None
    loss(hidden, head, targets, weights).backward()


def _in_a_process(name: str, tokens: int, vocabulary: int, hidden: int) -> float:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_bytes, name, tokens, vocabulary, hidden).result() / tokens


def _peak_bytes(name: str, tokens: int, vocabulary: int, hidden: int) -> int:
    torch.set_num_threads(2)
    inputs = _inputs(tokens, vocabulary, hidden)
    peak = Peak(torch.device("cpu"))
    peak.restart()
    _run(SYSTEMS[name], *inputs)
    return peak.num_bytes


BENCHMARK = Benchmark("logprobs", __doc__, cases)
