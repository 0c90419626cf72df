"""Measure trained tokens per second of the same job, synchronous (eta = 0) and asynchronous, by bound and depth.

    python benchmarks/async_vs_sync.py [--output benchmarks/results/async_vs_sync.json]

Run the quickstart's task on the quickstart's model with a tiny learning rate, so every run has the same load.
Synchronous: learner and rollout worker alternate, once with all cores each and once with half of the cores each,
because a tiny model may gain nothing from more cores. The faster setting is the baseline. Asynchronous: half of the
cores each, at the same time; with eta = 1, 2, 4 generation runs ahead as far as the bound allows, and with eta = 8 by
`algorithm.pipeline_depth` = 1, 2, 8 steps. Runs alternate. The first steps of each run do not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import hardware

from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord

NUM_STEPS = 16
NOT_COUNTED = 5


class Setup(NamedTuple):
    eta: int
    depth: int  # `algorithm.pipeline_depth`
    threads: int  # of learner and worker each

    @property
    def name(self) -> str:
        return f"eta_{self.eta}" if self.depth == max(1, self.eta) else f"eta_{self.eta}_depth_{self.depth}"


class Rate(NamedTuple):
    tokens_per_s: float
    staleness: float  # mean of the trained tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    setups = [Setup(0, 1, cores), Setup(0, 1, half), *(Setup(eta, eta, half) for eta in (1, 2, 4))]
    setups += [Setup(8, depth, half) for depth in (1, 2, 8)]
    rates: dict[Setup, list[Rate]] = {setup: [] for setup in dict.fromkeys(setups)}
    for _ in range(arguments.repeats):
        for setup, values in rates.items():
            values.append(_run(setup))
            print(f"{setup}: {values[-1].tokens_per_s:,.0f} trained tokens/s", flush=True)
    medians = {setup: statistics.median(rate.tokens_per_s for rate in values) for setup, values in rates.items()}
    synchronous = max(value for setup, value in medians.items() if setup.eta == 0)
    result = {
        "trained_tokens_per_s": {f"{setup.name}_threads_{setup.threads}": round(v) for setup, v in medians.items()},
        "mean_staleness": {
            f"{setup.name}_threads_{setup.threads}": round(statistics.mean(rate.staleness for rate in values), 2)
            for setup, values in rates.items()
        },
        **{f"{setup.name}_over_eta_0": round(v / synchronous, 2) for setup, v in medians.items() if setup.eta},
    }
    print(result)
    hardware.write(arguments.output, result)


def _run(setup: Setup) -> Rate:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        subprocess.run(
            [
                *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
                f"run.folder={folder}",
                f"algorithm.max_staleness={setup.eta}",
                f"algorithm.pipeline_depth={setup.depth}",
                f"learner.num_threads={setup.threads}",
                f"rollout.num_threads={setup.threads}",
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
    tokens = sum(record.trained_tokens for record in counted)
    stale = sum(record.trained_tokens * record.staleness_mean for record in counted)
    return Rate(tokens / (counted[-1].wall_s - records[NOT_COUNTED - 1].wall_s), stale / tokens)


if __name__ == "__main__":
    main()
