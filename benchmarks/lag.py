"""Find out why accuracy oscillates at a fixed staleness of 16: a smaller learning rate, and other weights.

    python benchmarks/lag.py [--output FILE.json]

The setup of `staleness.py`, 3 seeds. `sequence` weights a completion by the product of all w, at most 5.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping

import hardware
from learning import EVALUATE_EVERY, Job, interval, run_all

ETA, NUM_STEPS, SEEDS = 16, 60, (0, 1, 2)
COMMON = ("learner.groups_per_step=24",)
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
    jobs = [Job(name, COMMON + overrides, seed, ETA, NUM_STEPS) for name, overrides in SETUPS.items() for seed in SEEDS]
    outcomes = list(run_all(jobs))
    table = []
    for name in SETUPS:
        of_seeds = [outcome for outcome in outcomes if outcome.job.name == name]
        finals, areas = [outcome.final for outcome in of_seeds], [outcome.area for outcome in of_seeds]
        swings = [max(max(o.accuracies[:i]) - a for i, a in enumerate(o.accuracies) if i) for o in of_seeds]
        row: dict[str, object] = {"setup": name}
        for measure, values in (("final", finals), ("area", areas), ("largest_fall", swings)):
            row[f"{measure}_mean"] = round(statistics.fmean(values), 4)
            row[f"{measure}_interval"] = round(interval(values), 4)
        row["behaviour_kl"] = statistics.fmean(outcome.behaviour_kl for outcome in of_seeds)
        table.append(row)
        print(*(f"{key}={value}" for key, value in row.items()))
    hardware.write(
        arguments.output,
        {
            "eta": ETA,
            "num_steps": NUM_STEPS,
            "groups_per_step": 24,
            "evaluate_every_versions": EVALUATE_EVERY,
            "seeds": list(SEEDS),
            "table": table,
            "curves": {f"{o.job.name}/seed_{o.job.seed}": list(o.accuracies) for o in outcomes},
        },
    )


if __name__ == "__main__":
    main()
