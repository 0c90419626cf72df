"""`python -m areal_rloo.inspect RUN_FOLDER`: what the policy wrote and what became of it, trajectory by trajectory.

In: trajectories.jsonl, also of a run in progress. Out: the trajectories asked for, on the terminal or as JSON lines;
and for the report trajectories.html, a page of them.
"""

from __future__ import annotations

from pathlib import Path

from areal_rloo.errors import DataError
from areal_rloo.telemetry.trajectories import FILE_NAME


def trajectories_of(folder: Path) -> Path:
    """The file of a run folder.

    Raises:
        DataError: there is no run, or it has recorded no trajectories.
    """
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder}: no run here (there is no config.yaml); expected a run folder such as runs/latest")
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(
            f"{folder}: no {FILE_NAME}: expected after the first train step of a run with "
            "telemetry.trajectories_per_step above 0"
        )
    return path
