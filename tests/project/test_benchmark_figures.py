"""Compare the pages of the benchmarks, and the figures that the documents take from them, with the result files."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.tables import table

from benchmarks import harness, pages
from benchmarks.__main__ import NAMES
from benchmarks.harness import Result

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "benchmarks" / "results"
MEASURED = (REPO / "docs" / "measured.md").read_text(encoding="utf-8")
SCALING = (REPO / "docs" / "scaling.md").read_text(encoding="utf-8")


def _result(name: str) -> Result:
    return harness.read(RESULTS / f"{name}.json")


def _table(title: str, text: str = MEASURED) -> list[list[str]]:
    return table(title, text)


def _ratios(name: str, case: str, *pairs: tuple[str, str]) -> str:
    result = _result(name)
    return " / ".join(f"{result.ratio(case, *pair):.2f}" for pair in pairs)


@pytest.mark.parametrize("name", [name for name in NAMES if (RESULTS / f"{name}.json").exists()])
def test_page_and_plot_of_a_benchmark_show_its_result_file(name: str) -> None:
    result = _result(name)
    assert result.benchmark == name
    assert not result.quick, "the numbers of a quick run are no results"
    assert (RESULTS / f"{name}.md").read_text(encoding="utf-8") == pages.markdown(result)
    assert (RESULTS / f"{name}.svg").read_text(encoding="utf-8") == pages.svg(result)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_result_has_its_date_its_commit_and_the_hardware(path: Path) -> None:
    result = json.loads(path.read_text())
    made = result.get("recorded", result)  # an early run did not note them: those of the commit with its numbers
    assert made["date"] > "2026" and made["commit"] and result["hardware"]["processor"]


def test_the_document_names_the_processor_of_each_result() -> None:
    results = [_result(name) for name in NAMES if (RESULTS / f"{name}.json").exists()]
    assert {result.benchmark for result in results if str(result.hardware["processor"]) not in MEASURED} == set()


def test_the_table_of_ratios_equals_the_result_files() -> None:
    shapes = json.loads((RESULTS / "generation_shapes.json").read_text())["0.5b"]
    over = {
        name: " / ".join(f"{shapes[f'batch_{batch}']['embedded_over'][name]:.2f}" for batch in (1, 64, 256))
        for name in ("generate", "generate_batch")
    }
    pause = json.loads((RESULTS / "sglang_pause.json").read_text())["abort_over_in_place_cost"]
    memory = _result("logprobs").case("memory").facts
    packing = _result("packing")
    padding = packing.case("log_normal").facts["padded_tokens"] / packing.case("log_normal").facts["tokens"]
    plan = _result("plan").case("dry_run")
    dry_run = f"{plan.facts['processes_of_16_hosts']} processes ({plan.measured['16_hosts'].median:.2f} s)"
    tail = ("generation", "long_tail")
    expected = [
        _ratios("async_vs_sync", "quickstart", *((f"eta_{eta}", "eta_0") for eta in (1, 4))),
        _ratios(*tail, ("embedded", "generate")),
        _ratios(*tail, ("embedded", "generate_batch"), ("embedded", "running_manager")),
        *over.values(),
        f"1/{pause:.0f}",
        f"{_ratios('logprobs', 'time', ('at_once', 'whole'))} / {_ratios('logprobs', 'memory', ('at_once', 'whole'))}",
        f"{packing.ratio('log_normal', 'packed', 'padded') / padding:.2f}",
        _ratios("weights", "transports", ("shared_memory", "memcpy"), ("collective", "gloo_flat")),
        _ratios("observing", "quickstart", ("observed", "alone")),
        _ratios("plan", "dry_run", ("16_hosts", "1_hosts"), ("128_hosts", "1_hosts")),
        _ratios("starts", "learner", ("ours", "collecting")),
    ]
    table = _table("Ratios to named alternatives")
    assert [row[2] for row in table] == expected
    assert f"vocabulary {memory['vocabulary']:,}" in table[6][0]
    assert f"with {memory['tokens_at_once']:,} tokens" in table[6][1]
    assert f"{_result('generation').case('long_tail').facts['requests']} requests" in table[1][0]
    assert dry_run in table[10][0]
    (observed,) = _result("observing").case("quickstart").ratios
    assert observed.interval is not None
    assert "from {:.2f} to {:.2f}".format(*observed.interval) in table[9][1]


def test_the_tables_of_scaling_equal_the_result_files() -> None:
    intake, steps = _result("intake").case("cost_of_a_sample"), _result("step_overhead").cases
    over = {ratio.of: f"{ratio.median:.2f}" for ratio in intake.ratios}
    assert _table("Bookkeeping for a sample", SCALING) == [
        [name, f"{numbers.median:.0f}", over.get(name, "1.00")] for name, numbers in intake.measured.items()
    ]
    assert _table("Work of rank 0 beside the model", SCALING) == [
        [
            *(f"{case.facts[name]:,}" for name in ("ranks", "median_tokens")),
            f"{case.facts['million_tokens']:.2f}",
            f"{case.measured['overhead'].median:.3f}",
            f"{case.measured['ahead'].median:.4f}",
            f"{case.ratios[0].median:.0f}",
        ]
        for case in steps
    ]
    assert {case.facts["answer_bytes_per_rank"] for case in steps if case.facts["ranks"] > 1} == {924}
    last = list(intake.measured.values())[-1].median
    slowest = [f"({steps[-1].measured['overhead'].median:.3f} s a million)", f"({last:.0f} us)"]
    assert [row[2].partition(" (")[2] for row in _table("10,000 GPUs, by calculation", SCALING)[:2]] == [
        words.removeprefix("(") for words in slowest
    ]


def test_the_table_of_the_fleet_equals_the_result_file() -> None:
    cases = {case.case: case for case in _result("fleet").cases}
    expected = []
    for name, case in cases.items():
        if name.startswith("rate_"):
            full = case.facts["full"]
            expected.append(
                [
                    name.removeprefix("rate_"),
                    f"{case.measured['intake'].median:,.0f}",
                    f"{case.ratios[0].median:.2f}",
                    f"{full['intake_busy']:.2f} / {full['workers_busy']:.2f}",
                    f"{full['p50_ms']:.0f} / {full['p99_ms']:.0f}",
                    f"{full['learner_gib']:.2f}",
                ]
            )
    assert _table("A fleet on the wire", SCALING) == expected
    half, faults = (cases["latency_64"].facts[name] for name in ("half", "faults"))
    words = " ".join(SCALING.split())
    cost = 1e6 * half["intake_busy"] / half["samples_per_s"]
    assert f"the intake needs {cost:.0f} us a sample there ({half['intake_busy']:.2f} of a core" in words
    assert f"{round(1e6 / cost, -2):,.0f} samples/s ({cost:.0f} us)" in words
    full = cases["rate_64"].facts["full"]
    assert f"and {1e6 * full['intake_busy'] / full['samples_per_s']:.0f} us at the full rate" in words
    for load in (half, faults):
        assert f"{load['p50_ms']:.0f} ms" in words
        assert f"(p99 {load['p99_ms']:.0f} ms)" in words


def test_the_table_of_many_receivers_equals_the_result_file() -> None:
    cases = {case.case: case for case in _result("weights_many").cases}
    over = {name: {ratio.of: f"{ratio.median:.3g}" for ratio in case.ratios} for name, case in cases.items()}
    expected = [
        [
            name.removeprefix("to_"),
            f"{1000 * numbers.median:.1f}",
            over["shared_memory"].get(name, "1.00"),
            f"{1000 * cases['collective'].measured[name].median:.0f}",
            over["collective"].get(name, "1.00"),
        ]
        for name, numbers in cases["shared_memory"].measured.items()
    ]
    assert _table("Weights to many receivers", SCALING) == expected
    assert f"in {cases['collective'].facts['form_s']['to_64']:.1f} s with 64 receivers" in " ".join(SCALING.split())


def test_the_words_about_refused_numbers_name_the_limit_of_the_harness() -> None:
    assert f"further apart than {100 * harness.WIDEST_SPREAD:.0f} % of the median" in " ".join(MEASURED.split())


def test_the_words_about_the_long_tail_equal_the_result_file() -> None:
    over = [_ratios("generation", "long_tail", ("embedded", name)) for name in ("generate", "generate_batch")]
    assert f"gain is larger: {' and '.join(over)} times on the long tail" in " ".join(MEASURED.split())


def test_the_table_of_real_shapes_equals_the_result_file() -> None:
    result: dict[str, Any] = json.loads((RESULTS / "generation_shapes.json").read_text())
    expected = []
    for shape in ("0.5b", "1.5b"):
        for batch in (1, 64, 256):
            row = result[shape][f"batch_{batch}"]
            rate = row["tokens_per_s"]["embedded"]
            shares = [row[f"embedded_share_of_{limit}_limit"] for limit in ("bandwidth", "arithmetic")]
            cells = [*row["embedded_over"].values(), *shares]
            name = f"{shape.upper()}, {batch}"
            expected.append([name, f"{rate:.1f}" if rate < 10 else f"{rate:.0f}", *(f"{cell:.2f}" for cell in cells)])
    assert _table("The embedded engine on real shapes") == expected


def test_the_table_of_the_wire_equals_the_result_file() -> None:
    cases = _result("wire").cases
    assert _table("Messages over the wire") == [
        [
            f"{case.facts['trajectory_bytes']:,}",
            *(f"{measured.median:,.0f}" for measured in case.measured.values()),
        ]
        for case in cases
    ]


def test_the_words_about_the_wire_equal_the_result_file() -> None:
    result = _result("wire")

    def over(of: str, to: str) -> list[str]:
        return [f"{result.ratio(numbers.case, of, to):.2f}" for numbers in result.cases]

    raw, protocol = " and ".join(over("raw_curve", "raw_tcp")), " and ".join(over("protocol_curve", "protocol_tcp"))
    whole, files = " and ".join(over("protocol_ipc", "raw_ipc")), " and ".join(over("protocol_ipc", "protocol_tcp"))
    words = " ".join(MEASURED.split())
    assert f"The protocol over a socket file has {whole} of the rate of raw bytes." in words
    assert f"CURVE has {raw} of the raw rate of TCP without keys, and {protocol} of the protocol's rate." in words
    assert f"The socket file has {files} of the protocol's rate over TCP" in words
    assert f"medians of {result.cases[0].rounds} interleaved rounds" in words
