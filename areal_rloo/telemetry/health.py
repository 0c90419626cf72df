"""Say when a run does not learn, from the records: the symptom, the step since which it lasts, and a remedy.

A symptom is a state of the newest records, and over when they no longer show it. The learner logs the symptoms and
serves them as a metric, the launcher prints them, and the report lists them; all of them ask `Health`. The limits are
wide: a healthy run shows no symptom.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from areal_rloo.config import Config
from areal_rloo.telemetry.metric import Metric
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord

_IN_A_ROW = 3  # steps: one alone can be chance
_RECENT = 5  # steps of a mean
_WINDOW = 20  # steps kept
_TRUNCATED = 0.9  # share of trajectories
_MASKED = 0.5  # share of tokens
_CLIPPED = 10.0  # gradient norm over the limit
_MISMATCH = 0.05  # nats a token
_COLLAPSED = 0.1  # entropy over that of the first steps
_LONGER = 2.0  # completions within a window
_TRUNCATED_TOO = 0.2  # share of trajectories, for longer completions
_FALL = 0.5  # of the mean reward, in standard deviations of the rewards of a step
_LEAST_FALL = 1e-6  # for rewards without a spread
_ERRORS = 3.0  # standard errors between an accuracy and the best
_BEHIND = 2  # versions beyond the bound: a worker takes each version a moment after its step


class Symptom(NamedTuple):
    """A finding in the newest records, and a remedy. The metric and the alarm know the symptom by name."""

    name: str
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.finding}; {self.remedy}"


class HealthStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The symptoms of the newest records."""

    metrics_prefix: ClassVar[str] = ""

    symptom: Annotated[dict[str, int], Metric("1 while the records show a symptom", label="symptom", healthy=(0, 0))]


@dataclass(slots=True)
class _Accuracies:
    """The evaluations on a set."""

    best: EvalRecord
    before: EvalRecord
    last: EvalRecord


class Health:
    """Looks at the records of a run in their order; a record of an earlier version takes later records back."""

    def __init__(self, config: Config) -> None:
        self._max_norm, self._max_staleness = config.learner.optimizer.max_grad_norm, config.algorithm.max_staleness
        self._first: list[TrainRecord] = []  # steps of the run
        self._steps: deque[TrainRecord] = deque(maxlen=_WINDOW)
        self._best_reward: tuple[float, float, int] | None = None  # mean, standard deviation, last step
        self._accuracies: dict[str, _Accuracies] = {}
        self._present: dict[str, Symptom] = {}
        self._since: dict[str, int] = {}  # version at which a symptom began
        self._said: dict[str, int] = {}  # steps that a symptom had lasted

    @property
    def present(self) -> Sequence[Symptom]:
        """The symptoms of the newest records."""
        return [*self._present.values()]

    def statistics(self) -> HealthStatistics:
        return HealthStatistics(symptom={name: int(name in self._present) for name in SYMPTOMS})

    def look(self, record: Record) -> list[str]:
        """Take a record; return the lines to say: a symptom that began, lasts twice as long, or is over."""
        if isinstance(record, EvalRecord):
            self._note_accuracy(record)
        else:
            self._note_step(record)
        found = {symptom.name: symptom for symptom in self._symptoms()}
        lines = [f"health: {name} is over" for name in self._present if name not in found]
        for name, symptom in found.items():
            since = self._since.setdefault(name, record.policy_version) if name in self._present else None
            if since is None:
                self._since[name], self._said[name] = record.policy_version, 0
                lines.append(f"health: {symptom}")
            elif (lasted := record.policy_version - since) >= max(_WINDOW, 2 * self._said[name]):
                self._said[name] = lasted
                lines.append(f"health: for {lasted} steps, {symptom}")
        self._present = found
        return lines

    def _note_step(self, record: TrainRecord) -> None:
        if self._steps and record.policy_version <= self._steps[-1].policy_version:  # the learner went back
            self._steps = deque((s for s in self._steps if s.policy_version < record.policy_version), _WINDOW)
            self._first = [step for step in self._first if step.policy_version < record.policy_version]
        self._steps.append(record)
        if len(self._first) < _RECENT:
            self._first.append(record)
        if len(self._steps) >= _RECENT:
            mean, spread = self._mean("reward_mean"), self._mean("reward_std")
            if self._best_reward is None or mean > self._best_reward[0]:
                self._best_reward = (mean, spread, record.policy_version)

    def _note_accuracy(self, record: EvalRecord) -> None:
        known = self._accuracies.get(record.name)
        if known is None or known.best.num_prompts != record.num_prompts:  # another set by the same name
            self._accuracies[record.name] = _Accuracies(record, record, record)
            return
        known.before, known.last = known.last, record
        if record.accuracy > known.best.accuracy:
            known.best = record

    def _symptoms(self) -> Iterator[Symptom]:
        if len(self._steps) >= _IN_A_ROW:
            yield from self._of_the_batch()
        if len(self._steps) >= _RECENT:
            yield from self._of_the_policy()
        for accuracies in self._accuracies.values():
            yield from _of_an_accuracy(accuracies)

    def _of_the_batch(self) -> Iterator[Symptom]:
        """Find why steps teach nothing, the first cause alone."""
        last = self._steps[-1]
        if self._in_a_row(lambda step: step.trained_tokens == 0):
            yield Symptom(
                "nothing_trained",
                f"no token of the last {_IN_A_ROW} steps is in the loss ({_share(last.masked_token_share)} are past "
                f"algorithm.max_staleness={self._max_staleness}, {_share(last.truncated_token_share)} are of "
                "truncated completions)",
                "raise algorithm.max_staleness or rollout.sampling.max_new_tokens",
            )
        elif self._in_a_row(lambda step: step.zero_variance_group_share == 1 and not step.advantage_abs_mean > 0):
            yield Symptom(
                "no_signal",
                f"all rewards of each group are equal (mean reward {last.reward_mean:.3g}), so the advantages are 0",
                "look at trajectories with python -m areal_rloo.inspect; the reward may never be given, or the "
                "prompts are too hard, or all solved",
            )
        elif self._in_a_row(lambda step: step.gradient_norm == 0):
            yield Symptom("no_gradient", "the gradient is 0", "look at the clipped and masked shares of the report")
        if self._in_a_row(lambda step: step.weights_behind > self._max_staleness + _BEHIND):
            yield Symptom(
                "weights_late",
                f"a rollout worker is {last.weights_behind} versions behind",
                "logs/learner.log and logs/rollout-*.log say why it does not take the weights",
            )
        if self._in_a_row(lambda step: step.truncated_share >= _TRUNCATED):
            yield Symptom(
                "truncated",
                f"{_share(last.truncated_share)} of the completions end at the token limit",
                "raise rollout.sampling.max_new_tokens, or look whether the policy ever ends a completion",
            )

    def _of_the_policy(self) -> Iterator[Symptom]:
        steps, norm = self._steps, self._max_norm
        if self._mean("masked_token_share") >= _MASKED:
            yield Symptom(
                "stale",
                f"{_share(self._mean('masked_token_share'))} of the tokens are past algorithm.max_staleness="
                f"{self._max_staleness}, and not trained on",
                "raise algorithm.max_staleness, or generate faster",
            )
        if len(steps) == _WINDOW and all(step.gradient_norm > norm for step in steps):
            median = statistics.median(step.gradient_norm for step in steps)
            if median > _CLIPPED * norm:
                yield Symptom(
                    "always_clipped",
                    f"the gradient norm (median {median:.3g}) is above {norm:g} in each of {_WINDOW} steps",
                    "lower learner.optimizer.learning_rate, or look at the scale of the rewards",
                )
        mismatch = self._mean("mismatch_abs_mean")
        if mismatch > _MISMATCH:
            yield Symptom(
                "mismatch",
                f"engine and learner differ by {mismatch:.3g} nats a token at the same version",
                "compare their dtypes, sampling and attention; see docs/engines.md",
            )
        before = [step.completion_tokens_mean for step in list(steps)[:_RECENT]]
        length, truncated = self._mean("completion_tokens_mean"), self._mean("truncated_share")
        if len(steps) == _WINDOW and length > _LONGER * statistics.mean(before) and truncated > _TRUNCATED_TOO:
            yield Symptom(
                "longer",
                f"completions grew from {statistics.mean(before):.0f} to {length:.0f} tokens within {_WINDOW} steps, "
                f"and {_share(truncated)} end at the limit",
                "look at trajectories; algorithm.rewards.overlong_tokens takes reward from long completions",
            )
        yield from self._collapses()

    def _collapses(self) -> Iterator[Symptom]:
        """Find an entropy near 0 without a gain in reward, and a fallen reward."""
        reward, entropy = self._mean("reward_mean"), self._mean("entropy")
        began = [step.entropy for step in self._first if not math.isnan(step.entropy)]
        gain = reward - statistics.mean(step.reward_mean for step in self._first)
        spread = statistics.mean(step.reward_std for step in self._first)
        if began and entropy < _COLLAPSED * statistics.mean(began) and gain < _FALL * spread:
            yield Symptom(
                "entropy_collapse",
                f"the entropy fell from {statistics.mean(began):.3g} to {entropy:.3g} nats without a gain in reward",
                "lower learner.optimizer.learning_rate, or go back to an earlier checkpoint",
            )
        if self._best_reward is not None:
            best, spread, version = self._best_reward
            fall = _FALL * max(spread, self._mean("reward_std"))  # a solved task has no spread
            if reward < best - max(fall, _LEAST_FALL):
                yield Symptom(
                    "reward_fell",
                    f"the mean reward fell from {best:.3g} (step {version}) to {reward:.3g}",
                    "lower learner.optimizer.learning_rate, or go back to an earlier checkpoint",
                )

    def _in_a_row(self, holds: Callable[[TrainRecord], bool]) -> bool:
        return all(holds(step) for step in list(self._steps)[-_IN_A_ROW:])

    def _mean(self, field: str) -> float:
        """Return the mean of the last steps, without those that could not measure the number; NaN if none could."""
        values: list[float] = [attrgetter(field)(step) for step in list(self._steps)[-_RECENT:]]
        return statistics.mean([value for value in values if not math.isnan(value)] or [math.nan])


SYMPTOMS = (
    *("nothing_trained", "no_signal", "no_gradient", "weights_late", "truncated", "stale", "always_clipped"),
    *("mismatch", "longer", "entropy_collapse", "reward_fell", "accuracy_fell"),
)


def _of_an_accuracy(known: _Accuracies) -> Iterator[Symptom]:
    best, share = known.best, min(1.0, max(0.0, known.best.accuracy))
    error = math.sqrt(max(share * (1 - share), 1 / best.num_prompts) / best.num_prompts)
    if all(record.accuracy < best.accuracy - _ERRORS * error for record in (known.before, known.last)):
        yield Symptom(
            "accuracy_fell",
            f"the accuracy on {best.name} fell from {best.accuracy:.3f} (version {best.policy_version}) to "
            f"{known.last.accuracy:.3f}",
            f"go back to the checkpoint of version {best.policy_version}, or lower learner.optimizer.learning_rate",
        )


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
