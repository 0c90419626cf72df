"""Forecast a setup, name the bottleneck of a run, and search the best setup for a number of devices. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from areal_rloo.advice.calibration import LEAST_RECORDS, Load, calibrated, setup_of
from areal_rloo.advice.simulation import Setup, simulate
from areal_rloo.config import Config
from areal_rloo.errors import DataError
from areal_rloo.telemetry.bound import WINDOW, bound_by, shares_of
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord

FIRST, LAST = 6, 25  # the steps that a forecast counts: the first are of a pipeline that fills
_MOST_SAMPLES = 8192  # of a step
_WORTH = 0.98  # of the best throughput: a smaller depth is worth the rest
_MOST_DEPTH = 64  # searched: deeper pipelines only make samples older, and each takes longer to simulate
_ORDINALS = ("second", "third", "fourth", "fifth", "sixth", "seventh")


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


def forecast(load: Load, setup: Setup) -> Forecast:
    """Forecast steps 6 to 25 of a run that goes on after them."""
    long = replace(setup, num_train_steps=LAST + setup.pipeline_depth + 1, kept_share=load.kept_share)
    steps = simulate(load.speeds, long, load.lengths)
    before, counted = steps[FIRST - 2], steps[FIRST - 1 : LAST]
    seconds = counted[-1].ended_s - before.ended_s
    tokens = max(1.0, sum(step.trained_tokens for step in counted))
    masked = sum(step.masked_tokens for step in counted)
    return Forecast(
        tokens_per_s=load.loss_share * tokens / seconds,
        staleness=sum(step.staleness_sum for step in counted) / tokens,
        masked_share=masked / (tokens + masked),
        wait_share=sum(step.wait_s for step in counted) / seconds,
        idle_share=(counted[-1].rollout_idle_s - before.rollout_idle_s) / seconds / setup.num_workers,
    )


_NOTHING = "by about 0 %"


def bottleneck(load: Load, setup: Setup, *, wait_share: float, idle_share: float, is_forecast: bool = False) -> str:
    """Say in a sentence which half is the bottleneck, and the gain from more of this half; shares are of the time."""
    before = forecast(load, setup).tokens_per_s

    def gain(changed: Setup) -> str:
        return f"by about {max(0.0, 100 * (forecast(load, changed).tokens_per_s / before - 1)):.0f} %"

    worker = replace(setup, num_workers=setup.num_workers + 1)
    rank = replace(setup, num_ranks=setup.num_ranks + 1)
    a_worker, a_rank = f"{_next(worker.num_workers)} worker", f"{_next(rank.num_ranks)} learner rank"
    name, waits = bound_by(learner_waits=wait_share, rollouts_wait=idle_share, has_rewards=not is_forecast)
    if name == "reward-bound":
        remedy = "raise rollout.num_reward_workers, make rewards and tools faster, or async if they wait"
        return f"{name}: {waits}, both for completions that wait for a reward or a tool; {remedy}"
    if name == "in lockstep":
        depth = min(setup.pipeline_depth, setup.max_staleness) + 1
        deeper = replace(setup, pipeline_depth=depth, max_staleness=max(depth, setup.max_staleness))
        changed = {"max_staleness": setup.max_staleness < depth, "pipeline_depth": setup.pipeline_depth < depth}
        options = " ".join(f"algorithm.{key}={depth}" for key, changes in changed.items() if changes)
        gained = gain(deeper)
        if gained == _NOTHING:
            return f"{name}: {waits}; a deeper pipeline would bring nothing"
        return f"{name}: {waits}; {options} would raise throughput {gained}"
    if name == "balanced":
        gains = f"{gain(worker)}, {a_rank} {gain(rank)}"
        return f"{name}: {waits}; {a_worker}, with more cores or another GPU, would raise throughput {gains}"
    more, changed_setup = (a_worker, worker) if name == "rollout-bound" else (a_rank, rank)
    if (gained := gain(changed_setup)) == _NOTHING:
        return f"{name}: {waits}; {more} would bring nothing, by these steps"
    return f"{name}: {waits}; {more}, with more cores or another GPU, would raise throughput {gained}"


def bottleneck_of_run(records: Sequence[Record], config: Config) -> str | None:
    """Say which half was the bottleneck in the last steps of a run; None if the steps are too few to tell.

    None also if a step has too many samples to simulate in seconds, and with `rollout.share_devices: in_turns`, where
    the halves wait for a device and not for each other.
    """
    recent = [record for record in records if isinstance(record, TrainRecord)][-WINDOW - 1 :]
    evaluations = [record for record in records if isinstance(record, EvalRecord)]
    in_turns, is_large = config.rollout.takes_turns, config.samples_per_step > _MOST_SAMPLES
    if len(recent) < LEAST_RECORDS or in_turns or is_large or not recent[-1].wall_s > recent[0].wall_s:
        return None
    setup = replace(setup_of(config, evaluations), num_workers=max(1, recent[-1].num_workers))
    wait_share, idle_share = shares_of(recent)
    try:
        return bottleneck(calibrated(recent, config), setup, wait_share=wait_share, idle_share=idle_share)
    except (DataError, ArithmeticError, ValueError):  # numbers of a damaged file, or nothing trained
        return None


def splits(num_devices: int, *, per_worker: int, per_rank: int = 1, rank_step: int = 1) -> list[tuple[int, int]]:
    """List the possible numbers of ranks and workers that use these devices, fewest ranks first."""
    ranks = range(rank_step, num_devices, rank_step)
    counts = [(num, (num_devices - num * per_rank) // per_worker) for num in ranks]
    return [(num_ranks, num_workers) for num_ranks, num_workers in counts if num_workers >= 1]


def best_setup(
    load: Load, setup: Setup, choices: Sequence[tuple[int, int]], *, slots: Iterable[int]
) -> tuple[Setup, Forecast]:
    """Search ranks and workers, depth and slots; the least depth with 98 % of the best throughput wins.

    For each depth and number of slots, the search climbs from the split at which both halves alone are about as fast.
    It looks two splits ahead, because whole groups on whole workers make small steps, and at the fewest ranks: a single
    rank has no exchange, so there may be two peaks.
    """
    deepest = max(1, min(setup.max_staleness, _MOST_DEPTH))
    depths = sorted({min(depth, deepest) for depth in (1, 2, 4, deepest)})
    found: list[tuple[Setup, Forecast]] = []
    for num_slots in slots:
        for depth in depths:
            base = replace(setup, pipeline_depth=depth, num_slots=num_slots)
            found.append(_climb(load, base, choices))
    best = max(forecasted.tokens_per_s for _, forecasted in found)
    good = [pair for pair in found if pair[1].tokens_per_s >= _WORTH * best]
    return min(good, key=lambda pair: (pair[0].pipeline_depth, -pair[1].tokens_per_s))


def _climb(load: Load, setup: Setup, choices: Sequence[tuple[int, int]]) -> tuple[Setup, Forecast]:
    def with_split(index: int) -> Setup:
        ranks, workers = choices[index]
        return replace(setup, num_ranks=ranks, num_workers=workers)

    @functools.cache
    def at(index: int) -> Forecast:
        return forecast(load, with_split(index))

    index = _balanced(load, setup, choices)
    while True:
        near = sorted({0, *(number for number in range(index - 2, index + 3) if 0 <= number < len(choices))})
        best = max(near, key=lambda number: (at(number).tokens_per_s, number == index))
        if best == index:
            return with_split(index), at(index)
        index = best


def _balanced(load: Load, setup: Setup, choices: Sequence[tuple[int, int]]) -> int:
    """Return the index of the split whose slower half alone is the fastest."""
    speeds, tokens = load.speeds, setup.groups_per_step * load.lengths[0].size * float(load.lengths.mean())
    decode_s = tokens / load.kept_share * (speeds.decode_fixed_s / setup.num_slots + speeds.decode_each_s)
    slower = [
        max(speeds.train_fixed_s + speeds.train_s(tokens, ranks), decode_s / workers) for ranks, workers in choices
    ]
    return slower.index(min(slower))


def _next(number: int) -> str:
    return f"a {_ORDINALS[number - 2]}" if number < len(_ORDINALS) + 2 else "another"
