"""Measure speed and staleness by `algorithm.pipeline_depth`, with the same staleness bound.

    python -m benchmarks.pipeline_depth [--output benchmarks/results/pipeline_depth.json]

The quickstart's task and model with a bound of 8, a core each for learner and worker, and a tiny learning rate, so
every run has the same load. Generation is faster than training here (64 slots, gradient checkpointing), so generation
fills whatever the depth allows. Runs alternate. Staleness is the mean of the trained tokens of the first and of the
last counted step.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord
from benchmarks import hardware

ETA, DEPTHS = 8, (1, 2, 8)
NUM_STEPS, NOT_COUNTED = 20, 5


class Rate(NamedTuple):
    tokens_per_s: float
    first_staleness: float
    last_staleness: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    rates: dict[int, list[Rate]] = {depth: [] for depth in DEPTHS}
    for _ in range(arguments.repeats):
        for depth, values in rates.items():
            values.append(_run(depth))
            print(f"depth {depth}: {values[-1]}", flush=True)
    rows = [
        {
            "depth": depth,
            "trained_tokens_per_s": round(statistics.median(rate.tokens_per_s for rate in values)),
            "first_staleness": round(statistics.mean(rate.first_staleness for rate in values), 2),
            "last_staleness": round(statistics.mean(rate.last_staleness for rate in values), 2),
        }
        for depth, values in rates.items()
    ]
    hardware.write(arguments.output, {"eta": ETA, "counted_steps": [NOT_COUNTED + 1, NUM_STEPS], "depths": rows})


def _run(depth: int) -> Rate:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        subprocess.run(
            [
                *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
                *(f"run.folder={folder}", f"algorithm.max_staleness={ETA}", f"algorithm.pipeline_depth={depth}"),
                *("learner.num_threads=1", "rollout.num_threads=1", f"learner.num_train_steps={NUM_STEPS + 2}"),
                *(
                    "rollout.num_slots=64",
                    "learner.gradient_checkpointing=true",
                    "learner.optimizer.learning_rate=1e-9",
                ),
                *("evaluation.every_n_versions=0", "data.eval=null", "checkpoint.every_n_steps=0"),
                "telemetry.progress=false",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        records = [r for r in read_records(folder / "metrics.jsonl") if isinstance(r, TrainRecord)]
    before, counted = records[NOT_COUNTED - 1], records[NOT_COUNTED:NUM_STEPS]
    tokens_per_s = sum(record.trained_tokens for record in counted) / (counted[-1].wall_s - before.wall_s)
    return Rate(tokens_per_s, counted[0].staleness_mean, counted[-1].staleness_mean)


if __name__ == "__main__":
    main()
