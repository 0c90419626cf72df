"""Simulate a run in virtual time: leases, decoding, train steps, broadcasts and the staleness of every token.

In: the speeds of the parts (`Speeds`), the lengths of the completions, and the numbers of a config (`Setup`). Out: a
`Step` for each train step. Pure: no process, no device and no random number.

    admit (num_admissible) ─► lease to the worker with the most room ─► decode in slots ─► complete group
        ─► batch (must_wait) ─► train ─► new version ─► broadcast ─► admit

An engine decodes all running completions together. A decode step of n completions takes `fixed_s + n * each_s`, the
time between two tokens of each of them. So only starts, ends and weights change the speed, and are events; the tokens
between two events need no work. Evaluation has separate slots, as in the embedded engine.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from areal_rloo.algorithm.staleness import deadline, must_wait, num_admissible, within_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Seconds of the parts of a run."""

    decode_fixed_s: float  # of a decode step, whatever the batch
    decode_each_s: float  # of a decode step, for each completion in the batch
    prefill_s: float = 0.0  # an engine stands still for the prompt of a group
    train_fixed_s: float  # of a train step, whatever the batch and the ranks: publishing, records
    train_token_s: float  # of a rank; the ranks share the tokens of the batch
    exchange_token_s: float = 0.0  # of each token of the batch, if there are several ranks
    broadcast_s: float = 0.0  # from the end of a train step to the new weights in the engines

    def train_s(self, num_tokens: float, num_ranks: int) -> float:
        """Return the seconds in which the ranks train on these tokens together."""
        return num_tokens * (self.train_token_s / num_ranks + self.exchange_token_s * (num_ranks > 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The numbers of a config that decide the schedule; `kept_share` of the complete groups are trained on."""

    num_workers: int
    num_slots: int
    num_ranks: int
    groups_per_step: int
    max_staleness: int
    pipeline_depth: int
    num_train_steps: int
    lease_ahead: int | None = None  # samples of a worker beyond the slots; None: the worker's share of a batch
    stale_tokens: Literal["mask", "drop", "wait"] = "mask"
    kept_share: float = 1.0
    num_eval: int = 0  # samples of an evaluation
    eval_every: int = 0  # versions; 0: never
    publish_every: int = 1  # steps


class Step(NamedTuple):
    """A simulated train step; seconds since the start, and sums over workers since the start."""

    ended_s: float
    wait_s: float  # for the batch
    trained_tokens: float
    masked_tokens: float
    staleness_sum: float  # over trained tokens
    first_staleness: float  # of the first token of a sample, mean of the samples
    rollout_idle_s: float


_Runs = list[tuple[int, float]]  # the tokens of a sample by version, oldest first


@dataclass(slots=True)
class _Group:
    group_id: int
    admission_version: int
    deadline: int
    num_left: int  # samples not complete
    samples: list[_Runs] = field(default_factory=list)


class _Sample(NamedTuple):
    group: _Group | None  # None: of an evaluation
    num_tokens: float
    begins_group: bool


class _Engine:
    """Decodes samples. Progress is a count of decode steps, the same for all running samples."""

    def __init__(self, speeds: Speeds, num_slots: int, index: int) -> None:
        self._speeds, self._num_slots, self.index = speeds, num_slots, index
        self.num_held = 0  # train samples leased and not ended
        self.waiting: deque[_Sample] = deque()
        self.waiting_eval: deque[_Sample] = deque()
        self.idle_s = 0.0
        self.changes = 0  # invalidates older events of this engine
        self._versions: list[tuple[float, int]] = [(0.0, 0)]  # decode steps done before each version
        self._running: list[tuple[float, int, float, _Sample]] = []  # end in decode steps, a number, begin, sample
        self._num = [0, 0]  # running of the policy's batch, and of the evaluation's
        self._done, self._since_s, self._numbers = 0.0, 0.0, count()

    @property
    def policy_version(self) -> int:
        return self._versions[-1][1]

    def advance(self, now_s: float, *, at_end: bool) -> list[tuple[_Sample, _Runs]]:
        """Decode until now, `at_end`: to the end of the next sample; return the samples that ended, with their tokens.

        Rounding may leave a part of a token at the end of a sample, and this part would never become shorter.
        """
        if not self._running:
            self.idle_s += max(0.0, now_s - self._since_s)
        elif now_s > self._since_s:
            self._done += (now_s - self._since_s) / self._step_s()
        self._since_s = max(now_s, self._since_s)
        if at_end:
            self._done = self._running[0][0]
        ended = []
        while self._running and self._running[0][0] <= self._done:
            end, _, begin, sample = heapq.heappop(self._running)
            self._num[sample.group is None] -= 1
            ended.append((sample, self._runs(begin, end)))
        return ended

    def start_waiting(self) -> None:
        """Fill free slots, first come first served; skip samples that need newer weights."""
        while self.waiting_eval and self._num[1] < self._num_slots:
            self._start(self.waiting_eval.popleft())
        while self.waiting and self._num[0] < self._num_slots:
            group = self.waiting[0].group
            assert group is not None, "train samples have a group"
            if group.admission_version > self.policy_version:
                break  # later samples need at least this version
            self._start(self.waiting.popleft())

    def take_weights(self, policy_version: int) -> None:
        self._versions.append((self._done, policy_version))

    def next_end_s(self) -> float | None:
        """Return when the next sample ends if nothing changes; None if nothing runs."""
        left = max(0.0, self._running[0][0] - self._done) if self._running else 0.0
        return self._since_s + left * self._step_s() if self._running else None

    def _start(self, sample: _Sample) -> None:
        if sample.begins_group:
            self._since_s += self._speeds.prefill_s
        self._num[sample.group is None] += 1
        heapq.heappush(self._running, (self._done + sample.num_tokens, next(self._numbers), self._done, sample))

    def _step_s(self) -> float:
        """Return the seconds of a decode step of each batch that is not empty."""
        speeds = self._speeds
        return sum(speeds.decode_fixed_s + num * speeds.decode_each_s for num in self._num if num)

    def _runs(self, begin: float, end: float) -> _Runs:
        """Return the tokens between two counts of decode steps."""
        runs: _Runs = []
        for since, version in reversed(self._versions):
            if end > since:
                runs.append((version, end - max(begin, since)))
                end = max(begin, since)
            if since <= begin:
                break
        return runs[::-1]


class _Simulation:
    def __init__(self, speeds: Speeds, setup: Setup, lengths: npt.NDArray[np.float64]) -> None:
        self._speeds, self._setup = speeds, setup
        self._lengths: Iterator[list[float]] = cycle(lengths.tolist())
        self._eval_lengths = cycle(lengths.T.ravel().tolist())  # of different groups
        share = -(-setup.groups_per_step * lengths.shape[1] // setup.num_workers)
        self._capacity = setup.num_slots + (share if setup.lease_ahead is None else setup.lease_ahead)
        self._engines = [_Engine(speeds, setup.num_slots, index) for index in range(setup.num_workers)]
        self._by_load = [(0, index) for index in range(setup.num_workers)]  # a heap: samples held, engine
        self._live: dict[int, _Group] = {}
        self._ready: list[tuple[int, int]] = []  # deadline, group id
        self._batch: list[_Group] = []  # in training; empty: the learner waits
        self._since_s = 0.0  # the learner waits or trains
        self._kept = 0.0  # the share of a group, summed over complete groups
        self._version, self._published, self._num_admitted, self._now_s = 0, 0, 0, 0.0
        self._num_eval, self._eval_due = 0, False  # samples of the evaluation under way; another is due after it
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._steps: list[Step] = []

    def run(self, num_steps: int) -> list[Step]:
        """Run for this many train steps."""
        self._lease()
        while len(self._steps) < num_steps:
            self._now_s, _, event = heapq.heappop(self._events)
            event()
        return self._steps

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _evaluate(self) -> None:
        """Start an evaluation at the next event of each engine; a single one runs at a time."""
        self._eval_due = self._num_eval > 0
        if self._eval_due:
            return
        self._num_eval = self._setup.num_eval
        for number in range(self._num_eval):
            engine = self._engines[number % len(self._engines)]
            engine.waiting_eval.append(_Sample(None, next(self._eval_lengths), begins_group=True))

    def _lease(self) -> None:
        """Admit groups while the bound and the room of the workers allow, and let their engines start samples."""
        setup, given = self._setup, dict[_Engine, None]()  # a set has no fixed order
        while (engine := self._least_loaded()).num_held < self._capacity and num_admissible(
            policy_version=self._version,
            published_version=self._published,
            max_staleness=setup.max_staleness,
            pipeline_depth=setup.pipeline_depth,
            groups_per_step=setup.groups_per_step,
            num_train_steps=setup.num_train_steps,
            num_live=len(self._live),
        ):
            lengths = next(self._lengths)
            due = deadline(admission_version=self._published, max_staleness=setup.max_staleness)
            group = _Group(self._num_admitted, self._published, due, len(lengths))
            self._live[group.group_id] = group
            self._num_admitted += 1
            self._hold(engine, len(lengths))
            given[engine] = None
            engine.waiting.extend(_Sample(group, tokens, index == 0) for index, tokens in enumerate(lengths))
        for engine in given:
            self._tend(engine)

    def _least_loaded(self) -> _Engine:
        """Return the first engine with the fewest samples."""
        while (top := self._by_load[0])[0] != self._engines[top[1]].num_held:
            heapq.heappop(self._by_load)  # written before a change
        return self._engines[top[1]]

    def _hold(self, engine: _Engine, num: int) -> None:
        engine.num_held += num
        heapq.heappush(self._by_load, (engine.num_held, engine.index))

    def _tend(self, engine: _Engine, *, at_end: bool = False) -> None:
        """Bring an engine up to this moment, and plan the end of the next sample."""
        has_room = False
        for sample, runs in engine.advance(self._now_s, at_end=at_end):
            if sample.group is None:
                self._num_eval -= 1
                continue
            self._hold(engine, -1)
            has_room = True
            self._complete(sample.group, runs)
        if self._eval_due and not self._num_eval:
            self._evaluate()
        engine.start_waiting()
        engine.changes += 1
        if (end_s := engine.next_end_s()) is not None:
            changes = engine.changes

            def look() -> None:
                if engine.changes == changes:
                    self._tend(engine, at_end=True)

            self._at(end_s, look)
        if has_room:
            self._take()
            self._lease()

    def _complete(self, group: _Group, runs: _Runs) -> None:
        group.samples.append(runs)
        group.num_left -= 1
        if group.num_left:
            return
        self._kept += self._setup.kept_share
        if self._kept >= 1 - 1e-9:
            self._kept -= 1
            heapq.heappush(self._ready, (group.deadline, group.group_id))
        else:  # the filter of groups drops this one
            del self._live[group.group_id]

    def _take(self) -> None:
        """Take a batch and begin to train if the learner waits, and a batch is ready and may be taken."""
        setup, size = self._setup, self._setup.groups_per_step
        if self._batch or self._version == setup.num_train_steps:
            return
        while self._ready and self._ready[0][0] < self._version:  # past the deadline: perhaps nothing fresh is left
            if any(self._fresh(runs)[0] for runs in self._live[self._ready[0][1]].samples):
                break
            del self._live[heapq.heappop(self._ready)[1]]
        if len(self._ready) < size:
            return
        first = heapq.nsmallest(size, self._ready)
        if setup.stale_tokens == "wait":
            taken = {group_id for _, group_id in first}
            left = Counter(group.deadline for group in self._live.values() if group.group_id not in taken)
            if must_wait(policy_version=self._version, groups_per_step=size, num_left=left):
                return
        self._batch = [self._live[heapq.heappop(self._ready)[1]] for _ in first]
        wait_s, self._since_s = self._now_s - self._since_s, self._now_s
        samples = [runs for group in self._batch for runs in group.samples]
        trained, masked, staleness = map(sum, zip(*map(self._fresh, samples), strict=True))
        computed = trained if setup.stale_tokens == "drop" else trained + masked  # a mask spares the loss, not the pass
        train_s = self._speeds.train_fixed_s + self._speeds.train_s(computed, setup.num_ranks)
        first_staleness = sum(self._version - runs[0][0] for runs in samples) / len(samples)
        self._step = Step(self._now_s + train_s, wait_s, trained, masked, staleness, first_staleness, 0.0)
        self._at(self._step.ended_s, self._commit)

    def _fresh(self, runs: _Runs) -> tuple[float, float, float]:
        """Count the tokens of a sample to train on, and past the bound; sum the staleness of the first."""
        versions = np.array([version for version, _ in runs], np.int32)
        within = within_bound(versions, policy_version=self._version, max_staleness=self._setup.max_staleness)
        if self._setup.stale_tokens == "drop" and not within.all():  # the whole sample
            return 0.0, sum(tokens for _, tokens in runs), 0.0
        fresh = [run for run, is_fresh in zip(runs, within, strict=True) if is_fresh]
        trained = sum(tokens for _, tokens in fresh)
        staleness = sum((self._version - version) * tokens for version, tokens in fresh)
        return trained, sum(tokens for _, tokens in runs) - trained, staleness

    def _commit(self) -> None:
        """End the train step: publish, evaluate if due, admit and take."""
        for engine in self._engines:  # idle up to this moment
            self._tend(engine)
        self._steps.append(self._step._replace(rollout_idle_s=sum(engine.idle_s for engine in self._engines)))
        for group in self._batch:
            del self._live[group.group_id]
        self._batch, self._since_s = [], self._now_s
        self._version = version = self._version + 1
        evaluates = self._setup.eval_every and version % self._setup.eval_every == 0
        if evaluates or version % self._setup.publish_every == 0:
            self._published = version
            self._at(self._now_s + self._speeds.broadcast_s, lambda: self._publish(version))
        if evaluates:
            self._evaluate()
        self._take()
        self._lease()

    def _publish(self, version: int) -> None:
        for engine in self._engines:
            self._tend(engine)
            engine.take_weights(version)
            self._tend(engine)


def simulate(
    speeds: Speeds, setup: Setup, lengths: npt.NDArray[np.float64], *, num_steps: int | None = None
) -> list[Step]:
    """Simulate the first train steps of a run, by default all.

    `lengths`: tokens of completions, [num_groups, group_size], used in order, again and again.
    """
    return _Simulation(speeds, setup, lengths).run(setup.num_train_steps if num_steps is None else num_steps)
