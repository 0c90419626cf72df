"""Write events in Chrome's trace event format, which Perfetto opens.

A process of the run is a process there, and a track a thread; overlapping work goes to several threads of the same
name. Samples in flight fill as many as run at a time. Groups that wait for a step are threads of the learner. Arrows
lead from an episode to the group, and from the group to the step.

Source: "Trace Event Format", Google; https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import gzip
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_rloo.errors import DataError
from areal_rloo.files import replacing
from areal_rloo.telemetry.trace import MOST_BYTES, SAMPLES
from areal_rloo.trace.joined import Event, read_traces
from areal_rloo.trace.lives import Life, lives

FILE_NAME = "trace.json.gz"  # in the run folder
_GROUPS = "groups that wait for a step"
_STEPS = "training"
_SHORT_S = 1e-6  # a moment; an arrow begins this long before the end of a span


def write_perfetto(run_folder: Path) -> Path:
    """Join the traces of a run into a file for Perfetto.

    Raises:
        DataError: the run has no traces, or the disk refuses the file.
    """
    events = read_traces(run_folder, most_bytes=MOST_BYTES)
    path = run_folder / FILE_NAME
    try:
        with replacing(path) as target, gzip.open(target, "wb", compresslevel=5) as file:
            separator = b'{"displayTimeUnit":"ms","traceEvents":[\n'
            for line in trace_events(events):
                file.write(separator + msgspec.json.encode(line))
                separator = b",\n"
            file.write(b"\n]}\n")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def trace_events(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    """Give the trace events of a run."""
    all_lives = lives(events)
    groups = _whole_groups(event for life in all_lives for event in _wait(life))
    placed = _placed([*(event for event in events if event.seconds or event.track != "intake"), *groups])
    pids = {name: number for number, name in enumerate(sorted({event.process for event in events}, key=_order), 1)}
    threads = sorted({(event.process, event.track, lane) for event, lane in placed})
    tids = {thread: number for number, thread in enumerate(threads, 1)}
    for process, pid in pids.items():
        yield _meta("process_name", pid, name=process)
        yield _meta("process_sort_index", pid, sort_index=pid)
    for (process, track, _), tid in tids.items():
        yield _meta("thread_name", pids[process], tid, name=track)
        yield _meta("thread_sort_index", pids[process], tid, sort_index=tid)
    where = {}
    for event, lane in placed:
        place = {"pid": pids[event.process], "tid": tids[event.process, event.track, lane]}
        where[_key(event)] = place
        yield {
            "ph": "X",
            "name": _title(event),
            "cat": event.track,
            "ts": event.began_s * 1e6,
            "dur": max(event.seconds, _SHORT_S) * 1e6,
            "args": event.details,
            **place,
        }
    yield from _arrows(events, all_lives, groups, where)


def _wait(life: Life) -> Iterator[Event]:
    """Give the time between the arrival of a sample and the step of the group."""
    if life.arrived_s is not None and life.taken is not None:
        seconds = life.taken.began_s - life.arrived_s
        details, group = {"step": life.taken.details["step"]}, f"group {life.lease.group}"
        yield Event(life.taken.process, _GROUPS, group, life.arrived_s, seconds, details, life.taken.learner)


def _whole_groups(waits: Iterable[Event]) -> list[Event]:
    """Join the waits of the samples of each group."""
    by_group: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in waits:
        by_group[event.learner, event.name].append(event)
    return [min(of_group, key=lambda event: event.began_s) for of_group in by_group.values()]


def _placed(events: Iterable[Event]) -> list[tuple[Event, int]]:
    """Give each event a lane of the track: within a lane, events follow each other or lie inside each other.

    The stages of a sample are in the lane of the sample, if the episode is recorded.
    """
    tracks: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        tracks[event.process, event.track].append(event)
    placed: list[tuple[Event, int]] = []
    for of_track in tracks.values():
        lanes: list[list[float]] = []  # of each: the ends of the events that are open
        samples: dict[object, tuple[int, float]] = {}  # by name: the lane, and the end of the episode
        for event in sorted(of_track, key=lambda event: (event.began_s, -event.seconds)):
            sample = event.details.get("sample") if event.track == SAMPLES else None
            lane, until_s = samples.get(sample, (-1, -math.inf))
            if event.began_s > until_s:  # none, or another episode: a restarted worker gives a name again
                lane = next(lane for lane in itertools.count() if _fits(lanes, lane, event))
                samples |= {} if sample is None else {sample: (lane, event.ended_s)}
            lanes[lane].append(event.ended_s)
            placed.append((event, lane))
    return placed


def _fits(lanes: list[list[float]], lane: int, event: Event) -> bool:
    if lane == len(lanes):
        lanes.append([])
    ends = lanes[lane]
    while ends and ends[-1] <= event.began_s:
        ends.pop()
    # The lane of a sample is full until the episode has ended: stages of this sample do not ask.
    return not ends or (event.track not in {SAMPLES, _GROUPS} and ends[-1] >= event.ended_s)


def _arrows(
    events: Sequence[Event], all_lives: Sequence[Life], groups: Sequence[Event], where: dict[Any, dict[str, int]]
) -> Iterator[Any]:
    """Lead from episodes to their groups, and from these to the steps."""
    group_of = {(event.learner, event.name): event for event in groups}
    steps = {(event.learner, event.name): event for event in events if event.track == _STEPS}
    numbers = itertools.count(1)
    for life in all_lives:
        group = group_of.get((life.lease.learner, f"group {life.lease.group}"))
        if group is not None and life.episode is not None and life.arrived_s is not None:
            yield from _arrow(next(numbers), life.episode, group, life.arrived_s, where)
    for group in groups:
        step = steps.get((group.learner, f"step {group.details['step']}"))
        if step is not None:
            yield from _arrow(next(numbers), group, step, step.began_s, where)


def _arrow(number: int, begin: Event, end: Event, arrives_s: float, where: dict[Any, dict[str, int]]) -> Iterator[Any]:
    common = {"name": "sample", "cat": "sample", "id": number}
    leaves_s = max(begin.began_s, begin.ended_s - _SHORT_S)
    yield {**common, "ph": "s", "ts": leaves_s * 1e6, **where[_key(begin)]}
    yield {**common, "ph": "f", "bp": "e", "ts": arrives_s * 1e6, **where[_key(end)]}


def _title(event: Event) -> str:
    """Name an episode by the sample."""
    return f"sample {event.details['sample']}" if event.track == SAMPLES and event.name == "episode" else event.name


def _key(event: Event) -> tuple[object, ...]:
    return event.process, event.track, event.name, event.began_s, event.details.get("sample")


def _meta(kind: str, pid: int, tid: int = 0, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": arguments}


def _order(process: str) -> tuple[bool, int, str]:
    """The learner first, then the other ranks, then the workers by number."""
    return not process.startswith("learner"), len(process), process
