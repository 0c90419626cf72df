"""Completions decoded together: rows of a key/value cache, one running request each.

Active rows are always the first ones: a row that ends is filled with a waiting request or with the last active row, so
that a step works on a prefix of every tensor. A row's state lives in tensors; the host sees one token a row and step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_rloo.engines.base import GenerationRequest
from areal_rloo.engines.embedded.parameters import Parameters
from areal_rloo.engines.embedded.sampling import choose, truncate, uniforms
from areal_rloo.engines.embedded.transformer import Cache, decode, prefill
from areal_rloo.trajectory import Completion, FinishReason

_PREFIXES = 64  # prompts whose keys and values are kept for the next samples of their group
_PREFILL_TOKENS = 8192  # padded tokens of one prefill pass


@dataclass(slots=True)
class Running:
    """A request in a row. `spans` are (policy version, first token made by it)."""

    request: GenerationRequest
    future: Future[Completion]
    spans: list[tuple[int, int]] = field(default_factory=list)
    num_tokens: int = 0


class DecodeBatch:
    """Up to `num_rows` requests under one set of weights."""

    def __init__(self, parameters: Parameters, rope: Tensor, *, num_rows: int, context_tokens: int) -> None:
        a = parameters.architecture
        device, dtype = parameters.embedding.device, parameters.embedding.dtype
        self.parameters = parameters
        self.num_rows = num_rows
        self.prefill_tokens = 0
        self._rope = rope
        self._device = device
        self._running: list[Running] = []
        self._prefixes: OrderedDict[tuple[tuple[int, ...], int], Tensor] = OrderedDict()
        self._cache = Cache(a, num_rows=num_rows, context_tokens=context_tokens, device=device, dtype=dtype)
        self._tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(num_rows, context_tokens, device=device)
        self._out_tokens = torch.zeros(num_rows, context_tokens, dtype=torch.int64, device=device)
        self._out_logprobs = torch.zeros(num_rows, context_tokens, device=device)
        self._stops = np.zeros((num_rows, a.vocab_size), dtype=np.bool_)
        self._positions = np.zeros(num_rows, dtype=np.int64)
        self._made = np.zeros(num_rows, dtype=np.int64)
        self._limits = np.zeros(num_rows, dtype=np.int64)
        self._minimums = np.zeros(num_rows, dtype=np.int64)
        self._temperatures = np.ones(num_rows, dtype=np.float32)
        self._greedy = np.zeros(num_rows, dtype=np.bool_)
        self._top_p = np.ones(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free(self) -> int:
        return self.num_rows - len(self._running)

    def start(self, requests: Sequence[tuple[GenerationRequest, Future[Completion]]], policy_version: int) -> None:
        """Put requests into free rows; prompts that are not known at this version are computed, each once."""
        self._compute_prefixes([request.prompt_tokens for request, _ in requests], policy_version)
        for request, future in requests:
            row, sampling = len(self._running), request.sampling
            self._running.append(Running(request, future, [(policy_version, 0)]))
            prefix = self._prefixes[(request.prompt_tokens, policy_version)]
            self._prefixes.move_to_end((request.prompt_tokens, policy_version))
            num_cached = len(request.prompt_tokens) - 1
            self._cache.tensor[:, :, row, :, :num_cached] = prefix
            self._tokens[row] = request.prompt_tokens[-1]
            self._positions[row] = num_cached
            if not sampling.greedy:
                self._uniforms[row, : sampling.max_new_tokens] = uniforms(sampling.seed, sampling.max_new_tokens)
            self._stops[row] = False
            self._stops[row, list(sampling.stop_token_ids)] = True
            self._made[row] = 0
            self._limits[row] = sampling.max_new_tokens
            self._minimums[row] = sampling.min_new_tokens
            self._temperatures[row] = 1.0 if sampling.greedy else sampling.temperature
            self._greedy[row] = sampling.greedy
            self._top_p[row] = 1.0 if sampling.greedy else sampling.top_p
            self._top_k[row] = 0 if sampling.greedy else sampling.top_k
        while len(self._prefixes) > _PREFIXES:
            self._prefixes.popitem(last=False)

    def step(self) -> list[tuple[Running, Completion]]:
        """One token for every row; gives the requests that ended with it, their rows free again."""
        num = len(self._running)
        positions = torch.from_numpy(self._positions[:num]).to(self._device)
        longest = int(self._positions[:num].max()) + 1
        logits = decode(self.parameters, self._cache, self._tokens[:num], positions, longest, self._rope).float()
        made = torch.from_numpy(self._made[:num]).to(self._device)
        uniform = self._uniforms[:num].gather(1, made[:, None]).squeeze(1)
        greedy = torch.from_numpy(self._greedy[:num]).to(self._device) if self._greedy[:num].any() else None
        tokens, logprobs = choose(self._shaped(logits), uniform, greedy)
        self._tokens[:num] = tokens
        self._out_tokens[:num].scatter_(1, made[:, None], tokens[:, None])
        self._out_logprobs[:num].scatter_(1, made[:, None], logprobs[:, None])
        self._positions[:num] += 1
        self._made[:num] += 1
        stopped = self._stops[np.arange(num), tokens.cpu().numpy()]
        ended = np.flatnonzero(stopped | (self._made[:num] >= self._limits[:num]))
        finished = [self._finished(row, "stop" if stopped[row] else "length") for row in ended.tolist()]
        for row in reversed(ended.tolist()):
            self._free(row)
        return finished

    def new_version(self, policy_version: int) -> None:
        """The weights were exchanged: tokens from here on are tagged with this version."""
        for row, running in enumerate(self._running):
            running.spans.append((policy_version, int(self._made[row])))

    def abort(self, request_ids: set[str]) -> list[tuple[Running, Completion]]:
        """End requests early; gives what they have."""
        rows = [row for row, running in enumerate(self._running) if running.request.request_id in request_ids]
        aborted = [self._finished(row, "abort") for row in rows]
        for row in reversed(rows):
            self._free(row)
        return aborted

    def futures(self) -> list[Future[Completion]]:
        """Of everything that runs."""
        return [running.future for running in self._running]

    def _compute_prefixes(self, prompts: Sequence[tuple[int, ...]], policy_version: int) -> None:
        """Keys and values of all but the last token of each prompt; the last one is the first decode step's input."""
        missing = [p for p in dict.fromkeys(prompts) if (p, policy_version) not in self._prefixes]
        missing.sort(key=len)
        while missing:
            num = max(1, min(len(missing), _PREFILL_TOKENS // len(missing[-1])))
            chosen, missing = missing[-num:], missing[:-num]
            width = max(1, len(chosen[-1]) - 1)
            padded = torch.tensor([(*p[:-1], *[0] * (width - len(p) + 1)) for p in chosen], device=self._device)
            computed = prefill(self.parameters, padded, self._rope)
            for index, prompt in enumerate(chosen):
                self._prefixes[(prompt, policy_version)] = computed[:, :, index, :, : len(prompt) - 1]
                self.prefill_tokens += len(prompt) - 1

    def _shaped(self, logits: Tensor) -> Tensor:
        """Logits under each row's temperature, truncation and minimum length."""
        num = len(logits)
        temperatures = self._temperatures[:num]
        if (temperatures != 1).any():
            logits = logits / torch.from_numpy(temperatures)[:, None].to(self._device)
        early = self._made[:num] < self._minimums[:num]
        if early.any():
            banned = self._stops[:num] & early[:, None]
            logits = logits.masked_fill(torch.from_numpy(banned).to(self._device), -torch.inf)
        if (self._top_p[:num] < 1).any() or (self._top_k[:num] > 0).any():
            top_k, top_p = torch.from_numpy(self._top_k[:num]), torch.from_numpy(self._top_p[:num])
            logits = truncate(logits, top_k.to(self._device), top_p.to(self._device))
        return logits

    def _finished(self, row: int, reason: FinishReason) -> tuple[Running, Completion]:
        running, num = self._running[row], int(self._made[row])
        running.num_tokens = num
        starts = [start for _, start in running.spans]
        counts = np.diff(starts, append=num)
        versions = np.repeat(np.array([version for version, _ in running.spans], dtype=np.int32), counts)
        return running, Completion(
            tokens=self._out_tokens[row, :num].to(torch.int32).cpu().numpy().copy(),
            behaviour_logprobs=self._out_logprobs[row, :num].cpu().numpy().copy(),
            versions=versions,
            finish_reason=reason,
        )

    def _free(self, row: int) -> None:
        """Move the last active row here."""
        last = len(self._running) - 1
        if row != last:
            length = int(self._positions[last])
            self._cache.tensor[:, :, row, :, :length] = self._cache.tensor[:, :, last, :, :length]
            for tensor in (self._tokens, self._uniforms, self._out_tokens, self._out_logprobs):
                tensor[row] = tensor[last]
            state: tuple[np.ndarray[Any, Any], ...] = (
                *(self._stops, self._positions, self._made, self._limits, self._minimums),
                *(self._temperatures, self._greedy, self._top_p, self._top_k),
            )
            for array in state:
                array[row] = array[last]
            self._running[row] = self._running[last]
        self._running.pop()
