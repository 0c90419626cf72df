"""trajectories.jsonl: written records are read back, also after a killed writer."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_rloo.errors import DataError
from areal_rloo.telemetry.record_file import cut_records
from areal_rloo.telemetry.trajectories import TrajectoryFile, TrajectoryRecord, read_trajectories

MakeTrajectory = Callable[..., TrajectoryRecord]


def write(path: Path, *records: TrajectoryRecord) -> Path:
    file = TrajectoryFile(path)
    file.append(records)
    file.close()
    return path


@st.composite
def trajectories(draw: st.DrawFn) -> TrajectoryRecord:
    """Anything that a run may write; lists agree in length."""
    numbers = st.floats(-100, 100)
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    pieces = draw(st.lists(names, max_size=8))
    count = len(pieces)
    cut = draw(st.integers(0, count))
    return TrajectoryRecord(
        policy_version=draw(st.integers(0, 9)),
        group_id=draw(st.integers(-3, 9)),
        sample_index=draw(st.integers(0, 7)),
        part_index=draw(st.integers(0, 2)),
        source=draw(names),
        epoch=draw(st.integers(0, 2)),
        item_index=draw(st.integers(0, 99)),
        prompt=draw(names),
        pieces=pieces,
        token_ids=draw(st.lists(st.integers(0, 200_000), min_size=count, max_size=count)),
        logprobs=draw(st.lists(numbers, min_size=count, max_size=count)),
        versions=[[1, cut], [2, count - cut]],
        spans=draw(st.sampled_from([[], [cut, count - cut]])),
        reward=draw(st.none() | numbers),
        reward_parts=draw(st.dictionaries(names, numbers, max_size=2)),
        advantage=draw(st.none() | numbers),
        staleness=draw(st.none() | st.integers(0, 5)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        dropped=draw(st.none() | names),
        detail=draw(names),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(trajectories(), max_size=5))
def test_written_records_are_read_back(tmp_path: Path, records: list[TrajectoryRecord]) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.unlink(missing_ok=True)
    write(path, *records[:2])
    write(path, *records[2:])
    assert list(read_trajectories(path)) == records
    assert path.read_bytes().count(b"\n") == len(records), "one line a record, whatever its text"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(trajectories(), max_size=6), st.integers(-1, 10))
def test_a_cut_keeps_the_records_up_to_the_checkpoint(
    tmp_path: Path, records: list[TrajectoryRecord], version: int
) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.unlink(missing_ok=True)
    write(path, *records)
    cut_records(path, version)
    assert list(read_trajectories(path)) == [record for record in records if record.policy_version <= version]
    assert list(tmp_path.iterdir()) == [path]


def test_a_partial_last_line_of_a_killed_writer_is_skipped(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    path = write(tmp_path / "trajectories.jsonl", make_trajectory(group_id=1), make_trajectory(group_id=2))
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 40, whole.index(b"\n") + 2):
        path.write_bytes(whole[:length])
        assert [record.group_id for record in read_trajectories(path)] == [1]


def test_a_resume_removes_a_partial_last_line(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    path = write(tmp_path / "trajectories.jsonl", make_trajectory(policy_version=1), make_trajectory(policy_version=2))
    path.write_bytes(path.read_bytes()[:-10])
    cut_records(path, 5)
    write(path, make_trajectory(policy_version=3))
    assert [record.policy_version for record in read_trajectories(path)] == [1, 3]


def test_a_cut_leaves_records_of_other_versions_of_the_package(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(b'{"policy_version":1,"words":"other"}\n{"policy_version":2,"words":"other"}\n')
    cut_records(path, 1)
    assert path.read_bytes() == b'{"policy_version":1,"words":"other"}\n'


def test_cutting_a_missing_file_does_nothing(tmp_path: Path) -> None:
    cut_records(tmp_path / "trajectories.jsonl", 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"policy_version":1}', "another version of areal_rloo"),
        (b"[1, 2]", "another version of areal_rloo"),
        (b'{"reward_parts": 3}', "another version of areal_rloo"),
        (b"{{", "expected a record in JSON"),
        (b"\xff", "expected a record in JSON"),
    ],
)
def test_an_invalid_line_is_named_by_file_and_number(
    tmp_path: Path, make_trajectory: MakeTrajectory, line: bytes, words: str
) -> None:
    path = write(tmp_path / "trajectories.jsonl", make_trajectory())
    with path.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(DataError, match=words) as raised:
        list(read_trajectories(path))
    assert str(raised.value).startswith(f"{path}:2: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        list(read_trajectories(tmp_path / "trajectories.jsonl"))


def test_non_finite_numbers_are_read_back_as_nan(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    record = make_trajectory(
        pieces=["a", "b"],
        logprobs=[-math.inf, -1.0],
        advantages=[math.nan, 1.0],
        reward_parts={"format": math.nan, "correct": 1.0},
    )
    (read,) = read_trajectories(write(tmp_path / "trajectories.jsonl", record))
    assert math.isnan(read.logprobs[0])
    assert math.isnan(read.advantages[0])
    assert math.isnan(read.reward_parts["format"])
    assert (read.logprobs[1], read.advantages[1], read.reward_parts["correct"]) == (-1.0, 1.0, 1.0)


def test_invalid_unicode_does_not_stop_the_writer(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    path = write(tmp_path / "trajectories.jsonl", make_trajectory(detail="half \ud83d of a pair"))
    assert [record.detail for record in read_trajectories(path)] == ["half ? of a pair"]


def test_on_a_full_disk_a_step_is_written_whole_or_not_at_all(tmp_path: Path, make_trajectory: MakeTrajectory) -> None:
    resource = pytest.importorskip("resource")
    path = write(tmp_path / "trajectories.jsonl", make_trajectory())
    file = TrajectoryFile(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.append([make_trajectory(), make_trajectory()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(path.read_bytes().splitlines()) == 1
    file.append([make_trajectory()])
    file.close()
    assert len(list(read_trajectories(path))) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("token_ids", [1]), ("logprobs", []), ("versions", [[0, 1]]), ("spans", [1, 3]), ("advantages", [0.5])],
)
def test_lists_of_different_lengths_are_refused(make_trajectory: MakeTrajectory, field: str, value: Any) -> None:
    record = make_trajectory(pieces=["a", "b"])
    with pytest.raises(ValueError, match=f"{field}: expected 2 tokens"):
        msgspec.structs.replace(record, **{field: value})


def test_every_token_has_a_version_and_an_author(make_trajectory: MakeTrajectory) -> None:
    record = make_trajectory(
        pieces=["a", "b", "c", "d"], versions=[[3, 1], [4, 3]], spans=[1, 2, 1], advantages=[0.5, 0, 0, 1]
    )
    tokens = list(record.tokens())
    assert [token.version for token in tokens] == [3, 4, 4, 4]
    assert [token.by_policy for token in tokens] == [True, False, False, True]
    assert [token.advantage for token in tokens] == [0.5, 0, 0, 1]
    assert record.completion == "abcd"


@pytest.mark.parametrize("changes", [{"versions": [[3, 9], [4, -4]]}, {"spans": [9, -4]}])
def test_counts_below_zero_are_refused(
    tmp_path: Path, changes: dict[str, Any], make_trajectory: MakeTrajectory
) -> None:
    line = msgspec.json.decode(msgspec.json.encode(make_trajectory()))
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(msgspec.json.encode(line | changes) + b"\n")
    with pytest.raises(DataError, match=r"trajectories\.jsonl:1"):
        list(read_trajectories(path))
