"""Compare the presets on the same task: RLOO, GRPO, Dr. GRPO, REINFORCE++ with and without baseline, REINFORCE.

    python -m benchmarks.algorithms [--output benchmarks/results/algorithms.json]

Train the quickstart's arithmetic from the warm start, 3 seeds each, eta = 1 at every token (see `learning.py`). Only
the preset differs. The KL to the reference is off, so the comparison covers advantages and means. GRPO and REINFORCE++
run a second time with the KL of their presets. Report mean and 95 % interval over seeds (Student's t; wide for three
seeds).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks import hardware
from benchmarks.learning import SEEDS, SETUP, Job, Outcome, over_seeds, run_all

NO_KL = "algorithm.kl.coefficient=0"
SETUPS: dict[str, tuple[str, ...]] = {
    "rloo": ("algorithm.preset=rloo",),
    "grpo": ("algorithm.preset=grpo", NO_KL),
    "dr_grpo": ("algorithm.preset=dr_grpo",),
    "reinforce_plus_plus": ("algorithm.preset=reinforce_plus_plus", NO_KL),
    "reinforce_plus_plus_baseline": ("algorithm.preset=reinforce_plus_plus_baseline", NO_KL),
    "reinforce": ("algorithm.preset=reinforce",),
    "grpo with its KL": ("algorithm.preset=grpo",),
    "reinforce_plus_plus with its KL": ("algorithm.preset=reinforce_plus_plus",),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    arguments = parser.parse_args()
    jobs = [Job(name, overrides, seed, 1) for name, overrides in SETUPS.items() for seed in SEEDS]
    outcomes = list(run_all(jobs))
    table = [_row(name, [o for o in outcomes if o.job.name == name]) for name in SETUPS]
    print("algorithm                          final accuracy     area under the curve")
    for row in table:
        print(
            f"{row['algorithm']:32}   {row['final_mean']:.3f} +- {row['final_interval']:.3f}    "
            f"{row['area_mean']:.3f} +- {row['area_interval']:.3f}"
        )
    hardware.write(
        arguments.output,
        {
            "eta": 1,
            **SETUP,
            "table": table,
            "curves": {f"{o.job.name}/seed_{o.job.seed}": list(o.accuracies) for o in outcomes},
        },
    )


def _row(name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {"algorithm": name, **over_seeds(final=[o.final for o in outcomes], area=[o.area for o in outcomes])}


if __name__ == "__main__":
    main()
