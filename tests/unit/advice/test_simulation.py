"""The simulation against closed forms, and its invariants over random setups."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_rloo.advice.simulation import Setup, Speeds, Step, simulate

SPEEDS = Speeds(decode_fixed_s=0.001, decode_each_s=0.0001, train_fixed_s=0.01, train_token_s=1e-6)
SETUP = Setup(
    num_workers=1,
    num_slots=16,
    num_ranks=1,
    groups_per_step=16,
    max_staleness=1,
    pipeline_depth=1,
    num_train_steps=30,
)
EQUAL = np.full((16, 4), 50.0)
MIXED = np.maximum(1, np.random.default_rng(0).lognormal(3, 0.7, (97, 4)))


def run(lengths: Any, speeds: dict[str, float] | None = None, **setup: Any) -> list[Step]:
    changed_speeds = Speeds(**{name: getattr(SPEEDS, name) for name in SPEEDS.__slots__} | (speeds or {}))
    changed = Setup(**{name: getattr(SETUP, name) for name in SETUP.__slots__} | setup)
    return simulate(changed_speeds, changed, lengths)


def rate(steps: list[Step], first: int = 10) -> float:
    tokens = sum(step.trained_tokens for step in steps[first:])
    return tokens / (steps[-1].ended_s - steps[first - 1].ended_s)


def staleness(steps: list[Step], first: int = 10) -> float:
    tokens = sum(step.trained_tokens for step in steps[first:])
    return sum(step.staleness_sum for step in steps[first:]) / tokens


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_slow_rollouts_give_the_tokens_that_full_batches_decode(num_workers: int) -> None:
    steps = run(MIXED, num_workers=num_workers, num_slots=8, max_staleness=4, pipeline_depth=4)
    assert rate(steps) == pytest.approx(num_workers * 8 / (0.001 + 8 * 0.0001), rel=0.05)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_slow_learner_gives_the_tokens_of_back_to_back_steps(num_ranks: int) -> None:
    steps = run(EQUAL, {"train_token_s": 1e-3}, num_ranks=num_ranks, num_workers=4)
    assert rate(steps) == pytest.approx(3200 / (0.01 + 3.2 / num_ranks), rel=1e-6)
    assert sum(step.wait_s for step in steps[10:]) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("num_ranks", "seconds"), [(1, 3.2), (2, 1.6 + 0.64), (4, 0.8 + 0.64)])
def test_several_ranks_exchange_a_time_for_each_token(num_ranks: int, seconds: float) -> None:
    speeds = {"train_token_s": 1e-3, "exchange_token_s": 2e-4}
    steps = run(EQUAL, speeds, num_ranks=num_ranks, num_workers=8)
    assert rate(steps) == pytest.approx(3200 / (0.01 + seconds), rel=1e-6)


def test_the_learner_waits_for_the_missing_share_of_samples() -> None:
    """1 - v_R / v_T: 29.1 % at 1.95 generated and 2.75 trained samples a second."""
    decode_s, train_s = 50 / 16 / 1.95 * 16 / 50, 64 / 2.75
    speeds = {
        "decode_fixed_s": decode_s * 16 / 50,
        "decode_each_s": 0.0,
        "train_fixed_s": train_s,
        "train_token_s": 0.0,
    }
    steps = run(EQUAL, speeds, num_slots=16)
    seconds = steps[-1].ended_s - steps[9].ended_s
    assert sum(step.wait_s for step in steps[10:]) / seconds == pytest.approx(1 - 1.95 / 2.75, abs=0.01)


def test_synchronous_steps_take_generation_training_and_broadcast() -> None:
    steps = run(EQUAL, {"broadcast_s": 0.3}, max_staleness=0)
    rounds = 64 / 16
    period_s = rounds * 50 * (0.001 + 16 * 0.0001) + 0.01 + 3200e-6 + 0.3
    assert steps[-1].ended_s - steps[-2].ended_s == pytest.approx(period_s, rel=1e-6)
    assert staleness(steps, first=1) == 0


@pytest.mark.parametrize("every", [1, 3, 5])
def test_rarely_published_versions_add_half_of_the_steps_between_them(every: int) -> None:
    steps = run(EQUAL, {"train_fixed_s": 10.0}, max_staleness=8, publish_every=every, num_train_steps=40)
    assert staleness(steps) == pytest.approx(1 + (every - 1) / 2, abs=0.01)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_fast_rollouts_have_the_staleness_of_the_depth(depth: int) -> None:
    steps = run(EQUAL, {"train_fixed_s": 10.0}, max_staleness=6, pipeline_depth=depth)
    assert staleness(steps) == pytest.approx(depth, abs=0.01)


def test_tokens_decoded_during_a_train_step_have_the_weights_before() -> None:
    """A slot alone, and a train step for half the time of a completion: half of the tokens are one version old."""
    lengths, speeds = np.full((1, 1), 100.0), {"train_fixed_s": 50 * 0.0011, "train_token_s": 0.0}
    steps = run(lengths, speeds, num_slots=1, groups_per_step=1, lease_ahead=1, max_staleness=2, pipeline_depth=2)
    assert staleness(steps) == pytest.approx(0.5, abs=0.01)


def test_a_straggler_past_the_bound_is_masked_or_waited_for() -> None:
    lengths = np.full((600, 4), 50.0)
    lengths[20, 0] = 5000
    masked = run(lengths, stale_tokens="mask", num_slots=64)
    assert sum(step.masked_tokens for step in masked) > 0
    waited = run(lengths, stale_tokens="wait", num_slots=64)
    assert sum(step.masked_tokens for step in waited) == 0
    assert max(step.wait_s for step in waited) > 1.5 * max(step.wait_s for step in masked)


def test_a_masked_token_costs_its_pass() -> None:
    steps = run(MIXED, {"train_token_s": 1e-5, "train_fixed_s": 0.02}, num_slots=64, groups_per_step=4)
    for before, step in itertools.pairwise(steps):
        computed = step.trained_tokens + step.masked_tokens
        assert step.ended_s - before.ended_s - step.wait_s == pytest.approx(0.02 + 1e-5 * computed)
    assert sum(step.masked_tokens for step in steps) > 0


def test_an_engine_stands_still_for_the_prompt_of_each_group() -> None:
    steps = run(EQUAL, {"prefill_s": 0.02}, max_staleness=4, pipeline_depth=4)
    assert rate(steps) == pytest.approx(1 / ((0.001 + 16 * 0.0001) / 16 + 0.02 / 200), rel=0.02)


def test_an_evaluation_takes_decode_time_from_training() -> None:
    plain, evaluated = run(MIXED), run(MIXED, num_eval=64, eval_every=1)
    assert rate(evaluated) < 0.75 * rate(plain)


def test_a_filter_of_half_the_groups_halves_the_rate_of_slow_rollouts() -> None:
    assert rate(run(MIXED, num_slots=8, kept_share=0.5)) == pytest.approx(rate(run(MIXED, num_slots=8)) / 2, rel=0.05)


@given(
    workers=st.integers(1, 5),
    slots=st.sampled_from([4, 16, 64]),
    eta=st.integers(0, 3),
    depth=st.integers(1, 3),
    ranks=st.integers(1, 3),
    policy=st.sampled_from(["mask", "drop", "wait"]),
    train_token_s=st.floats(1e-5, 1e-3),
    broadcast_s=st.floats(0, 0.5),
)
@settings(max_examples=40, deadline=None)
def test_twice_as_many_workers_never_lower_throughput(
    workers: int,
    slots: int,
    eta: int,
    depth: int,
    ranks: int,
    policy: str,
    train_token_s: float,
    broadcast_s: float,
) -> None:
    speeds = {"train_token_s": train_token_s, "broadcast_s": broadcast_s}
    # A single further worker can: 16 groups on five workers end later than on four, because a group stays whole.
    options = {
        **{"num_slots": slots, "max_staleness": eta, "pipeline_depth": depth, "num_ranks": ranks},
        **{"stale_tokens": policy, "num_train_steps": 40},
    }
    fewer, more = (run(MIXED, speeds, num_workers=num, **options) for num in (workers, 2 * workers))
    assert rate(more) >= 0.9 * rate(fewer)
    for steps in (fewer, more):
        assert len(steps) == 40
        assert staleness(steps, 0) <= eta
        assert policy != "wait" or sum(step.masked_tokens for step in steps) == 0
