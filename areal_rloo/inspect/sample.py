"""Which trajectories go on the page, where there are too many: one pass that holds what is shown, and group ids.

Whole groups, spread evenly over the run, for an advantage is understood beside its siblings; and some of each reason of
drops, which are rare and wanted.
"""

from __future__ import annotations

from collections.abc import Iterable

from areal_rloo.telemetry.trajectories import TrajectoryRecord

_Numbered = tuple[int, TrajectoryRecord]


def spread(
    records: Iterable[TrajectoryRecord], *, most: int, most_by_reason: int
) -> tuple[list[TrajectoryRecord], int]:
    """At most `most` that were not dropped and `most_by_reason` of each reason, in their order; and how many came."""
    not_dropped = _Spread(most)
    dropped: dict[str, _Spread] = {}
    num_records = 0
    for record in records:
        part = not_dropped
        if record.dropped is not None:
            part = dropped.setdefault(record.dropped, _Spread(most_by_reason))
        part.add(num_records, record)
        num_records += 1
    chosen = [pair for part in (not_dropped, *dropped.values()) for pair in part.kept()]
    return [record for _, record in sorted(chosen, key=lambda pair: pair[0])], num_records


class _Spread:
    """Every n-th group of those that come; n doubles whenever they hold more than `most` records."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._every = 1
        self._ordinals: dict[int, int] = {}  # of the groups, as they came
        self._groups: dict[int, list[_Numbered]] = {}

    def add(self, number: int, record: TrajectoryRecord) -> None:
        ordinal = self._ordinals.setdefault(record.group_id, len(self._ordinals))
        if ordinal % self._every:
            return
        group = self._groups.setdefault(ordinal, [])
        if len(group) < self._most:  # a single group may have too many
            group.append((number, record))
        while len(self.kept()) > self._most:
            self._every *= 2
            self._groups = {ordinal: group for ordinal, group in self._groups.items() if ordinal % self._every == 0}

    def kept(self) -> list[_Numbered]:
        return [pair for group in self._groups.values() for pair in group]
