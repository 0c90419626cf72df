"""The life of a sample: leased, an episode with turns, tools and reward, arrived, taken for a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from areal_rloo.telemetry.trace import SAMPLES
from areal_rloo.trace.joined import Event, Lease, lease_of, leases_of
from areal_rloo.trajectory import SampleId, purpose_of


@dataclass(slots=True)
class Life:
    """A lease of a sample, and the outcome. None: not recorded, or not yet."""

    lease: Lease
    granted_s: float | None = None
    episode: Event | None = None
    stages: list[Event] = field(default_factory=list)  # of the episode, in order
    arrived_s: float | None = None
    taken: Event | None = None  # of the group, by a step


def lives(events: Sequence[Event]) -> list[Life]:
    """Return the lives of all train samples, in the order of the leases."""
    found: dict[Lease, Life] = {}
    stages: dict[object, list[Event]] = defaultdict(list)
    taken: dict[tuple[str, int], Event] = {}
    for event in events:
        if event.track == SAMPLES and event.name == "episode":
            if (lease := lease_of(event.details)) is not None:
                found.setdefault(lease, Life(lease)).episode = event
        elif event.track == SAMPLES:
            stages[event.process, event.details["sample"]].append(event)
        elif event.track == "intake" and event.name == "taken":
            taken |= {(event.learner, group): event for group in _numbers(event.details["groups"])}
        elif event.track == "intake" and event.name in {"granted", "arrived"}:
            for lease in filter(_is_train, leases_of(event.learner, event.details)):
                life = found.setdefault(lease, Life(lease))
                if event.name == "granted":
                    life.granted_s = event.began_s
                else:
                    life.arrived_s = event.began_s
    for life in found.values():
        life.taken = taken.get((life.lease.learner, life.lease.group)) if life.arrived_s is not None else None
        if (episode := life.episode) is not None:
            of_sample = stages[episode.process, episode.details["sample"]]
            life.stages = [stage for stage in of_sample if episode.began_s <= stage.began_s <= episode.ended_s]
    return list(found.values())


def life_of(events: Sequence[Event], sample_id: SampleId) -> list[str]:
    """Describe all lives of a sample, a line for each stage: seconds since the lease, name, duration."""
    lines: list[str] = []
    for life in lives(events):
        if (life.lease.group, life.lease.sample_index) == sample_id:
            lines += _lines(life)
    return lines


def _lines(life: Life) -> Iterable[str]:
    known = [moment for moment in (life.granted_s, life.arrived_s) if moment is not None]
    start_s = min([*known, *([life.episode.began_s] if life.episode is not None else [])])

    def line(at_s: float, text: str, seconds: float | None = None) -> str:
        return f"{at_s - start_s:9.3f} s  {text}" + ("" if seconds is None else f", {seconds:.3f} s")

    yield f"lease {life.lease.lease_id}, {start_s:.3f} s after the start of the trace"
    if life.episode is not None:
        yield line(life.episode.began_s, f"begins at {life.episode.process}")
        for stage in life.stages:
            details = "".join(f", {key} {value}" for key, value in stage.details.items() if key != "sample")
            yield line(stage.began_s, stage.name + details, stage.seconds)
        yield line(life.episode.ended_s, "ends", life.episode.seconds)
    if life.arrived_s is not None:
        yield line(life.arrived_s, "arrives at the learner")
    if life.taken is not None and life.arrived_s is not None:
        waited_s = life.taken.began_s - life.arrived_s
        yield line(life.taken.began_s, f"taken for step {life.taken.details['step']}, waited", waited_s)


def _is_train(lease: Lease) -> bool:
    return purpose_of(lease.group) == "train"


def _numbers(detail: object) -> list[int]:
    assert isinstance(detail, list), "as the intake records"
    return detail
