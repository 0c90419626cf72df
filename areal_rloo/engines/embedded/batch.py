"""Decode many completions together under the same weights.

    launch: compute one token for every row on the device  ─►  collect: copy tokens to the host, find ended requests

All inputs of a launch are on the device and are updated there until the rows change. On a GPU the next step is launched
before the host reads the tokens of the last step (`steps_ahead`), so the host never waits for a token. An ended row
makes one more token meanwhile; `collect` discards this token.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_rloo.engines.embedded.cache import Block, Cache, RowKind
from areal_rloo.engines.embedded.decode_attention import BlockAttention, RowAttention
from areal_rloo.engines.embedded.parameters import Parameters
from areal_rloo.engines.embedded.recorded import RecordedSteps
from areal_rloo.engines.embedded.requests import PlacedRequest, WaitingRequest
from areal_rloo.engines.embedded.sampling import Shaping, choose, uniforms
from areal_rloo.engines.embedded.transformer import Rotations, Rows, decode
from areal_rloo.errors import ModelError
from areal_rloo.models.device import HostCopy
from areal_rloo.trajectory import FinishReason

Ending = list[tuple[PlacedRequest, FinishReason]]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The inputs of all steps until the rows change."""

    num_moves: int  # of the cache; the plan is valid while the cache has the same number
    blocks: list[Block]
    longest: list[int]  # of each block, 1 + the largest position
    slots: npt.NDArray[np.int64]
    slots_on_device: Tensor
    rows: Rows  # recorded steps may have more rows than slots
    shaping: Shaping


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched step."""

    slots: npt.NDArray[np.int64]
    arrivals: npt.NDArray[np.int64]  # distinguish the request in a slot from an earlier request in the same slot
    made: HostCopy  # tokens [num_rows] int64, logprobs [num_rows] float32


class DecodeBatch:
    """Up to `num_slots` placed requests under the same weights, in prefill or decoded."""

    def __init__(
        self,
        parameters: Parameters,
        cache: Cache,
        rope: Tensor,
        *,
        policy_version: int,
        kind: RowKind,
        num_slots: int,
        context_tokens: int,
        steps_ahead: int,
    ) -> None:
        device = self._device = parameters.embedding.device
        self.parameters = parameters
        self.policy_version = policy_version
        self.kind = kind
        self.prefilling: list[PlacedRequest] = []
        self.running: dict[int, PlacedRequest] = {}  # the decoded requests, by slot
        self.num_generated = 0  # tokens collected since the scheduler last reset this count
        self._cache = cache
        self._steps_ahead = steps_ahead
        self._num_slots = num_slots
        self._rotations = Rotations(parameters.architecture, rope, num_rows=num_slots)
        self._recorded: RecordedSteps | None = None
        dtype = parameters.embedding.dtype
        if RowAttention.serves(parameters.architecture, num_rows=num_slots, device=device, dtype=dtype):
            self._recorded = RecordedSteps(parameters, cache, self._rotations, num_slots=num_slots)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._launched: deque[_Launched] = deque()
        self._plan: _Plan | None = None
        self._tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._table_tokens = context_tokens + steps_ahead  # an ended row makes `steps_ahead` more tokens
        self._uniforms = torch.zeros(num_slots, self._table_tokens, dtype=torch.float64, device=device)
        self._out_tokens = np.zeros((num_slots, context_tokens), dtype=np.int32)
        self._out_logprobs = np.zeros((num_slots, context_tokens), dtype=np.float32)
        self._arrivals = np.full(num_slots, -1, dtype=np.int64)
        self._positions, self._capacities, self._limits, self._minimums = np.zeros((4, num_slots), dtype=np.int64)
        self._made, self._collected = np.zeros((2, num_slots), dtype=np.int64)  # tokens launched, and on the host
        self._stops = np.zeros((num_slots, parameters.architecture.vocab_size), dtype=np.bool_)

    @property
    def num_requests(self) -> int:
        return len(self.prefilling) + len(self.running)

    @property
    def has_free_slot(self) -> bool:
        return self.num_requests < self._num_slots

    def requests(self) -> list[PlacedRequest]:
        return [*self.prefilling, *self.running.values()]

    def begin(self, placed: PlacedRequest) -> None:
        """Decode a request after the prefill: the row holds all known tokens but the last."""
        self._drop_plan()
        self.prefilling.remove(placed)
        slot, before, sampling = self._free_slots.pop(), placed.before, placed.submission.request.sampling
        num_made = len(before.tokens)
        placed.spans.append((self.policy_version, num_made))
        placed.row.slot = slot
        self.running[slot] = placed
        self._arrivals[slot] = placed.arrival
        self._tokens[slot] = int(before.known_tokens[-1])
        self._positions[slot] = len(before.known_tokens) - 1
        self._made[slot] = self._collected[slot] = num_made
        self._out_tokens[slot, :num_made] = before.tokens
        self._out_logprobs[slot, :num_made] = before.logprobs
        self._limits[slot] = sampling.max_new_tokens
        self._minimums[slot] = sampling.min_new_tokens
        self._stops[slot] = False
        self._stops[slot, list(sampling.stop_token_ids)] = True
        if not sampling.greedy:
            self._uniforms[slot, : sampling.max_new_tokens] = uniforms(placed.submission.seed, sampling.max_new_tokens)

    def full(self) -> list[PlacedRequest]:
        """Return the requests whose row has no room for the next token."""
        slots = np.fromiter(self.running, dtype=np.int64, count=len(self.running))
        if self._current_plan() is None:
            self._capacities[slots] = [placed.row.capacity for placed in self.running.values()]
        full = slots[self._positions[slots] >= self._capacities[slots]]
        return [self.running[slot] for slot in full.tolist()]

    def num_written(self, placed: PlacedRequest) -> int:
        """Return the number of tokens whose keys and values are in the row."""
        return int(self._positions[placed.row.slot])

    def step(self) -> Ending:
        """Make one token for every row; return the requests known to have ended."""
        if any(self._made[slot] < self._limits[slot] for slot in self.running):
            self._launch()
            return self.collect(self._steps_ahead)
        return self.collect()

    def collect(self, num_left: int = 0) -> Ending:
        """Wait for all launched steps but the last `num_left`; return the requests that ended.

        Raises:
            ModelError: a logprob is not finite.
        """
        ended: Ending = []
        while len(self._launched) > num_left:
            launched = self._launched.popleft()
            made, logprobs = launched.made.wait()
            alive = self._arrivals[launched.slots] == launched.arrivals
            slots, tokens = launched.slots[alive], made.numpy()[alive]
            at = self._collected[slots]
            self._out_tokens[slots, at] = tokens
            self._out_logprobs[slots, at] = kept = logprobs.numpy()[alive]
            if not np.isfinite(kept).all():
                raise ModelError(
                    f"model.path: the weights of version {self.policy_version} give a logprob of "
                    f"{kept[~np.isfinite(kept)][0]}, expected a number; at version 0, the files of the model hold NaN "
                    "or infinity: download the model again; later, the training has diverged: resume from an earlier "
                    "checkpoint with a lower learner.optimizer.learning_rate"
                )
            self._collected[slots] += 1
            self.num_generated += len(slots)
            stopped = self._stops[slots, tokens]
            for index in np.flatnonzero(stopped | (at + 1 >= self._limits[slots])).tolist():
                ended.append((self.running[int(slots[index])], "stop" if stopped[index] else "length"))
                self._arrivals[slots[index]] = -1
        return ended

    def new_version(self, policy_version: int) -> None:
        """Tag tokens with this version from now on: the weights were swapped."""
        self.policy_version = policy_version
        for slot, placed in self.running.items():
            placed.spans.append((policy_version, int(self._made[slot])))

    def so_far(self, placed: PlacedRequest) -> WaitingRequest:
        """Return the request with all collected tokens."""
        if placed in self.prefilling:
            return placed.before
        slot = placed.row.slot
        num = self._collected[slot]
        return placed.without_row(self._out_tokens[slot, :num], self._out_logprobs[slot, :num])

    def leave(self, placed: PlacedRequest) -> WaitingRequest:
        """Free the slot; return the request with all collected tokens."""
        left = self.so_far(placed)
        if placed in self.prefilling:
            self.prefilling.remove(placed)
            return left
        self._drop_plan()
        slot = placed.row.slot
        placed.row.slot = -1
        del self.running[slot]
        self._arrivals[slot] = -1
        self._free_slots.append(slot)
        return left

    def release_memory(self) -> None:
        """Forget what needs the memory of the cache; no request is placed."""
        self._plan = None
        if self._recorded is not None:
            self._recorded.forget()

    def _current_plan(self) -> _Plan | None:
        if self._plan is not None and self._plan.num_moves != self._cache.num_moves:
            self._drop_plan()
        return self._plan

    def _drop_plan(self) -> None:
        """Let the next launch read again which rows exist, and where."""
        if self._plan is not None:
            slots = self._plan.slots_on_device
            self._tokens.index_copy_(0, slots, self._plan.rows.tokens[: len(slots)])
            self._plan = None

    def _launch(self) -> None:
        plan = self._current_plan() or self._make_plan()
        rows, slots, num = plan.rows, plan.slots, len(plan.slots)
        logits = self._logits(plan)[:num].float()
        uniform = self._uniforms.view(-1).index_select(0, rows.uniform_places[:num])
        tokens, logprobs = choose(plan.shaping(logits), uniform, plan.shaping.greedy)
        rows.tokens[:num].copy_(tokens)
        if len(rows.tokens) > num:
            rows.tokens[num:].copy_(tokens[:1])
        rows.counters.add_(1)
        plan.longest[:] = [longest + 1 for longest in plan.longest]
        self._positions[slots] += 1
        self._made[slots] += 1
        if (self._made[slots] == self._minimums[slots]).any():
            self._drop_plan()  # stop tokens of these rows are allowed from now on
        self._launched.append(_Launched(slots, self._arrivals[slots], HostCopy.begin(tokens, logprobs)))

    def _logits(self, plan: _Plan) -> Tensor:
        """Compute the next logits of all rows, [num_rows, vocab_size]."""
        if self._recorded is not None:
            return self._recorded.logits(plan.rows)
        a = self.parameters.architecture
        attention = BlockAttention(self._cache, plan.blocks, plan.longest, plan.rows, a)
        return decode(self.parameters, self._cache, plan.rows, self._rotations, attention)

    def _make_plan(self) -> _Plan:
        blocks = self._cache.blocks(self.kind)
        rows = list(itertools.chain(*blocks))
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        positions = self._positions[slots]
        self._capacities[slots] = [row.capacity for row in rows]
        starts = np.array([row.start for row in rows], dtype=np.int64)
        uniform_places = slots * self._table_tokens + self._made[slots]
        numbers = np.stack([slots, starts, self._capacities[slots], positions, uniform_places])
        longest = [int(self._positions[[row.slot for row in block]].max()) + 1 for block in blocks]
        sampled = [self.running[slot].submission.request.sampling for slot in slots.tolist()]
        early = self._made[slots] < self._minimums[slots]
        self._plan = _Plan(
            num_moves=self._cache.num_moves,
            blocks=blocks,
            longest=longest,
            slots=slots,
            slots_on_device=torch.from_numpy(slots).to(self._device),
            rows=self._rows(numbers),
            shaping=Shaping.of(sampled, self._stops[slots] & early[:, None] if early.any() else None, self._device),
        )
        return self._plan

    def _rows(self, numbers: npt.NDArray[np.int64]) -> Rows:
        """Lay the rows out for a step: slots, starts, capacities, positions and uniform places, [5, num_rows]."""
        if self._recorded is not None:  # the first row fills the rest
            num = numbers.shape[1]
            numbers = numbers[:, np.pad(np.arange(num), (0, self._recorded.size_for(num) - num))]
        slots, starts, capacities, positions, uniform_places = torch.from_numpy(numbers).to(self._device)
        tokens = self._tokens.index_select(0, slots)
        places = self._cache.places(starts, capacities, positions)
        keys = places[:, : self._cache.num_kv_heads]
        counters = torch.cat([positions, uniform_places, keys.flatten(), places.flatten()])
        if self._recorded is None:
            return Rows.of(tokens, counters)
        return self._recorded.rows(tokens, counters, (keys - positions[:, None]).flatten())
