"""Decode steps of a GPU, recorded once for each number of rows, and replayed.

A step of a 1.5B model launches 950 kernels. The host needs 13 ms to launch them, an H200 3 to 6 ms to compute them. A
replay launches all of them together. It reads and writes the memory of the recording, so a plan copies the numbers of
the rows there. The number of rows is rounded up, for fewer recordings: the first row fills the rest, and its keys are
written more than once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from areal_rloo.engines.embedded.cache import Cache
from areal_rloo.engines.embedded.decode_attention import RowAttention
from areal_rloo.engines.embedded.parameters import Parameters
from areal_rloo.engines.embedded.transformer import Rotations, Rows, decode
from areal_rloo.models.device import GraphRecorder


class RecordedSteps:
    """The decode steps of a batch, by the number of rows."""

    def __init__(self, parameters: Parameters, cache: Cache, rotations: Rotations, *, num_slots: int) -> None:
        self._parameters, self._cache, self._rotations, self._num_slots = parameters, cache, rotations, num_slots
        self.forget()

    def forget(self) -> None:
        """Free the memory of all recordings."""
        self._recorder = GraphRecorder(self._parameters.embedding.device)
        self._rows: dict[int, tuple[Rows, Tensor]] = {}  # with the starts of `RowAttention`
        self._replays: dict[int, Callable[[], None]] = {}
        self._logits: Tensor | None = None  # of the last step, of any number of rows

    def size_for(self, num_rows: int) -> int:
        """Return the number of rows to compute for so many rows: a power of two, or three quarters of it."""
        power = 1 << (num_rows - 1).bit_length()
        return min(power * 3 // 4 if 4 < num_rows <= power * 3 // 4 else power, self._num_slots)

    def rows(self, tokens: Tensor, counters: Tensor, starts: Tensor) -> Rows:
        """Copy `Rows.of(tokens, counters)` to the memory of their number, and return them; a step updates them there.

        `starts`: the place of the first key of each row and head, [num_rows * num_kv_heads] int64.
        """
        num = len(tokens)
        if num not in self._rows:
            kept = torch.zeros(len(starts) + 1, dtype=torch.int32, device=starts.device)
            self._rows[num] = (Rows.of(torch.zeros_like(tokens), torch.zeros_like(counters)), kept)
        rows, kept = self._rows[num]
        rows.tokens.copy_(tokens)
        rows.counters.copy_(counters)
        kept[:-1].copy_(starts)
        return rows

    def logits(self, rows: Rows) -> Tensor:
        """Return the next logits of rows from `rows`, [num_rows, vocab_size]; the next step overwrites them."""
        num = len(rows.tokens)
        if self._logits is None:
            shape = (self._num_slots, self._parameters.architecture.vocab_size)
            self._logits = torch.empty(shape, device=rows.tokens.device)
        if num in self._replays:
            self._replays[num]()
        else:
            self._replays[num] = self._recorder.record(partial(self._step, *self._rows[num], self._logits[:num]))
        return self._logits[:num]

    def _step(self, rows: Rows, starts: Tensor, logits: Tensor) -> None:
        attention = RowAttention(self._cache, starts, rows.positions, self._parameters.architecture)
        logits.copy_(decode(self._parameters, self._cache, rows, self._rotations, attention))
