"""The screen that follows a run: numbers of records and of processes, with real endpoints for these."""

import io
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console

from areal_rloo.config import Config, dump_config, load_config
from areal_rloo.program import run_main
from areal_rloo.telemetry.metrics import LearnerMetrics, MetricsFile
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord
from areal_rloo.telemetry.scrapes import serve_process
from areal_rloo.telemetry.targets import Target, Targets
from areal_rloo.top.__main__ import main
from areal_rloo.top.fleet import Answer, Fleet, Process
from areal_rloo.top.screen import curve, number, screen

MakeTrainRecord = Callable[..., TrainRecord]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config("quickstart.yaml", [f"telemetry.targets_folder={tmp_path / 'targets'}"])


@pytest.fixture
def folder(config: Config, tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    return tmp_path / "run"


def test_the_processes_of_a_run_are_asked_for_their_metrics(
    config: Config, folder: Path, make_train_record: MakeTrainRecord
) -> None:
    registry = CollectorRegistry()
    LearnerMetrics(registry).train_step(make_train_record(policy_version=7))
    serve_process(registry, config, folder, process="learner", port=0)
    targets = Targets(config, folder)
    targets.add("rollout-10", 1)  # nobody listens at port 1
    targets.add("rollout-9", 1)
    found = Fleet().look(targets.read())
    assert [process.name for process in found] == ["learner", "rollout-9", "rollout-10"]
    assert found[0].value("policy_version") == 7
    assert (found[0].value("process_resident_memory_bytes") or 0) > 1e6
    assert found[1].now.numbers == {}


def test_a_damaged_file_of_a_target_is_left_out(config: Config, folder: Path) -> None:
    targets = Targets(config, folder)
    targets.add("learner", 9400)
    (whole,) = (folder.parent / "targets").iterdir()
    for name, text in (("rollout-0", "[{"), ("rollout-1", '[{"targets": ["h:1"], "labels": {}}]')):
        whole.with_name(whole.name.replace("learner", name)).write_text(text)
    assert targets.read() == [Target("learner", "http://127.0.0.1:9400/metrics")]


def test_a_rate_needs_two_looks_at_the_same_process() -> None:
    one, two = Answer(10.0, {"total": 5.0}), Answer(12.0, {"total": 9.0})
    assert Process("a", two, one).per_second("total") == 2.0
    assert Process("a", two, None).per_second("total") is None
    assert Process("a", one, Answer(8.0, {"total": 9.0})).per_second("total") is None, "another process"
    assert Process("a", two, one).per_second("other") is None


def test_the_screen_names_state_samples_processes_and_symptoms(
    config: Config, folder: Path, make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    records: list[Record] = [make_train_record(num_train_steps=step, policy_version=step) for step in range(1, 8)]
    worker = {
        "engine_num_running": 16.0,
        "engine_policy_version": 6.0,
        "reward_waiting": 3.0,
        "engine_generated_tokens_total": 900.0,
    }
    processes = [
        Process("rollout-0", Answer(2.0, worker), Answer(1.0, {"engine_generated_tokens_total": 100.0})),
        Process("rollout-1", Answer(2.0, {}), None),
    ]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(folder, config, [*records, eval_record], processes, []))
    text = console.export_text()
    assert "run: step 7/50" in text
    assert "arithmetic 0.625 at version 4" in text
    assert "32 trained on, 12 in the buffer, 16 in flight; dropped: stale 3, reward_failed 1" in text
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["rollout-0"])
    assert row[1:6] == ["6", "16", "-", "3", "800"]
    assert re.search("rollout-1 +no answer", text)


def test_numbers_and_curves_are_short() -> None:
    assert [number(value) for value in (None, math.nan, 3.0, 0.12345, 1234.5)] == ["-", "-", "3", "0.123", "1,234"]
    assert curve([0.0, 0.5, math.nan, 1.0]) == "▁▅ █"
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([math.nan]) == ""


def test_a_look_at_a_run_without_a_process(
    folder: Path,
    make_train_record: MakeTrainRecord,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = MetricsFile(folder / "metrics.jsonl")
    for step in (1, 2, 3):
        file.append(make_train_record(num_train_steps=step, policy_version=step, truncated_share=1.0))
    file.close()
    assert run_main(main, [str(folder), "--once"]) == 0
    printed = capsys.readouterr().out
    assert "step 3/50" in printed
    assert "health: truncated: 100 %" in printed
    (folder / "summary.json").write_text('{"exit_reason": "failed"}')
    assert run_main(main, [str(folder), "--once"]) == 0
    assert "step 3/50; ended: failed" in capsys.readouterr().out
    (folder / "summary.json").write_text("{")
    assert run_main(main, [str(folder), "--once"]) == 0
    assert "ended" not in capsys.readouterr().out
    assert run_main(main, [str(folder / "nowhere"), "--once"]) == 2
    assert "no run here" in capsys.readouterr().err
