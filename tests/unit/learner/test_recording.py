"""trajectories.jsonl as the learner writes it: trained trajectories with their numbers, and dropped samples."""

import itertools
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_rloo.config import TelemetryConfig, load_config
from areal_rloo.intake.ledger import Ledger
from areal_rloo.intake.prompts import Prompt
from areal_rloo.learner.advantages import Advantages, Masks
from areal_rloo.learner.recording import Recorder
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.telemetry import trajectories
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.trajectories import TrajectoryRecord, read_trajectories
from areal_rloo.trajectory import Completion, Group, Item, Trajectory

TOKENIZER = make_tiny_tokenizer()


def _ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text), np.int32)


def _trajectory(group_id: int, index: int, *, versions: list[int], spans: tuple[int, ...] = ()) -> Trajectory:
    completion = Completion(
        _ids("ab1"), np.array([-0.123456789, -1, -2], np.float32), np.array(versions, np.int32), "stop", spans
    )
    return Trajectory(group_id, index, _ids("1+1=?"), completion, float(index), {"right": float(index)})


def _batch(num_groups: int = 6) -> tuple[list[Group], Masks, Advantages]:
    """Groups of two samples at version 5; the second token of every first sample is past the bound."""
    groups, masks, advantages = [], Masks([], [], torch.tensor([]), 0, Counter()), Advantages([], [], {})
    for group_id in range(num_groups):
        trajectories = (
            _trajectory(group_id, 0, versions=[3, 4, 5], spans=(1, 1, 1)),
            _trajectory(group_id, 1, versions=[5, 5, 5]),
        )
        groups.append(Group(group_id, 9, trajectories, "sums", 2, 100 + group_id, "2"))
        masks.of_tokens.extend([torch.tensor([False, False, True]), torch.ones(3, dtype=torch.bool)])
        advantages.of_tokens.extend([torch.full((3,), -0.5), torch.tensor([0.5, 1.0, 1.5])])
        masks.stale_tokens.extend([1, 0])
    return groups, masks, advantages


def _written(path: Path, trajectories_per_step: int) -> list[TrajectoryRecord]:
    recorder = Recorder(path, TOKENIZER, TelemetryConfig(trajectories_per_step=trajectories_per_step))
    recorder.step(*_batch(), [], policy_version=5)
    recorder.close([], policy_version=5)
    return list(read_trajectories(path)) if path.exists() else []


def test_a_record_has_the_numbers_of_its_training(tmp_path: Path) -> None:
    first, second, *_ = _written(tmp_path / "t.jsonl", 12)
    assert (first.prompt, first.completion, first.pieces) == ("1+1=?", "ab1", ["a", "b", "1"])
    assert (first.source, first.epoch, first.item_index, first.policy_version) == ("sums", 2, 100, 5)
    assert (first.versions, first.spans, first.num_masked_tokens) == ([[3, 1], [4, 1], [5, 1]], [1, 1, 1], 1)
    assert first.logprobs == [-0.12346, -1, -2]
    assert (first.advantage, first.advantages, first.staleness) == (-0.5, [], 0)  # of the one token in the loss
    assert (second.reward, second.reward_parts) == (1.0, {"right": 1.0})
    assert (second.advantage, second.advantages) == (1.0, [0.5, 1.0, 1.5])
    assert (first.dropped, first.expected) == (None, "2")


@pytest.mark.parametrize(("wanted", "groups"), [(1, [0]), (4, [0, 3]), (6, [0, 2, 4]), (1000, [0, 1, 2, 3, 4, 5])])
def test_whole_groups_are_written_spread_over_the_batch(tmp_path: Path, wanted: int, groups: list[int]) -> None:
    records = _written(tmp_path / "t.jsonl", wanted)
    assert [record.group_id for record in records] == [group for group in groups for _ in range(2)]


def test_zero_trajectories_per_step_write_no_file(tmp_path: Path) -> None:
    _written(tmp_path / "t.jsonl", 0)
    assert list(tmp_path.iterdir()) == []


def test_dropped_samples_are_written_with_reason_with_or_without_tokens(tmp_path: Path) -> None:
    ledger = Ledger()
    answer = "a" * 5000 + "#### 4"
    prompt = Prompt(1, 7, tuple(_ids("2+2=?").tolist()), Item("2+2=?", answer, source="sums"))
    for _ in range(2):
        ledger.admit(prompt, group_size=2, admission_version=0, deadline=9)
    done = [_trajectory(0, 0, versions=[0, 0, 0]), _trajectory(0, 0, versions=[0, 0, 1])]
    ledger.finish((0, 0), done)
    ledger.drop_sample((0, 1), "reward_error", detail="ValueError: no")
    ledger.drop_group(0, "group_too_small")
    recorder = Recorder(tmp_path / "t.jsonl", TOKENIZER, TelemetryConfig(trajectories_per_step=1))
    ledger.drop_sample((1, 1), "max_attempts")
    recorder.step(*_batch(1), ledger.take_drops(), policy_version=5)
    ledger.drop_sample((1, 0), "reward_error", detail="at the end")
    recorder.close(ledger.take_drops(), policy_version=6)
    assert ledger.take_drops() == []
    dropped = [record for record in read_trajectories(tmp_path / "t.jsonl") if record.dropped is not None]
    assert [(r.name, r.dropped, r.detail) for r in dropped] == [
        ("0/1", "reward_error", "ValueError: no"),
        ("0/0", "group_too_small", ""),
        ("0/0.1", "group_too_small", ""),
        ("1/1", "max_attempts", ""),
        ("1/0", "reward_error", "at the end"),
    ]
    assert {(len(r.expected), r.expected[-10:]) for r in dropped} == {(2005, "aaaa#### 4")}
    assert [(r.prompt, r.completion) for r in dropped[:2]] == [("2+2=?", ""), ("1+1=?", "ab1")]
    assert all((r.source, r.epoch, r.item_index, r.advantage) == ("sums", 1, 7, None) for r in dropped)


def test_a_full_disk_loses_only_records(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(Path("/dev/full"), TOKENIZER, TelemetryConfig(trajectories_per_step=2))
    get_logger("areal_rloo").addHandler(caplog.handler)
    recorder.step(*_batch(), [], policy_version=5)
    recorder.step(*_batch(), [], policy_version=6)
    recorder.close([], policy_version=6)
    get_logger("areal_rloo").removeHandler(caplog.handler)
    assert "4 records are missing from trajectories.jsonl so far" in caplog.text


def test_a_run_writes_trajectories_by_default() -> None:
    assert load_config("quickstart.yaml").telemetry.trajectories_per_step > 0


def test_a_long_run_keeps_its_first_and_its_newest_steps_dense(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    config = TelemetryConfig(trajectories_per_step=2, most_trajectories_bytes=20_000)
    recorder, sizes = Recorder(path, TOKENIZER, config), []
    for version in range(200):
        recorder.step(*_batch(1), [], policy_version=version)
        assert recorder._written is not None
        recorder._written.result()
        sizes.append(path.stat().st_size)
    recorder.close([], policy_version=200)
    assert max(sizes) <= 20_000
    assert min(sizes[100:]) > 10_000, "not more is lost than needed"
    records = list(read_trajectories(path))
    versions = [record.policy_version for record in records]
    assert versions == sorted(versions)
    assert versions.count(0) == versions.count(199) == 2, "whole steps stay"
    assert set(range(195, 200)) <= set(versions)
    gaps = [after - before for before, after in itertools.pairwise(sorted(set(versions)))]
    assert gaps[0] >= 8 and gaps[-1] == 1, "the older, the sparser"


def test_a_file_of_a_few_long_steps_is_not_rewritten_at_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    monkeypatch.setattr(trajectories, "thin_records", calls.append)
    config = TelemetryConfig(trajectories_per_step=2, most_trajectories_bytes=1)
    recorder = Recorder(tmp_path / "t.jsonl", TOKENIZER, config)
    for version in range(40):
        recorder.step(*_batch(1), [], policy_version=version)
    recorder.close([], policy_version=40)
    assert 2 < len(calls) < 20


def test_a_step_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(trajectories, "thin_records", lambda _: go_on.wait(60) and None)
    recorder = Recorder(tmp_path / "t.jsonl", TOKENIZER, TelemetryConfig(most_trajectories_bytes=1))
    recorder.step(*_batch(1), [], policy_version=0)
    assert recorder._written is not None
    assert not recorder._written.done()
    go_on.set()
    recorder.step(*_batch(1), [], policy_version=1)
    recorder.close([], policy_version=2)
    assert [record.policy_version for record in read_trajectories(tmp_path / "t.jsonl")] == [0, 0, 1, 1]


def test_an_error_of_the_writer_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with it, and the drops at the end are written."""
    recorder = Recorder(tmp_path / "t.jsonl", TOKENIZER, TelemetryConfig(trajectories_per_step=2))
    with monkeypatch.context() as broken:
        broken.setattr(trajectories.TrajectoryFile, "append", lambda *_: [].pop())
        recorder.step(*_batch(1), [], policy_version=0)
        assert recorder._written is not None
        recorder._written.exception()
    with pytest.raises(IndexError):
        recorder.step(*_batch(1), [], policy_version=1)
    ledger, prompt = Ledger(), Prompt(0, 0, tuple(_ids("2+2=?").tolist()), Item("2+2=?", "4", source="sums"))
    ledger.admit(prompt, group_size=2, admission_version=0, deadline=9)
    ledger.drop_sample((0, 1), "max_attempts")
    recorder.close(ledger.take_drops(), policy_version=1)
    assert [record.dropped for record in read_trajectories(tmp_path / "t.jsonl")] == ["max_attempts"]


@pytest.mark.parametrize("refused", ["thin_records", "RecordFile"])
def test_a_disk_that_refuses_the_thinner_file_loses_no_record(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_refused, work = 0, getattr(trajectories, refused)

    def refuse_once(path: Path) -> object:
        nonlocal num_refused
        num_refused += 1
        if num_refused == 1:
            raise OSError("no room")
        return work(path)

    recorder = Recorder(tmp_path / "t.jsonl", TOKENIZER, TelemetryConfig(most_trajectories_bytes=1))
    monkeypatch.setattr(trajectories, refused, refuse_once)
    get_logger("areal_rloo").addHandler(caplog.handler)
    for version in range(3):
        recorder.step(*_batch(1), [], policy_version=version)
    recorder.close([], policy_version=3)
    get_logger("areal_rloo").removeHandler(caplog.handler)
    versions = [record.policy_version for record in read_trajectories(tmp_path / "t.jsonl")]
    assert versions == [0, 0, 2, 2], "the thinning after the refusal has removed the second step"
    assert "t.jsonl cannot be made smaller: no room" in caplog.text
