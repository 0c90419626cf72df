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
    """Return the lives of all train samples, by lease. A restarted learner counts leases anew."""
    found: dict[Lease, list[Life]] = defaultdict(list)
    stages: dict[object, list[Event]] = defaultdict(list)
    taken: dict[int, Event] = {}
    for event in events:
        if event.track == SAMPLES and event.name == "episode":
            if (lease := lease_of(event.details)) is not None:
                if not found[lease] or found[lease][-1].episode is not None:
                    found[lease].append(Life(lease))
                found[lease][-1].episode = event
        elif event.track == SAMPLES:
            stages[event.process, event.details["sample"]].append(event)
        elif event.track == "intake" and event.name == "taken":
            taken |= dict.fromkeys(_numbers(event.details["groups"]), event)
        elif event.track == "intake":
            for lease in filter(_is_train, leases_of(event.details)):
                if event.name == "granted":
                    found[lease].append(Life(lease, event.began_s))
                elif found[lease]:
                    found[lease][-1].arrived_s = event.began_s
    all_lives = [life for lease in sorted(found) for life in found[lease]]
    for life in all_lives:
        life.taken = taken.get(life.lease[0]) if life.arrived_s is not None else None
        if (episode := life.episode) is not None:
            of_sample = stages[episode.process, episode.details["sample"]]
            life.stages = [stage for stage in of_sample if episode.began_s <= stage.began_s <= episode.ended_s]
    return all_lives


def life_of(events: Sequence[Event], sample_id: SampleId) -> list[str]:
    """Describe all lives of a sample, a line for each stage: seconds since the lease, name, duration."""
    lines: list[str] = []
    for life in lives(events):
        if life.lease[:2] == sample_id:
            lines += _lines(life)
    return lines


def _lines(life: Life) -> Iterable[str]:
    known = [moment for moment in (life.granted_s, life.arrived_s) if moment is not None]
    start_s = min([*known, *([life.episode.began_s] if life.episode is not None else [])])

    def line(at_s: float, text: str, seconds: float | None = None) -> str:
        return f"{at_s - start_s:9.3f} s  {text}" + ("" if seconds is None else f", {seconds:.3f} s")

    yield f"lease {life.lease[2]}, {start_s:.3f} s after the start of the trace"
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
    return purpose_of(lease[0]) == "train"


def _numbers(detail: object) -> list[int]:
    assert isinstance(detail, list), "as the intake records"
    return detail
