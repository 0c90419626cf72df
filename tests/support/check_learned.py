"""Check that a finished run learned, stayed within its bound, and lost nothing: `check_learned.py RUN_FOLDER`.

Exits with 1 and says what is wrong. CI checks a whole quickstart with it, and test_learning.py the runs on clusters.
"""

import json
import sys
from pathlib import Path


def conditions(folder: Path) -> dict[str, bool]:
    """Return each condition of a run that learned, with the numbers of the run, and if it holds."""
    summary = json.loads((folder / "summary.json").read_text())
    first, last = (summary["evaluation"][index]["accuracy"] for index in (0, -1))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    spanning = max(record.get("spanning_share", 0.0) for record in records)
    ledger, staleness, times = summary["ledger"], summary["staleness"], summary["time_s"]
    return {
        f"accuracy rose by 0.35 or more ({first:.3f} to {last:.3f})": last - first >= 0.35,
        f"accuracy ended at 0.95 or more ({last:.3f})": last >= 0.95,
        f"the ledger balances ({ledger})": ledger["admitted"]
        == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["buffered"] + ledger["in_flight"],
        f"the run was asynchronous (mean staleness {staleness['mean_trained']:.2f})": staleness["mean_trained"] > 0,
        f"weights came while completions were made (up to {100 * spanning:.0f} % of a batch span versions)": spanning
        > 0,
        f"rollouts idled less than 10 % ({times['rollout_idle']:.1f} s of {times['wall']:.1f} s)": times["rollout_idle"]
        < 0.1 * times["wall"],
        f"it ended by itself ({summary['exit_reason']})": summary["exit_reason"] == "completed",
    }


def main() -> int:
    found = conditions(Path(sys.argv[1]))
    for text, holds in found.items():
        print(f"{'ok    ' if holds else 'FAILED'} {text}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
