"""Trackers get every number of every record, by processes that cost the run nothing; with the real libraries."""

import contextlib
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.patience import eventually
from support.processes import processes_with

from areal_rloo.config import dump_config, load_config
from areal_rloo.telemetry import trackers, trajectories
from areal_rloo.telemetry.metrics import MetricsFile
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord
from areal_rloo.telemetry.tracker_libraries import Row
from areal_rloo.telemetry.trackers import Tables, Trackers, numbers_of
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryFile, TrajectoryRecord, TrajectoryTail

_STARTER = """
import os, sys, time
from pathlib import Path
from areal_rloo.config import load_config
from areal_rloo.telemetry.trackers import Trackers
folder = Path(sys.argv[1])
trackers = Trackers(load_config(str(folder / "config.yaml")), folder, print, resume=False)
os.kill(os.getpid(), 9)
"""

MakeTrainRecord = Callable[..., TrainRecord]
MakeTrajectory = Callable[..., TrajectoryRecord]

# As wandb does: a process of the library, and an end that waits for this process.
HANGING = """
import subprocess, time
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, flush=True)
class Run:
    def log(self, numbers, step):
        child.wait()
def init(**options):
    return Run()
"""


WITHOUT_TABLES = """
class Run:
    def log(self, numbers, step):
        print("logged", step, flush=True)
    def finish(self):
        pass
def Table(columns, data):
    raise PermissionError("Access Denied")
def init(**options):
    return Run()
"""


def test_a_tracker_ends_with_a_launcher_that_is_killed_at_once(tmp_path: Path) -> None:
    config = load_config("quickstart.yaml", ["telemetry.trackers=[trackio]"])
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "trackio.py").write_text(WITHOUT_TABLES)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, "-c", _STARTER, str(tmp_path)], env=environment, check=False)
    assert ended.returncode == -9
    eventually(lambda: not processes_with([str(tmp_path)]), "a tracker lives on")


def _track(
    folder: Path,
    records: Sequence[Record],
    *names: str,
    samples: Sequence[TrajectoryRecord] = (),
    resume: bool = False,
    waits: bool = True,
) -> list[str]:
    """Pass records and samples on to trackers; return the lines for the user."""
    said: list[str] = []
    config = load_config("quickstart.yaml", [f"telemetry.trackers=[{', '.join(names)}]"])
    (folder / "config.yaml").write_text(dump_config(config))
    logs = [folder / "logs" / f"tracker-{name}.out" for name in names]
    for log in logs:  # of an earlier launcher
        log.unlink(missing_ok=True)
    passed = Trackers(config, folder, said.append, resume=resume)
    if waits:
        eventually(lambda: all("gets the numbers" in log.read_text() for log in logs), "the start of the trackers")
    if samples:
        written = TrajectoryFile(folder / FILE_NAME)
        written.append(samples)
        written.close()
    file = MetricsFile(folder / "metrics.jsonl")
    for record in records:
        file.append(record)
    file.close()
    if not waits:
        eventually(lambda: passed.look() or said, "a word about the trackers")  # type: ignore[func-returns-value]
    passed.close()
    return said


def test_every_number_has_the_name_of_its_field(make_train_record: MakeTrainRecord, eval_record: EvalRecord) -> None:
    numbers = dict(numbers_of(make_train_record(entropy=math.nan, reward_parts={"format": 0.5}), names="areal_rloo"))
    assert numbers["train/reward_mean"] == make_train_record().reward_mean
    assert numbers["train/reward_parts/format"] == 0.5
    assert numbers["train/ledger/dropped/stale"] == 3
    assert "train/entropy" not in numbers, "it could not be measured"
    evaluated = dict(numbers_of(eval_record, names="areal_rloo"))
    assert evaluated["evaluation/arithmetic/accuracy"] == 0.625
    assert not any("pass_share" in name for name in evaluated)


@pytest.mark.parametrize(
    ("names", "train", "evaluation"),
    [
        (
            "trl",
            {"train/reward", "train/frac_reward_zero_std", "train/completions/mean_length"},
            {"eval/arithmetic_reward"},
        ),
        (
            "verl",
            {"critic/rewards/mean", "actor/pg_loss", "response_length/mean"},
            {"val-core/arithmetic/reward/mean@1"},
        ),
    ],
)
def test_numbers_have_a_second_name_for_dashboards_of_another_system(
    names: str, train: set[str], evaluation: set[str], make_train_record: MakeTrainRecord, eval_record: EvalRecord
) -> None:
    for record, expected in ((make_train_record(), train), (eval_record, evaluation)):
        own = dict(numbers_of(record, names="areal_rloo"))
        both = dict(numbers_of(record, names=names))
        assert own.items() <= both.items()
        assert expected <= both.keys() - own.keys()
    assert {*trackers._TRL, *trackers._VERL} <= {*TrainRecord.__struct_fields__, *EvalRecord.__struct_fields__}


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_fails_is_said_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").mkdir()
    for module in ("wandb", "mlflow"):
        (tmp_path / "broken" / f"{module}.py").write_text("raise ConnectionError('the server is gone')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (line,) = _track(tmp_path, [], name, waits=False)
    assert line == (
        f"telemetry.trackers: {name} has ended, and gets no more numbers: ConnectionError: the server is gone "
        f"({tmp_path / 'logs' / f'tracker-{name}.out'})"
    )


def test_the_last_words_of_a_tracker_with_much_output_take_little_memory(tmp_path: Path) -> None:
    log = tmp_path / "tracker-wandb.out"
    with log.open("wb") as file:
        file.truncate(2**27)
        file.seek(0, os.SEEK_END)
        file.write(b"\nConnectionError: gone\n\n")
    tracemalloc.start()
    try:
        assert trackers._last_line(log) == "ConnectionError: gone"
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert trackers._last_line(tmp_path / "absent") == "no words"


def test_a_tracker_that_hangs_does_not_hold_the_end_of_the_run(
    make_train_record: MakeTrainRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get all numbers; what hangs is killed with all that its library has started."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "trackio.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(trackers, "_CLOSE_S", 5.0)
    said = _track(tmp_path, [make_train_record(policy_version=1)], "trackio", "tensorboard")
    assert said == ["telemetry.trackers: no end of trackio after 5 s; the last numbers may be missing there"]
    started = int((tmp_path / "logs" / "tracker-trackio.out").read_text().split()[0])
    eventually(lambda: not psutil.pid_exists(started) or psutil.Process(started).status() == "zombie", "the kill")
    assert len(_curve(tmp_path, "train/reward_mean")) == 1


def test_without_trackers_nothing_is_made(make_train_record: MakeTrainRecord, tmp_path: Path) -> None:
    assert _track(tmp_path, [make_train_record()]) == []
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "metrics.jsonl"}


def _curve(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.tensor_proto.float_val[0]) for event in _shown(folder).Tensors(name)]


def _shown(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    shown.Reload()
    return shown


def test_tensorboard_shows_the_curves(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord, make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    steps: list[Record] = [make_train_record(policy_version=step, reward_mean=0.1 * step) for step in (1, 2, 3)]
    samples = [make_trajectory(policy_version=2, sample_index=index) for index in (0, 1)]
    assert _track(tmp_path, [*steps, eval_record], "tensorboard", samples=samples) == []
    (table,) = _shown(tmp_path).Tensors("samples")
    cells = [cell.decode() for cell in table.tensor_proto.string_val]
    assert (table.step, cells[: len(Row._fields)], cells[len(Row._fields)]) == (3, list(Row._fields), samples[0].name)
    assert _curve(tmp_path, "train/reward_mean") == [(step, pytest.approx(0.1 * step)) for step in (1, 2, 3)]
    assert _curve(tmp_path, "evaluation/arithmetic/accuracy") == [(4, 0.625)]


def test_wandb_keeps_the_numbers_offline(
    make_train_record: MakeTrainRecord, make_trajectory: MakeTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    steps: list[Record] = [make_train_record(policy_version=step, reward_mean=0.5 * step) for step in (1, 2, 2)]
    assert _track(tmp_path, steps, "wandb", samples=[make_trajectory(policy_version=1)]) == []
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()  # of messages with plain text: each number is in the history and in the summary
    for name, numbers in (("train/reward_mean", ["0.5", "1", "1"]), ("policy_version", ["1", "2", "2", "2"])):
        kept = re.findall(rb"(?<!/)" + name.encode() + rb"\x82\x01.([0-9.]+)", content, re.DOTALL)
        assert sorted(kept) == sorted(number.encode() for number in numbers * 2), (
            "a step may come again, and the table has one"
        )
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/samples_*.table.json")
    assert json.loads(table.read_text())["columns"] == list(Row._fields)


def test_mlflow_goes_on_with_the_run_of_an_earlier_launcher(
    make_train_record: MakeTrainRecord, make_trajectory: MakeTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for step in (1, 2):
        record = make_train_record(policy_version=step, reward_mean=0.5 * step, reward_parts={"//scorer/score": 1.0})
        samples = [make_trajectory(policy_version=20 * step)]
        assert _track(tmp_path, [record], "mlflow", samples=samples, resume=step == 2) == []
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "areal_rloo"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["algorithm.group_size"] == "8"
    history = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.0)]
    assert [one.value for one in client.get_metric_history(run.info.run_id, "train/reward_parts/scorer/score")] == [
        1,
        1,
    ]
    assert run.info.status == "FINISHED"
    tables = sorted((tmp_path / "mlflow").rglob("samples/*.json"))
    assert [path.name for path in tables] == ["step-000021.json", "step-000041.json"]
    assert json.loads(tables[0].read_text())[0]["completion"] == make_trajectory().completion


def test_trackio_keeps_the_numbers_in_its_folder(
    make_train_record: MakeTrainRecord, make_trajectory: MakeTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio", reason="the extra trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    steps: list[Record] = [make_train_record(policy_version=step, reward_mean=0.5 * step) for step in (1, 2)]
    assert _track(tmp_path, steps, "trackio", samples=[make_trajectory(policy_version=1)]) == []
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "areal_rloo.db")) as database:
        rows = [(step, json.loads(numbers)) for step, numbers in database.execute("select step, metrics from metrics")]
    rewards = [(step, numbers["train/reward_mean"]) for step, numbers in rows if "train/reward_mean" in numbers]
    assert rewards == [(1, 0.5), (2, 1.0)]
    assert any("samples" in numbers for _, numbers in rows)


def test_a_table_has_some_samples_of_every_tenth_step_and_of_the_last(
    make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    path = tmp_path / FILE_NAME
    tables, file = Tables(TrajectoryTail(path, from_end=False)), TrajectoryFile(path)
    found = tables.read(ends=False)
    for version in range(34):
        file.append(make_trajectory(policy_version=version, sample_index=index, pieces=["x"]) for index in range(12))
        found += tables.read(ends=False)
    found += tables.read(ends=True)
    file.close()
    assert [step for step, _ in found] == [1, 11, 21, 31, 34]
    assert all(len(rows) == 8 for _, rows in found)
    assert found[0][1][3].sample.endswith("/3")
    assert tables.read(ends=True) == []


def test_tables_go_on_after_a_learner_went_back_and_show_no_drops(
    make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    """The drops after the last step have the version of a step that never came."""
    path = tmp_path / FILE_NAME
    tables, file = Tables(TrajectoryTail(path, from_end=False)), TrajectoryFile(path)
    file.append([make_trajectory(policy_version=version) for version in (*range(25), *range(3, 8))])
    file.append([make_trajectory(policy_version=8, dropped="reward_timeout", reward=None)])
    file.close()
    assert [step for step, _ in tables.read(ends=True)] == [1, 11, 21, 8]


def test_a_line_longer_than_a_block_is_left_out(
    make_trajectory: MakeTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectories, "_MOST_READ_BYTES", 1000)
    file, tail = TrajectoryFile(tmp_path / FILE_NAME), TrajectoryTail(tmp_path / FILE_NAME, from_end=False)
    file.append([make_trajectory(policy_version=1, prompt="p" * 5000), make_trajectory(policy_version=2)])
    file.close()
    assert [record.policy_version for _ in range(12) for record in tail.read()] == [2]


def test_a_table_that_fails_costs_no_number(
    make_train_record: MakeTrainRecord, make_trajectory: MakeTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "trackio.py").write_text(WITHOUT_TABLES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'broken'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    samples = [make_trajectory(policy_version=version) for version in range(0, 60, 10)]
    steps = [make_train_record(policy_version=step) for step in (1, 2, 3)]
    assert _track(tmp_path, steps, "trackio", samples=samples) == []
    lines = (tmp_path / "logs" / "tracker-trackio.out").read_text().splitlines()
    assert [line for line in lines if line.startswith("logged")] == ["logged 1", "logged 2", "logged 3"]
    assert lines.count("no more tables of samples: PermissionError: Access Denied") == 1


def test_long_texts_are_cut_in_a_table(make_trajectory: MakeTrajectory, tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    file = TrajectoryFile(path)
    file.append([make_trajectory(prompt="p" * 5000)])
    file.close()
    ((_, (row,)),) = Tables(TrajectoryTail(path, from_end=False)).read(ends=True)
    assert (len(row.prompt), row.prompt[-4:], row.ends, row.reward) == (2004, " ...", "stop", 1.0)


def test_a_tail_of_trajectories_survives_other_files_and_other_lines(
    make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    path = tmp_path / FILE_NAME
    tail, file = TrajectoryTail(path, from_end=False), TrajectoryFile(path)
    assert tail.read() == []
    file.append([make_trajectory(policy_version=1), make_trajectory(policy_version=2)])
    assert [record.policy_version for record in tail.read()] == [1, 2]
    file.close()
    with path.open("ab") as raw:
        raw.write(b'{"of": "another version"}\n{"cut')
    assert tail.read() == []
    file = TrajectoryFile(path)
    file.append([make_trajectory(policy_version=3)])  # removes the incomplete line
    assert [record.policy_version for record in tail.read()] == [3]
    file.close()
    path.write_bytes(b"")  # cut by a resume
    assert tail.read() == []
    file = TrajectoryFile(path)
    file.append([make_trajectory(policy_version=4)])
    assert [record.policy_version for record in tail.read()] == [4]
    assert TrajectoryTail(path, from_end=True).read() == []
    file.close()
