"""The report tells what happened when, how long completions were, and what the best and the worst looked like."""

import html
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_rloo.config import Config, dump_config, load_config
from areal_rloo.learner.stretches import begin_stretch
from areal_rloo.report import write_report
from areal_rloo.report.charts import Row, bar_chart, strip_chart
from areal_rloo.report.recorded import best_and_worst, length_chart, read_recorded
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import EvalRecord, TrainRecord
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryFile, TrajectoryRecord

MakeTrajectory = Callable[..., TrajectoryRecord]


def of_length(make: MakeTrajectory, num_tokens: int, **changes: object) -> TrajectoryRecord:
    return make(pieces=["a"] * num_tokens, **changes)


def write(folder: Path, *records: TrajectoryRecord) -> None:
    file = TrajectoryFile(folder / FILE_NAME)
    file.append(records)
    file.close()


def titles(section: str) -> list[str]:
    return [html.unescape(title) for title in re.findall("<title>(.*?)</title>", section)]


def shares(section: str, name: str) -> list[float]:
    """The shares of the bars of a name."""
    return [float(t.rpartition(": ")[2].rstrip(" %")) / 100 for t in titles(section) if t.startswith(f"{name},")]


def test_lengths_are_of_the_first_and_the_last_steps(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    write(
        tmp_path,
        *(of_length(make_trajectory, 5, policy_version=version) for version in range(1, 4)),
        *(of_length(make_trajectory, 100, policy_version=version) for version in range(4, 7)),
        *(of_length(make_trajectory, 300 + version, policy_version=version) for version in range(7, 10)),
        of_length(make_trajectory, 300, policy_version=9, reward=None, dropped="stale"),
    )
    section = length_chart(read_recorded(tmp_path))
    assert shares(section, "first third") == [1.0] + [0.0] * (len(shares(section, "first third")) - 1)
    assert shares(section, "last third of the steps")[-1] == 1.0
    assert "100 to" not in "".join(title for title in titles(section) if not title.endswith(": 0 %"))


def test_a_run_of_few_steps_has_a_single_row_of_lengths(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    write(tmp_path, of_length(make_trajectory, 0, policy_version=1), of_length(make_trajectory, 7, policy_version=2))
    section = length_chart(read_recorded(tmp_path))
    assert sum(shares(section, "all steps")) == pytest.approx(1.0)
    assert "third" not in section


def test_the_best_and_the_worst_are_of_the_last(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    def made(reward: float, text: str) -> TrajectoryRecord:
        return make_trajectory(pieces=[text], reward=reward, prompt="2+2 <b>\x1b[2J")

    write(
        tmp_path,
        made(99.0, "too old"),
        *(made(0.5, "in the middle") for _ in range(260)),
        made(-1.0, "worst"),
        made(2.0, "best</td><script>"),
    )
    section = best_and_worst(read_recorded(tmp_path))
    assert "too old" not in section
    assert section.index("best&lt;/td&gt;&lt;script&gt;") < section.index("worst")
    assert "<b>" not in section
    assert "\x1b" not in section
    assert section.count("<tr>") == 6


def test_equal_rewards_and_damaged_lines_show_nothing(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    assert best_and_worst(read_recorded(tmp_path)) == length_chart(read_recorded(tmp_path)) == ""
    write(tmp_path, *(make_trajectory(reward=1.0) for _ in range(10)))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b"\x00\xff{\n[1]\n" + json.dumps({"reward": 1, "versions": [[0, -5]]}).encode() + b'\n{"cut')
    recorded = read_recorded(tmp_path)
    assert len(recorded.lengths) == 10
    assert best_and_worst(recorded) == ""


def test_the_timeline_has_what_happened_when(
    tmp_path: Path, make_train_record: Callable[..., TrainRecord], eval_record: EvalRecord
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(Config()))
    (tmp_path / "environment.jsonl").write_text('{"code": {"commit": "abc123"}}\nnot json\n')
    (tmp_path / "checkpoints" / "step-000020").mkdir(parents=True)
    begin_stretch(tmp_path, Config(), 0)
    changed = load_config(str(tmp_path / "config.yaml"), ["learner.optimizer.learning_rate=0.5"])
    begin_stretch(tmp_path, changed, 20)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        shares = {"truncated_share": 1.0 if 10 <= step < 25 else 0.0, "skipped_steps": int(step >= 30)}
        num_workers = 1 if 33 <= step < 36 else 2
        file.append(make_train_record(num_train_steps=step, policy_version=step, num_workers=num_workers, **shares))
    file.append(msgspec.structs.replace(eval_record, policy_version=7, accuracy=0.625))
    file.close()
    text = write_report(tmp_path).read_text()
    timeline = text[text.index("<h2>Timeline") :].partition("</section>")[0]
    events = titles(timeline)
    assert f"{eval_record.name}: accuracy 0.625: 7" in events
    assert "learner.optimizer.learning_rate: 20" in events
    assert [event[-2:] for event in events if event.startswith("the learner starts at 2")] == [" 0", "20"]
    assert "the gradient was not finite (alarm StepsSkipped): 30" in events
    assert [event for event in events if event.endswith(": 33")] == ["2 to 1 rollout workers (alarm TargetDown): 33"]
    began, ended = next(event for event in events if event.startswith("truncated (alarm ")).split(": ")[1].split(" to ")
    assert 10 < int(began) <= 16
    assert 25 <= int(ended) <= 32
    assert "commit&quot;: &quot;abc123" in text
    assert "Environment of start 2" in text


def test_fewer_workers_after_a_start_are_no_alarm(
    tmp_path: Path, make_train_record: Callable[..., TrainRecord]
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(Config()))
    begin_stretch(tmp_path, Config(), 0)
    begin_stretch(tmp_path, Config(), 20)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        num_workers = 4 if step <= 20 else 2 if step <= 30 else 1
        file.append(make_train_record(num_train_steps=step, policy_version=step, num_workers=num_workers))
    file.close()
    events = titles(write_report(tmp_path).read_text())
    assert "4 to 2 rollout workers: 21" in events
    assert "2 to 1 rollout workers (alarm TargetDown): 31" in events


def test_an_evaluation_of_an_older_version_shortens_no_symptom(
    tmp_path: Path, make_train_record: Callable[..., TrainRecord], eval_record: EvalRecord
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(Config()))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 41):
        file.append(make_train_record(num_train_steps=step, policy_version=step, truncated_share=1.0))
    file.append(msgspec.structs.replace(eval_record, policy_version=20))
    file.close()
    assert "truncated (alarm Unhealthy): 3 to 40" in titles(write_report(tmp_path).read_text())


@pytest.mark.parametrize(
    ("tokens", "bars"),
    [
        (
            {0: 10, 3_000_000: 30},
            ["trained tokens, 0 to 187,500: 25 %", "trained tokens, 2,812,515 to 3,000,015: 75 %"],
        ),
        ({-5: 10}, []),
        ({-1: 90, 0: 10, 1: -4}, ["trained tokens, 0: 100 %"]),
    ],
)
def test_any_staleness_draws_a_page(
    tokens: dict[int, int], bars: list[str], tmp_path: Path, make_train_record: Callable[..., TrainRecord]
) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(Config()))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.append(make_train_record(staleness_tokens=tokens))
    file.close()
    text = write_report(tmp_path).read_text()
    assert [t for t in titles(text) if t.startswith("trained tokens, ") and not t.endswith(": 0 %")] == bars
    assert len(text) < 2**20


def test_many_events_are_joined_and_none_is_lost() -> None:
    moments = [(float(x), float(x), f"event {x}") for x in range(1, 1004)]
    boxes = _boxes(strip_chart("a", [Row("b", [*moments, (5.0, 1000.0, "long")])], 0, 1003))
    assert len(boxes) <= 200
    assert max(float(box["width"]) for box in boxes) > 250
    assert max(float(box["x"]) + float(box["width"]) for box in boxes) >= 410


def test_numbers_that_were_not_measured_hide_no_trajectory(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    gaps = {"reward_parts": {"a": math.nan}, "prompt": "unmeasured"}
    write(tmp_path, *(make_trajectory(reward=0.1 * index, **(gaps if index > 6 else {})) for index in range(10)))
    assert best_and_worst(read_recorded(tmp_path)).count("unmeasured") == 3


widths = st.floats(-1e9, 1e9)


@given(st.lists(st.tuples(widths, widths), max_size=6), widths, widths)
def test_every_event_lies_inside_its_strip(events: list[tuple[float, float]], low: float, high: float) -> None:
    low, high = sorted((low, high))
    rows = [Row("<a>", [(*sorted(event), "it & that") for event in events]), Row("b", [], bad=True)]
    for box in _boxes(strip_chart("a & b", rows, low, high)):
        assert 100 <= float(box["x"]) <= float(box["x"]) + float(box["width"]) <= 420


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 3))
def test_every_bar_lies_inside_its_frame(heights: list[float], num_names: int) -> None:
    labels = [f"{index} to {index + 1}" for index in range(len(heights))]
    boxes = _boxes(bar_chart("a", labels, {f"name <{index}>": heights for index in range(num_names)}))
    assert len(boxes) == num_names * len(heights)
    for box in boxes:
        assert 50 <= float(box["x"]) <= float(box["x"]) + float(box["width"]) <= 420
        assert 0 <= float(box["y"]) <= float(box["y"]) + float(box["height"]) <= 220


def _boxes(section: str) -> list[dict[str, str]]:
    svg = re.search(r"<svg.*</svg>", section)
    assert svg is not None
    drawing = ElementTree.fromstring(re.sub(r"=([^\s'>]+)", r"='\1'", svg.group()))
    return [box.attrib for box in drawing.iter("rect")]
