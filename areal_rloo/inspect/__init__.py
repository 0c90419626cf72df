"""`python -m areal_rloo.inspect RUN_FOLDER`: shows trajectories, with rewards, advantages and drops.

In: trajectories.jsonl of a finished or running run. Out: selected trajectories, on the terminal or as JSON lines. The
report uses this package for trajectories.html.

- `__main__`: the command, and the checks of the command line.
- `select`: conditions and orders, and the pass over the records that applies them.
- `text`: trajectories and summaries as text for the terminal.
- `page`: trajectories as a web page, with the script `page.js`.
- `shown`: formats numbers, makes untrusted text visible, and has the common style of the pages.
"""

from __future__ import annotations

from pathlib import Path

from areal_rloo.errors import DataError
from areal_rloo.telemetry.trajectories import FILE_NAME


def trajectories_of(folder: Path) -> Path:
    """Return the file with the trajectories of a run folder.

    Raises:
        DataError: the folder has no run, or the run has no recorded trajectories.
    """
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder}: no run here (config.yaml is missing); expected a run folder such as runs/latest")
    path = folder / FILE_NAME
    if not path.is_file():
        raise DataError(
            f"{folder}: no {FILE_NAME}: expected after the first train step of a run with "
            "telemetry.trajectories_per_step above 0"
        )
    return path
