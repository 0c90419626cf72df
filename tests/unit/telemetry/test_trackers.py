"""Trackers get every number of every record, from a thread that costs the run nothing; with the real libraries."""

import math
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from areal_rloo.config import load_config
from areal_rloo.telemetry import trackers
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord
from areal_rloo.telemetry.trackers import Trackers, numbers_of

MakeTrainRecord = Callable[..., TrainRecord]


def _track(folder: Path, records: list[Record], *names: str, options: tuple[str, ...] = ()) -> list[str]:
    """Pass records on to trackers; return the lines for the user."""
    said: list[str] = []
    config = load_config("quickstart.yaml", [f"telemetry.trackers=[{', '.join(names)}]", *options])
    passed = Trackers(config, folder, said.append)
    assert passed.take(records) is records
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


class _Recorder:
    """A tracker in memory."""

    made: ClassVar[list[Any]] = []

    def __init__(self, config: object, folder: Path) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.is_closed = False
        self.made.append(self)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.logged.append((step, numbers))

    def close(self) -> None:
        self.is_closed = True


class _Failing(_Recorder):
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        if step == 2:
            raise ConnectionError("the server is gone")


class _Hanging(_Recorder):
    release = threading.Event()

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self.release.wait()


def test_a_tracker_that_fails_costs_its_own_numbers_alone(
    make_train_record: MakeTrainRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: object, folder: Path) -> trackers.Tracker:
        raise RuntimeError("no key")

    monkeypatch.setattr(_Recorder, "made", [])
    monkeypatch.setattr(trackers, "_TRACKERS", {"wandb": refuse, "mlflow": _Failing, "tensorboard": _Recorder})
    records: list[Record] = [make_train_record(policy_version=step) for step in (1, 2, 3)]
    said = _track(tmp_path, records, "wandb", "mlflow", "tensorboard")
    assert said == [
        "telemetry.trackers: wandb fails, and gets no more numbers: RuntimeError('no key')",
        "telemetry.trackers: mlflow fails, and gets no more numbers: ConnectionError('the server is gone')",
    ]
    failing, whole = _Recorder.made
    assert (failing.is_closed, whole.is_closed) == (False, True)
    assert [step for step, _ in whole.logged] == [1, 2, 3]


def test_a_tracker_that_hangs_does_not_hold_the_end_of_the_run(
    make_train_record: MakeTrainRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_TRACKERS", {"trackio": _Hanging})
    monkeypatch.setattr(trackers, "_CLOSE_S", 0.1)
    said = _track(tmp_path, [make_train_record()], "trackio")
    assert said == ["telemetry.trackers: no end after 0.1 s; the last numbers may be missing there"]
    _Hanging.release.set()


def test_without_trackers_nothing_is_made(make_train_record: MakeTrainRecord, tmp_path: Path) -> None:
    num_threads = threading.active_count()
    assert _track(tmp_path, [make_train_record()]) == []
    assert threading.active_count() == num_threads
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_shows_the_curves(
    make_train_record: MakeTrainRecord, eval_record: EvalRecord, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps: list[Record] = [make_train_record(policy_version=step, reward_mean=0.1 * step) for step in (1, 2, 3)]
    assert _track(tmp_path, [*steps, eval_record], "tensorboard") == []
    shown = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    shown.Reload()
    curve = [(event.step, event.tensor_proto.float_val[0]) for event in shown.Tensors("train/reward_mean")]
    assert curve == [(step, pytest.approx(0.1 * step)) for step in (1, 2, 3)]
    (evaluated,) = shown.Tensors("evaluation/arithmetic/accuracy")
    assert (evaluated.step, evaluated.tensor_proto.float_val[0]) == (4, 0.625)


def test_wandb_keeps_the_numbers_offline(
    make_train_record: MakeTrainRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    steps: list[Record] = [make_train_record(policy_version=step, reward_mean=0.5 * step) for step in (1, 2, 2)]
    assert _track(tmp_path, steps, "wandb") == []
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()  # of messages with plain text: each number is in the history and in the summary
    for name, numbers in (("train/reward_mean", ["0.5", "1", "1"]), ("policy_version", ["1", "2", "2"])):
        kept = re.findall(rb"(?<!/)" + name.encode() + rb"\x82\x01.([0-9.]+)", content, re.DOTALL)
        assert sorted(kept) == sorted(number.encode() for number in numbers * 2), "a step may come again"


def test_mlflow_goes_on_with_the_run_of_an_earlier_launcher(
    make_train_record: MakeTrainRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (1, 2):
        assert _track(tmp_path, [make_train_record(policy_version=step, reward_mean=0.5 * step)], "mlflow") == []
    client = MlflowClient((tmp_path / "mlflow").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "areal_rloo"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["algorithm.group_size"] == "8"
    history = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.0)]
    assert run.info.status == "FINISHED"
