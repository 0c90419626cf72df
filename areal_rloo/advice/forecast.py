"""Forecast a setup, name the bottleneck of a run, and search the best setup for a number of devices. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from areal_rloo.advice.calibration import LEAST_RECORDS, Load, calibrated, setup_of
from areal_rloo.advice.shrinking import MOST_SAMPLES, shrunk
from areal_rloo.advice.simulation import Setup, Step, simulate
from areal_rloo.config import MOST_RANKS, MOST_WORKERS, Config
from areal_rloo.errors import DataError
from areal_rloo.telemetry.bound import bound_by, newest, shares_of
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord

FIRST, LAST = 6, 25  # the steps that a forecast counts: the first are of a pipeline that fills
_WORTH = 0.98  # of the best throughput: a smaller depth is worth the rest
_MOST_DEPTH = 64  # searched: deeper pipelines only make samples older, and each takes longer to simulate
_MOST_SEARCHED = 512  # samples of a step, for the many forecasts of a search
_STRIDES = 16  # of the way from the fewest ranks to the most
_NOTHING = "by about 0 %"
_WITH = "with more cores or another GPU"
_ORDINALS = ("second", "third", "fourth", "fifth", "sixth", "seventh")
_MANY = 20  # workers or ranks: from here on, the gain is that of a tenth more
_LEAST_GAIN = 0.05  # percent: less is called nothing


class Forecast(NamedTuple):
    """Means of the counted steps; shares are of the time, but `masked_share` is of the completion tokens."""

    tokens_per_s: float
    staleness: float
    masked_share: float
    wait_share: float  # of the learner
    idle_share: float  # of the workers

    def words(self) -> str:
        return (
            f"{self.tokens_per_s:,.0f} trained tokens/s, mean staleness {self.staleness:.2f}, "
            f"{100 * self.masked_share:.1f} % of the tokens past the bound, the learner waits "
            f"{100 * self.wait_share:.0f} %, the rollouts wait {100 * self.idle_share:.0f} %"
        )


class _Sums(NamedTuple):
    """Sums over neighbouring steps."""

    seconds: float
    tokens: float
    masked: float
    staleness: float
    wait_s: float
    idle_s: float

    @classmethod
    def of(cls, before: Step, steps: Sequence[Step]) -> _Sums:
        return cls(
            seconds=steps[-1].ended_s - before.ended_s,
            tokens=sum(step.trained_tokens for step in steps),
            masked=sum(step.masked_tokens for step in steps),
            staleness=sum(step.staleness_sum for step in steps),
            wait_s=sum(step.wait_s for step in steps),
            idle_s=steps[-1].rollout_idle_s - before.rollout_idle_s,
        )


def forecast(load: Load, setup: Setup, *, most_samples: int = MOST_SAMPLES) -> Forecast:
    """Forecast steps 6 to 25 of a run that goes on after them, with the share of evaluations in these steps.

    Evaluations every few versions: of whole periods. Rare ones: of `eval_every` steps, 20 of which have the evaluation.
    `most_samples`: of a simulated step; a run with more is shrunk.
    """
    kept = replace(setup, kept_share=load.kept_share)
    speeds, small, scale = shrunk(load.speeds, kept, load.lengths.shape[1], most_samples)
    counted, period = LAST - FIRST + 1, small.eval_every if small.num_eval else 0
    is_rare = period > counted
    last = LAST + counted * is_rare
    length = counted if is_rare or not period else counted // period * period
    steps = simulate(
        speeds,
        replace(small, num_train_steps=last + small.pipeline_depth + 1, eval_every=LAST if is_rare else period),
        load.lengths,
        num_steps=last,
    )
    sums = _Sums.of(steps[FIRST - 2], steps[FIRST - 1 : FIRST - 1 + length])
    if is_rare:
        weight, with_evaluation = (period - counted) / counted, _Sums.of(steps[LAST - 1], steps[LAST:last])
        sums = _Sums(*(weight * one + other for one, other in zip(sums, with_evaluation, strict=True)))
    tokens = max(1.0, sums.tokens)
    return Forecast(
        tokens_per_s=scale * load.loss_share * tokens / sums.seconds,
        staleness=sums.staleness / tokens,
        masked_share=sums.masked / (tokens + sums.masked),
        wait_share=sums.wait_s / sums.seconds,
        idle_share=sums.idle_s / sums.seconds / small.num_workers,
    )


def bottleneck(load: Load, setup: Setup, *, wait_share: float, idle_share: float, is_forecast: bool = False) -> str:
    """Say in a sentence which half is the bottleneck, and the gain from more of this half; shares are of the time."""
    name, waits = bound_by(learner_waits=wait_share, rollouts_wait=idle_share, has_rewards=not is_forecast)
    if name == "reward-bound":
        remedy = "raise rollout.num_reward_workers, make rewards and tools faster, or async if they wait"
        return f"{name}: {waits}, both for completions that wait for a reward or a tool; {remedy}"
    return f"{name}: {waits}; {_remedy(name, load, setup)}"


def _remedy(name: str, load: Load, setup: Setup) -> str:
    """Say what would help a run with this bound, and the gain."""
    before = forecast(load, setup).tokens_per_s

    def gain(changed: Setup) -> str:
        percent = 100 * (forecast(load, changed).tokens_per_s / before - 1)
        return "" if percent < _LEAST_GAIN else f"by about {percent:.{int(percent < 1)}f} %"

    if name == "in lockstep":
        depth = min(setup.pipeline_depth, setup.max_staleness) + 1
        deeper = replace(setup, pipeline_depth=depth, max_staleness=max(depth, setup.max_staleness))
        changed = {"max_staleness": setup.max_staleness < depth, "pipeline_depth": setup.pipeline_depth < depth}
        options = " ".join(f"algorithm.{key}={depth}" for key, changes in changed.items() if changes)
        gained = gain(deeper)
        return f"{options} would raise throughput {gained}" if gained else "a deeper pipeline would bring nothing"
    more_workers = min(_more(setup.num_workers), MOST_WORKERS - setup.num_workers)
    if name == "rollout-bound" and more_workers <= 0:
        return "a learner takes no more workers; make each faster, with more devices"
    more_ranks = _more(setup.num_ranks)
    worker = replace(setup, num_workers=setup.num_workers + more_workers)
    rank = replace(setup, num_ranks=setup.num_ranks + more_ranks)
    a_worker = _named(more_workers, worker.num_workers, "worker")
    a_rank = _named(more_ranks, rank.num_ranks, "learner rank")
    if name == "balanced":
        gains = f"{gain(worker) or _NOTHING}, {a_rank} {gain(rank) or _NOTHING}"
        return f"{a_worker}, {_WITH}, would raise throughput {gains}"
    more, changed_setup = (a_worker, worker) if name == "rollout-bound" else (a_rank, rank)
    gained = gain(changed_setup)
    return (
        f"{more}, {_WITH}, would raise throughput {gained}" if gained else f"{more} would bring nothing, by these steps"
    )


def bottleneck_of_run(records: Sequence[Record], config: Config) -> str | None:
    """Say which half was the bottleneck in the last steps of a run; None if the steps are too few to tell.

    None also with `rollout.share_devices: in_turns`, where the halves wait for a device and not for each other.
    """
    recent = newest([record for record in records if isinstance(record, TrainRecord)])
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    if len(recent) < LEAST_RECORDS or config.rollout.takes_turns or not recent[-1].wall_s > recent[0].wall_s:
        return None
    setup = replace(setup_of(config, evaluations), num_workers=max(1, recent[-1].num_workers))
    wait_share, idle_share = shares_of(recent)
    try:
        return bottleneck(calibrated(recent, config), setup, wait_share=wait_share, idle_share=idle_share)
    except (DataError, ArithmeticError, ValueError):  # numbers of a damaged file, or nothing trained
        return None


def splits(
    num_devices: int, *, per_worker: int, rank_step: int = 1, most_ranks: int = MOST_RANKS
) -> list[tuple[int, int]]:
    """List the possible numbers of ranks and workers, fewest ranks first; a split may leave devices unused.

    `most_ranks`: the samples of a step, because a rank without a sample only waits.
    """
    ranks = range(rank_step, min(num_devices, most_ranks + 1, MOST_RANKS + 1), rank_step)
    counts = [(num, min(MOST_WORKERS, (num_devices - num) // per_worker)) for num in ranks]
    return [(num_ranks, num_workers) for num_ranks, num_workers in counts if num_workers >= 1]


def best_setup(
    load: Load, setup: Setup, choices: Sequence[tuple[int, int]], *, slots: Iterable[int]
) -> tuple[Setup, Forecast]:
    """Search ranks and workers, depth and slots; the least depth with 98 % of the best throughput wins.

    For each number of slots, the search climbs from the split at which both halves alone are about as fast, and for
    each further depth from the best split of the one before. It looks two splits ahead, because whole groups on whole
    workers make small steps, and at the fewest ranks: a single rank has no exchange, so there may be two peaks. Among
    many splits it first makes strides of a 16th of the way.
    """
    deepest = max(1, min(setup.max_staleness, _MOST_DEPTH))
    depths = sorted({min(depth, deepest) for depth in (1, 2, 4, deepest)})
    found: list[tuple[Setup, Forecast]] = []
    for num_slots in slots:
        index = _balanced(load, replace(setup, num_slots=num_slots), choices)
        for depth in depths:
            base = replace(setup, pipeline_depth=depth, num_slots=num_slots)
            index, chosen, forecasted = _climb(load, base, choices, index)
            found.append((chosen, forecasted))
    best = max(forecasted.tokens_per_s for _, forecasted in found)
    good = [pair for pair in found if pair[1].tokens_per_s >= _WORTH * best]
    setup, _ = min(good, key=lambda pair: (pair[0].pipeline_depth, -pair[1].tokens_per_s))
    return setup, forecast(load, setup)


def _climb(load: Load, setup: Setup, choices: Sequence[tuple[int, int]], index: int) -> tuple[int, Setup, Forecast]:
    """Return the best split that the search finds from the one at `index`: index, setup and forecast."""

    def with_split(index: int) -> Setup:
        ranks, workers = choices[index]
        return replace(setup, num_ranks=ranks, num_workers=workers)

    @functools.cache
    def at(index: int) -> Forecast:
        return forecast(load, with_split(index), most_samples=_MOST_SEARCHED)

    stride = max(1, len(choices) // _STRIDES)
    while True:
        ahead = (-1, 0, 1) if stride > 1 else (-2, -1, 0, 1, 2)
        near = sorted({0, *(number for each in ahead if 0 <= (number := index + stride * each) < len(choices))})
        best = max(near, key=lambda number: (at(number).tokens_per_s, number == index))
        if best == index and stride == 1:
            return index, with_split(index), at(index)
        index, stride = best, stride if best != index else stride // 2


def _balanced(load: Load, setup: Setup, choices: Sequence[tuple[int, int]]) -> int:
    """Return the index of the split whose slower half alone is the fastest."""
    speeds, tokens = load.speeds, setup.groups_per_step * load.lengths[0].size * float(load.lengths.mean())
    decode_s = tokens / load.kept_share * (speeds.decode_fixed_s / setup.num_slots + speeds.decode_each_s)
    slower = [
        max(speeds.train_fixed_s + speeds.train_s(tokens, ranks), decode_s / workers) for ranks, workers in choices
    ]
    return slower.index(min(slower))


def _more(number: int) -> int:
    """Return of how many more workers or ranks the gain is: of one, or beside many, of a tenth."""
    return 1 if number < _MANY else round(number / 10)


def _named(num_more: int, number: int, name: str) -> str:
    """Name so many more, the last of which is this number."""
    if num_more > 1:
        return f"{num_more:,} more {name}s"
    return f"{f'a {_ORDINALS[number - 2]}' if number < len(_ORDINALS) + 2 else 'another'} {name}"
