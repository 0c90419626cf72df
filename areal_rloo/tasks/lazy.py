"""Items that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from areal_rloo.tasks.base import Item


class LazyItems(Sequence[Item]):
    """So many items, each a function of its index."""

    def __init__(self, num: int, make: Callable[[int], Item]) -> None:
        self._indices = range(num)
        self._make = make

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self._make(i) for i in self._indices[index]]
        return self._make(self._indices[index])
