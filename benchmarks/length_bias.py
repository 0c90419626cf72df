"""Measure how late tokens change the lengths that are trained on: the learner's intake, in simulated time.

    python -m benchmarks.length_bias [--output FILE.json]

A worker generates a token of each running completion every 10 ms. Lengths are log-normal (mean 89 tokens, at most
1,024). The learner trains 16 groups of 4 in half a second. The intake is the real one: it admits groups, leases
samples, and fills batches. New weights reach running completions at once.

By `algorithm.stale_tokens`, eta and number of slots: the mean length of completions drawn and trained on, the share of
tokens past the bound (in the longest quarter of the completions, and in the others), mean staleness, and steps/s.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import hardware

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.intakes import LEARNER, duties_of, make_intake, make_offers

from areal_rloo.algorithm.staleness import within_bound
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.trajectory import Completion, SampleId, Trajectory
from areal_rloo.wire.messages import Duty, Finished, Hello, Results, Work

TOKEN_S, TRAIN_S = 0.01, 0.5
GROUPS, SAMPLES = 16, 4
NUM_STEPS = 300
MEAN_TOKENS, MOST_TOKENS = 89, 1024
WORKER = "rollout-0"


@dataclass
class Simulation:
    """A learner and a worker in simulated time."""

    stale_tokens: str
    eta: int
    slots: int
    now_s: float = 0.0
    updates_s: list[float] = field(default_factory=list)  # when version 1, 2, ... reached the worker
    running: list[tuple[float, Duty, float]] = field(default_factory=list)  # end, duty, begin; the earliest first
    waiting: list[Duty] = field(default_factory=list)
    drawn: dict[SampleId, int] = field(default_factory=dict)  # lengths
    trained: list[tuple[int, int, int]] = field(default_factory=list)  # length, tokens past the bound, sum of staleness

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._intake = make_intake(
            make_offers(),
            f"algorithm.group_size={SAMPLES}",
            f"learner.groups_per_step={GROUPS}",
            f"algorithm.max_staleness={self.eta}",
            f"algorithm.pipeline_depth={max(1, self.eta)}",
            f"algorithm.stale_tokens={self.stale_tokens}",
            f"learner.num_train_steps={NUM_STEPS}",
            f"rollout.sampling.max_new_tokens={MOST_TOKENS}",
            "learner.num_minibatches=1",
        )
        hello = Hello(WORKER, "1", self.slots, 0, None, 1, 0, (), Work())
        self._take(self._intake.handle(WORKER, hello, 0.0))

    def run(self) -> dict[str, Any]:
        ends_s, number = None, 0  # of the running train step
        while len(self.updates_s) < NUM_STEPS:
            if ends_s is None and (batch := self._intake.take_batch()) is not None:
                self._record([t for group in batch for t in group.trajectories])
                ends_s = self.now_s + TRAIN_S
            self._take(self._intake.grants())  # in place of groups that were dropped
            if ends_s is not None and (not self.running or ends_s <= self.running[0][0]):
                self.now_s = ends_s
                self.updates_s.append(self.now_s)
                ends_s = None
                self._take(self._intake.commit(len(self.updates_s), evaluate=False))
                continue
            assert self.running, "the learner waits for nothing"
            self.now_s, duty, begin_s = heapq.heappop(self.running)
            number += 1
            finished = Finished(duty.lease_id, (self._trajectory(duty, begin_s),))
            self._take(self._intake.handle(WORKER, Results(LEARNER, number, (finished,)), self.now_s))
        return self._summary()

    def _take(self, messages: list[Outgoing]) -> None:
        self.waiting += duties_of(messages, WORKER)
        while self.waiting and len(self.running) < self.slots:
            duty = self.waiting.pop(0)
            length = self.drawn.setdefault(duty.sample_id, self._length())
            heapq.heappush(self.running, (self.now_s + length * TOKEN_S, duty, self.now_s))

    def _length(self) -> int:
        sigma = 0.9
        length = self._random.lognormal(np.log(MEAN_TOKENS) - sigma**2 / 2, sigma)
        return int(np.clip(length, 1, MOST_TOKENS))

    def _trajectory(self, duty: Duty, begin_s: float) -> Trajectory:
        num = self.drawn[duty.sample_id]
        versions = np.searchsorted(self.updates_s, begin_s + TOKEN_S * np.arange(num), side="right").astype(np.int32)
        completion = Completion(np.full(num, 3, np.int32), np.full(num, -1.0, np.float32), versions, "stop")
        return Trajectory(*duty.sample_id, np.array([1, 2], np.int32), completion, 1.0)

    def _record(self, trajectories: list[Trajectory]) -> None:
        version = len(self.updates_s)
        for trajectory in trajectories:
            versions = trajectory.completion.versions
            fresh = within_bound(versions, policy_version=version, max_staleness=self.eta)
            self.trained.append((len(versions), int((~fresh).sum()), int((version - versions)[fresh].sum())))

    def _summary(self) -> dict[str, Any]:
        lengths, late, staleness = np.array(self.trained).T
        longest = lengths >= np.quantile(lengths, 0.75)
        return {
            "drawn_mean": round(float(np.mean(list(self.drawn.values()))), 1),
            "trained_mean": round(float(np.mean(lengths)), 1),
            "late_share_longest": round(float(late[longest].sum() / lengths[longest].sum()), 3),
            "late_share_others": round(float(late[~longest].sum() / lengths[~longest].sum()), 3),
            "staleness_mean": round(float(staleness.sum() / max(1, (lengths - late).sum())), 2),
            "steps_per_s": round(NUM_STEPS / self.now_s, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    arguments = parser.parse_args()
    table = []
    for eta in (1, 2, 4, 8):
        for slots in (GROUPS * SAMPLES, 8 * GROUPS * SAMPLES):
            for stale_tokens in ("mask", "drop", "wait"):
                case = {"stale_tokens": stale_tokens, "eta": eta, "slots": slots}
                table.append(case | Simulation(stale_tokens, eta, slots).run())
                print(*(f"{key}={value}" for key, value in table[-1].items()))
    hardware.write(arguments.output, {"token_s": TOKEN_S, "train_s": TRAIN_S, "num_steps": NUM_STEPS, "table": table})


if __name__ == "__main__":
    main()
