"""Find out why accuracy oscillates at a fixed staleness of 16: a smaller learning rate, and other weights.

    python -m benchmarks.lag [--output FILE.json]

The setup of `staleness.py`, 3 seeds. `sequence` weights a completion by the product of all w, at most 5.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping

from benchmarks import hardware
from benchmarks.learning import SEEDS, SETUP, Job, over_seeds, run_all

ETA = 16
SETUPS: Mapping[str, tuple[str, ...]] = {
    "decoupled": (),
    "decoupled, half the rate": ("learner.optimizer.learning_rate=5e-5",),
    "decoupled, a quarter of the rate": ("learner.optimizer.learning_rate=2.5e-5",),
    "decoupled, clamp 1.5": ("algorithm.loss.behaviour_weight.upper=1.5",),
    "naive_ppo, half the rate": ("algorithm.loss.decoupled=false", "learner.optimizer.learning_rate=5e-5"),
    "sequence": ("algorithm.loss.behaviour_weight={level: sequence, aggregate: sum}",),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    arguments = parser.parse_args()
    jobs = [Job(name, overrides, seed, ETA) for name, overrides in SETUPS.items() for seed in SEEDS]
    outcomes = list(run_all(jobs))
    table = []
    for name in SETUPS:
        of_seeds = [outcome for outcome in outcomes if outcome.job.name == name]
        falls = [max(max(o.accuracies[:i]) - a for i, a in enumerate(o.accuracies) if i) for o in of_seeds]
        row = {
            "setup": name,
            **over_seeds(final=[o.final for o in of_seeds], area=[o.area for o in of_seeds], largest_fall=falls),
            "behaviour_kl": statistics.fmean(outcome.behaviour_kl for outcome in of_seeds),
        }
        table.append(row)
        print(*(f"{key}={value}" for key, value in row.items()))
    hardware.write(
        arguments.output,
        {
            "eta": ETA,
            **SETUP,
            "table": table,
            "curves": {f"{o.job.name}/seed_{o.job.seed}": list(o.accuracies) for o in outcomes},
        },
    )


if __name__ == "__main__":
    main()
