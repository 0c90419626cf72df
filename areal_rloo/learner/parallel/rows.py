"""Distribute sequences to rows without padding, and the rows to ranks.

In: the lengths of the sequences and a token budget. Out: by rank, the sequences of each row. First-fit decreasing
defines the number of rows. Then each sequence, longest first, goes into the row with the fewest tokens, so ranks finish
at about the same time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def plan_rows(lengths: Sequence[int], max_tokens: int, *, num_ranks: int = 1) -> list[list[list[int]]]:
    """Return by rank the indices in each row: the same number of rows for every rank, none over `max_tokens`.

    Row n holds a similar number of tokens on every rank.
    """
    assert max(lengths, default=0) <= max_tokens, f"a sequence of {max(lengths)} tokens does not fit {max_tokens}"
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = _first_fit(order, lengths, max_tokens)
    num_rows = -(-len(rows) // num_ranks) * num_ranks
    rows = _evened(order, lengths, max_tokens, num_rows) or [*rows, *([] for _ in range(num_rows - len(rows)))]
    rows.sort(key=lambda row: sum(lengths[i] for i in row), reverse=True)
    return [rows[rank::num_ranks] for rank in range(num_ranks)]


def _first_fit(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    left = np.full(len(order), max_tokens)
    for index in order:
        place = int(np.argmax(left[: len(rows) + 1] >= lengths[index]))
        if place == len(rows):
            rows.append([])
        rows[place].append(index)
        left[place] -= lengths[index]
    return rows


def _evened(order: Sequence[int], lengths: Sequence[int], max_tokens: int, num_rows: int) -> list[list[int]] | None:
    """Put each sequence, longest first, into the emptiest row; None if a row exceeds the budget."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    emptiest = [(0, place) for place in range(num_rows)]  # a heap: tokens and row
    for index in order:
        used, place = emptiest[0]
        if used + lengths[index] > max_tokens:
            return None
        heapq.heapreplace(emptiest, (used + lengths[index], place))
        rows[place].append(index)
    return rows
