"""Does the learner's bookkeeping for a sample cost more with more samples in flight, or with more workers?

Each case fills the pipeline up to the staleness bound; all workers have the same room. Then workers finish samples, one
message each, and after every message the training thread looks for a batch, as in a run. Each worker sends a heartbeat
a second, and the timer for silent workers ticks, at 25,000 samples a second. The time is that of `Intake.handle`,
`tick`, `take_batch`, `grants` and `commit`, for each sample, on one core and without sockets. The named alternative is
the first case: a flat cost has a ratio of 1.
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
from areal_rloo.wire.messages import Duty, Finished, Heartbeat, Hello, Leases, Results, Work, digest
from benchmarks.harness import Benchmark, Case

# groups a step, group size, eta, workers
SIZES = ((48, 8, 1, 1), (256, 8, 2, 32), (512, 16, 4, 64), (1024, 16, 8, 512), (1024, 16, 8, 1024), (8192, 16, 8, 1024))
_LEARNER = "learner"
_SAMPLE_S = 40e-6  # between two samples: the aim
_HEARTBEAT_S, _TICK_S = 1.0, 0.25


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
        room = -(-self.num_in_flight // num_workers)
        self._intake.fleet._most_samples = room
        self._version, self._num_samples, self._random = 0, 0, random.Random(0)
        self._peers = [f"w{index}" for index in range(num_workers)]
        self._beats, self._ticks = Clock(_HEARTBEAT_S / num_workers), Clock(_TICK_S)
        self._held: deque[tuple[str, Duty, int]] = deque()
        for peer in self._peers:
            hello = Hello(peer, "1", room, 0, _LEARNER, 1, 0, (), Work())
            self._note(self._intake.handle(peer, hello, 0.0))
            while self._intake.owes_grants:
                self._note(self._intake.grants())

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
            now_s = self._num_samples * _SAMPLE_S
            beats = [self._heartbeat(number) for number in self._beats.due(now_s)]
            num_ticks = len(self._ticks.due(now_s))
            began_s = time.thread_time()
            outgoing = self._intake.handle(peer, message, now_s)
            for sender, heartbeat in beats:
                outgoing += self._intake.handle(sender, heartbeat, now_s)
            for _ in range(num_ticks):
                outgoing += self._intake.tick(now_s)
            if self._intake.take_batch() is not None:
                self._version += 1
                outgoing += self._intake.commit(self._version, evaluate=False)
            else:
                outgoing += self._intake.grants()
            busy_s += time.thread_time() - began_s
            self._num_samples += 1
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

    def _heartbeat(self, number: int) -> tuple[str, Heartbeat]:
        worker = self._intake.fleet.at(self._peers[number % len(self._peers)])
        assert worker is not None
        duties = digest(worker.duties)
        return worker.peer, Heartbeat(_LEARNER, 8, worker.newest_lease, duties, 0, self._version, False, Work(), 0)

    def _note(self, outgoing: list[Outgoing]) -> None:
        for peer, message in outgoing:
            if isinstance(message, Leases):
                self._held.extend((peer, duty, lease.min_version) for lease in message.leases for duty in lease.duties)


class Clock:
    """Events at equal distances in time."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._num = every_s, 0

    def due(self, now_s: float) -> range:
        """Return the numbers of the events since the last call."""
        before, self._num = self._num, int(now_s / self._every_s)
        return range(before, self._num)


def _completion(version: int) -> Completion:
    tokens = np.full(8, 3, np.int32)
    return Completion(tokens, np.full(8, -1.0, np.float32), np.full(8, version, np.int32), "stop")


BENCHMARK = Benchmark("intake", __doc__, cases)
