"""The command line of the report: a run folder in, the path of the page out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal_rloo.errors import UserError
from areal_rloo.report import write_report
from areal_rloo.standard_streams import open_missing_streams


def main() -> int:
    """Write the report of the folder on the command line."""
    open_missing_streams()
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.report", description="Draw a run as one HTML page.")
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="such as runs/latest")
    try:
        print(write_report(parser.parse_args().run_folder))  # noqa: T201 - users read this line
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
