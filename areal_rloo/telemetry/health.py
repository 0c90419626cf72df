"""Say when a run does not learn, from the records: the symptom, the step since which it lasts, and a remedy.

A symptom is a state of the newest records, and over when they no longer show it. The learner logs the symptoms and
serves them as a metric, the launcher prints them, and the report lists them; all of them ask `Health`. The limits are
wide: a healthy run shows no symptom, and small batches are looked at for more steps.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, ClassVar, NamedTuple

import msgspec

from areal_rloo.config import Config
from areal_rloo.telemetry.metric import Metric
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord, result_field

_IN_A_ROW, _SAMPLES = 3, 100  # steps: one alone can be chance, and so can few samples
_RECENT, _GROUPS = 5, 100  # steps of a mean, with at least so many groups
_WINDOW = 4  # times the steps of a mean
_AGAIN = 20  # steps until a symptom is said again
_OVER = 5  # steps without a symptom
_TRUNCATED = 0.9  # share of trajectories
_MASKED = 0.5  # share of tokens
_FEW_SIGNALS = 0.9  # share of groups with equal rewards: fewer other groups are luck in a task that is too hard
_CLIPPED = 10.0  # gradient norm over the limit
_MISMATCH = 0.05  # nats a token
_COLLAPSED = 0.1  # entropy over that of the first steps
_LONGER = 2.0  # completions within a window
_TRUNCATED_TOO = 0.2  # share of trajectories, for longer completions
_FALL = 0.5  # of the mean reward, in standard deviations of the rewards of a step
_NOISE = 8.0  # standard errors between a mean reward and the best of thousands of steps
_LEAST_FALL = 1e-6  # for rewards without a spread
_ERRORS = 4.0  # standard errors of the difference between an accuracy and the best of many
_LEAST_PROMPTS = 20  # of an evaluation that tells
_BEHIND = 2  # versions beyond the bound: a worker takes each version a moment after its step

SYMPTOMS = (
    *("nothing_trained", "no_signal", "no_gradient", "weights_late", "truncated", "stale", "always_clipped"),
    *("mismatch", "longer", "entropy_collapse", "reward_fell", "accuracy_fell"),
)


_COLLAPSES = ("entropy_collapse", "reward_fell", "accuracy_fell", "always_clipped")

_SLOWER = "lower learner.optimizer.learning_rate, or go back to an earlier checkpoint"


class Breaks(NamedTuple):
    """Versions at which a resume with another config began: numbers before and after cannot be compared."""

    rewards: Sequence[int] = ()
    evaluations: Mapping[str, Sequence[int]] = {}  # by set

    def evaluations_after(self, name: str) -> int:
        """Give the version after which all accuracies of a set can be compared; -1: there was no break."""
        return max(self.evaluations.get(name, ()), default=-1)

    def comparable(self, evaluations: Iterable[EvalRecord]) -> list[EvalRecord]:
        """Give the evaluations after the last change of their set."""
        return [record for record in evaluations if record.policy_version > self.evaluations_after(record.name)]


_NO_BREAKS = Breaks()


class Symptom(NamedTuple):
    """A finding in the newest records, and a remedy. The metric and the alarm know the symptom by name."""

    name: str
    finding: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name}: {self.finding}; {self.remedy}"


_Judgement = tuple[str, Symptom | None]  # None: the records do not show the symptom of this name


class HealthStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The symptoms of the newest records."""

    metrics_prefix: ClassVar[str] = ""

    symptom: Annotated[dict[str, int], Metric("1 while the records show a symptom", label="symptom", healthy=(0, 0))]


@dataclass(slots=True)
class _Lasting:
    """A symptom that began and is not over."""

    symptom: Symptom
    since: int  # version
    said: int = 0  # steps that it had lasted
    absent: int = 0  # records in a row without it


class _Reward(NamedTuple):
    """The rewards of the steps up to a version."""

    mean: float
    spread: float  # standard deviation within a step; 0 for a solved task
    error: float  # standard error of the mean
    version: int


class Health:
    """Looks at the records of a run in their order; the record of a step takes back records of later steps."""

    def __init__(self, config: Config, breaks: Breaks = _NO_BREAKS) -> None:
        groups = config.learner.groups_per_step
        self.breaks, self._sets = breaks, {source.label for source in config.data.eval_sources}
        self._max_norm, self._max_staleness = config.learner.optimizer.max_grad_norm, config.algorithm.max_staleness
        # With a baseline of the group, equal rewards leave an advantage to a KL in the reward alone.
        kl, norms = config.algorithm.kl, (config.algorithm.adv_norm, config.algorithm.reward_norm)
        of_group = any(norm.mean_level == "group" for norm in norms)
        self._kl_alone = of_group and kl.coefficient > 0 and kl.placement == "reward"
        self._in_a_row = max(_IN_A_ROW, math.ceil(_SAMPLES / (groups * config.algorithm.group_size)))
        self._equal_in_a_row = max(_IN_A_ROW, math.ceil(_GROUPS / groups))
        self._recent = max(_RECENT, math.ceil(_GROUPS / groups))
        self._first: list[TrainRecord] = []  # steps of the run
        self._steps: deque[TrainRecord] = deque(maxlen=_WINDOW * self._recent)
        self._bests: list[_Reward] = []  # each better than the one before
        self._evaluations: dict[str, list[EvalRecord]] = {}
        self._lasting: dict[tuple[str, str], _Lasting] = {}  # by name and evaluation set

    @property
    def present(self) -> Sequence[Symptom]:
        """The symptoms that last; a collapse first, because others follow from it."""
        return sorted(
            (one.symptom for one in self._lasting.values()), key=lambda symptom: symptom.name not in _COLLAPSES
        )

    @property
    def learns(self) -> bool:
        """False if the newest steps train nothing, so that more of them in a second would bring nothing."""
        return {"nothing_trained", "no_signal", "no_gradient"}.isdisjoint(name for name, _ in self._lasting)

    def statistics(self) -> HealthStatistics:
        present = {name for name, _ in self._lasting.copy()}  # a scrape comes on a thread of its own
        return HealthStatistics(symptom={name: int(name in present) for name in SYMPTOMS})

    def look(self, record: Record) -> list[str]:
        """Take a record; return the lines to say: a symptom that began, lasts twice as long, or is over."""
        if isinstance(record, EvalRecord):
            if record.name not in self._sets:
                return []  # an earlier config had it, and it is measured no more
            self._note_evaluation(record)
            return self._lines(_fallen(self._evaluations[record.name]), record, of=record.name, absent=1)
        self._note_step(record)
        return self._lines(self._judge(), record, of="", absent=_OVER)

    def _lines(self, judged: Iterable[_Judgement], record: Record, *, of: str, absent: int) -> list[str]:
        """Bring what lasts up to date. A symptom that cannot be judged stays; `absent`: records without one end it."""
        lines, version = [], record.policy_version
        for name, symptom in judged:
            lasting = self._lasting.get((name, of))
            if symptom is None:
                if lasting is not None:
                    lasting.absent += 1
                    if lasting.absent >= absent:
                        del self._lasting[name, of]
                        lines.append(f"health: {name} is over{f' on {of}' if of else ''}")
            elif lasting is None:
                self._lasting[name, of] = _Lasting(symptom, version)
                lines.append(f"health: {symptom}")
            else:
                lasting.symptom, lasting.since, lasting.absent = symptom, min(lasting.since, version), 0
                if (lasted := version - lasting.since) >= max(_AGAIN, 2 * lasting.said):
                    lasting.said = lasted
                    lines.append(f"health: for {lasted} steps, {symptom}")
        return lines

    def _note_step(self, record: TrainRecord) -> None:
        version = record.policy_version
        if self._steps and version <= self._steps[-1].policy_version:  # the learner went back
            self._steps = deque((s for s in self._steps if s.policy_version < version), self._steps.maxlen)
            self._first = [step for step in self._first if step.policy_version < version]
            self._bests = [best for best in self._bests if best.version < version]
            for name, records in self._evaluations.items():
                self._evaluations[name] = [known for known in records if known.policy_version < version]
        if self._steps and _between(self.breaks.rewards, self._steps[-1], record):
            self._steps.clear()
            self._first, self._bests = [], []
        self._steps.append(record)
        if len(self._first) < self._recent:
            self._first.append(record)
        if len(self._steps) >= self._recent:
            reward = self._reward()
            if not self._bests or reward.mean > self._bests[-1].mean:
                self._bests.append(reward)

    def _note_evaluation(self, record: EvalRecord) -> None:
        known = self._evaluations.setdefault(record.name, [])
        if known and (
            known[-1].num_prompts != record.num_prompts
            or _between(self.breaks.evaluations.get(record.name, ()), known[-1], record)
        ):
            known.clear()
            self._lasting.pop(("accuracy_fell", record.name), None)
        known.append(record)

    def _judge(self) -> Iterator[_Judgement]:
        """Judge the symptoms for which there are enough steps."""
        num, first, last = self._equal_in_a_row, self._first[0], self._steps[-1]
        if len(self._steps) >= self._in_a_row:
            yield from self._of_steps_in_a_row()
        if len(self._steps) >= num:
            had_signal = first.zero_variance_group_share < _FEW_SIGNALS
            fell = had_signal and last.reward_mean < first.reward_mean
            earlier = f", {first.reward_mean:.3g} in step {first.policy_version}" if fell else ""
            yield _judged(
                "no_signal",
                self._all_of(num, self._has_equal_rewards),
                f"all rewards of each group are equal (mean reward {last.reward_mean:.3g}{earlier}), so "
                f"{'only the KL to the reference trains' if self._kl_alone else 'the advantages are 0'}",
                _SLOWER
                if earlier
                else "look at trajectories with areal-rloo inspect RUN_FOLDER; the reward may never be given, or the "
                "prompts are too hard, or all solved",
            )
        if len(self._steps) >= self._recent:
            yield from self._of_means()
            yield from self._of_collapses()
        if len(self._steps) == self._steps.maxlen:
            yield from self._of_a_window()

    def _of_steps_in_a_row(self) -> Iterator[_Judgement]:
        num, first, last = self._in_a_row, self._first[0], self._steps[-1]
        yield _judged(
            "nothing_trained",
            self._all_of(num, lambda step: step.trained_tokens == 0),
            f"no token of the last {num} steps is in the loss ({_share(last.masked_token_share)} are past "
            f"algorithm.max_staleness={self._max_staleness}, {_share(last.truncated_token_share)} are of truncated "
            "completions)",
            "raise algorithm.max_staleness or rollout.sampling.max_new_tokens",
        )
        yield _judged(
            "no_gradient",
            self._all_of(num, lambda step: step.gradient_norm == 0 and step.advantage_abs_mean > 0),
            "the gradient is 0",
            "look at the clipped and masked shares of the report",
        )
        yield _judged(
            "weights_late",
            self._all_of(num, lambda step: step.weights_behind > self._max_staleness + _BEHIND),
            f"a rollout worker is {last.weights_behind} versions behind",
            "logs/learner.log and logs/rollout-*.log say why it does not take the weights",
        )
        rose = first.truncated_share < _TRUNCATED / 2
        earlier = f", {_share(first.truncated_share)} in step {first.policy_version}" if rose else ""
        yield _judged(
            "truncated",
            self._all_of(num, lambda step: step.truncated_share >= _TRUNCATED),
            f"{_share(last.truncated_share)} of the completions end at the token limit{earlier}",
            _SLOWER
            if earlier
            else "raise rollout.sampling.max_new_tokens, or look whether the policy ever ends a completion",
        )

    def _of_means(self) -> Iterator[_Judgement]:
        masked, mismatch = self._mean("masked_token_share"), self._mean("mismatch_abs_mean")
        began, *_ = _finite(step.mismatch_abs_mean for step in self._first)  # a huge rate breaks the second step
        earlier = f", and by {began:.3g} in the first step" if began <= _MISMATCH else ""
        worse = "if the policy got worse, too, lower learner.optimizer.learning_rate; else "
        yield _judged(
            "stale",
            masked >= _MASKED,
            f"{_share(masked)} of the tokens are past algorithm.max_staleness={self._max_staleness}, and not trained "
            "on",
            "raise algorithm.max_staleness, or generate faster",
        )
        yield _judged(
            "mismatch",
            mismatch > _MISMATCH,
            f"engine and learner differ by {mismatch:.3g} nats a token at the same version{earlier}",
            f"{worse if earlier else ''}compare their dtypes, sampling and attention; see docs/engines.md",
        )

    def _of_a_window(self) -> Iterator[_Judgement]:
        steps, limit = [*self._steps], self._max_norm
        norms = [step.gradient_norm for step in steps]
        median = statistics.median(norms)
        yield _judged(
            "always_clipped",
            all(math.isfinite(norm) and norm > limit for norm in norms) and median > _CLIPPED * limit,
            f"the gradient norm (median {median:.3g}) is above {limit:g} in each of {len(norms)} steps",
            "lower learner.optimizer.learning_rate, or look at the scale of the rewards",
        )
        before = _mean_of(step.completion_tokens_mean for step in steps[: self._recent])
        length, truncated = self._mean("completion_tokens_mean"), self._mean("truncated_share")
        yield _judged(
            "longer",
            length > _LONGER * before and truncated > _TRUNCATED_TOO,
            f"completions grew from {before:.0f} to {length:.0f} tokens within {len(steps)} steps, and "
            f"{_share(truncated)} end at the limit",
            "look at trajectories; algorithm.rewards.overlong_tokens takes reward from long completions",
        )

    def _of_collapses(self) -> Iterator[_Judgement]:
        """Find an entropy near 0 without a gain in reward, and a fallen reward."""
        reward, entropy, best = self._reward(), self._mean("entropy"), self._bests[-1]
        began = _mean_of(_finite(step.entropy for step in self._first))
        gain = reward.mean - _mean_of(step.reward_mean for step in self._first)
        spread = _mean_of(step.reward_std for step in self._first)
        yield _judged(
            "entropy_collapse",
            entropy < _COLLAPSED * began and gain < _FALL * spread,
            f"the entropy fell from {began:.3g} to {entropy:.3g} nats without a gain in reward",
            _SLOWER,
        )
        fall = max(_FALL * max(best.spread, reward.spread), _NOISE * max(best.error, reward.error), _LEAST_FALL)
        yield _judged(
            "reward_fell",
            reward.mean < best.mean - fall,
            f"the mean reward fell from {best.mean:.3g} (step {best.version}) to {reward.mean:.3g}",
            _SLOWER,
        )

    def _reward(self) -> _Reward:
        """Measure the reward of the last steps."""
        means = [step.reward_mean for step in list(self._steps)[-self._recent :]]
        mean, version = _mean_of(means), self._steps[-1].policy_version
        squares = sum((each - mean) * (each - mean) for each in means)  # NaN for NaN; `statistics` would raise
        error = math.sqrt(squares / (len(means) - 1) / len(means))
        return _Reward(mean, self._mean("reward_std"), error, version)

    def _has_equal_rewards(self, step: TrainRecord) -> bool:
        """Tell a step without a signal from one whose tokens are all masked."""
        is_flat = self._kl_alone or not step.advantage_abs_mean > 0
        return step.trained_tokens > 0 and step.zero_variance_group_share == 1 and is_flat

    def _all_of(self, num_steps: int, holds: Callable[[TrainRecord], bool]) -> bool:
        return all(holds(step) for step in list(self._steps)[-num_steps:])

    def _mean(self, field: str) -> float:
        """Return the mean of the last steps, without those that could not measure the number; NaN if none could."""
        return _mean_of(_finite(attrgetter(field)(step) for step in list(self._steps)[-self._recent :]))


def _fallen(evaluations: Sequence[EvalRecord]) -> Iterator[_Judgement]:
    """Compare the last two evaluations on a set with the best before: one alone can be chance."""
    if len(evaluations) <= 2 or evaluations[-1].num_prompts < _LEAST_PROMPTS:
        return
    *earlier, before, last = evaluations
    best = max(earlier, key=lambda record: record.reward)
    version = best.policy_version
    back = (
        f"; or move the checkpoints after version {version} away, if there is one before, and resume with a lower rate"
    )
    falls = [
        record.reward < best.reward - _ERRORS * math.hypot(best.reward_error, record.reward_error)
        for record in (before, last)
    ]
    yield _judged(
        "accuracy_fell",
        all(falls),
        f"the {result_field([best, last])} on {best.name} fell from {best.reward:.3f} (version {version}) to "
        f"{last.reward:.3f}",
        f"start again with a lower learner.optimizer.learning_rate{back if version else ''}",
    )


def _judged(name: str, shows: bool, finding: str, remedy: str) -> _Judgement:
    return name, Symptom(name, finding, remedy) if shows else None


def _between(versions: Sequence[int], one: Record, other: Record) -> bool:
    """Return True if a break lies between two records; at the version of a break, the old config still measured."""
    return any(one.policy_version <= version < other.policy_version for version in versions)


def _mean_of(values: Iterable[float]) -> float:
    """Return the mean. `statistics.mean` computes with fractions: a minute for the records of a long run."""
    numbers = [*values]
    return sum(numbers) / len(numbers)


def _finite(values: Iterator[float]) -> list[float]:
    """Leave out numbers that could not be measured; a file has null for an infinite one, too."""
    return [value for value in values if math.isfinite(value)] or [math.nan]


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"
