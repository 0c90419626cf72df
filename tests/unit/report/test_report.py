"""The report: a single page without other files, for any run folder at any time."""

import html.parser
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.full_disk import disk_of
from support.measured_steps import measured_steps

from areal_rloo.config import Config, dump_config, load_config
from areal_rloo.errors import DataError
from areal_rloo.learner.stretches import begin_stretch
from areal_rloo.report import page, pages_in, result_in, write_report
from areal_rloo.report.charts import Curve, line_chart, smoothed, stacked_chart, ticks
from areal_rloo.telemetry import trace
from areal_rloo.telemetry.metric import declared_metrics
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import EvalRecord, TrainRecord

MakeTrainRecord = Callable[..., TrainRecord]

SUMMARY = {
    "exit_reason": "completed",
    "num_train_steps": 3,
    "policy_version": 3,
    "evaluation": [{"policy_version": 0, "accuracy": 0.5, "num_prompts": 200}],
    "ledger": {
        "admitted": 1234,
        "trained": 1200,
        "dropped": {"stale": 34, "max_attempts": 5},
        "dropped_tokens": {"stale": 3400},
        "buffered": 0,
        "in_flight": 0,
    },
    "staleness": {"max_trained": 2, "mean_trained": 0.87, "masked_token_share": 0.0123, "by_value": {"0": 1}},
    "tokens": {"generated": 5000, "trained": 4321},
    "time_s": {"warm_start": 61.0, "wall": 3725.0, "learner_idle": 1.0, "rollout_idle": 1.0},
}


@pytest.fixture
def run_folder(tmp_path: Path, make_train_record: MakeTrainRecord, eval_record: EvalRecord) -> Path:
    folder = tmp_path / "my <run>"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(Config()))
    file = MetricsFile(folder / "metrics.jsonl")
    for step in range(1, 4):
        file.append(make_train_record(num_train_steps=step, policy_version=step, reward_mean=0.25 * step))
    file.append(eval_record)
    file.close()
    return folder


class Page(html.parser.HTMLParser):
    """The parts of a page that a browser would load or run, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.shown = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href", "srcset", "data"}]

    def handle_data(self, data: str) -> None:
        self.shown += data


def test_the_page_loads_nothing_from_outside(run_folder: Path) -> None:
    text = write_report(run_folder).read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.links == []
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_has_every_curve_the_facts_the_ledger_and_the_config(run_folder: Path) -> None:
    (run_folder / "summary.json").write_text(json.dumps(SUMMARY))
    page = Page(write_report(run_folder).read_text())
    for part in (
        *("Held-out accuracy", "Reward", "Staleness", "past the bound", "Completion length", "truncated completions"),
        *("Tokens per second", "Ratio", "behaviour_weight", "Entropy", "Gradient norm", "Idle"),
        *("ended: completed", "0.250 → 0.750", "4,321", "0.87, 2", "1.23 %", "1 min 1 s"),
        *("admitted", "1,234", "dropped: stale", "34", "100 known tokens each", "max_staleness: 2"),
    ):
        assert part in page.shown, part
    assert page.tags.count("svg") == page.tags.count("section") - 2, "all sections but ledger and config are charts"
    assert page.shown.count("known tokens") == 1, "nobody told the tokens of max_attempts"
    assert "my <run>" in page.shown, "the name of the folder is text, not markup"


def test_the_page_names_the_bottleneck_of_the_run(tmp_path: Path, make_train_record: MakeTrainRecord) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config("quickstart.yaml", [])))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for record in measured_steps(make_train_record, [16] * 6, wait_s=1.5):
        file.append(record)
    file.close()
    (words,) = result_in(tmp_path)
    assert words.startswith("rollout-bound: the learner waits 50 %; a second worker, with more cores or another GPU, ")
    assert words in Page(write_report(tmp_path).read_text()).shown


def test_a_run_that_learns_nothing_gets_no_advice_about_its_speed(
    tmp_path: Path, make_train_record: MakeTrainRecord
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config("quickstart.yaml", [])))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for record in measured_steps(make_train_record, [16] * 6, wait_s=1.5, gradient_norm=0.0):
        file.append(record)
    file.close()
    assert result_in(tmp_path) == []


def test_the_result_of_a_run_is_the_first_and_the_last_accuracy(run_folder: Path, eval_record: EvalRecord) -> None:
    (run_folder / "checkpoints" / "step-000009").mkdir(parents=True)
    assert result_in(run_folder) == [], "a single evaluation is no result"
    for name, version, accuracy in (("hard", 3, 0.25), (eval_record.name, 9, 0.75), ("hard", 9, 0.5)):
        record = msgspec.structs.replace(
            eval_record, name=name, policy_version=version, accuracy=accuracy, reward=accuracy
        )
        with (run_folder / "metrics.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
    first = f"accuracy {eval_record.accuracy:.3f} (version {eval_record.policy_version}) -> 0.750 (version 9)"
    assert result_in(run_folder) == [
        f"result: {eval_record.name} {first}",
        "result: hard accuracy 0.250 (version 3) -> 0.500 (version 9)",
    ]


def test_the_result_has_no_lost_weights_and_no_other_set(run_folder: Path, eval_record: EvalRecord) -> None:
    for version in (6, 8, 9):
        record = msgspec.structs.replace(
            eval_record, policy_version=version, accuracy=0.1 * version, reward=0.1 * version
        )
        with (run_folder / "metrics.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
    (run_folder / "checkpoints" / "step-000008").mkdir(parents=True)
    assert result_in(run_folder) == ["result: arithmetic accuracy 0.625 (version 4) -> 0.800 (version 8)"]
    begin_stretch(run_folder, load_config("quickstart.yaml", []), 0)
    begin_stretch(run_folder, load_config("quickstart.yaml", ["data.eval.num_prompts=8"]), 4)
    assert result_in(run_folder) == ["result: arithmetic accuracy 0.600 (version 6) -> 0.800 (version 8)"]
    assert "0.600 → 0.900" in Page(write_report(run_folder).read_text()).shown, "the page shows each evaluation"


def test_a_run_in_progress_has_a_page_with_the_ledger_of_its_last_step(run_folder: Path) -> None:
    page = Page(write_report(run_folder).read_text())
    assert "in progress" in page.shown
    assert "dropped: reward_failed" in page.shown


def test_a_pipe_or_a_device_in_place_of_a_record_is_an_error(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    for make in (os.mkfifo, lambda there: there.symlink_to("/dev/zero")):
        make(run_folder / "metrics.jsonl")
        with pytest.raises(DataError, match="expected a regular file"):
            write_report(run_folder)
        (run_folder / "metrics.jsonl").unlink()


def test_a_run_that_has_not_trained_yet_has_a_page(run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    page = Page(write_report(run_folder).read_text())
    assert "nothing measured" in page.shown
    assert "svg" not in page.tags


def test_numbers_that_are_not_finite_leave_a_gap(run_folder: Path, make_train_record: MakeTrainRecord) -> None:
    file = MetricsFile(run_folder / "metrics.jsonl")
    file.append(make_train_record(num_train_steps=4, policy_version=4, ratio_max=math.inf, entropy=math.nan))
    file.close()
    text = write_report(run_folder).read_text()
    assert not re.search(r"\b(nan|inf)\b", text)


def test_options_changed_on_a_resume_are_shown_with_both_values(run_folder: Path) -> None:
    assert "Options changed" not in Page(write_report(run_folder).read_text()).shown
    begin_stretch(run_folder, Config(), 0)
    begin_stretch(run_folder, load_config(str(run_folder / "config.yaml"), ["learner.groups_per_step=64"]), 2)
    shown = Page(write_report(run_folder).read_text()).shown
    for part in ("Options changed", "step 2", "learner.groups_per_step", "32 -> 64", "Config from step 0 on"):
        assert part in shown


def run_main(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "areal_rloo.report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_names_the_page_it_wrote(run_folder: Path) -> None:
    ended = run_main(str(run_folder))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == str(run_folder / "report.html")
    assert (run_folder / "report.html").is_file()


def test_a_folder_without_a_run_gives_one_clear_line(tmp_path: Path) -> None:
    ended = run_main(str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {tmp_path}: no run here")
    assert len(ended.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_summary_that_cannot_be_read_is_named(run_folder: Path) -> None:
    (run_folder / "summary.json").write_text("{")
    with pytest.raises(DataError, match="the report cannot be made"):
        write_report(run_folder)


numbers = st.floats(-1e12, 1e12)


@given(st.lists(st.tuples(st.integers(0, 10_000), numbers), max_size=20), st.booleans())
def test_every_shape_lies_inside_its_frame(points: list[tuple[int, float]], dots: bool) -> None:
    section = line_chart("a & b", [Curve("<c>", sorted(points))], dots=dots)
    svg = re.search(r"<svg.*</svg>", section)
    if not points:
        assert svg is None
        return
    assert svg is not None
    quoted = re.sub(r"=([^\s'>]+)", r"='\1'", svg.group())
    drawing = ElementTree.fromstring(quoted)
    for circle in drawing.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= 420
        assert 0 <= float(circle.attrib["cy"]) <= 220
    assert len(list(drawing.iter("circle"))) == len(points)


@given(numbers, numbers)
def test_ticks_are_few_and_sorted_and_cover_the_values(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    found = ticks(low, high, 5)
    slack = 1e-9 * max(abs(low), abs(high), 1.0)
    assert found[0] <= low + slack
    assert found[-1] >= high - slack
    assert 2 <= len(found) <= 8
    assert found == sorted(set(found))


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(), st.floats(), st.floats()), max_size=5))
@example([(0, -1e308, 0, 0), (1, 1e308, 0, 0), (2, 1e100, 0, 0)])
@example([(0, 0.5, -1e308, 1e308), (1, 0.5, 0.0, 1.0)])
@example([(0, 0.5, math.inf, math.nan)])
def test_numbers_of_any_size_draw_a_chart(rows: list[tuple[int, float, float, float]]) -> None:
    """Numbers beyond +-1e100, infinities and NaN count as missing, in the line and in the band."""
    rows.sort()
    band = [(low, high) for _, _, low, high in rows]
    section = line_chart("a", [Curve("b", [(x, y) for x, y, _, _ in rows], band)])
    kept = [row for row in rows if all(abs(number) <= 1e100 for number in row)]
    assert section.count("<circle") == len(kept)
    assert "nan" not in section and "inf" not in section


def test_stacked_shares_fill_the_frame() -> None:
    curves = [Curve("0", [(1, 0.25), (2, 0.5)]), Curve("1", [(1, 0.75), (2, 0.5)])]
    text = stacked_chart("shares", curves)
    areas = [
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in re.findall(r"<polygon points='([^']+)'", text)
    ]
    lowest, highest = max(y for _, y in areas[0]), min(y for _, y in areas[1])
    assert (lowest, highest) == (194, 12), "from the floor of the frame to its ceiling"
    assert areas[0][:2] == areas[1][:1:-1], "the second area stands on the first"


def test_every_declared_chart_and_number_is_on_the_page(
    run_folder: Path, make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    file = MetricsFile(run_folder / "metrics.jsonl")
    both = {"a": 0.1, "b": 0.2}
    file.append(make_train_record(num_train_steps=4, policy_version=4, reward_parts=both, reward_by_source=both))
    numbers = {"num_samples": 4, "pass_share": 0.75, "majority_share": 0.5, "reward": 0.7}
    file.append(msgspec.structs.replace(eval_record, **numbers))
    file.close()
    shown = Page(write_report(run_folder).read_text()).shown
    drawn = [declared for struct in (TrainRecord, EvalRecord) for declared in declared_metrics(struct)]
    assert sum(declared.metric.chart is not None for declared in drawn) > 30
    for declared in drawn:
        if declared.metric.chart is not None:
            assert declared.metric.chart.title in shown
    for declared in declared_metrics(TrainRecord):
        if declared.metric.label is None and len(declared.path) == 1:
            assert declared.field in shown
            assert declared.metric.help in shown


def test_a_report_that_the_disk_refuses_leaves_the_previous_report(run_folder: Path) -> None:
    before = write_report(run_folder).read_bytes()
    with disk_of(100), pytest.raises(DataError, match="the report cannot be made"):
        write_report(run_folder)
    assert (run_folder / "report.html").read_bytes() == before


def test_the_page_of_a_long_run_is_small_and_keeps_the_extremes(
    run_folder: Path, make_train_record: MakeTrainRecord
) -> None:
    file = MetricsFile(run_folder / "metrics.jsonl")
    rng = random.Random(0)
    for step in range(4, 5001):
        values = {"reward_mean": rng.random(), "entropy": 9.0 if step == 2500 else 1.0 + rng.random()}
        file.append(make_train_record(num_train_steps=step, policy_version=step, **values))
    file.close()
    text = write_report(run_folder).read_text()
    assert len(text) < 2_000_000
    entropy = text.partition("<h2>Entropy")[2].partition("</section>")[0]
    assert 150 <= entropy.count("<circle") <= 200
    heights = [float(pair.split(",")[1]) for pair in entropy.partition("<polygon points='")[2].split("'")[0].split()]
    assert min(heights) < 40, "the band reaches the one step with 9.0"


def test_a_long_curve_is_smoothed_and_a_short_one_is_not() -> None:
    noisy = [(x, x / 100 + (-1.0) ** x) for x in range(100)]
    section = line_chart("a", [Curve("c", noisy)])
    assert section.count("<polyline") == 2
    assert "opacity=0.35" in section
    line = smoothed(noisy)
    assert [x for x, _ in line] == [x for x, _ in noisy]
    assert max(abs(y - x / 100) for x, y in line[10:]) < 0.3, "the noise has an amplitude of 1"
    assert smoothed([(x, 2.5) for x in range(50)])[-1][1] == pytest.approx(2.5)
    assert line_chart("a", [Curve("c", noisy[:30])]).count("<polyline") == 1


@pytest.mark.parametrize(
    ("heights", "logarithmic"),
    [([1.0, 2.0, 1.5, 900.0], True), ([1.0, 2.0, 1.5, 9.0], False), ([0.0, 2.0, 1.5, 900.0], False)],
)
def test_the_axis_is_logarithmic_if_a_value_squashes_the_others(heights: list[float], logarithmic: bool) -> None:
    section = line_chart("a", [Curve("c", list(enumerate(heights)))], hint="healthy: 0")
    assert ("healthy: 0; log axis" in section) == logarithmic
    if logarithmic:
        downs = [float(down) for down in re.findall(r"cy=([\d.]+)", section)]
        assert downs[0] - downs[1] == pytest.approx((downs[0] - downs[3]) * math.log(2) / math.log(900), abs=1)


def test_a_stacked_chart_of_a_long_run_still_adds_up() -> None:
    xs = range(1000)
    halves = [Curve("a", [(x, x / 1000) for x in xs]), Curve("b", [(x, 1 - x / 1000) for x in xs])]
    section = stacked_chart("a", halves)
    assert section.count("<circle") == 400
    top = section.split("<polygon points='")[2].split("'")[0].split()
    assert {pair.split(",")[1] for pair in top[:200]} == {"12.0"}, "the upper edge is 1 everywhere"


def test_a_trace_is_joined_at_the_end_unless_it_is_long_or_empty(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pages_in(run_folder) == [f"report: {run_folder / 'report.html'}"]
    with trace.traced(run_folder, "learner", on=True):
        pass
    assert pages_in(run_folder)[-1].startswith("no trace: ")
    with trace.traced(run_folder, "learner", on=True):
        trace.record("training", "step 1")
    said = pages_in(run_folder)[-1]
    assert said.startswith(f"trace: {run_folder / 'trace.json.gz'}, for https://ui.perfetto.dev")
    (run_folder / "trace.json.gz").unlink()
    monkeypatch.setattr(page, "_MOST_TRACE_BYTES", 10)
    said = pages_in(run_folder)[-1]
    assert re.fullmatch(r"trace: \d+ bytes; for Perfetto: .* -m areal_rloo.report '.*my <run>'", said), said
    assert not (run_folder / "trace.json.gz").exists()
    assert run_main(str(run_folder)).stdout.split("\n")[1] == str(run_folder / "trace.json.gz")
