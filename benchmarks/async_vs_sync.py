"""Trained tokens per second of the same job, synchronous (eta = 0) and asynchronous (eta = 1, 2, 4).

    python benchmarks/async_vs_sync.py [--output benchmarks/results/async_vs_sync.json]

The quickstart's task on its own model, learning switched off in effect (a tiny learning rate), so that every run makes
the same load. Synchronous: learner and rollout worker have all cores each, because they work in turn. Asynchronous:
half of the cores each, at the same time. Runs take turns; the first steps of each are not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import hardware

from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord

NUM_STEPS = 16
NOT_COUNTED = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    rates: dict[int, list[float]] = {0: [], 1: [], 2: [], 4: []}
    for _ in range(arguments.repeats):
        for max_staleness, values in rates.items():
            threads = cores if max_staleness == 0 else max(1, cores // 2)
            values.append(_run(max_staleness, threads))
            print(f"eta {max_staleness}, {threads} threads each: {values[-1]:,.0f} trained tokens/s", flush=True)
    medians = {eta: statistics.median(values) for eta, values in rates.items()}
    ratios = {f"eta_{eta}_over_eta_0": round(value / medians[0], 2) for eta, value in medians.items() if eta}
    print("trained tokens/s", {eta: round(value) for eta, value in medians.items()}, ratios)
    result = {f"eta_{eta}": round(value, 1) for eta, value in medians.items()}
    hardware.write(arguments.output, {"trained_tokens_per_s": result, **ratios})


def _run(max_staleness: int, threads: int) -> float:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        subprocess.run(
            [
                *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
                f"run.folder={folder}",
                f"algorithm.max_staleness={max_staleness}",
                f"learner.num_threads={threads}",
                f"rollout.num_threads={threads}",
                f"learner.num_train_steps={NUM_STEPS + NOT_COUNTED}",
                "learner.optimizer.learning_rate=1e-9",
                "evaluation.every_n_versions=0",
                "data.eval=null",
                "checkpoint.every_n_steps=0",
                "telemetry.progress=false",
            ],
            check=True,
        )
        records = [r for r in read_records(folder / "metrics.jsonl") if isinstance(r, TrainRecord)]
    counted = records[NOT_COUNTED:]
    return sum(r.trained_tokens for r in counted) / (counted[-1].wall_s - records[NOT_COUNTED - 1].wall_s)


if __name__ == "__main__":
    main()
