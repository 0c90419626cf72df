"""Measure the speeds of a run from its records: the parameters of the simulation.

In: train records of neighbouring steps, and the config of the run. Out: a `Load`. Pure.

A record gives no time of a single decode step. But `decoding_s / busy_s` is the mean number of completions decoded
together, and `decoding_s / generated_tokens` is the mean time between two tokens of a completion. Both are of the same
messages of the workers, so the delay of these messages changes neither.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from areal_rloo.advice.simulation import Setup, Speeds
from areal_rloo.config import Config
from areal_rloo.errors import DataError
from areal_rloo.telemetry.records import EvalRecord, TrainRecord

_NUM_GROUPS = 1024  # whose lengths are drawn
_FIXED_SHARE = 0.5  # of a decode step, if the run shows a single size of the decode batch
_LEAST_SPREAD = 1.25  # between the sizes of the decode batch, for a line through them
_LEAST_KEPT = 0.01  # of the groups; with fewer, a simulation takes too long
LEAST_RECORDS = 3  # the first step is slower: memory is allocated, caches are cold


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run computes, and how fast; `sizes_differ` is True if decoding was measured at several batch sizes."""

    speeds: Speeds
    num_ranks: int  # of the run
    lengths: npt.NDArray[np.float64]  # [groups, group_size] tokens of a sample
    loss_share: float  # of the policy's tokens of a batch that are within the bound
    kept_share: float  # of the complete groups
    sizes_differ: bool


def calibrated(records: Sequence[TrainRecord], config: Config) -> Load:
    """Measure the load of a run.

    Raises:
        DataError: there are fewer than three records, or nothing was generated or trained in them.
    """
    if len(records) < LEAST_RECORDS:
        raise DataError(f"expected at least {LEAST_RECORDS} train steps to calibrate from, got {len(records)}")
    after = records[1:]
    mean = statistics.fmean(record.completion_tokens_mean for record in after)
    std = math.sqrt(statistics.fmean(record.completion_tokens_std**2 for record in after))
    longest = statistics.fmean(record.longest_of_group_mean for record in after)
    num_tokens = sum(record.policy_tokens for record in after)
    num_fresh = num_tokens - sum(record.masked_token_share * record.policy_tokens for record in after)
    trained, train_s = sum(record.trained_tokens for record in after), sum(record.train_step_s for record in after)
    of_sample = num_tokens / (config.samples_per_step * len(after))  # perhaps of several completions
    others = [now.wall_s - before.wall_s - now.wait_s - now.train_step_s for before, now in pairwise(records)]
    points = list(_decode_points(records))
    fixed_s, each_s, differ = _decode_line(points) if points else (math.nan, math.nan, False)
    positive, finite = (trained, num_fresh, num_tokens, train_s, mean), (std, longest, sum(others), fixed_s, each_s)
    if not all(0 < number < math.inf for number in positive) or not all(map(math.isfinite, finite)):
        raise DataError("nothing was generated and trained in these steps: there is no speed to calibrate from")
    ledger = records[-1].ledger
    num_filtered = sum(num for reason, num in ledger.dropped.items() if reason != "stale")  # those are simulated
    kept_share = ledger.trained / max(1, ledger.trained + num_filtered)
    return Load(
        speeds=Speeds(
            decode_fixed_s=fixed_s,
            decode_each_s=each_s,
            train_fixed_s=max(0.0, statistics.median(others)),
            train_token_s=train_s / num_tokens * config.learner.num_ranks,
            broadcast_s=max(0.0, statistics.median(record.times_s.get("broadcast", 0.0) for record in after)),
        ),
        num_ranks=config.learner.num_ranks,
        lengths=drawn_lengths(
            mean=of_sample,
            std=std * of_sample / mean,
            longest_of_group=longest * of_sample / mean,
            group_size=config.algorithm.group_size,
            most=_most_tokens(after, config) * max(1.0, of_sample / mean),
        ),
        loss_share=trained / num_fresh,
        kept_share=max(_LEAST_KEPT, kept_share),
        sizes_differ=differ,
    )


def _most_tokens(records: Sequence[TrainRecord], config: Config) -> int:
    """Return the tokens of the longest completion: `max_new_tokens` limits each turn of an episode."""
    return max(config.rollout.sampling.max_new_tokens, *(record.completion_tokens_max for record in records))


def merged(loads: Sequence[Load], records: Sequence[Sequence[TrainRecord]]) -> Load:
    """Take the first load, with the speeds of all runs.

    Other numbers of slots show the speed of decoding by batch size, and other numbers of ranks the exchange's cost.
    """
    fixed_s, each_s, differ = _decode_line([point for run in records for point in _decode_points(run)])
    token_s, exchange_s = _of_ranks(loads)
    speeds = replace(
        loads[0].speeds,
        decode_fixed_s=fixed_s,
        decode_each_s=each_s,
        train_token_s=token_s,
        exchange_token_s=exchange_s,
    )
    return replace(loads[0], speeds=speeds, sizes_differ=differ)


def _of_ranks(loads: Sequence[Load]) -> tuple[float, float]:
    """Return the seconds in which one rank trains on a token, and the extra seconds of a token with several ranks.

    Several ranks share the first time, and exchange gradients in the second. Without runs of both kinds, only the sum
    is known, and all of it counts as the first.
    """
    alone = [load.speeds.train_token_s for load in loads if load.num_ranks == 1]
    several = [load for load in loads if load.num_ranks > 1]
    if not alone or not several:
        return statistics.fmean(load.speeds.train_token_s for load in loads), 0.0
    own_s = statistics.fmean(alone)
    exchange_s = statistics.fmean((load.speeds.train_token_s - own_s) / load.num_ranks for load in several)
    return own_s, max(0.0, exchange_s)


def setup_of(config: Config, evaluations: Sequence[EvalRecord] = ()) -> Setup:
    """Read the schedule of a config, whose counts of processes are numbers, and the size of the last evaluation."""
    samples = {record.name: record.num_prompts * record.num_samples for record in evaluations}
    return Setup(
        num_workers=max(1, config.rollout.num_workers),
        num_slots=config.rollout.num_slots,
        num_ranks=max(1, config.learner.num_ranks),
        groups_per_step=config.learner.groups_per_step,
        max_staleness=config.algorithm.max_staleness,
        pipeline_depth=config.algorithm.pipeline_depth,
        num_train_steps=config.learner.num_train_steps,
        lease_ahead=config.rollout.lease_ahead_samples,
        stale_tokens=config.algorithm.stale_tokens,
        num_eval=sum(samples.values()),
        eval_every=config.evaluation.every_n_versions,
        publish_every=config.weights.publish_every_n_steps,
    )


def drawn_lengths(
    *, mean: float, std: float, longest_of_group: float, group_size: int, most: float
) -> npt.NDArray[np.float64]:
    """Draw lengths with this mean, spread and mean of the longest of a group: [groups, group_size], 1 to `most`.

    Lognormal. The prompt decides a part of a length, the same for its group; the longest of a group shows which part.
    """
    generator = np.random.default_rng(0)
    common = generator.standard_normal((_NUM_GROUPS, 1))
    own = generator.standard_normal((_NUM_GROUPS, group_size))
    sigma = math.sqrt(math.log1p((std / mean) ** 2))

    def draw(own_share: float) -> npt.NDArray[np.float64]:
        lengths = np.exp(sigma * (math.sqrt(1 - own_share) * common + math.sqrt(own_share) * own))
        for _ in range(5):  # the limit lowers the mean again
            lengths = np.clip(lengths * (mean / lengths.mean()), 1.0, most)
        return lengths

    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if draw(middle).max(axis=1).mean() < longest_of_group else (low, middle)
    return draw((low + high) / 2)


def _decode_points(records: Sequence[TrainRecord]) -> Iterable[tuple[float, float, int]]:
    """Yield the mean batch size, the seconds of a decode step, and the tokens, between records with new counts."""
    before = records[0]
    for now in records[1:]:
        tokens, busy_s = now.generated_tokens - before.generated_tokens, now.rollout_busy_s - before.rollout_busy_s
        decoding_s = now.decoding_s - before.decoding_s
        if tokens > 0 and busy_s > 0 and decoding_s > 0:
            yield decoding_s / busy_s, decoding_s / tokens, tokens
            before = now


def _decode_line(points: Sequence[tuple[float, float, int]]) -> tuple[float, float, bool]:
    """Fit seconds of a decode step = fixed + each * size, both at least 0; return both, and True if the sizes differ.

    If the sizes hardly differ, only the sum is known, and half of it counts as fixed.
    """
    sizes, seconds, tokens = (np.array(column, np.float64) for column in zip(*points, strict=True))
    size, second = float(np.average(sizes, weights=tokens)), float(np.average(seconds, weights=tokens))
    each_s, differ = (1 - _FIXED_SHARE) * second / size, bool(sizes.max() >= _LEAST_SPREAD * sizes.min())
    if differ:
        spread = np.average((sizes - size) ** 2, weights=tokens)
        slope = float(np.average((sizes - size) * (seconds - second), weights=tokens) / spread)
        each_s = min(max(0.0, slope), second / size)
    return second - each_s * size, each_s, differ
