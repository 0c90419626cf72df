"""The staleness bound under random schedules: the real admission, leasing, ledger and buffer, and pretended workers.

A schedule is a list of small numbers that decides what happens next: a sample finishes, a worker dies or takes the
newest weights, a reward fails, the learner trains, or resumes with other options. Every token is tagged as an engine
would tag it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from support.slow_intake import differences, missed_leases

from areal_rloo.algorithm.staleness import within_bound
from areal_rloo.config import (
    AlgorithmConfig,
    Config,
    LearnerConfig,
    RolloutConfig,
    SamplingConfig,
    WeightsConfig,
    WireConfig,
)
from areal_rloo.intake.buffer import Buffer
from areal_rloo.intake.evaluation import Evaluation
from areal_rloo.intake.fleet import Fleet
from areal_rloo.intake.leasing import Leasing
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import PromptStream
from areal_rloo.intake.refit import refit
from areal_rloo.intake.saved_ledger import LedgerState, by_sample, ledger_of, ledger_state
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Group, SampleId, Trajectory
from areal_rloo.wire.messages import Duty, Hello, Work

NUM_STEPS, NUM_WORKERS = 6, 2
_SOURCE = Source("all", [Item(str(index)) for index in range(200)])


def make_config(
    *,
    max_staleness: int,
    stale_tokens: Any,
    pipeline_depth: int = 3,
    group_size: int = 3,
    groups_per_step: int = 2,
    num_train_steps: int = NUM_STEPS,
    max_new_tokens: int = 40,
    microbatch_tokens: int = 40,
    publish_every: int = 1,
) -> Config:
    algorithm = AlgorithmConfig(
        group_size=group_size,
        max_staleness=max_staleness,
        pipeline_depth=pipeline_depth,
        stale_tokens=stale_tokens,
    )
    learner = LearnerConfig(
        groups_per_step=groups_per_step, num_train_steps=num_train_steps, microbatch_tokens=microbatch_tokens
    )
    rollout = RolloutConfig(sampling=SamplingConfig(max_new_tokens=max_new_tokens))
    weights, wire = WeightsConfig(publish_every_n_steps=publish_every), WireConfig(max_attempts=3)
    return Config(algorithm=algorithm, learner=learner, rollout=rollout, weights=weights, wire=wire)


class Simulation:
    """The learner's bookkeeping without sockets, and workers as a dict of their samples."""

    def __init__(self, config: Config) -> None:
        self.version = 0
        self.incarnation = 0
        self.trained: Counter[SampleId] = Counter()
        self.trained_prompts: Counter[int] = Counter()
        self._start(config, Ledger(), self._stream())

    def _stream(self) -> PromptStream:
        return PromptStream([_SOURCE], lambda item, _: (int(item.text) + 1,), seed=0, num_epochs=1)

    def _start(self, config: Config, ledger: Ledger, stream: PromptStream) -> None:
        """Start the learner, and workers with nothing in hand."""
        self.config, self.ledger, self.stream, self.published = config, ledger, stream, self.version
        self.workers = Fleet(most_samples=1000)
        self.buffer = Buffer(self.ledger, config=self.config, give_back=self.stream.give_back)
        self.leasing = Leasing(
            config=self.config,
            ledger=self.ledger,
            fleet=self.workers,
            buffer=self.buffer,
            stream=self.stream,
            evaluation=Evaluation([], lambda record: None),
        )
        self.engine_version: dict[str, int] = {}
        self.min_version: dict[Duty, int] = {}
        self.held: dict[str, dict[Duty, list[int]]] = {}
        for index in range(NUM_WORKERS):
            self.join(f"w{index}")

    def resume(self, config: Config) -> None:
        """Stop everything, and start from a checkpoint of this moment with another config."""
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger_state(self.ledger)), type=LedgerState)
        live, stream = self.ledger.groups, self._stream()
        stream.restore(self.stream.state())
        trajectories = by_sample(t for g in live.values() for s in g.samples.values() for t in s.trajectories)
        prompts = {name: group.prompt for name, group in live.items()}
        before, ledger = self.config, ledger_of(state, prompts, trajectories)
        refit(ledger, before=before, now=config, policy_version=self.version, give_back=stream.give_back)
        self._start(config, ledger, stream)

    def join(self, worker_id: str) -> None:
        """A (new incarnation of a) worker says Hello with the initial weights and nothing in hand."""
        self.incarnation += 1
        before = self.workers.alive.get(worker_id)
        if before is not None:
            self.workers.remove(before)
            self.leasing.lose(before.duties, is_attempt=True)
        incarnation = str(self.incarnation)
        hello = Hello(worker_id, incarnation, 8, 0, None, 1, 0, (), Work())
        self.workers.welcome(hello, incarnation, now_s=0.0, policy_version=self.published)
        self.engine_version[worker_id] = 0
        self.held[worker_id] = {}
        self.grant()

    def grant(self) -> None:
        admitted, algorithm = self.ledger.counts().admitted, self.config.algorithm
        for worker, leases in self.leasing.grants(self.version, self.published):
            for lease in leases:
                for duty in lease.duties:
                    self.held[worker.worker_id][duty] = []
                    self.min_version[duty] = lease.min_version
        assert missed_leases(self.leasing, self.version, self.published) == []
        if self.ledger.counts().admitted > admitted:  # those of before a resume may be more
            ahead = min(self.published + algorithm.max_staleness - self.version, algorithm.pipeline_depth)
            assert len(self.ledger.groups) <= (ahead + 1) * self.config.learner.groups_per_step

    def decode(self, worker_id: str) -> None:
        """A token for every sample this worker may work on."""
        version = self.engine_version[worker_id]
        for duty, versions in self.held[worker_id].items():
            if version >= self.min_version[duty]:
                versions.append(version)

    def finish(self, worker_id: str, pick: int) -> None:
        started = [duty for duty, versions in self.held[worker_id].items() if versions]
        if not started:
            return
        duty = started[pick % len(started)]
        most = self.config.rollout.sampling.max_new_tokens
        versions = np.array(self.held[worker_id].pop(duty), dtype=np.int32)[:most]
        versions = np.pad(versions, (0, max(0, pick * most // 11 - len(versions))), mode="edge")
        tokens = np.zeros(len(versions), dtype=np.int32)
        completion = Completion(tokens, np.zeros(len(versions), dtype=np.float32), versions, "stop")
        self.workers.release(self.workers.alive[worker_id], duty)
        sample = self.ledger.sample(duty.sample_id)
        assert sample is not None and sample.grant(duty.lease_id) is not None
        made = Trajectory(*duty.sample_id, np.ones(1, dtype=np.int32), completion, float(pick % 2))
        self.buffer.settle(self.ledger.finish(duty.sample_id, [made]))
        self.grant()

    def fail(self, worker_id: str, pick: int) -> None:
        if self.held[worker_id]:
            duty = list(self.held[worker_id])[pick % len(self.held[worker_id])]
            del self.held[worker_id][duty]
            self.workers.release(self.workers.alive[worker_id], duty)
            self.leasing.drop(duty.sample_id, "reward_error")
            self.grant()

    def train(self) -> None:
        if self.version == self.config.learner.num_train_steps:
            return
        foreseen, is_late = self.buffer.upcoming(self.version), self.has_late_groups
        batch = self.buffer.take(self.version, is_last=lambda: self.stream.exhausted)
        self.grant()
        if batch is None:
            return
        if foreseen is None:
            assert is_late, "only a group past its deadline hides a batch"
        else:
            self.check_foreseen(foreseen, batch)
        self.check_batch(batch)
        self.buffer.trained()
        self.version += 1
        if self.version % self.config.weights.publish_every_n_steps == 0:
            self.published = self.version
        self.grant()

    @property
    def has_late_groups(self) -> bool:
        return any(group.complete and group.deadline < self.version for group in self.ledger.groups.values())

    def check_foreseen(self, foreseen: Sequence[Group], batch: Sequence[Group]) -> None:
        assert [group.group_id for group in foreseen] == [group.group_id for group in batch]
        for ahead, taken in zip(foreseen, batch, strict=True):
            assert all(one is other for one, other in zip(ahead.trajectories, taken.trajectories, strict=True))

    def check_batch(self, batch: Sequence[Group]) -> None:
        eta, policy = self.config.algorithm.max_staleness, self.config.algorithm.stale_tokens
        assert len(batch) == self.config.learner.groups_per_step
        num_fresh = 0
        for group in batch:
            assert len(group.trajectories) >= 2
            self.trained_prompts[self.ledger.groups[group.group_id].prompt.item_index] += 1
            for trajectory in group.trajectories:
                self.trained[trajectory.sample_id] += 1
                versions = trajectory.completion.versions
                fresh = within_bound(versions, policy_version=self.version, max_staleness=eta)
                assert (self.version - versions[fresh] <= eta).all()
                num_fresh += int(fresh.sum())
                assert trajectory.num_tokens - 1 <= self.config.learner.microbatch_tokens
                if policy != "mask" or eta == 0:
                    assert fresh.all(), f"version {self.version} trains on {versions} under {policy}, eta {eta}"
        assert num_fresh > 0, f"the step at version {self.version} trains on nothing"

    def check_ledger(self) -> None:
        counts = self.ledger.counts()
        assert counts.balanced
        assert differences(self.ledger, self.buffer, self.leasing) == []
        assert counts.trained == sum(self.trained.values())
        assert set(self.trained.values()) <= {1}
        assert set(self.trained_prompts.values()) <= {1}
        learner, eta = self.config.learner, self.config.algorithm.max_staleness
        num_steps = min(eta + 1, learner.num_train_steps - self.version)
        assert len(self.ledger.groups) <= num_steps * learner.groups_per_step

    def act(self, what: int, who: int, pick: int) -> None:
        worker_id = f"w{who % NUM_WORKERS}"
        match what:
            case 0 | 1 | 2:
                self.finish(worker_id, pick)
            case 3 | 4:
                self.decode(worker_id)
            case 5 | 6:
                self.train()
            case 7:
                self.engine_version[worker_id] = self.published
            case 8 if pick % 4 == 0:
                self.join(worker_id)
            case 9 if pick % 4 == 0:
                self.fail(worker_id, pick)
        self.check_ledger()

    def run_out(self) -> None:
        """Let everything go well until the run is over."""
        for _ in range(4000):
            if self.version == self.config.learner.num_train_steps:
                return
            for worker_id in self.held:
                self.engine_version[worker_id] = self.published
                self.decode(worker_id)
                self.finish(worker_id, 0)
            self.train()
            self.check_ledger()
        raise AssertionError(f"no progress beyond version {self.version}")
