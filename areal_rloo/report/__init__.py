"""`python -m areal_rloo.report RUN_FOLDER`: a run as one self-contained page, report.html.

In: config.yaml, metrics.jsonl and, once the run has ended, summary.json. Out: HTML with curves drawn as SVG; no script,
nothing loaded from anywhere, light and dark; and beside it, where trajectories were recorded, a page of them
(`areal_rloo.inspect.page`). Works on a run in progress.
"""

from __future__ import annotations

import json
from pathlib import Path

from areal_rloo.errors import DataError
from areal_rloo.inspect.page import PAGE_NAME, write_page
from areal_rloo.report.page import page
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord, TrainRecord
from areal_rloo.telemetry.trajectories import FILE_NAME, read_trajectories

__all__ = ["write_report"]


def write_report(folder: Path) -> Path:
    """Write report.html into a run folder, and trajectories.html where there are any; gives the path of the first.

    Raises:
        DataError: the folder holds no run, or its files cannot be read or written.
    """
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder}: no run here (there is no config.yaml); expected a run folder such as runs/latest")
    target = folder / "report.html"
    summary_path = folder / "summary.json"
    try:
        records = read_records(folder / "metrics.jsonl")
        config = (folder / "config.yaml").read_text(encoding="utf-8")
        summary = json.loads(summary_path.read_text(encoding="utf-8")) if summary_path.is_file() else None
        train = [record for record in records if isinstance(record, TrainRecord)]
        evaluations = [record for record in records if isinstance(record, EvalRecord)]
        trajectories = PAGE_NAME if (folder / FILE_NAME).is_file() else None
        text = page(folder.resolve().name, config, train, evaluations, summary, trajectories)
        target.write_text(text, encoding="utf-8")
        if trajectories is not None:
            write_page(folder, read_trajectories(folder / FILE_NAME))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: the report cannot be made: {error}") from error
    return target
