"""Completions decoded together under one set of weights.

    launch: one token for every row, on the device  ─►  collect: its tokens on the host, and who ended with it

What a launch needs is on the device already and moved on there, until the rows change. On a GPU the next step is
launched before the tokens of the last are looked at (`steps_ahead`): the host waits for no token, and a row that turns
out to have ended has made one more, which is thrown away.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_rloo.engines.embedded.cache import Cache, RowKind
from areal_rloo.engines.embedded.parameters import Parameters
from areal_rloo.engines.embedded.running import Running
from areal_rloo.engines.embedded.sampling import Shaping, choose, uniforms
from areal_rloo.engines.embedded.transformer import Rotations, Rows, decode
from areal_rloo.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class _Plan:
    """What steps need until the rows change; `counters` are all numbers that a step moves on by one.

    It holds while the cache has made no more than `num_moves`.
    """

    num_moves: int
    slots: npt.NDArray[np.int64]
    slots_on_device: Tensor
    rows: Rows
    uniform_places: Tensor
    counters: Tensor
    shaping: Shaping


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way to the host. `arrivals` tell a slot's request from one that had the slot before."""

    slots: npt.NDArray[np.int64]
    arrivals: npt.NDArray[np.int64]
    tokens: Tensor
    logprobs: Tensor
    done: torch.cuda.Event | None


class DecodeBatch:
    """Up to `num_slots` requests.

    Attributes:
        parameters: the weights.
        kind: of the rows it decodes.
        running: by slot, those that are decoded.
        num_generated: tokens that requests got, since somebody last took the count.
    """

    def __init__(
        self,
        parameters: Parameters,
        cache: Cache,
        rope: Tensor,
        *,
        kind: RowKind,
        num_slots: int,
        context_tokens: int,
        steps_ahead: int,
    ) -> None:
        device = parameters.embedding.device
        self.parameters = parameters
        self.kind = kind
        self.running: dict[int, Running] = {}
        self.num_generated = 0
        self._cache = cache
        self._device = device
        self._steps_ahead = steps_ahead
        self._rotations = Rotations(parameters.architecture, rope, num_rows=num_slots)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._launched: deque[_Launched] = deque()
        self._plan: _Plan | None = None
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._table_tokens = context_tokens + steps_ahead  # a row makes so many more before it is known to have ended
        self._uniforms = torch.zeros(num_slots, self._table_tokens, device=device)
        self._out_tokens = np.zeros((num_slots, context_tokens), dtype=np.int32)
        self._out_logprobs = np.zeros((num_slots, context_tokens), dtype=np.float32)
        self._arrivals = np.full(num_slots, -1, dtype=np.int64)
        self._positions = np.zeros(num_slots, dtype=np.int64)
        self._capacities = np.zeros(num_slots, dtype=np.int64)
        self._made = np.zeros(num_slots, dtype=np.int64)  # launched
        self._collected = np.zeros(num_slots, dtype=np.int64)  # of these, on the host
        self._limits = np.zeros(num_slots, dtype=np.int64)
        self._minimums = np.zeros(num_slots, dtype=np.int64)
        self._stops = np.zeros((num_slots, parameters.architecture.vocab_size), dtype=np.bool_)

    def begin(self, running: Running, policy_version: int) -> None:
        """Decode a request whose row holds all known tokens but the last; there must be a free slot."""
        assert running.row is not None, "a request is decoded in a row"
        self._drop_plan()
        slot, sampling, known = self._free_slots.pop(), running.request.sampling, running.known_tokens
        num_made = len(running.tokens)
        running.spans.append((policy_version, num_made))
        running.row.slot = slot
        self.running[slot] = running
        self._arrivals[slot] = running.arrival
        self._tokens[slot] = int(known[-1])
        self._positions[slot] = len(known) - 1
        self._made[slot] = self._collected[slot] = num_made
        self._out_tokens[slot, :num_made] = running.tokens
        self._out_logprobs[slot, :num_made] = running.logprobs
        self._limits[slot] = sampling.max_new_tokens
        self._minimums[slot] = sampling.min_new_tokens
        self._stops[slot] = False
        self._stops[slot, list(sampling.stop_token_ids)] = True
        if not sampling.greedy:
            self._uniforms[slot, : sampling.max_new_tokens] = uniforms(running.seed, sampling.max_new_tokens)

    def full(self) -> list[Running]:
        """Those whose next token has no room in their row, the first submitted first."""
        slots = np.fromiter(self.running, dtype=np.int64, count=len(self.running))
        full = slots[self._positions[slots] >= self._capacities_of(slots)]
        return sorted((self.running[slot] for slot in full.tolist()), key=lambda running: running.arrival)

    def num_written(self, running: Running) -> int:
        """Tokens whose keys and values are in its row."""
        assert running.row is not None, "a request is decoded in a row"
        return int(self._positions[running.row.slot])

    def step(self) -> list[tuple[Running, FinishReason]]:
        """One token for every row; gives the requests that are known to have ended."""
        if any(self._made[slot] < self._limits[slot] for slot in self.running):
            self._launch()
            return self._collect(self._steps_ahead)
        return self.drain()

    def drain(self) -> list[tuple[Running, FinishReason]]:
        """Wait for all that was launched; gives the requests that ended."""
        return self._collect(0)

    def new_version(self, policy_version: int) -> None:
        """The weights were exchanged: tokens from here on are tagged with this version."""
        for slot, running in self.running.items():
            running.spans.append((policy_version, int(self._made[slot])))

    def leave(self, running: Running) -> None:
        """Give the slot back; the request keeps what was collected."""
        assert running.row is not None, "a request is decoded in a row"
        self._drop_plan()
        slot = running.row.slot
        num = self._collected[slot]
        running.keep_made(self._out_tokens[slot, :num], self._out_logprobs[slot, :num])
        running.row.slot = -1
        del self.running[slot]
        self._arrivals[slot] = -1
        self._free_slots.append(slot)

    def _current_plan(self) -> _Plan | None:
        if self._plan is not None and self._plan.num_moves != self._cache.num_moves:
            self._drop_plan()
        return self._plan

    def _drop_plan(self) -> None:
        """The next launch looks again which rows there are, and where."""
        if self._plan is not None:
            self._tokens.index_copy_(0, self._plan.slots_on_device, self._plan.rows.tokens)
            self._plan = None

    def _capacities_of(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._current_plan() is None:
            for slot in slots.tolist():
                row = self.running[slot].row
                assert row is not None, "a request is decoded in a row"
                self._capacities[slot] = row.capacity
        return self._capacities[slots]

    def _launch(self) -> None:
        plan = self._current_plan() or self._make_plan()
        rows, slots = plan.rows, plan.slots
        logits = decode(self.parameters, self._cache, rows, self._rotations).float()
        uniform = self._uniforms.view(-1).index_select(0, plan.uniform_places)
        tokens, logprobs = choose(plan.shaping(logits), uniform, plan.shaping.greedy)
        rows.tokens.copy_(tokens)
        plan.counters.add_(1)
        for index in range(len(rows.longest)):
            rows.longest[index] += 1
        self._positions[slots] += 1
        self._made[slots] += 1
        if (self._made[slots] == self._minimums[slots]).any():
            self._drop_plan()  # their stop tokens are allowed from here on
        done = None
        if self._device.type == "cuda":
            tokens, logprobs = tokens.to("cpu", non_blocking=True), logprobs.to("cpu", non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._launched.append(_Launched(slots, self._arrivals[slots], tokens, logprobs, done))

    def _collect(self, num_left: int) -> list[tuple[Running, FinishReason]]:
        ended: list[tuple[Running, FinishReason]] = []
        while len(self._launched) > num_left:
            launched = self._launched.popleft()
            if launched.done is not None:
                launched.done.synchronize()
            tokens = launched.tokens.numpy()
            alive = self._arrivals[launched.slots] == launched.arrivals
            slots = launched.slots
            if not alive.all():
                slots, tokens = slots[alive], tokens[alive]
            at = self._collected[slots]
            self._out_tokens[slots, at] = tokens
            self._out_logprobs[slots, at] = launched.logprobs.numpy()[alive]
            self._collected[slots] += 1
            self.num_generated += len(slots)
            stopped = self._stops[slots, tokens]
            for index in np.flatnonzero(stopped | (at + 1 >= self._limits[slots])).tolist():
                running = self.running[int(slots[index])]
                ended.append((running, "stop" if stopped[index] else "length"))
                self._arrivals[slots[index]] = -1
        return ended

    def _make_plan(self) -> _Plan:
        blocks = self._cache.blocks(self.kind)
        rows = [row for block in blocks for row in block.rows]
        num, num_kv_heads = len(rows), self._cache.num_kv_heads
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        positions = self._positions[slots]
        self._capacities[slots] = [row.capacity for row in rows]
        starts = np.array([row.start for row in rows], dtype=np.int64)
        uniform_places = slots * self._table_tokens + self._made[slots]
        numbers = np.stack([slots, starts, self._capacities[slots], positions, uniform_places])
        on_device = torch.from_numpy(numbers).to(self._device)
        places = self._cache.places(on_device[1], on_device[2], on_device[3])
        counters = torch.cat([on_device[3], on_device[4], places[:, :num_kv_heads].flatten(), places.flatten()])
        sizes = [num, num, num * num_kv_heads, 2 * num * num_kv_heads]
        at, uniform_at, key_places, all_places = counters.split(sizes)
        ends = np.cumsum([0] + [len(block.rows) for block in blocks])
        longest = [int(positions[begin:end].max()) + 1 for begin, end in itertools.pairwise(ends)]
        tokens = self._tokens.index_select(0, on_device[0])
        sampled = [self.running[slot].request.sampling for slot in slots.tolist()]
        early = self._made[slots] < self._minimums[slots]
        self._plan = _Plan(
            num_moves=self._cache.num_moves,
            slots=slots,
            slots_on_device=on_device[0],
            rows=Rows(blocks, longest, tokens, at, all_places, key_places),
            uniform_places=uniform_at,
            counters=counters,
            shaping=Shaping.of(sampled, self._stops[slots] & early[:, None] if early.any() else None, self._device),
        )
        return self._plan
