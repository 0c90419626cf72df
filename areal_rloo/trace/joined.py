"""Read the traces of all processes, and give all times on one clock.

Processes of one host share a monotonic clock. The clocks of two hosts are compared by cause and effect: a sample is
leased on the learner's host before the episode begins on the worker's, and the episode ends there before the
trajectories arrive at the learner. Both bound the difference of the clocks, as in NTP, by the fastest message of each
direction.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from areal_rloo.decoding import from_json
from areal_rloo.errors import DataError, DecodeError
from areal_rloo.files import open_regular
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trace import FOLDER_NAME, SAMPLES, Beginning, Detail, Span

logger = get_logger(__name__)

_SAMPLE = re.compile(r"-?[0-9]+/[0-9]+/[0-9]+")


class Lease(NamedTuple):
    """A lease of a sample, which may be leased again. Each learner counts its leases."""

    learner: str
    group: int
    sample_index: int
    lease_id: int


class Event(NamedTuple):
    """A span on the common clock."""

    process: str
    track: str
    name: str
    began_s: float  # 0: the first event of the run
    seconds: float
    details: dict[str, Detail]
    learner: str = ""  # of a span in a learner: the id of this start

    @property
    def ended_s(self) -> float:
        return self.began_s + self.seconds


@dataclass(frozen=True, slots=True)
class _Start:
    """A start of a process, and all spans until the end of the process."""

    beginning: Beginning
    spans: list[Span]

    @property
    def learner(self) -> str:
        """The id of the learner; empty in another process."""
        begins = (span for span in self.spans if (span.track, span.name) == ("intake", "begins"))
        return next((str(span.details["learner"]) for span in begins), "")

    @property
    def wall_offset_s(self) -> float:
        return self.beginning.wall_s - self.beginning.monotonic_s


def read_traces(run_folder: Path, *, most_bytes: int = sys.maxsize) -> list[Event]:
    """Return all events of a run, in order of their beginnings; of longer files, those of the first bytes.

    Raises:
        DataError: the folder has no trace.
    """
    files = sorted((run_folder / FOLDER_NAME).glob("*.jsonl"))
    starts = [start for path, share in _shares(files, most_bytes).items() for start in _starts(path, share)]
    if not any(start.spans for start in starts):
        raise DataError(f"{run_folder}: no traces here; expected {FOLDER_NAME}/ of a run with telemetry.trace=true")
    offsets, events = _offsets(starts), list[Event]()
    for start in starts:
        process, learner, offset_s = start.beginning.process, start.learner, offsets[start.beginning.host]
        events += [
            Event(process, span.track, span.name, span.began_s + offset_s, span.seconds, span.details, learner)
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
    return Lease(str(details.get("learner", "")), int(group), int(index), lease)


def leases_of(learner: str, details: dict[str, Detail]) -> list[Lease]:
    """Return the leases of a moment of the intake: samples that were leased, or have arrived."""
    group, samples, lease = details["group"], details["samples"], details["lease"]
    assert isinstance(group, int) and isinstance(lease, int) and isinstance(samples, list), "as the intake records"
    return [Lease(learner, group, index, lease) for index in samples]


def _shares(files: Sequence[Path], most_bytes: int) -> dict[Path, int]:
    """Deal out the bytes to read: short files are whole, and the longest share the rest."""
    sizes, shares = {path: path.stat().st_size for path in files}, dict[Path, int]()
    for number, path in enumerate(sorted(files, key=sizes.__getitem__)):
        shares[path] = min(sizes[path], most_bytes // (len(files) - number))
        most_bytes -= shares[path]
        if shares[path] < sizes[path]:
            logger.warning("%s: only the first %s bytes are read", path, f"{shares[path]:,}")
    return shares


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
            elif start is not None and _is_whole(record):
                start.spans.append(record)
    if start is not None:
        yield start


def _is_whole(span: Span) -> bool:
    """Return False for a span of a damaged file, without the details that readers take."""
    details = span.details
    if span.track == SAMPLES:
        return isinstance(sample := details.get("sample"), str) and _SAMPLE.fullmatch(sample) is not None
    if span.track != "intake":
        return True
    if span.name in {"granted", "arrived"}:
        numbers = (details.get("group"), details.get("lease"))
        return all(isinstance(number, int) for number in numbers) and isinstance(details.get("samples"), list)
    if span.name == "taken":
        return isinstance(details.get("groups"), list) and isinstance(details.get("step"), int)
    return span.name != "begins" or "learner" in details


def _offsets(starts: list[_Start]) -> dict[str, float]:
    """Return the seconds to add to the monotonic times of each host; 0 for the learner's."""
    learner = next((start for start in starts if start.beginning.process == "learner"), starts[0])
    own = learner.beginning.host
    granted, arrived = _moments(starts, own, "granted"), _moments(starts, own, "arrived")
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
    """Return when each lease was granted on a host, or the sample arrived."""
    return {
        lease: span.began_s
        for start in starts
        if start.beginning.host == host
        for span in start.spans
        if span.track == "intake" and span.name == name
        for lease in leases_of(start.learner, span.details)
    }
