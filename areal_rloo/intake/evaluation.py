"""Evaluation on the held-out sets, beside training: leases outside the ledger, pinned to a version.

The intake sends the leases to rollout workers and records the trajectories; rollouts never pause for an evaluation. A
single evaluation runs at a time. A version that falls due meanwhile waits; a newer due version replaces a waiting one.

Metrics of a set with k samples a prompt, besides the mean reward:

    accuracy share of right samples, if all rewards are from 0 to 1
    pass@k   share of prompts with a right sample (arXiv:2107.03374; the estimator for n = k samples)
    maj@k    share of prompts whose most frequent final answer is right; ties count the share of right answers among the
             most frequent (arXiv:2203.11171); only for tasks with final answers

A sample is right if the reward is at least 1. A sample without a reward counts as 0.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from areal_rloo.errors import DataError
from areal_rloo.intake.ledger import Sample
from areal_rloo.intake.prompts import Prompt
from areal_rloo.telemetry.records import EvalRecord
from areal_rloo.trajectory import SampleId, Trajectory
from areal_rloo.wire.messages import MOST_DUTIES

_MOST_SAMPLES = MOST_DUTIES // 2  # a worker holds train samples, too
_RIGHT, _MOST_SHARE = 1.0 - 1e-9, 1.0 + 1e-9  # a weighted sum may miss 1 by rounding


@dataclass(frozen=True, slots=True)
class EvalSet:
    """The held-out prompts of a source, and the number of samples for each."""

    label: str
    prompts: Sequence[Prompt]
    num_samples: int = 1


@dataclass(slots=True)
class _Result:
    """The outcome of a sample."""

    reward: float
    answer: str | None = None
    num_tokens: int = 0
    versions: Sequence[int] = ()  # lowest and highest of each trajectory
    failed: bool = False


@dataclass(slots=True)
class _Progress:
    """A set in the running evaluation. Groups are numbered from `first_group` downwards, a group for each prompt."""

    chosen: EvalSet
    first_group: int
    missing: dict[SampleId, Sample]
    results: dict[SampleId, _Result] = field(default_factory=dict)

    def number(self, group_id: int) -> int:
        """Return the number of a group's prompt in the set."""
        return self.first_group - group_id


class Evaluation:
    """The held-out sets, and the running evaluation."""

    def __init__(self, sets: Sequence[EvalSet], on_record: Callable[[EvalRecord], None]) -> None:
        """Check the number of samples: a single worker may have to hold all of them.

        Raises:
            DataError: the sets have more samples than a worker can report to the learner.
        """
        num_samples = sum(len(chosen.prompts) * chosen.num_samples for chosen in sets)
        if num_samples > _MOST_SAMPLES:
            raise DataError(
                f"data.eval: expected at most {_MOST_SAMPLES} samples in all sets together, got {num_samples}; set a "
                "lower num_samples, or choose fewer items"
            )
        self._sets = [chosen for chosen in sets if chosen.prompts]
        self._on_record = on_record
        self._next_group = -1
        self._due: int | None = None
        self._version = 0
        self._started_s = 0.0
        self._under_way: list[_Progress] = []
        self._waiting: dict[SampleId, None] = {}  # for a lease; a sample can be lost twice before the next

    @property
    def finished(self) -> bool:
        """True if no evaluation is running or due."""
        return self._due is None and not self._under_way

    def request(self, policy_version: int) -> None:
        """Evaluate this version as soon as the running evaluation has ended."""
        if self._sets:
            self._due = policy_version
            self._start_if_free()

    @property
    def has_waiting(self) -> bool:
        """True if samples wait for a lease."""
        return bool(self._waiting)

    def take_waiting(self, most_samples: int | None = None) -> list[tuple[int, Prompt, tuple[int, ...]]]:
        """Return the prompts of all or so many samples to lease, each with its group id and the sample indices."""
        groups: dict[int, list[int]] = {}
        for sample_id in [*islice(self._waiting, most_samples)]:
            del self._waiting[sample_id]
            sample = self.sample(sample_id)
            if sample is not None and sample.worker_id is None:  # else a late result came, or the holder came back
                groups.setdefault(sample_id[0], []).append(sample_id[1])
        return [(group_id, self.prompt(group_id), tuple(sorted(indices))) for group_id, indices in groups.items()]

    def wait_again(self, sample_id: SampleId) -> None:
        """Queue a lost sample for another lease."""
        self._waiting[sample_id] = None

    @property
    def policy_version(self) -> int:
        """The version of the running evaluation."""
        return self._version

    def has_begun(self, group_id: int) -> bool:
        """Return True if an evaluation so far had this group."""
        return group_id > self._next_group

    def seed(self, group_id: int) -> int:
        """Return the seed of a prompt, the same at every evaluation: only the weights differ."""
        return self._progress_of(group_id).number(group_id) << 20

    def sample(self, sample_id: SampleId) -> Sample | None:
        """Return a sample; None if it has a result already, or is of an earlier evaluation."""
        return next((p.missing[sample_id] for p in self._under_way if sample_id in p.missing), None)

    def finish(self, trajectories: Sequence[Trajectory]) -> None:
        """Record all trajectories of a missing sample."""
        first, completions = trajectories[0], [trajectory.completion for trajectory in trajectories]
        num_tokens = sum(len(completion.tokens) for completion in completions)
        versions = [int(version) for c in completions for version in (c.versions.min(), c.versions.max())]
        self._settle(first.sample_id, _Result(first.reward, first.answer, num_tokens, versions))

    def fail(self, sample_id: SampleId, num_tokens: int) -> None:
        """Count a missing sample without a reward as wrong."""
        self._settle(sample_id, _Result(0.0, num_tokens=num_tokens, failed=True))

    def _progress_of(self, group_id: int) -> _Progress:
        return next(p for p in self._under_way if 0 <= p.number(group_id) < len(p.chosen.prompts))

    def prompt(self, group_id: int) -> Prompt:
        """Return the prompt of a group of the running evaluation."""
        progress = self._progress_of(group_id)
        return progress.chosen.prompts[progress.number(group_id)]

    def _settle(self, sample_id: SampleId, result: _Result) -> None:
        progress = self._progress_of(sample_id[0])
        del progress.missing[sample_id]
        progress.results[sample_id] = result
        if not progress.missing:
            self._on_record(self._record(progress))
            self._under_way.remove(progress)
            self._start_if_free()

    def _record(self, progress: _Progress) -> EvalRecord:
        results = list(progress.results.values())
        by_prompt: dict[int, list[_Result]] = {}
        for (group_id, _), result in progress.results.items():
            by_prompt.setdefault(group_id, []).append(result)
        versions = [version for result in results for version in result.versions]
        many = progress.chosen.num_samples > 1
        voted = many and any(result.answer is not None for result in results)
        accuracy, accuracy_error = _accuracy([*by_prompt.values()])
        return EvalRecord(
            name=progress.chosen.label,
            policy_version=min(versions, default=self._version),
            policy_version_max=max(versions, default=self._version),
            accuracy=accuracy,
            accuracy_error=accuracy_error,
            reward=_mean([result.reward for result in results]),
            reward_error=_error([_mean([result.reward for result in samples]) for samples in by_prompt.values()]),
            num_prompts=len(by_prompt),
            num_samples=progress.chosen.num_samples,
            num_failed=sum(result.failed for result in results),
            pass_share=_mean([any(map(_is_right, samples)) for samples in by_prompt.values()]) if many else math.nan,
            majority_share=_mean([_majority(samples) for samples in by_prompt.values()]) if voted else math.nan,
            completion_tokens_mean=_mean([result.num_tokens for result in results]),
            wall_s=time.monotonic() - self._started_s,
        )

    def _start_if_free(self) -> None:
        if self._under_way or self._due is None:
            return
        self._version, self._due = self._due, None
        self._started_s = time.monotonic()
        for chosen in self._sets:
            first, num = self._next_group, len(chosen.prompts)
            self._next_group -= num
            ids = [(first - number, index) for number in range(num) for index in range(chosen.num_samples)]
            self._under_way.append(_Progress(chosen, first, {sample_id: Sample() for sample_id in ids}))
            self._waiting |= dict.fromkeys(ids)


def _is_right(sample: _Result) -> bool:
    return sample.reward >= _RIGHT


def _accuracy(by_prompt: Sequence[Sequence[_Result]]) -> tuple[float, float]:
    """Return the share of right samples, and its standard error; NaN for rewards beyond right and wrong."""
    if not all(0 <= sample.reward <= _MOST_SHARE for samples in by_prompt for sample in samples):
        return math.nan, math.nan
    right = [[float(_is_right(sample)) for sample in samples] for samples in by_prompt]
    return _mean([*chain.from_iterable(right)]), _error([_mean(samples) for samples in right])


def _majority(samples: Sequence[_Result]) -> float:
    votes: Counter[str | None] = Counter(sample.answer for sample in samples if sample.answer is not None)
    most = max(votes.values(), default=0)
    return _mean([_is_right(sample) for sample in samples if votes[sample.answer] == most]) if most else 0.0


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN of a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
