"""Measure trained tokens per second of the same job, synchronous (eta = 0) and asynchronous (eta = 1, 2, 4).

    python -m benchmarks.async_vs_sync [--output benchmarks/results/async_vs_sync.json]

Run the quickstart's task on the quickstart's model with a tiny learning rate, so every run has the same load.
Synchronous: learner and rollout worker alternate, once with all cores each and once with half of the cores each,
because a tiny model may gain nothing from more cores. The faster setting is the baseline. Asynchronous: half of the
cores each, at the same time. Runs alternate. The first steps of each run do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord
from benchmarks import hardware

NUM_STEPS = 16
NOT_COUNTED = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    setups = [(0, cores), (0, half), (1, half), (2, half), (4, half)]
    rates: dict[tuple[int, int], list[float]] = {setup: [] for setup in dict.fromkeys(setups)}
    for _ in range(arguments.repeats):
        for (max_staleness, threads), values in rates.items():
            values.append(_run(max_staleness, threads))
            print(f"eta {max_staleness}, {threads} threads each: {values[-1]:,.0f} trained tokens/s", flush=True)
    medians = {setup: statistics.median(values) for setup, values in rates.items()}
    synchronous = max(value for (eta, _), value in medians.items() if eta == 0)
    ratios = {f"eta_{eta}_over_eta_0": round(value / synchronous, 2) for (eta, _), value in medians.items() if eta}
    result = {f"eta_{eta}_threads_{threads}": round(value) for (eta, threads), value in medians.items()}
    print("trained tokens/s", result, ratios)
    hardware.write(arguments.output, {"trained_tokens_per_s": result, **ratios})


def _run(max_staleness: int, threads: int) -> float:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        subprocess.run(
            [
                *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
                f"run.folder={folder}",
                f"algorithm.max_staleness={max_staleness}",
                f"algorithm.pipeline_depth={max(1, max_staleness)}",
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
