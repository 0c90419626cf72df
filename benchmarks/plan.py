"""Measure the time of a dry run with a large plan, as a whole process, against an idle Python and a small plan.

    python -m benchmarks.plan [--output benchmarks/results/plan.json]

The plan is gsm8k_rloo.yaml over 16 hosts of 8 GPUs (and over 128), with all counts `auto`. The benchmark parses the
JSON and counts the processes. Repeats are interleaved, and results are medians of the wall clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from benchmarks import hardware

DRY_RUN = [sys.executable, "-m", "areal_rloo.launcher.slurm", "--config", "gsm8k_rloo.yaml", "--dry-run", "--json"]
AUTO = ["rollout.num_workers=auto", "learner.num_ranks=auto"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output")
    arguments = parser.parse_args()
    commands = {"python": [sys.executable, "-c", ""]} | {
        f"{num}_hosts": [
            *DRY_RUN,
            *AUTO,
            *(f"launcher.num_hosts={num}", "launcher.gpus_per_host=8", "launcher.cores_per_host=96"),
        ]
        for num in (1, 16, 128)
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    counts = dict.fromkeys(commands, 0)
    for _ in range(arguments.repeats):
        for name, command in commands.items():
            began_s = time.perf_counter()
            said = subprocess.run(command, capture_output=True, check=True, text=True).stdout
            seconds[name].append(time.perf_counter() - began_s)
            counts[name] = len(json.loads(said)["processes"]) if said else 0
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name}: {counts[name]} processes, {median:.2f} s, {median / medians['1_hosts']:.2f} of one host's plan")
    hardware.write(
        arguments.output,
        {
            "median_s": {name: round(value, 3) for name, value in medians.items()},
            "num_processes": counts,
            "ratio_to_one_host": {name: round(value / medians["1_hosts"], 2) for name, value in medians.items()},
        },
    )


if __name__ == "__main__":
    main()
