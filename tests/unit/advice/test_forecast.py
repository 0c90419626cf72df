"""Forecasts, the sentence about a run, and the search of a split against an exhaustive sweep."""

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from support.measured_steps import measured_steps

from areal_rloo.advice.calibration import Load, drawn_lengths
from areal_rloo.advice.forecast import best_setup, bottleneck, bottleneck_of_run, forecast, splits
from areal_rloo.advice.shrinking import shrunk
from areal_rloo.advice.simulation import Setup, Speeds
from areal_rloo.config import load_config
from areal_rloo.telemetry.bound import newest
from areal_rloo.telemetry.records import LedgerCounts, TrainRecord

SETUP = Setup(
    num_workers=1,
    num_slots=16,
    num_ranks=1,
    groups_per_step=32,
    max_staleness=4,
    pipeline_depth=1,
    num_train_steps=100,
)
LENGTHS = drawn_lengths(mean=40, std=20, longest_of_group=60, group_size=4, most=200)


def load(decode_each_s: float, train_token_s: float) -> Load:
    speeds = Speeds(
        decode_fixed_s=16 * decode_each_s,
        decode_each_s=decode_each_s,
        train_fixed_s=0.05,
        train_token_s=train_token_s,
        broadcast_s=0.05,
    )
    return Load(speeds=speeds, num_ranks=1, lengths=LENGTHS, loss_share=1.0, kept_share=1.0, sizes_differ=True)


def sentence(load: Load, setup: Setup) -> str:
    found = forecast(load, setup)
    return bottleneck(load, setup, wait_share=found.wait_share, idle_share=found.idle_share)


def test_the_sentence_of_slow_rollouts_has_the_gain_from_a_worker() -> None:
    """Generation takes 2 * 1e-4 s a token, training 1.5e-4: the learner waits a quarter, and a worker helps by 4/3."""
    words = sentence(load(1e-4, 1.5e-4 - 0.05 / 5120), SETUP)
    assert words.startswith("rollout-bound: the learner waits 2")
    assert words.endswith("%; a second worker, with more cores or another GPU, would raise throughput by about 33 %")


def test_the_sentence_of_a_slow_learner_has_the_gain_from_a_rank() -> None:
    words = sentence(load(1e-5, 4e-4), replace(SETUP, num_ranks=3, num_workers=7))
    assert words.startswith("learner-bound: the rollouts wait ")
    assert words.endswith("a fourth learner rank, with more cores or another GPU, would raise throughput by about 30 %")


def test_a_forecast_knows_no_rewards_that_both_halves_wait_for() -> None:
    shares = {"wait_share": 0.9, "idle_share": 0.8}
    assert bottleneck(load(1e-4, 1e-4), SETUP, **shares).startswith("reward-bound")
    assert bottleneck(load(1e-4, 1e-4), SETUP, **shares, is_forecast=True).startswith("in lockstep")


def test_a_huge_bound_does_not_make_the_search_long() -> None:
    setup, _ = best_setup(load(1e-4, 1e-4), replace(SETUP, max_staleness=100_000), splits(2, per_worker=1), slots=[16])
    assert setup.pipeline_depth <= 64


@pytest.mark.parametrize("eval_every", [1, 3, 10, 20, 25, 50, 200])
def test_evaluations_cost_their_share_of_slow_rollouts(eval_every: int) -> None:
    """However rare: of `eval_every` steps, one evaluation decodes as many samples as four steps."""
    measured, setup = load(1e-4, 1e-5), replace(SETUP, num_ranks=2, num_eval=4 * 128)
    rate = forecast(measured, replace(setup, eval_every=0)).tokens_per_s
    evaluating = forecast(measured, replace(setup, eval_every=eval_every)).tokens_per_s
    # A single evaluation runs at a time, and takes half of the engine.
    assert evaluating == pytest.approx(rate * max(0.5, 1 / (1 + 4 / eval_every)), rel=0.05)


def test_a_huge_depth_is_simulated_for_the_counted_steps_alone() -> None:
    huge, deep = (replace(SETUP, max_staleness=num, pipeline_depth=num) for num in (1_000_000, 100))
    assert forecast(load(1e-4, 1e-4), huge) == forecast(load(1e-4, 1e-4), deep)


def test_an_evaluation_at_the_start_is_no_part_of_a_forecast() -> None:
    measured = load(1e-4, 1e-5)
    assert forecast(measured, replace(SETUP, num_eval=50_000, eval_every=0)) == forecast(measured, SETUP)


@pytest.mark.parametrize("ratio", [0.6, 1.0, 1.6])
@pytest.mark.parametrize(
    ("num_workers", "groups_per_step", "kept_share", "most_samples"),
    [(32, 512, 1.0, 512), (2, 512, 1.0, 256), (1, 512, 0.25, 1024)],
)
def test_a_shrunk_run_has_nearly_the_forecast_of_the_whole(
    num_workers: int, groups_per_step: int, kept_share: float, most_samples: int, ratio: float
) -> None:
    """`ratio`: of the seconds of generating to those of training."""
    decode_s = 1e-4 * 2  # a token, of 16 slots
    train_token_s = decode_s / num_workers / ratio / kept_share
    measured = replace(load(1e-4, train_token_s), kept_share=kept_share)
    setup = replace(SETUP, num_workers=num_workers, groups_per_step=groups_per_step, pipeline_depth=2)
    small, whole = forecast(measured, setup, most_samples=most_samples), forecast(measured, setup, most_samples=10**9)
    kept = replace(setup, kept_share=kept_share)
    assert shrunk(measured.speeds, kept, 4, most_samples).setup.groups_per_step <= groups_per_step / 2
    assert small.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=0.08)
    for name in ("staleness", "masked_share", "wait_share", "idle_share"):
        assert getattr(small, name) == pytest.approx(getattr(whole, name), abs=0.2 if name == "staleness" else 0.06), (
            name
        )


def test_a_run_of_any_size_is_shrunk_to_a_few_samples() -> None:
    for num_workers, groups_per_step, num_slots in ((1, 1 << 20, 64), (1024, 1 << 16, 256), (1024, 4096, 1)):
        setup = replace(SETUP, num_workers=num_workers, groups_per_step=groups_per_step, num_slots=num_slots)
        small = shrunk(load(1e-4, 1e-4).speeds, setup, 16).setup
        assert small.groups_per_step * 16 <= 16_384, "twice the aim"
        assert small.num_workers <= 1024


def test_groups_that_a_filter_drops_cost_rollouts() -> None:
    """The rollouts are the bottleneck: a quarter of the groups gives a quarter of the tokens, and another split."""
    measured, setup = load(1e-4, 1e-5), replace(SETUP, num_ranks=2)
    filtered = replace(measured, kept_share=0.25)
    rate = forecast(measured, setup).tokens_per_s
    assert forecast(filtered, setup).tokens_per_s == pytest.approx(rate / 4, rel=0.05)
    slow, choices = load(1e-4, 2e-4), splits(10, per_worker=1)
    (few, _), (many, _) = (
        best_setup(found, SETUP, choices, slots=[16]) for found in (slow, replace(slow, kept_share=0.25))
    )
    assert few.num_workers < many.num_workers


def test_the_sentence_of_synchronous_steps_names_the_staleness() -> None:
    words = sentence(load(5e-5, 1e-4), replace(SETUP, max_staleness=0))
    assert words.startswith("in lockstep: the learner waits 5")
    assert "algorithm.max_staleness=1 would raise throughput by about" in words
    assert int(words.split()[-2]) > 50


def test_the_sentence_of_slow_rewards_names_their_processes() -> None:
    """Neither more workers nor a deeper pipeline would help."""
    words = bottleneck(load(5e-5, 1e-4), SETUP, wait_share=0.9, idle_share=0.9)
    assert words.startswith("reward-bound: the learner waits 90 %, the rollouts wait 90 %, both for completions ")
    assert "raise rollout.num_reward_workers" in words


def test_the_sentence_beyond_the_known_ordinals_still_reads() -> None:
    words = sentence(load(1e-3, 1e-5), replace(SETUP, num_workers=7))
    assert "; another worker, with more cores or another GPU, would raise" in words


def test_the_gain_of_many_workers_is_that_of_a_tenth_more() -> None:
    """Another worker beside 256 would bring 0.4 %, which reads like nothing."""
    setup = replace(SETUP, num_workers=40, groups_per_step=320, num_slots=4)
    words = sentence(load(1e-3, 1e-7), setup)
    assert words.startswith("rollout-bound: ")
    assert "; 4 more workers, with more cores or another GPU, would raise throughput by about " in words
    assert 8 <= int(words.split()[-2]) <= 12


def test_a_small_gain_is_not_called_nothing() -> None:
    measured = load(1e-4, 1e-4)
    slow = replace(measured, speeds=replace(measured.speeds, train_fixed_s=100.0))
    words = bottleneck(slow, SETUP, wait_share=0.0, idle_share=0.9)
    assert words.endswith(
        "a second learner rank, with more cores or another GPU, would raise throughput by about 0.3 %"
    )


def test_a_learner_with_the_most_workers_gets_no_advice_on_another() -> None:
    words = bottleneck(load(1e-3, 1e-6), replace(SETUP, num_workers=1024), wait_share=0.9, idle_share=0.0)
    assert words.endswith("; a learner takes no more workers; make each faster, with more devices")


@pytest.mark.parametrize("num_devices", [3, 8])
@pytest.mark.parametrize("train_token_s", [2e-5, 1e-4, 8e-4])
@pytest.mark.parametrize("exchange_share", [0.0, 0.25, 0.6])  # a lone rank without exchange makes a second peak
def test_the_advised_split_is_near_the_best_of_a_sweep(
    num_devices: int, train_token_s: float, exchange_share: float
) -> None:
    measured, choices = load(1e-4, train_token_s), splits(num_devices, per_worker=1)
    speeds = replace(measured.speeds, exchange_token_s=exchange_share * train_token_s)
    measured, setup = replace(measured, speeds=speeds), replace(SETUP, groups_per_step=16)
    best, found = best_setup(measured, setup, choices, slots=[8, 32])
    swept = max(
        forecast(
            measured,
            replace(setup, num_ranks=ranks, num_workers=workers, pipeline_depth=depth, num_slots=slots),
        ).tokens_per_s
        for ranks, workers in choices
        for depth in (1, 2, 4)
        for slots in (8, 32)
    )
    assert best.num_ranks + best.num_workers == num_devices
    assert found.tokens_per_s == forecast(measured, best).tokens_per_s >= 0.95 * swept


def test_ranks_that_exchange_slowly_leave_devices_to_the_workers() -> None:
    of_load = load(1e-4, 1e-4)
    alone, *_ = best_setup(of_load, SETUP, splits(4, per_worker=1), slots=[SETUP.num_slots])
    slow = replace(of_load, speeds=replace(of_load.speeds, exchange_token_s=1e-4))
    exchanging, *_ = best_setup(slow, SETUP, splits(4, per_worker=1), slots=[SETUP.num_slots])
    assert (alone.num_ranks, exchanging.num_ranks) == (2, 1)


@pytest.mark.parametrize(
    ("num_devices", "max_staleness", "decode_each_s", "exchange_share", "num_ranks"),
    [(12, 1, 1e-4, 0.25, 6), (8, 0, 2e-4, 0.6, 1)],
)
def test_the_search_passes_small_steps_and_two_ranks_slower_than_one(
    num_devices: int, max_staleness: int, decode_each_s: float, exchange_share: float, num_ranks: int
) -> None:
    lengths = drawn_lengths(mean=40, std=10, longest_of_group=50, group_size=8, most=64)
    measured = replace(load(decode_each_s, 1e-4), lengths=lengths)
    speeds = replace(measured.speeds, decode_fixed_s=1e-3, train_fixed_s=0.01, exchange_token_s=exchange_share * 1e-4)
    measured, choices = replace(measured, speeds=speeds), splits(num_devices, per_worker=1)
    setup = replace(SETUP, groups_per_step=12, max_staleness=max_staleness)
    best, found = best_setup(measured, setup, choices, slots=[16])
    swept = max(
        forecast(measured, replace(setup, num_ranks=ranks, num_workers=workers)).tokens_per_s
        for ranks, workers in choices
    )
    assert (best.num_ranks, found.tokens_per_s) == (num_ranks, swept)


def test_synchronous_steps_get_more_ranks_than_equal_halves_need() -> None:
    """Sums of both times are least at another split than the larger of both times, where the search starts."""
    measured, setup, choices = load(2e-4, 1e-4), replace(SETUP, max_staleness=0), splits(12, per_worker=1)
    best, found = best_setup(measured, setup, choices, slots=[16])
    rates = [
        forecast(measured, replace(setup, num_ranks=ranks, num_workers=workers)).tokens_per_s
        for ranks, workers in choices
    ]
    assert found.tokens_per_s == max(rates)
    assert best.num_ranks == choices[rates.index(max(rates))][0] > 2
    assert max(rates) > 1.05 * rates[1], "of two ranks, which train as fast as ten workers generate"


def test_splits_use_the_devices_of_tensor_parallel_workers_and_replicas() -> None:
    assert splits(8, per_worker=2) == [(1, 3), (2, 3), (3, 2), (4, 2), (5, 1), (6, 1)]
    assert splits(8, per_worker=1, rank_step=3) == [(3, 5), (6, 2)]
    assert splits(1, per_worker=1) == []


def test_splits_stay_within_what_a_run_takes() -> None:
    """4,096 ranks, 1,024 workers, and no more ranks than samples."""
    assert splits(6, per_worker=1, most_ranks=2) == [(1, 5), (2, 4)]
    huge = splits(10**12, per_worker=4)
    assert (huge[0], huge[-1], len(huge)) == ((1, 1024), (4096, 1024), 4096)
    assert splits(1026, per_worker=1)[:3] == [(1, 1024), (2, 1024), (3, 1023)]


def test_a_search_among_many_splits_ends_near_the_best() -> None:
    measured, setup = load(1e-4, 1e-5), replace(SETUP, groups_per_step=64)
    choices = splits(200, per_worker=1)
    best, found = best_setup(measured, setup, choices, slots=[16])
    some = [
        forecast(measured, replace(best, num_ranks=ranks, num_workers=workers)).tokens_per_s
        for ranks, workers in choices[:: len(choices) // 20]
    ]
    assert found.tokens_per_s >= 0.95 * max(some)


def test_a_run_says_which_half_waits(make_train_record: Callable[..., TrainRecord]) -> None:
    config = load_config("quickstart.yaml", ["rollout.num_slots=16"])
    all_kept = LedgerCounts(admitted=9, trained=9, dropped={}, dropped_tokens={}, buffered=0, in_flight=0)
    words = bottleneck_of_run(measured_steps(make_train_record, [16] * 8, wait_s=1.5, ledger=all_kept), config)
    assert words is not None
    assert words.startswith("rollout-bound: the learner waits 50 %; a second worker, with more cores or another GPU, ")
    # A worker decodes 384 * 40 tokens in 2.5 s, so the next bound is the learner, with 1.5 s a step.
    assert 60 <= int(words.split()[-2]) <= 67


def test_a_restart_of_the_learner_is_no_part_of_the_sentence(make_train_record: Callable[..., TrainRecord]) -> None:
    """After a restart the learner waits for the first batch, and trains slowly at first."""
    config = load_config("quickstart.yaml", ["rollout.num_slots=16"])
    records = measured_steps(make_train_record, [16] * 16, wait_s=0.0)
    restarted = [
        msgspec.structs.replace(
            record,
            steps_since_start=record.num_train_steps - 8,
            wall_s=record.wall_s + 300,
            learner_idle_s=record.learner_idle_s + 200,
            train_step_s=record.train_step_s + 100 * (record.num_train_steps == 9),
        )
        for record in records[8:]
    ]
    assert newest([*records[:8], *restarted]) == restarted
    assert bottleneck_of_run([*records[:8], *restarted], config) == bottleneck_of_run(records[8:], config)
    assert bottleneck_of_run([*records[:8], *restarted[:2]], config) is None, "two steps since the restart"


def test_a_run_that_cannot_tell_says_nothing(make_train_record: Callable[..., TrainRecord]) -> None:
    config = load_config("quickstart.yaml", [])
    assert bottleneck_of_run(measured_steps(make_train_record, [16] * 2), config) is None
    assert bottleneck_of_run(measured_steps(make_train_record, [16] * 8, wall_s=2.0), config) is None, "a damaged file"
    in_turns = load_config("quickstart.yaml", ["rollout.share_devices=in_turns"])
    assert bottleneck_of_run(measured_steps(make_train_record, [16] * 8, wait_s=1.5), in_turns) is None


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, 1e300, math.nan])
@pytest.mark.parametrize(
    "field",
    [
        *("wall_s", "wait_s", "train_step_s", "learner_idle_s", "rollout_idle_s", "rollout_busy_s", "decoding_s"),
        *("completion_tokens_mean", "completion_tokens_std", "longest_of_group_mean"),
        *("trained_tokens", "generated_tokens", "policy_tokens", "masked_token_share", "steps_since_start"),
    ],
)
def test_damaged_numbers_give_a_sentence_or_none(
    field: str, value: float, make_train_record: Callable[..., TrainRecord]
) -> None:
    records = measured_steps(make_train_record, [16] * 8)
    for damaged in (records[:4], records[7:]):
        changed = [msgspec.structs.replace(record, **{field: value}) for record in damaged]
        others = [record for record in records if record not in damaged]
        words = bottleneck_of_run([*changed, *others], load_config("quickstart.yaml", []))
        assert words is None or "would raise throughput" in words or "would bring nothing" in words
