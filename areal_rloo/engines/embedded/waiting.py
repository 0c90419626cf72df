"""Requests without a row, in the order of their submission: new ones, and those whose row was taken away."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from areal_rloo.engines.embedded.cache import RowKind
from areal_rloo.engines.embedded.running import Running


class Waiting:
    """One queue for each batch; the earliest submission comes first, however often it had a row."""

    def __init__(self) -> None:
        self._by_kind: dict[RowKind, list[Running]] = {RowKind.RUNNING: [], RowKind.PINNED: []}

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))

    def add(self, running: Running) -> None:
        insort(self._queue(running), running, key=lambda waiting: waiting.arrival)

    def remove(self, running: Running) -> None:
        self._queue(running).remove(running)

    def take(self, wanted: Iterable[Running]) -> list[Running]:
        """Remove those that wait; gives them."""
        found = [running for running in wanted if running in self._queue(running)]
        for running in found:
            self.remove(running)
        return found

    def first(self, kind: RowKind, policy_version: int, newest_version: int) -> Running | None:
        """The first that may start with weights of this version.

        Those that ask for newer weights hold up nobody, but for one case: where weights they would take are loaded, and
        pinned requests still run with older ones, none starts with these any more, or they would never be exchanged.
        """
        exchange = False
        for running in self._by_kind[kind]:
            asked = running.request.min_version
            if asked <= policy_version and (running.spans or not exchange):
                return running
            exchange = exchange or policy_version < asked <= newest_version
        return None

    def any_for(self, policy_version: int) -> bool:
        """Whether one may start with weights of this version."""
        return any(running.request.min_version <= policy_version for q in self._by_kind.values() for running in q)

    @property
    def holds_weights(self) -> bool:
        """Whether a pinned request lost its row; it goes on with the weights it began with."""
        return any(running.spans for running in self._by_kind[RowKind.PINNED])

    def _queue(self, running: Running) -> list[Running]:
        return self._by_kind[running.kind]
