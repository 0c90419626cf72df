"""Check that a finished run learned, stayed within its bound, and lost nothing: `check_learned.py RUN_FOLDER`.

Exits with 1 and says what is wrong. CI checks a whole quickstart with it, and test_learning.py the runs on clusters.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_rloo.config import load_config
from areal_rloo.telemetry.health import Health
from areal_rloo.telemetry.metrics import read_records


def conditions(folder: Path) -> dict[str, bool]:
    """Return each condition of a run that learned, with the numbers of the run, and if it holds."""
    summary = json.loads((folder / "summary.json").read_text())
    first, last = (summary["evaluation"][index]["accuracy"] for index in (0, -1))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    spanning = max(record.get("spanning_share", 0.0) for record in records)
    ledger, staleness = summary["ledger"], summary["staleness"]
    health = Health(load_config(str(folder / "config.yaml")))
    lines = [line for record in read_records(folder / "metrics.jsonl") for line in health.look(record)]
    learner_idle, rollout_idle = idle_shares([record for record in records if record["kind"] == "train"])
    return {
        f"accuracy rose by 0.35 or more ({first:.3f} to {last:.3f})": last - first >= 0.35,
        f"accuracy ended at 0.95 or more ({last:.3f})": last >= 0.95,
        f"the ledger balances ({ledger})": ledger["admitted"]
        == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["buffered"] + ledger["in_flight"],
        f"the run was asynchronous (mean staleness {staleness['mean_trained']:.2f})": staleness["mean_trained"] > 0,
        f"weights came while completions were made (up to {100 * spanning:.0f} % of a batch span versions)": spanning
        > 0,
        "generation and training overlapped, so the slower of the two idled less than 15 % "
        f"(learner {100 * learner_idle:.1f} %, rollouts {100 * rollout_idle:.1f} %)": min(learner_idle, rollout_idle)
        < 0.15,
        f"no symptom of ill health ({'; '.join(lines) or 'none'})": not lines,
        f"it ended by itself ({summary['exit_reason']})": summary["exit_reason"] == "completed",
    }


def idle_shares(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the shares of time that the learner and the rollouts idled, from the first train step to the last.

    The staleness bound makes the faster of the two wait, and which is faster depends on the machine. The slower waits
    only if the protocol hands out work too late; without any overlap, both wait for about half of the time.
    """
    first, last = steps[0], steps[-1]
    wall_s = last["wall_s"] - first["wall_s"]
    learner_s = sum(step["wait_s"] for step in steps[1:])
    idle_s, busy_s = (last[key] - first[key] for key in ("rollout_idle_s", "rollout_busy_s"))
    return learner_s / wall_s, idle_s / (idle_s + busy_s)


def main() -> int:
    found = conditions(Path(sys.argv[1]))
    for text, holds in found.items():
        print(f"{'ok    ' if holds else 'FAILED'} {text}")
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
