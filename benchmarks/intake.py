"""Does the learner's bookkeeping for a sample cost more with more samples in flight, or with more workers?

Each case fills the pipeline up to the staleness bound, as a fleet with much room does. Then workers finish samples, one
message each, and after every message the training thread looks for a batch, as in a run. The time is that of
`Intake.handle`, `take_batch`, `grants` and `commit`, for each sample, on one core and without sockets. The named
alternative is the first case: a flat cost has a ratio of 1.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Generator, Iterator
from functools import partial

import numpy as np

from areal_rloo.config import load_config
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Outgoing
from areal_rloo.intake.intake import Intake
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.lies import Lies
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Trajectory
from areal_rloo.weights.offers import Offers
from areal_rloo.wire.messages import Duty, Finished, Hello, Leases, Results, Work
from benchmarks.harness import Benchmark, Case

# groups a step, group size, eta, workers
SIZES = ((48, 8, 1, 1), (256, 8, 2, 32), (512, 16, 4, 64), (1024, 16, 8, 512), (1024, 16, 8, 1024), (8192, 16, 8, 1024))
_LEARNER = "learner"


def cases(quick: bool) -> Generator[Case]:
    loads = [Load(*size) for size in (SIZES[:2] if quick else SIZES)]
    gc.collect()
    gc.freeze()  # the learner's thread for collections is no part of the question
    contestants = {load.name: partial(load.microseconds, 500 if quick else load.whole_steps(10_000)) for load in loads}
    first, *others = contestants
    yield Case("cost_of_a_sample", "us", contestants, [(name, first) for name in others], 2 if quick else 7)


class Load:
    """An intake whose pipeline is full, and workers that finish one sample after another."""

    def __init__(self, groups_per_step: int, group_size: int, max_staleness: int, num_workers: int) -> None:
        self._case = (groups_per_step, group_size, max_staleness, num_workers)
        config = load_config(
            "quickstart.yaml",
            [
                f"algorithm.group_size={group_size}",
                f"algorithm.max_staleness={max_staleness}",
                f"algorithm.pipeline_depth={max(1, max_staleness)}",
                f"learner.groups_per_step={groups_per_step}",
                "learner.num_minibatches=1",
                "learner.num_train_steps=1000000",
            ],
        )
        source = Source("all", [Item("1+1=?", "2")] * 1000)
        self._intake = Intake(
            config,
            ledger=Ledger(),
            stream=PromptStream([source], lambda *_: (1, 2), seed=0, num_epochs=None),
            evaluation=Evaluation([], lambda _: None),
            offers=Offers(together=False, timeout_s=300.0, call_timeout_s=2.0),
            policy_version=0,
            history=((_LEARNER, 0),),
            lies=Lies(config, vocab_size=100),
        )
        self._intake.fleet._most_samples = self.num_in_flight  # room is not what limits this fleet
        self._version, self._random = 0, random.Random(0)
        self._held: deque[tuple[str, Duty, int]] = deque()
        for index in range(num_workers):
            hello = Hello(f"w{index}", "1", self.num_in_flight, 0, _LEARNER, 1, 0, (), Work())
            self._note(self._intake.handle(f"w{index}", hello, 0.0))

    @property
    def num_in_flight(self) -> int:
        groups_per_step, group_size, max_staleness, _ = self._case
        return groups_per_step * group_size * (max_staleness + 1)

    def whole_steps(self, least: int) -> int:
        """Return the samples of the fewest steps with at least so many: the end of a step costs more than a sample."""
        samples = self._case[0] * self._case[1]
        return -(-least // samples) * samples

    @property
    def name(self) -> str:
        num_workers = self._case[3]
        return f"{self.num_in_flight:,} in flight, {num_workers} worker{'s' if num_workers > 1 else ''}"

    def microseconds(self, num_samples: int) -> float:
        """Finish samples; return the time of the intake for each."""
        busy_s = 0.0
        for peer, message in self._results(num_samples):
            began_s = time.thread_time()
            outgoing = self._intake.handle(peer, message, 0.0)
            if self._intake.take_batch() is not None:
                self._version += 1
                outgoing += self._intake.commit(self._version, evaluate=False)
            else:
                outgoing += self._intake.grants()
            busy_s += time.thread_time() - began_s
            self._note(outgoing)
        return 1e6 * busy_s / num_samples

    def _results(self, number: int) -> Iterator[tuple[str, Results]]:
        together: list[tuple[str, Duty, int]] = []
        for _ in range(number):
            if not together:  # the samples of a step finish in any order
                together = [self._held.popleft() for _ in range(self._case[0] * self._case[1])]
                self._random.shuffle(together)
            peer, duty, version = together.pop()
            made = Trajectory(*duty.sample_id, np.array([1, 2], np.int32), _completion(version), 1.0)
            yield peer, Results(_LEARNER, 7, (Finished(duty.lease_id, (made,)),))
        self._held.extendleft(together)

    def _note(self, outgoing: list[Outgoing]) -> None:
        for peer, message in outgoing:
            if isinstance(message, Leases):
                self._held.extend((peer, duty, lease.min_version) for lease in message.leases for duty in lease.duties)


def _completion(version: int) -> Completion:
    tokens = np.full(8, 3, np.int32)
    return Completion(tokens, np.full(8, -1.0, np.float32), np.full(8, version, np.int32), "stop")


BENCHMARK = Benchmark("intake", __doc__, cases)
