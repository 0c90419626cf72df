"""Calibration: a simulated run, written as records, gives back the speeds that made it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from support.measured_steps import TOKENS, measured_steps

from areal_rloo.advice.calibration import Load, calibrated, drawn_lengths, merged, setup_of
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
