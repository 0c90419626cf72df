"""Compare tables and numbers of the documents with the result files of the benchmarks."""

import itertools
import math
import re
import statistics
from typing import Any

import pytest
from support.tables import document, table
from support.tables import result as _result

from areal_rloo.config import load_config
from areal_rloo.learner.memory import GIB, estimate
from areal_rloo.models.sizes import SHIPPED

MEASURED, ALGORITHMS, LEARNER, GPU = (
    document(name) for name in ("measured.md", "algorithms.md", "learner.md", "gpu.md")
)


def _table(title: str, text: str = MEASURED) -> list[list[str]]:
    return table(title, text)


@pytest.mark.parametrize(
    ("title", "file"),
    [("The cost of staleness", "staleness.json"), ("The cost of mixed staleness", "staleness_mixed.json")],
)
def test_the_staleness_tables_equal_the_result_files(title: str, file: str) -> None:
    measured = {(row["correction"], row["eta"]): row for row in _result(file)["table"]}
    cells = _table(title)
    assert [int(row[0]) for row in cells] == [0, 1, 2, 4, 8, 16]
    for eta, *of_corrections in cells:
        for name, cell in zip(("decoupled", "naive_ppo", "no_correction"), of_corrections, strict=True):
            row = measured[name, int(eta)]
            final = f"{row['final_mean']:.3f} ± {row['final_interval']:.3f}"
            assert cell == f"{final} / {row['area_mean']:.3f} ± {row['area_interval']:.3f}"


@pytest.mark.parametrize(
    ("title", "task"), [("Arithmetic", "arithmetic"), ("Chain sums", "chain_sum"), ("Counted primes", "count_primes")]
)
def test_the_baselines_equal_the_result_file(title: str, task: str) -> None:
    measured = {
        (row["preset"], row["staleness"]): row for row in _result("baselines.json")["table"] if row["task"] == task
    }
    baselines = document("baselines.md")
    cells = _table(title, baselines)
    assert [int(row[0]) for row in cells] == [0, 1, 2, 8, 16]
    for staleness, *of_presets, seconds in cells:
        rows = [measured[preset, int(staleness)] for preset in ("rloo", "grpo", "reinforce_plus_plus")]
        assert of_presets == [f"{row['final_mean']:.3f} ± {row['final_interval']:.3f}" for row in rows]
        assert seconds == f"{min(row['core_s'] for row in rows):.0f} to {max(row['core_s'] for row in rows):.0f}"
    assert f"from an accuracy of {rows[0]['start']:.3f}" in baselines


@pytest.mark.parametrize(
    ("title", "file"),
    [
        ("The lead of the decoupled loss", "staleness.json"),
        ("The lead with mixed staleness", "staleness_mixed.json"),
    ],
)
def test_the_leads_equal_the_paired_differences_of_the_curves(title: str, file: str) -> None:
    result = _result(file)
    rows = {(row["over"], row["eta"]): row for row in result["leads"]}
    for eta, *cells in _table(title):
        for other, cell in zip(("naive_ppo", "no_correction"), cells, strict=True):
            row = rows[other, int(eta)]
            final = f"{row['final_mean']:+.3f} ± {row['final_interval']:.3f}"
            assert cell == f"{final} / {row['area_mean']:+.3f} ± {row['area_interval']:.3f}"
            ends = [
                [sum(result["curves"][f"{loss}/eta_{eta}/seed_{seed}"][-2:]) / 2 for loss in ("decoupled", other)]
                for seed in result["seeds"]
            ]
            mean = sum(ours - theirs for ours, theirs in ends) / len(ends)
            assert row["final_mean"] == pytest.approx(mean, abs=1e-4)


def _fall(curve: list[float]) -> float:
    return max(max(curve[: index + 1]) - accuracy for index, accuracy in enumerate(curve))


def test_the_falls_of_accuracy_equal_those_of_the_curves() -> None:
    result = _result("staleness.json")
    for eta, *cells in _table("Falls of accuracy during a run"):
        for loss, cell in zip(("decoupled", "naive_ppo", "no_correction"), cells, strict=True):
            falls = [_fall(result["curves"][f"{loss}/eta_{eta}/seed_{seed}"]) for seed in result["seeds"]]
            assert cell == f"{min(falls):.3f} to {max(falls):.3f}"


def test_the_lead_of_grpo_in_area_is_of_the_curves_seed_by_seed() -> None:
    curves = _result("algorithms.json")["curves"]
    leads = [_area(curves[f"grpo/seed_{seed}"]) - _area(curves[f"reinforce/seed_{seed}"]) for seed in range(3)]
    half = 4.303 * statistics.stdev(leads) / math.sqrt(3)
    assert f"this lead is {statistics.mean(leads):.3f} ± {half:.3f}" in " ".join(MEASURED.split())


def _area(curve: list[float]) -> float:
    return sum(first + second for first, second in itertools.pairwise(curve)) / 2 / (len(curve) - 1)


def test_the_table_of_algorithms_equals_the_result_file() -> None:
    measured = [
        [
            row["algorithm"],
            f"{row['final_mean']:.3f} ± {row['final_interval']:.3f}",
            f"{row['area_mean']:.3f} ± {row['area_interval']:.3f}",
        ]
        for row in _result("algorithms.json")["table"]
    ]
    assert _table("The algorithms against each other") == measured


def _largest(processes: dict[str, Any], begin: str) -> str:
    rows = [row for name, row in processes.items() if name.startswith(begin)]
    return " / ".join(f"{max(row[key] for row in rows):.1f}" for key in ("middle_third_mib", "last_third_mib"))


def test_the_table_of_memory_equals_the_result_file_and_is_flat() -> None:
    kinds = ("learner", "rollout", "rewards", "launcher", "/dev/shm")
    for cells, (name, case) in zip(
        _table("Healthy, and with either half slow"), _result("memory.json")["cases"].items(), strict=True
    ):
        times = " / ".join(f"{case[key]:.3f}" for key in ("learner_busy_s", "rollout_busy_s", "step_s"))
        assert cells == [
            *(name, f"{case['trained_samples']:,}", times),
            *(_largest(case["processes"], kind) for kind in kinds),
        ]
        assert all(row["flat"] for row in case["processes"].values())


def test_the_table_of_fuzzing_equals_the_result_file_without_findings() -> None:
    targets = _result("fuzz.json")["targets"]
    columns = ("seconds", "cpu_seconds", "inputs", "branches", "peak_rss_mib")
    assert _table("The longest search of each boundary") == [
        [name, *(f"{row[key]:,}" for key in columns)] for name, row in targets.items()
    ]
    assert not any(row["findings"] for row in targets.values())


def test_the_table_of_a_fixed_lag_equals_the_result_file() -> None:
    measured = [
        [
            f"`{row['setup']}`",
            *(f"{row[f'{name}_mean']:.3f} ± {row[f'{name}_interval']:.3f}" for name in ("final", "area")),
            f"{row['largest_fall_mean']:.2f} ± {row['largest_fall_interval']:.2f}",
            f"{row['behaviour_kl']:.4f}",
        ]
        for row in _result("lag.json")["table"]
    ]
    assert _table("Why accuracy swings at a fixed staleness of 16") == measured


def _percent(error: float) -> str:
    return "exact" if error < 1e-12 else f"{100 * error:.1f} %" if error < 0.0995 else f"{100 * error:.0f} %"


def test_the_table_of_losses_on_stale_tokens_equals_the_result_file() -> None:
    names = {  # in the order of the table
        "sequence, product": "`{level: sequence, aggregate: sum, rule: none}`",
        "token": "`{rule: none}`, w of each token",
        "token, clamp 5": "`{rule: clamp, upper: 5}`, the default",
        "token, clamp 1.5": "`{rule: clamp, upper: 1.5}`",
        "token, mask 1.5": "`{rule: mask, upper: 1.5}`",
        "sequence, mean": "`{level: sequence, aggregate: mean, rule: none}`",
        "ignore": "`{rule: ignore}`",
        "decoupled: false": "`decoupled: false`",
    }
    rows = {(row["loss"], row["distance"]): row for row in _result("bias.json")["corrections"]}
    assert _table("Losses on stale tokens", ALGORITHMS) == [
        [
            shown,
            *(_percent(rows[name, distance]["error"]) for distance in (0.0017, 0.015, 0.15)),
            *(f"{rows[name, 0.15][key]:.2f}" for key in ("size", "variance")),
        ]
        for name, shown in names.items()
    ]
    assert {name for name, _ in rows} == set(names)


def test_the_table_of_a_kl_on_stale_tokens_equals_the_result_file() -> None:
    rows = {(r["loss"], r["estimator"], r["correction"], r["distance"]): r["error"] for r in _result("bias.json")["kl"]}
    table = _table("A KL in the loss on stale tokens", ALGORITHMS)
    for name, *cells in table:
        estimator, correction = name.replace("`", "").split(", ")
        errors = [rows["token", estimator, correction, distance] for distance in (0.0017, 0.015, 0.15)]
        assert cells == [*map(_percent, errors), _percent(rows["sequence, product", estimator, correction, 0.15])]
    assert len(table) == len({(estimator, correction) for _, estimator, correction, _ in rows})


def test_the_words_about_the_kl_of_completions_equal_the_file() -> None:
    errors = {row["placement"]: row["error"] for row in _result("bias.json")["placements"]}
    assert f"of fresh tokens is {_percent(errors['k2 in the loss'])} away from the gradient of" in " ".join(
        ALGORITHMS.split()
    )
    assert _percent(errors["k1 in the reward"]) == "exact"


def test_the_table_of_lost_samples_equals_the_result_file() -> None:
    assert _table("Samples that are lost", ALGORITHMS) == [
        [row["lost"], _percent(row["error"]), f"{row['size']:.2f}"] for row in _result("bias.json")["lost"]
    ]


def test_the_table_of_late_tokens_equals_the_result_file() -> None:
    table = _result("length_bias.json")["table"]
    rows = {(row["eta"], row["slots"], row["stale_tokens"]): row for row in table}
    expected = []
    for eta, slots in dict.fromkeys((row["eta"], row["slots"]) for row in table):
        mask, drop, wait = (rows[eta, slots, rule] for rule in ("mask", "drop", "wait"))
        assert mask["trained_mean"] == pytest.approx(mask["drawn_mean"], rel=0.01)
        assert wait["trained_mean"] == pytest.approx(wait["drawn_mean"], rel=0.01)
        expected.append(
            [
                f"{eta}, {slots}",
                f"{mask['late_share_longest']:.3f} / {mask['late_share_others']:.3f}",
                f"{drop['trained_mean']} / {drop['drawn_mean']}",
                " / ".join(str(row["staleness_mean"]) for row in (mask, drop, wait)),
                " / ".join(str(row["steps_per_s"]) for row in (mask, drop, wait)),
            ]
        )
    assert _table("Completions with late tokens", ALGORITHMS) == expected


def test_the_words_about_late_tokens_equal_the_result_file() -> None:
    table = _result("length_bias.json")["table"]
    shares = {(r["eta"], r["slots"]): r["late_share_longest"] for r in table if r["stale_tokens"] == "mask"}
    factors = [r["late_share_longest"] / r["late_share_others"] for r in table if r["stale_tokens"] == "mask"]
    assert f"{min(factors):.1f} to {max(factors):.1f} times as large a share" in " ".join(ALGORITHMS.split())
    for slots in {slots for _, slots in shares}:
        assert shares[2, slots] == pytest.approx(shares[1, slots], rel=0.1)  # not less with the larger eta
        assert shares[8, slots] < shares[4, slots] < shares[2, slots]
    assert all(shares[eta, 64] < shares[eta, 512] for eta in (4, 8))


def test_the_table_of_adapters_equals_the_result_file() -> None:
    result = _result("lora.json")
    expected = []
    for row in result["table"]:
        ways = ("apart", "nearest", "stochastic", "none")
        kept = [
            f"{100 * row[f'kept_{way}_mean']:.0f} ± {100 * row[f'kept_{way}_interval']:.0f} %"
            for way in (ways[:3] if row["size"] else ())
        ]
        of_ways = (f"{row[f'{way}_mean']:.4f} ± {row[f'{way}_interval']:.4f}" for way in ways)
        lost = "" if row["lost"] is None else f"{100 * row['lost']:.2f} %"
        expected.append([f"{row['size']:g}", lost, " / ".join(kept), *of_ways])
        if row["size"]:
            assert row["apart_mean"] + row["apart_interval"] < row["nearest_mean"] - row["nearest_interval"]
            assert row["nearest_mean"] < row["stochastic_mean"]
            assert abs(row["kept_stochastic_mean"] - 1) <= row["kept_stochastic_interval"]
        if row["size"] >= 0.001:
            assert row["kept_apart_mean"] == pytest.approx(row["kept_nearest_mean"], abs=0.05)
        if row["size"] == 0.0001:
            assert row["none_mean"] + row["none_interval"] < row["nearest_mean"] - row["nearest_interval"]
    assert _table("Adapters and rounding", ALGORITHMS) == expected
    ratio = f"{result['speed_apart_over_merged']['median']:.2f}"
    assert f"at {ratio} of the speed of merged weights" in " ".join(LEARNER.split())


def test_the_estimate_of_the_learners_memory_is_near_the_measured_peaks() -> None:
    ratios = {row["case"]: row["estimated_over_measured"] for row in _result("learner_memory.json")["cases"]}
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values())
    assert f"| {' | '.join(ratios)} |\n" in LEARNER
    assert f"| {' | '.join(f'{ratio:.2f}' for ratio in ratios.values())} |\n" in LEARNER


def test_the_numbers_of_a_gpu_equal_the_result_file() -> None:
    parts = _result("gpu/gpu_check.json")
    rows = {(row["shape"], row["batch"]): row for row in parts["engine"]["tables"]["decoding"]}
    large = [rows["1.5b", batch] for batch in (1, 64, 256)]
    rates = " / ".join(f"{row['embedded_tokens_per_s']:,.0f}" for row in large)
    over = " / ".join(f"{row['over_generate']:.1f}" for row in large)
    assert f"| embedded engine, 1.5B, batch 1 / 64 / 256 | {rates} tokens/s; {over} times `generate` |" in GPU
    shares = [row["share_of_bandwidth_limit"] for row in rows.values()]
    assert f"the engine has {min(shares):.2f} to {max(shares):.2f} of the bandwidth limit" in GPU
    steps = parts["learner"]["tables"]["train step"]
    ratios = [row["estimated_over_measured"] for row in steps]
    assert len(steps) == 8
    assert f"is {min(ratios):.2f} to {max(ratios):.2f} of the peak" in GPU
    assert min(ratios) >= 0.85 and max(ratios) <= 1.15
    faster = [row["eager_s"] / row["compiled_s"] for row in parts["compiled"]["tables"]["compiled against eager"]]
    assert f"{min(faster):.2f} to {max(faster):.2f} times the speed of eager layers" in GPU
    outcomes = [row["outcome"] for row in parts["tests"]["tables"]["tests"]]
    assert f"| {outcomes.count('passed')} passed; {len(outcomes) - outcomes.count('passed')} of NCCL" in GPU


def test_the_table_against_trl_equals_the_result_file() -> None:
    expected = []
    for part in ("speed", "long_tail"):
        speed = _result("trl_peer.json")[part]
        rates, ranges = speed["samples_per_s"], speed["range"]
        names = ("asynchronous", "synchronous", "trl")
        cells = [f"{rates[name]:.1f} ({ranges[name][0]:.1f} to {ranges[name][1]:.1f})" for name in names]
        assert speed["asynchronous_over_trl"] == pytest.approx(rates["asynchronous"] / rates["trl"], rel=0.02)
        expected.append([*cells, f"{speed['asynchronous_over_trl']:.2f}"])
    assert [row[1:] for row in _table("Samples a second")] == expected
    result, words = _result("trl_peer.json"), " ".join(MEASURED.split())
    for name in ("asynchronous", "synchronous"):
        low, median, high = sorted(result["learning"]["seconds_to_goal"][name])
        assert f"{median:.0f} s ({low:.0f} to {high:.0f}; {name})" in words
    final = {name: statistics.median(ends) for name, ends in result["learning"]["final_accuracy"].items()}
    assert f"at the end {final['asynchronous']} and {final['synchronous']} of 200 prompts" in words
    assert f"TRL ended at {final['trl']}" in words
    limits = result["limit"]["samples_per_s"]
    shares = {
        part: [f"{result[part]['samples_per_s'][name] / limits[part]:.2f}" for name in names]
        for part in ("speed", "long_tail")
    }
    of_quickstart, of_long_tail = shares["speed"], shares["long_tail"]
    assert f"has {of_quickstart[0]}, the synchronous one {of_quickstart[1]} and TRL {of_quickstart[2]}." in words
    assert f"the shares are {of_long_tail[0]}, {of_long_tail[1]} and {of_long_tail[2]}." in words
    assert f"{result['limit']['peak_gflops']:.0f} GFLOP/s" in words
    assert f"{result['limit']['mflop_of_sample']['speed']:.0f} MFLOP" in words
    assert f"{limits['speed']:,.0f} samples/s" in words


def test_the_table_of_the_depth_equals_the_result_file() -> None:
    rows = _result("pipeline_depth.json")["depths"]
    first = rows[0]["trained_tokens_per_s"]
    assert _table("Depth") == [
        [
            str(row["depth"]),
            f"{row['trained_tokens_per_s'] / first:.2f}",
            f"{row['first_staleness']:.2f} / {row['last_staleness']:.2f}",
        ]
        for row in rows
    ]


def test_todays_estimate_is_near_the_peaks_of_a_gpu() -> None:
    shares = []
    for row in _result("gpu/gpu_check.json")["learner"]["tables"]["train step"]:
        tokens, option = re.fullmatch(r"rows of (\d+) tokens, (.*)", row["case"]).groups()  # type: ignore[union-attr]
        options = ["model.dtype=bfloat16", f"learner.microbatch_tokens={tokens}", "learner.num_minibatches=1"]
        config = load_config("quickstart.yaml", [*options, *([] if option == "plain" else [option])])
        parts = estimate(SHIPPED["Qwen/Qwen2.5-1.5B-Instruct"], config, on_gpu=True)
        shares.append(sum(parts.values()) / GIB / row["measured_gib"])
    assert len(shares) == 8
    assert f"by the same peaks, {min(shares):.2f} to {max(shares):.2f}." in LEARNER
