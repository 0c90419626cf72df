"""Files of records: whole lines after a kill and on a full disk, and the records up to a checkpoint."""

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.full_disk import disk_of

from areal_rloo.errors import CheckpointError
from areal_rloo.telemetry.record_file import RecordFile, cut_records


def _lines(*versions: int) -> bytes:
    return b"".join(msgspec.json.encode({"number": n, "policy_version": v}) + b"\n" for n, v in enumerate(versions))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=30), st.integers(0, 200_000))
def test_a_new_line_never_joins_a_line_that_a_kill_cut(tmp_path: Path, rest: bytes, num_whole: int) -> None:
    rest = rest.replace(b"\n", b"")
    path = tmp_path / "records"
    whole = b"x" * num_whole + b"\n" if num_whole else b""
    path.write_bytes(whole + rest)
    file = RecordFile(path)
    file.append(b"next\n")
    file.close()
    assert path.read_bytes() == whole + b"next\n"


def test_a_long_line_that_a_kill_cut_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(b"first\n" + b"x" * 300_000)
    RecordFile(path).close()
    assert path.read_bytes() == b"first\n"


def test_on_a_full_disk_lines_are_appended_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = RecordFile(path)
    file.append(b"first\n")
    with disk_of(10):
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                file.append(b"longer than the disk\n")
            assert path.read_bytes() == b"first\n"
    file.append(b"second\n")
    file.close()
    assert path.read_bytes() == b"first\nsecond\n"


@pytest.mark.parametrize("rest", [b"", b'{"policy_version":1'])
@pytest.mark.parametrize(
    ("versions", "kept"),
    [
        ((1, 2, 3, 4), (1, 2)),
        ((1, 2, 3, 2, 4), (1, 2, 2)),
        ((3, 4), ()),
        ((1, 2), (1, 2)),
        ((), ()),
        ((3, 1, 2), (1, 2)),
    ],
)
def test_a_cut_removes_the_records_after_the_checkpoint(
    tmp_path: Path, versions: tuple[int, ...], kept: tuple[int, ...], rest: bytes
) -> None:
    """An evaluation of a version may be written after train steps of later versions."""
    path = tmp_path / "records"
    path.write_bytes(_lines(*versions) + rest)
    (tmp_path / ".records.unfinished").write_bytes(b"of a killed learner")
    cut_records(path, 2)
    assert [msgspec.json.decode(line)["policy_version"] for line in path.read_bytes().splitlines()] == list(kept)
    assert list(tmp_path.iterdir()) == [path]


def test_a_cut_at_the_end_needs_no_room_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(_lines(1, 2, 3))
    with disk_of(0):
        cut_records(path, 2)
    assert path.read_bytes() == _lines(1, 2)


def test_a_cut_that_the_disk_refuses_changes_nothing_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(_lines(1, 3, 2))
    with (
        disk_of(10),
        pytest.raises(CheckpointError, match=r"records after version 2 .* free some disk, then areal-rloo resume "),
    ):
        cut_records(path, 2)
    assert path.read_bytes() == _lines(1, 3, 2)
    assert list(tmp_path.iterdir()) == [path]


def test_cutting_a_missing_file_does_nothing(tmp_path: Path) -> None:
    cut_records(tmp_path / "records", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_in_place_of_records_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "records")
    with pytest.raises(CheckpointError, match="records: cannot be read: expected a regular file; move the file away"):
        cut_records(tmp_path / "records", 1)
