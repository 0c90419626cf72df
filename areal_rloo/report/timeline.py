"""The timeline of the report: a row for each kind of event, by step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from areal_rloo.learner.checkpoint_folder import folder_of, list_checkpoints
from areal_rloo.learner.stretches import Stretch, read_starts
from areal_rloo.report.charts import Row, strip_chart
from areal_rloo.telemetry.records import EvalRecord, TrainRecord


class Lasted(NamedTuple):
    """A symptom, with the versions of the first and the last record of it."""

    name: str
    first: int
    last: int


def timeline(
    folder: Path,
    train: Sequence[TrainRecord],
    evaluations: Sequence[EvalRecord],
    stretches: Sequence[Stretch],
    lasted: Sequence[Lasted],
) -> str:
    """Draw starts, evaluations, kept checkpoints, changes of the config, lost workers, skipped steps, and symptoms."""
    if not train:
        return ""
    pairs = [*itertools.pairwise(train)]
    skipped = [now for before, now in pairs if now.skipped_steps > before.skipped_steps]
    starts = read_starts(folder)

    def lost(before: TrainRecord, now: TrainRecord) -> str:
        """Name no alarm after a start: the config may have fewer workers, or some have not joined yet."""
        has_started = any(before.policy_version <= one.version < now.policy_version for one in starts)
        words = f"{before.num_workers} to {now.num_workers} rollout workers"
        return words if has_started else f"{words} (alarm TargetDown)"

    points = {
        "starts": [(one.version, f"the learner starts at {one.time} UTC") for one in starts],
        "evaluations": [
            (one.policy_version, f"{one.name}: {one.result[0]} {one.result[1]:.3f}") for one in evaluations
        ],
        "checkpoints kept": [(version, "checkpoint") for version in list_checkpoints(folder_of(folder))],
        "config changed": [
            (stretch.version, ", ".join(change.key for change in stretch.changes) or "cannot be compared")
            for stretch in stretches[1:]
        ],
        "workers lost": [
            (now.policy_version, lost(before, now)) for before, now in pairs if now.num_workers < before.num_workers
        ],
        "steps skipped": [
            (record.policy_version, "the gradient was not finite (alarm StepsSkipped)") for record in skipped
        ],
    }
    rows = [Row(name, [(x, x, text) for x, text in events]) for name, events in points.items() if events]
    for name in dict.fromkeys(symptom.name for symptom in lasted):
        spans = [(one.first, one.last, f"{name} (alarm Unhealthy)") for one in lasted if one.name == name]
        rows.append(Row(name, spans, bad=True))
    return strip_chart("Timeline, by step", rows, 0, train[-1].policy_version)
