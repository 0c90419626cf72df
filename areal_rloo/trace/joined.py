"""Read the traces of all processes, and give all times on one clock.

Processes of one host share a monotonic clock. The clocks of two hosts are compared by cause and effect: a sample is
leased on the learner's host before the episode begins on the worker's, and the episode ends there before the
trajectories arrive at the learner. Both bound the difference of the clocks, as in NTP, by the fastest message of each
direction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from areal_rloo.decoding import from_json
from areal_rloo.errors import DataError, DecodeError
from areal_rloo.files import open_regular
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trace import FOLDER_NAME, MOST_BYTES, SAMPLES, Beginning, Detail, Span

logger = get_logger(__name__)

Lease = tuple[int, int, int]
"""(group id, sample index, lease id): a sample may be leased again."""


class Event(NamedTuple):
    """A span on the common clock."""

    process: str
    track: str
    name: str
    began_s: float  # 0: the first event of the run
    seconds: float
    details: dict[str, Detail]

    @property
    def ended_s(self) -> float:
        return self.began_s + self.seconds


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of a process, and all spans until the end of the process."""

    beginning: Beginning
    spans: list[Span]

    @property
    def wall_offset_s(self) -> float:
        return self.beginning.wall_s - self.beginning.monotonic_s


def read_traces(run_folder: Path) -> list[Event]:
    """Return all events of a run, in order of their beginnings.

    Raises:
        DataError: the folder has no trace.
    """
    files = sorted((run_folder / FOLDER_NAME).glob("*.jsonl"))
    most_bytes = MOST_BYTES // max(1, len(files))  # Perfetto opens no more in a browser
    for path in files:
        if path.stat().st_size > most_bytes:
            logger.warning("%s: only the first %s bytes are read", path, f"{most_bytes:,}")
    starts = [start for path in files for start in _starts(path, most_bytes)]
    if not any(start.spans for start in starts):
        raise DataError(f"{run_folder}: no traces here; expected {FOLDER_NAME}/ of a run with telemetry.trace=true")
    offsets = _offsets(starts)
    events = [
        Event(
            start.beginning.process,
            span.track,
            span.name,
            span.began_s + offsets[start.beginning.host],
            span.seconds,
            span.details,
        )
        for start in starts
        for span in start.spans
    ]
    first_s = min(event.began_s for event in events)
    moved = [event._replace(began_s=event.began_s - first_s) for event in events]
    return sorted(moved, key=lambda event: event.began_s)


def lease_of(details: dict[str, Detail]) -> Lease | None:
    """Return the lease of an episode's span; None for an evaluation sample, and for details of another form."""
    sample, lease = details.get("sample"), details.get("lease")
    if not isinstance(sample, str) or not isinstance(lease, int) or details.get("purpose") != "train":
        return None
    group, index, _ = sample.split("/")
    return int(group), int(index), lease


def leases_of(details: dict[str, Detail]) -> list[Lease]:
    """Return the leases of a moment of the intake: samples that were leased, or have arrived."""
    group, samples, lease = details["group"], details["samples"], details["lease"]
    assert isinstance(group, int) and isinstance(lease, int) and isinstance(samples, list), "as the intake records"
    return [(group, index, lease) for index in samples]


def _starts(path: Path, most_bytes: int) -> Iterator[_Start]:
    """Read a file. Skip an incomplete line, of a running or killed process."""
    start: _Start | None = None
    with open_regular(path) as file:
        for line in file:
            if (most_bytes := most_bytes - len(line)) < 0:
                break
            try:
                record = from_json(line, Beginning | Span)
            except DecodeError:
                continue
            if isinstance(record, Beginning):
                if start is not None:
                    yield start
                start = _Start(record, [])
            elif start is not None:
                start.spans.append(record)
    if start is not None:
        yield start


def _offsets(starts: list[_Start]) -> dict[str, float]:
    """Return the seconds to add to the monotonic times of each host; 0 for the learner's."""
    learner = next((start for start in starts if start.beginning.process == "learner"), starts[0])
    own = learner.beginning.host
    granted = _moments(starts, own, "granted")
    arrived = _moments(starts, own, "arrived")
    offsets = {own: 0.0}
    for host in {start.beginning.host for start in starts} - {own}:
        there = [start for start in starts if start.beginning.host == host]
        least, most = -math.inf, math.inf
        for span in (span for start in there for span in start.spans):
            lease = lease_of(span.details) if span.track == SAMPLES and span.name == "episode" else None
            if lease in granted:
                least = max(least, granted[lease] - span.began_s)
            if lease in arrived:
                most = min(most, arrived[lease] - span.began_s - span.seconds)
        by_wall_clock = there[-1].wall_offset_s - learner.wall_offset_s
        both = math.isfinite(least) and math.isfinite(most)
        offsets[host] = by_wall_clock if least <= by_wall_clock <= most or not both else (least + most) / 2
    return offsets


def _moments(starts: list[_Start], host: str, name: str) -> dict[Lease | None, float]:
    """Return when a lease was granted, or a sample arrived. Leave out leases counted again by a restarted learner."""
    moments = [
        (lease, span.began_s)
        for start in starts
        if start.beginning.host == host
        for span in start.spans
        if span.track == "intake" and span.name == name
        for lease in leases_of(span.details)
    ]
    times = Counter(lease for lease, _ in moments)
    return {lease: began_s for lease, began_s in moments if times[lease] == 1}
