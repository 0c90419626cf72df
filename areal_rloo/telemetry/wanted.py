"""How many rollout workers a run should have: the launcher notes the number, the learner serves it to Prometheus.

A worker that dies before it serves metrics is in no list of targets, so only this number shows that it is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

import msgspec

from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError
from areal_rloo.files import read_regular, write_atomically
from areal_rloo.telemetry.metric import Metric

_NAME = "workers.json"


class LauncherStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher has noted in the run folder."""

    metrics_prefix: ClassVar[str] = "launcher_"

    num_workers: Annotated[int, Metric("Rollout workers that the launcher keeps running")]


def note_wanted(folder: Path, num_workers: int) -> None:
    """Note the number of workers; raises OSError if the disk refuses."""
    write_atomically(folder / _NAME, msgspec.json.encode(LauncherStatistics(num_workers=num_workers)))


def read_wanted(folder: Path, otherwise: int) -> LauncherStatistics:
    """Read the number of workers; `otherwise` if there is none."""
    try:
        return from_json(read_regular(folder / _NAME), LauncherStatistics)
    except (OSError, DecodeError):
        return LauncherStatistics(num_workers=otherwise)
