"""Compare the tables of forecasts and simulations in docs/measured.md with the result files."""

import statistics

from support.tables import document, result, table

MEASURED = document("measured.md")


def test_the_tables_of_forecasts_equal_the_result_file() -> None:
    measured = result("advice.json")
    kinds = ("plain", "equal_load", "model")
    runs = [
        [
            row["run"],
            f"{row['measured']['tokens_per_s']:.0f}",
            *(f"{100 * row[kind]['error']:+.1f} %" for kind in kinds),
        ]
        for row in measured["runs"]
    ]
    assert [[row[0], row[1], *row[3:6]] for row in table("Forecast against run", MEASURED)] == runs
    summary = [measured["summary"][kind] for kind in kinds]
    errors = [f"{100 * row['error_median']:.1f} % / {100 * row['error_worst']:.1f} %" for row in summary]
    assert [row[1] for row in table("Errors of the forecasts", MEASURED)] == errors


def test_the_sweep_of_splits_equals_the_result_file() -> None:
    loads = result("splits.json")["loads"]
    cells = table("Sweep of splits", MEASURED)
    assert cells == [
        [
            load["load"],
            f"{row['ranks']} and {row['workers']}",
            " / ".join(f"{rate:,.0f}" for rate in row["tokens_per_s"]),
            f"{row['forecast']:,.0f}",
            "yes" * ([row["ranks"], row["workers"]] == load["advised"]),
        ]
        for load in loads
        for row in load["splits"]
    ]
    assert [load["advised_over_best"] for load in loads] == [1.0, 1.0]
    medians = [{row["ranks"]: statistics.median(row["tokens_per_s"]) for row in load["splits"]} for load in loads]
    assert f"two ranks train {medians[0][2] / medians[0][1]:.2f} times as fast as one" in MEASURED
    over = [
        row["forecast"] / statistics.median(row["tokens_per_s"]) - 1 for load in loads for row in load["splits"][2:]
    ]
    assert f"was {100 * over[0]:.0f} % and {100 * over[1]:.0f} % too high" in document("advice.md").replace("\n", " ")
    assert f"with {medians[1][2] / medians[1][1]:.2f} of the best throughput" in MEASURED


def test_the_published_figures_equal_the_simulations() -> None:
    simulated = result("published.json")
    names = ("published", "formula", "simulated")
    rows = [[row["case"], *(f"{row[name]:.2f}" for name in names)] for row in simulated["staleness"]]
    assert table("Published staleness", MEASURED) == rows
    speeds = [row for part in ("waits", "steps", "depths", "hours") for row in simulated[part]]
    assert [row[1:] for row in table("Published speeds", MEASURED)] == [
        [row["case"], f"{row['published']:.2f}", f"{row['simulated']:.2f}", "fitted" * row["is_fitted"]]
        for row in speeds
    ]
    found = simulated["decoding"]
    words = (
        f"({found['tokens_mean']:,} tokens; a decode step takes {found['fixed_ms']:.1f} ms and {found['each_ms']:.2f}"
    )
    assert words in " ".join(MEASURED.split())
