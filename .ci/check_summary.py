"""Holds a finished quickstart to what it promises: it learned, the ledger balances, nothing stale was trained on.

`python .ci/check_summary.py RUN_FOLDER` prints what is wrong, a line each, and exits with 1 if anything is.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LEAST_RISE = 0.35
LEAST_FINAL = 0.95


def faults(summary: dict[str, Any], max_staleness: int) -> Iterator[str]:
    """What the summary of a run does not fulfil."""
    if summary["exit_reason"] != "completed":
        yield f"exit_reason: expected completed, got {summary['exit_reason']}"
    accuracy = [e["accuracy"] for e in sorted(summary["evaluation"], key=lambda e: e["policy_version"])]
    if len(accuracy) < 2:
        yield f"evaluation: expected one before and one after training, got {len(accuracy)}"
    else:
        if accuracy[-1] - accuracy[0] < LEAST_RISE:
            yield f"accuracy: expected a rise of {LEAST_RISE}, got {accuracy[0]} to {accuracy[-1]}"
        if accuracy[-1] < LEAST_FINAL:
            yield f"accuracy: expected {LEAST_FINAL} at the end, got {accuracy[-1]}"
    ledger = summary["ledger"]
    accounted = ledger["trained"] + sum(ledger["dropped"].values()) + ledger["buffered"] + ledger["in_flight"]
    if ledger["admitted"] != accounted:
        yield f"ledger: {ledger['admitted']} samples admitted, {accounted} accounted for"
    if ledger["trained"] == 0:
        yield "ledger: nothing was trained on"
    staleness = summary["staleness"]
    if staleness["max_trained"] > max_staleness:
        yield f"staleness: a token {staleness['max_trained']} versions late was trained on, past {max_staleness}"
    if max_staleness > 0 and staleness["mean_trained"] <= 0:
        yield "staleness: 0 throughout, so the run was not asynchronous"


def main() -> int:
    """Check the run folder on the command line."""
    folder = Path(sys.argv[1])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    found = list(faults(summary, config["algorithm"]["max_staleness"]))
    if not (folder / "report.html").is_file():
        found.append("report.html: the run did not write its report")
    for fault in found:
        print(f"error: {folder}: {fault}", file=sys.stderr)
    if not found:
        print(f"{folder}: as promised; final accuracy {summary['evaluation'][-1]['accuracy']}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
