"""Which tokens stand in the cache already, so that a request that begins with them starts from there.

Rows of running requests offer their prompts (the samples of a group), rows of finished ones all they hold (the next
turn of an episode). Found by hashes of their first 16, 32, 48 ... tokens and of a whole prompt, then compared token by
token. Rows of finished requests stay until their memory is wanted, the longest unused one leaving first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from areal_rloo.engines.embedded.cache import Cache, CacheRow

_HASHED_TOKENS = 16


class Prefixes:
    """What rows hold, by version and tokens."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._rows: dict[int, CacheRow] = {}
        self._kept: dict[CacheRow, None] = {}  # the longest unused first

    @property
    def kept_tokens(self) -> int:
        """Tokens of memory that `evict` can give."""
        return sum(row.capacity for row in self._kept)

    def find(self, tokens: npt.NDArray[np.int32], policy_version: int) -> tuple[CacheRow | None, int]:
        """The row that holds the most of these tokens from their beginning, and how many."""
        for key in reversed(list(_keys(tokens.tolist(), policy_version))):
            row = self._rows.get(key)
            if row is not None and row.policy_version == policy_version:
                num = _num_equal(row.tokens, tokens)
                if num > 0:
                    return row, num
        return None, 0

    def offer(self, row: CacheRow, tokens: npt.NDArray[np.int32], policy_version: int) -> None:
        """A row holds these tokens, all computed at this version; what it offered before, it holds still."""
        row.tokens, row.policy_version = tokens, policy_version
        for key in _keys(tokens.tolist(), policy_version):
            self._rows[key] = row  # the latest, which is likely to stay the longest
            row.keys.append(key)

    def withdraw(self, row: CacheRow) -> None:
        """Nobody is to start from this row any more."""
        for key in row.keys:
            if self._rows.get(key) is row:
                del self._rows[key]
        row.keys = []
        row.policy_version = -1

    def keep(self, row: CacheRow) -> None:
        """A row nobody decodes any more; it stays until it is evicted or taken."""
        self._kept[row] = None

    def kept(self, row: CacheRow) -> bool:
        return row in self._kept

    def used(self, row: CacheRow) -> None:
        """Somebody starts from this row; of those kept it is the last to leave."""
        if row in self._kept:
            del self._kept[row]
            self._kept[row] = None

    def take(self, row: CacheRow) -> None:
        """A kept row becomes the caller's, and nobody else's."""
        del self._kept[row]
        self.withdraw(row)

    def evict(self) -> bool:
        """Give back the memory of the longest unused kept row; False if there is none."""
        row = next(iter(self._kept), None)
        if row is None:
            return False
        del self._kept[row]
        self.withdraw(row)
        self._cache.remove(row)
        return True

    def forget_other_versions(self, policy_versions: Sequence[int]) -> None:
        """Weights were exchanged: what other versions computed is of no use."""
        for row in [row for row in self._rows.values() if row.policy_version not in policy_versions]:
            self.withdraw(row)
        for row in [row for row in self._kept if row.policy_version not in policy_versions]:
            del self._kept[row]
            self._cache.remove(row)


def _keys(tokens: list[int], policy_version: int) -> Iterator[int]:
    """Hashes of ever longer beginnings; each builds on the one before."""
    key = hash(policy_version)
    for end in range(_HASHED_TOKENS, len(tokens) + 1, _HASHED_TOKENS):
        key = hash((key, tuple(tokens[end - _HASHED_TOKENS : end])))
        yield key
    rest = len(tokens) % _HASHED_TOKENS
    if rest:
        yield hash((key, tuple(tokens[-rest:])))


def _num_equal(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    num = min(len(one), len(other))
    differ = one[:num] != other[:num]
    return int(differ.argmax()) if differ.any() else num
