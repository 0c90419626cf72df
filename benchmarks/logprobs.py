"""Measure the loss from hidden states: full logits, recomputed chunks, and chunks with an immediate gradient.

    python -m benchmarks.logprobs [--tokens 1024] [--vocabulary 151936] [--hidden 896] [--device cpu]
        [--output benchmarks/results/logprobs.json]

Run a microbatch forward and backward, with gradients for hidden states and head, as in a train step. `whole` has
[tokens, vocabulary] logits, like `log_softmax` of a model's output. `recomputed` is `chosen_logprobs`, and `at_once` is
`loss_of_tokens`. The systems alternate. Times are medians, and ratios are within a repeat. Memory is the peak above the
level before, each in a separate process. `--most-tokens` is measured for the two systems with bounded memory; the
memory of `whole` grows with the tokens.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from areal_rloo.models.head import LogitForm
from areal_rloo.models.policy import TokenLogprobs, chosen_logprobs, loss_of_tokens
from benchmarks import hardware
from benchmarks.peaks import Peak, finish

TEMPERATURE = 0.9
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # hidden, head, targets, weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--most-tokens", type=int, default=16384)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output")
    parser.add_argument("--memory-of", choices=SYSTEMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        print(_peak_bytes(SYSTEMS[arguments.memory_of], arguments))
        return
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    inputs = _inputs(arguments)
    for repeat in range(arguments.repeats + 1):
        for name, loss in SYSTEMS.items():
            started = time.perf_counter()
            _run(loss, *inputs)
            if repeat:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - started)
    del inputs
    result: dict[str, object] = {
        name: getattr(arguments, name) for name in ("tokens", "vocabulary", "hidden", "device", "dtype", "threads")
    }
    whole = _memory("whole", arguments.tokens)
    for name, times in seconds.items():
        most = {} if name == "whole" else {"peak_bytes_at_most_tokens": _memory(name, arguments.most_tokens)}
        ratios = [own / theirs for own, theirs in zip(times, seconds["whole"], strict=True)]
        result[name] = row = {
            "s": round(statistics.median(times), 3),
            "time_over_whole": round(statistics.median(ratios), 3),
            "peak_bytes": _memory(name, arguments.tokens),
            **most,
        }
        if most:
            scaled = whole * arguments.most_tokens / arguments.tokens
            row["memory_over_whole_at_most_tokens"] = round(most["peak_bytes_at_most_tokens"] / scaled, 3)
        print(name, row, flush=True)
    hardware.write(arguments.output, {"most_tokens": arguments.most_tokens, **result})


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


def _inputs(arguments: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    device, num = arguments.device, arguments.tokens
    hidden = torch.randn(num, arguments.hidden, device=device).to(getattr(torch, arguments.dtype)).requires_grad_()
    head = (torch.randn(arguments.vocabulary, arguments.hidden, device=device) / 30).requires_grad_()
    targets = torch.randint(0, arguments.vocabulary, (num,), device=device)
    return hidden, head, targets, torch.randn(num, device=device)


def _run(loss: Loss, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> None:
    hidden.grad = head.grad = None
    loss(hidden, head, targets, weights).backward()
    finish(hidden.device)


def _memory(name: str, tokens: int) -> int:
    options = [*sys.argv[1:], f"--tokens={tokens}", f"--memory-of={name}"]
    return int(subprocess.run([sys.executable, __file__, *options], check=True, capture_output=True, text=True).stdout)


def _peak_bytes(loss: Loss, arguments: argparse.Namespace) -> int:
    inputs = _inputs(arguments)
    peak = Peak(torch.device(arguments.device))
    peak.restart()
    _run(loss, *inputs)
    return peak.num_bytes


if __name__ == "__main__":
    main()
