"""What the launcher notes, and the learner serves to Prometheus: how many rollout workers a run should have, restarts.

A worker that dies before it serves metrics is in no list of targets, so only this number shows that it is missing.
"""

from __future__ import annotations

import math
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
    restarts: Annotated[
        dict[str, int], Metric("Times the launcher has restarted a process", kind="counter", label="restarted")
    ] = {}
    # A resume starts all processes, and is no restart.
    start_timestamp_s: Annotated[float, Metric("Time of the start of the launcher", unit="s")] = math.nan


def note_wanted(folder: Path, statistics: LauncherStatistics) -> None:
    """Note the numbers; raises OSError if the disk refuses."""
    write_atomically(folder / _NAME, msgspec.json.encode(statistics))


def read_wanted(folder: Path, otherwise: int) -> LauncherStatistics:
    """Read the number of workers; `otherwise` if there is none."""
    try:
        return from_json(read_regular(folder / _NAME), LauncherStatistics)
    except (OSError, DecodeError):
        return LauncherStatistics(num_workers=otherwise)
