"""Find out why accuracy oscillates at a fixed staleness of 16, and what holds.

    python -m benchmarks.lag [--output FILE.json]

The setup of `staleness.py`, 3 seeds. `sequence` weights a completion by the product of all w, at most 5. Methods that
the package does not have are made here, for this comparison alone:

- `step by ESS`: each optimizer step is scaled by sqrt(ESS / B), with the effective sample size
  ESS = (sum W)^2 / sum W^2 of the B completions of the minibatch, and W the product of a completion's w (VCPO,
  arXiv:2602.17616, without its baseline);
- `second moment`: the tokens with the largest (log w)^2 are masked until the mean over the others is at most 0.04; w
  has no bound (the mask of M2PO, arXiv:2510.01161).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from areal_rloo.algorithm import loss
from areal_rloo.algorithm.behaviour_weight import BehaviourWeights
from areal_rloo.algorithm.kl import exp_limited
from areal_rloo.algorithm.loss import LossOutput
from areal_rloo.config import BehaviourWeightConfig
from areal_rloo.learner.packing import RowLoss
from areal_rloo.learner.rank import LearnerRank
from benchmarks import hardware
from benchmarks.learning import SEEDS, SETUP, Job, over_seeds, run_all

ETA = 16
MOST_SECOND_MOMENT = 0.04  # as in the paper
_SEQUENCE = "algorithm.loss.behaviour_weight={level: sequence, aggregate: sum}"
_ONE_ROW = "learner.microbatch_tokens=65536"  # so that a mask sees the whole minibatch


def effective_share(weights: Tensor) -> float:
    """Return ESS / B = (sum W)^2 / (B sum W^2) of weights [num_sequences]."""
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))


def scale_steps(rank: LearnerRank) -> None:
    """Scale the learning rate of each optimizer step by sqrt(ESS / B); the schedule sets the rate again afterwards."""
    plain: Callable[[RowLoss], LossOutput] = rank._loss
    weights: list[Tensor] = []

    def watched(row_loss: RowLoss) -> LossOutput:
        output = plain(row_loss)
        index = row_loss.row.sequence_index[row_loss.row.columns["weights"] != 0]
        tokens = output.tokens
        logs = tokens.proximal_logprobs - tokens.behaviour_logprobs
        sums = logs.new_zeros(int(row_loss.row.sequence_index.max()) + 1).scatter_add(0, index, logs)
        weights.append(exp_limited(sums)[index.unique()])
        return output

    def scale(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        factor = effective_share(torch.cat(weights)) ** 0.5
        weights.clear()
        for group in optimizer.param_groups:
            group["lr"] *= factor

    patched: Any = rank
    patched._loss = watched
    rank.optimizer.register_step_pre_hook(scale)


def mask_second_moment(rank: LearnerRank) -> None:
    """Replace the rule for w in this process, which trains alone."""
    patched: Any = loss
    patched.behaviour_weights = second_moment_weights


def second_moment_weights(
    log_weight: Tensor, in_loss: Tensor, sequence_index: Tensor, rule: BehaviourWeightConfig
) -> BehaviourWeights:
    """Mask the tokens with the largest (log w)^2 until the mean over the others is at most `MOST_SECOND_MOMENT`."""
    log_weight = log_weight.detach()
    ascending, order = torch.where(in_loss, log_weight.square(), torch.inf).sort()
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)
    kept = torch.zeros_like(in_loss).scatter(0, order, means <= MOST_SECOND_MOMENT)
    weight = torch.where(kept, exp_limited(log_weight), 0.0)
    return BehaviourWeights(weight, log_weight, torch.zeros_like(in_loss), in_loss & ~kept)


SETUPS: Mapping[str, tuple[str, ...]] = {
    "decoupled": (),
    "decoupled, half the rate": ("learner.optimizer.learning_rate=5e-5",),
    "decoupled, a quarter of the rate": ("learner.optimizer.learning_rate=2.5e-5",),
    "decoupled, clamp 1.5": ("algorithm.loss.behaviour_weight.upper=1.5",),
    "decoupled, step by ESS": (),
    "second moment": ("algorithm.loss.behaviour_weight.level=sequence", _ONE_ROW),
    "naive_ppo, half the rate": ("algorithm.loss.decoupled=false", "learner.optimizer.learning_rate=5e-5"),
    "sequence": (_SEQUENCE,),
    "sequence, step by ESS": (_SEQUENCE,),
    "sequence, masked above 5": (_SEQUENCE, "algorithm.loss.behaviour_weight.rule=mask"),
    "sequence, geometric mean": (_SEQUENCE, "algorithm.loss.behaviour_weight.aggregate=mean"),
}
CHANGES: Mapping[str, Callable[[LearnerRank], None]] = {
    "decoupled, step by ESS": scale_steps,
    "second moment": mask_second_moment,
    "sequence, step by ESS": scale_steps,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    arguments = parser.parse_args()
    jobs = [Job(name, setup, seed, ETA, change=CHANGES.get(name)) for name, setup in SETUPS.items() for seed in SEEDS]
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
