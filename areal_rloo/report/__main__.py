"""The command line of the report: run folders in, the path of the page out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from areal_rloo.errors import DataError
from areal_rloo.program import Parser, run_main
from areal_rloo.report import write_report
from areal_rloo.report.comparison import write_comparison
from areal_rloo.telemetry.trace import FOLDER_NAME
from areal_rloo.trace.perfetto import write_perfetto


def main(words: Sequence[str]) -> int:
    """Write the report of a run folder, or the comparison of several.

    Raises:
        UserError: a folder has no run, or a page cannot be written.
    """
    parser = Parser(prog="areal-rloo report", description="Draw runs as one HTML page.")
    parser.add_argument("run_folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="such as runs/latest")
    parser.add_argument("--output", type=Path, help="of several runs; default: comparison.html beside the first run")
    arguments = parser.parse_args(words)
    first, *others = arguments.run_folders
    if others:
        target = arguments.output or first.resolve().parent / "comparison.html"
        print(write_comparison(arguments.run_folders, target))  # noqa: T201 - users read this line
    elif arguments.output is not None:
        raise DataError("--output: expected several run folders; the report of one is in the folder of the run")
    else:
        print(write_report(first))  # noqa: T201
        if any((first / FOLDER_NAME).glob("*.jsonl")):
            print(write_perfetto(first))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
