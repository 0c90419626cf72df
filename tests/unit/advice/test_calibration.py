"""Calibration: a simulated run, written as records, gives back the speeds that made it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.measured_steps import TOKENS, measured_steps

from areal_rloo.advice.calibration import Load, calibrated, drawn_lengths, merged, setup_of
from areal_rloo.advice.forecast import forecast
from areal_rloo.advice.simulation import Speeds, simulate
from areal_rloo.config import Config, load_config
from areal_rloo.errors import DataError
from areal_rloo.telemetry.records import LedgerCounts, TrainRecord

MakeTrainRecord = Callable[..., TrainRecord]


@pytest.fixture
def config() -> Config:
    return load_config("quickstart.yaml", ["rollout.num_slots=16"])


def test_times_of_records_give_the_speeds(make_train_record: MakeTrainRecord, config: Config) -> None:
    load = calibrated(measured_steps(make_train_record, [16, 16, 12, 8, 16]), config)
    assert load.speeds.decode_fixed_s == pytest.approx(0.001)
    assert load.speeds.decode_each_s == pytest.approx(0.0001)
    assert load.speeds.train_token_s == pytest.approx(1.4 / TOKENS)
    assert load.speeds.train_fixed_s == pytest.approx(0.1)
    assert load.speeds.broadcast_s == 0.2
    assert load.loss_share == pytest.approx(1.0)
    assert load.sizes_differ


def test_the_first_step_is_left_out(make_train_record: MakeTrainRecord, config: Config) -> None:
    steps = measured_steps(make_train_record, [16, 16, 12, 8, 16])
    slow = msgspec.structs.replace(
        steps[0], train_step_s=100.0, completion_tokens_mean=90.0, times_s={"broadcast": 9.0}
    )
    assert calibrated([slow, *steps[1:]], config).speeds == calibrated(steps, config).speeds


def test_a_single_batch_size_gives_the_time_of_this_size(make_train_record: MakeTrainRecord, config: Config) -> None:
    load = calibrated(measured_steps(make_train_record, [16, 16, 16, 16]), config)
    assert load.speeds.decode_fixed_s + 16 * load.speeds.decode_each_s == pytest.approx(0.0026)
    assert not load.sizes_differ


def test_a_second_run_with_other_slots_gives_the_line(make_train_record: MakeTrainRecord, config: Config) -> None:
    runs = [measured_steps(make_train_record, [size] * 4) for size in (16, 64)]
    load = merged([calibrated(run, config) for run in runs], runs)
    assert load.sizes_differ
    assert load.speeds.decode_fixed_s == pytest.approx(0.001)
    assert load.speeds.decode_each_s == pytest.approx(0.0001)


def test_ranks_share_the_tokens(make_train_record: MakeTrainRecord) -> None:
    config = load_config("quickstart.yaml", ["learner.num_ranks=2"])
    load = calibrated(measured_steps(make_train_record, [16, 16, 16]), config)
    assert load.speeds.train_token_s == pytest.approx(2 * 1.4 / TOKENS)


@pytest.mark.parametrize(
    ("seconds", "own", "exchange"),
    [
        ({1: 3e-4, 2: 3e-4 + 2e-4}, 3e-4, 1e-4),
        ({4: 3e-4 + 4e-4, 1: 3e-4, 2: 3e-4 + 2e-4}, 3e-4, 1e-4),
        ({1: 3e-4, 2: 2e-4}, 3e-4, 0.0),  # two ranks more than twice as fast
        ({2: 5e-4, 4: 9.9e-4}, 7.45e-4, 0.0),  # no rank alone: nothing tells the two apart
        ({2: 5e-4, 4: 10.1e-4}, 7.55e-4, 0.0),
    ],
)
def test_one_rank_and_several_give_the_time_of_the_exchange(
    seconds: dict[int, float], own: float, exchange: float, make_train_record: MakeTrainRecord
) -> None:
    """`seconds`: for a token, times the number of ranks."""
    runs = [measured_steps(make_train_record, [16, 16, 16])] * len(seconds)
    loads = [
        with_train_token_s(calibrated(run, ranks_of(num)), token_s)
        for run, (num, token_s) in zip(runs, seconds.items(), strict=True)
    ]
    speeds = merged(loads, runs).speeds
    assert (speeds.train_token_s, speeds.exchange_token_s) == (pytest.approx(own), pytest.approx(exchange))


def ranks_of(num_ranks: int) -> Config:
    return load_config("quickstart.yaml", [f"learner.num_ranks={num_ranks}"])


def with_train_token_s(load: Load, token_s: float) -> Load:
    return replace(load, speeds=replace(load.speeds, train_token_s=token_s))


def test_stale_tokens_are_computed_and_no_share_of_the_loss(make_train_record: MakeTrainRecord, config: Config) -> None:
    """A quarter of the tokens is past the bound, which the simulation finds itself; a third of the others is masked."""
    masked = {"masked_token_share": 0.25, "trained_tokens": TOKENS // 2}
    load = calibrated(measured_steps(make_train_record, [16, 16, 16], **masked), config)
    assert load.loss_share == pytest.approx(2 / 3)
    assert load.speeds.train_token_s == pytest.approx(1.4 / TOKENS)
    assert load.lengths.mean() == pytest.approx(40, rel=0.01)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_simulated_run_with_stale_tokens_is_forecast_again(
    max_staleness: int, make_train_record: MakeTrainRecord
) -> None:
    options = [
        "rollout.num_slots=16",
        "learner.groups_per_step=8",
        f"algorithm.max_staleness={max_staleness}",
        "rollout.sampling.max_new_tokens=800",
    ]
    config = load_config("quickstart.yaml", options)
    speeds = Speeds(decode_fixed_s=1e-3, decode_each_s=1e-4, train_fixed_s=0.1, train_token_s=6e-5, broadcast_s=0.05)
    setup, lengths = setup_of(config), drawn_lengths(mean=40, std=80, longest_of_group=150, group_size=8, most=800)
    steps = simulate(speeds, setup, lengths)[5:25]
    tokens = [step.trained_tokens + step.masked_tokens for step in steps]
    records = [
        msgspec.structs.replace(
            record,
            policy_tokens=round(num),
            trained_tokens=round(step.trained_tokens),
            masked_token_share=step.masked_tokens / num,
            train_step_s=speeds.train_s(num, 1),
            wall_s=step.ended_s,
            wait_s=step.wait_s,
            times_s={"broadcast": 0.05},
        )
        for record, num, step in zip(
            measured_steps(
                make_train_record,
                [12, 16] * 10,
                **{"completion_tokens_std": 80.0, "longest_of_group_mean": 150.0, "completion_tokens_max": 800},
            ),
            tokens,
            steps,
            strict=True,
        )
    ]
    rate = sum(step.trained_tokens for step in steps[1:]) / (steps[-1].ended_s - steps[0].ended_s)
    assert (sum(step.masked_tokens for step in steps) > 0.1 * sum(tokens)) == (max_staleness == 1)
    assert forecast(calibrated(records, config), setup).tokens_per_s == pytest.approx(rate, rel=0.05)


def test_a_sample_of_several_completions_has_the_tokens_of_all(
    make_train_record: MakeTrainRecord, config: Config
) -> None:
    """An episode whose turns are completions of their own: three of 40 tokens, one after the other."""
    several = measured_steps(make_train_record, [16] * 4, policy_tokens=3 * TOKENS, trained_tokens=3 * TOKENS)
    single = [
        msgspec.structs.replace(
            record, completion_tokens_mean=120.0, completion_tokens_std=30.0, longest_of_group_mean=150.0
        )
        for record in several
    ]
    long = load_config("quickstart.yaml", ["rollout.num_slots=16", "rollout.sampling.max_new_tokens=288"])
    found = calibrated(several, config)
    assert found.lengths.mean() == pytest.approx(120, rel=0.01)
    assert found.speeds.train_token_s == pytest.approx(1.4 / (3 * TOKENS))
    assert forecast(found, setup_of(config)) == forecast(calibrated(single, long), setup_of(config))


def test_dropped_samples_lower_the_kept_share(make_train_record: MakeTrainRecord, config: Config) -> None:
    """Except the stale ones, which the simulation drops itself."""
    counts = {"admitted": 500, "dropped_tokens": {}, "buffered": 0, "in_flight": 0}
    ledger = LedgerCounts(**counts, trained=375, dropped={"low_reward_std": 125, "stale": 50})
    assert calibrated(measured_steps(make_train_record, [16, 16, 16], ledger=ledger), config).kept_share == 0.75


def test_too_few_steps_and_steps_without_tokens_are_refused(make_train_record: MakeTrainRecord, config: Config) -> None:
    with pytest.raises(DataError, match="at least 3 train steps"):
        calibrated(measured_steps(make_train_record, [16, 16]), config)
    with pytest.raises(DataError, match="no speed"):
        calibrated(measured_steps(make_train_record, [16, 16, 16], generated_tokens=7), config)


@pytest.mark.parametrize("std", [0.0, 10.0, 40.0])
@pytest.mark.parametrize("longest", [41.0, 55.0, 70.0])
def test_drawn_lengths_have_the_mean_and_the_longest_of_a_group(std: float, longest: float) -> None:
    lengths = drawn_lengths(mean=40.0, std=std, longest_of_group=longest, group_size=8, most=96)
    assert lengths.shape[1] == 8
    assert lengths.mean() == pytest.approx(40, rel=0.02)
    assert lengths.min() >= 1
    assert lengths.max() <= 96
    independent = np.random.default_rng(1).permutation(lengths.ravel()).reshape(-1, 8).max(axis=1).mean()
    assert lengths.max(axis=1).mean() == pytest.approx(min(longest, max(40.0, independent)), rel=0.05)


def test_a_setup_has_the_counts_of_the_config_and_the_last_evaluation(
    make_train_record: MakeTrainRecord, eval_record: Any
) -> None:
    config = load_config(
        "quickstart.yaml", ["rollout.num_workers=3", "rollout.num_slots=16", "algorithm.max_staleness=4"]
    )
    setup = setup_of(config, [eval_record])
    assert (setup.num_workers, setup.num_slots, setup.groups_per_step, setup.max_staleness) == (3, 16, 48, 4)
    assert (setup.num_eval, setup.eval_every) == (200, 5)
