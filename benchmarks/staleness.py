"""Measure the cost of staleness and the effect of corrections: final accuracy and area under the curve by eta.

    python -m benchmarks.staleness [--schedule fixed|mixed] [--output FILE.json] [--plot FILE.svg]

Train the quickstart's arithmetic from the warm start, 3 seeds, eta = 0, 1, 2, 4, 8, 16 (see `learning.py`):

    decoupled      clip against the proximal policy, weighted by proximal / behaviour (the default)
    naive_ppo      clip against the behaviour policy instead of the proximal policy (loss.decoupled=false)
    no_correction  REINFORCE as if all samples were fresh (loss.kind=reinforce, behaviour_weight.rule=ignore)

At eta = 0 the first two are equal to the last digits. The plot needs matplotlib (`pip install areal_rloo[plot]`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import hardware
from benchmarks.learning import SEEDS, SETUP, Job, Outcome, over_seeds, run_all

ETAS = (0, 1, 2, 4, 8, 16)
CORRECTIONS: Mapping[str, tuple[str, ...]] = {
    "decoupled": (),
    "naive_ppo": ("algorithm.loss.decoupled=false",),
    "no_correction": ("algorithm.loss.kind=reinforce", "algorithm.loss.behaviour_weight.rule=ignore"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=["fixed", "mixed"], default="fixed")
    parser.add_argument("--output")
    parser.add_argument("--plot")
    arguments = parser.parse_args()
    jobs = [
        Job(name, overrides, seed, eta, arguments.schedule)
        for eta in ETAS
        for name, overrides in CORRECTIONS.items()
        for seed in SEEDS
    ]
    outcomes = list(run_all(jobs))
    table = [_row(name, eta, outcomes) for name in CORRECTIONS for eta in ETAS]
    print("95 % intervals of the mean over seeds")
    print("correction      eta   final            area             behaviour KL   effective sample share")
    for row in table:
        print(
            f"{row['correction']:14} {row['eta']:4}   {row['final_mean']:.3f} +- {row['final_interval']:.3f}   "
            f"{row['area_mean']:.3f} +- {row['area_interval']:.3f}   {row['behaviour_kl']:.5f}        "
            f"{row['effective_sample_share']:.3f}"
        )
    leads = [_lead(name, eta, outcomes) for name in list(CORRECTIONS)[1:] for eta in ETAS]
    print("lead of decoupled over another loss, paired by seed")
    for row in leads:
        print(*(f"{key}={value}" for key, value in row.items()))
    if arguments.plot:
        plot(table, arguments.plot, arguments.schedule)
    hardware.write(
        arguments.output,
        {
            "schedule": arguments.schedule,
            **SETUP,
            "table": table,
            "leads": leads,
            "curves": {f"{o.job.name}/eta_{o.job.eta}/seed_{o.job.seed}": list(o.accuracies) for o in outcomes},
        },
    )


def _row(name: str, eta: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    of_seeds = [outcome for outcome in outcomes if outcome.job.name == name and outcome.job.eta == eta]
    return {
        "correction": name,
        "eta": eta,
        **over_seeds(final=[o.final for o in of_seeds], area=[o.area for o in of_seeds]),
        "behaviour_kl": statistics.fmean(outcome.behaviour_kl for outcome in of_seeds),
        "effective_sample_share": round(statistics.fmean(o.effective_sample_share for o in of_seeds), 4),
    }


def _lead(name: str, eta: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Compare the default with another loss, seed by seed."""
    of = {(o.job.name, o.job.seed): o for o in outcomes if o.job.eta == eta}
    pairs = [(of["decoupled", seed], of[name, seed]) for seed in SEEDS]
    differences = over_seeds(
        final=[ours.final - theirs.final for ours, theirs in pairs],
        area=[ours.area - theirs.area for ours, theirs in pairs],
    )
    return {"over": name, "eta": eta, **differences}


def plot(table: Sequence[Mapping[str, Any]], path: str, schedule: str) -> None:
    """Plot both measures over eta, a line per correction, with the 95 % interval over seeds."""
    import matplotlib  # noqa: PLC0415 - an extra, and only the plot needs it

    matplotlib.use("svg")
    import matplotlib.pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    # Equal numbers give an equal file, and text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "areal_rloo", "svg.fonttype": "none"})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
    for axis, measure in zip(axes, ("final", "area"), strict=True):
        for name in CORRECTIONS:
            rows = [row for row in table if row["correction"] == name]
            axis.errorbar(
                range(len(rows)),
                [row[f"{measure}_mean"] for row in rows],
                yerr=[row[f"{measure}_interval"] for row in rows],
                label=name,
                marker="o",
                capsize=3,
            )
        axis.set_xticks(range(len(ETAS)), [str(eta) for eta in ETAS])
        axis.set_xlabel(f"eta ({schedule} staleness, versions)")
        axis.set_title({"final": "final accuracy", "area": "area under the curve"}[measure])
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
