"""The folder `batches` of a run: batches are read back as they were, damaged files are refused, resumes cut."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.full_disk import disk_of
from support.train_steps import long_group, ragged_groups, replaced, with_turns

from areal_rloo.errors import DataError
from areal_rloo.learner.batches import (
    BatchRecorder,
    Start,
    cut_batches,
    encode_batch,
    list_batches,
    list_starts,
    read_batch,
    read_start,
    software,
)
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.trajectory import Group, Trajectory


def _start(version: int = 0) -> Start:
    return Start(
        policy_version=version, config="{}", model_path="m", device="cpu", num_threads=1, software=software("cpu")
    )


def _record(folder: Path, *steps: int, start: int = 0) -> BatchRecorder:
    recorder = BatchRecorder(folder, _start(start))
    for step in steps:
        recorder.append(ragged_groups(step), policy_version=step - 1)
    recorder.close()
    return recorder


def _same(one: Trajectory, other: Trajectory) -> bool:
    plain = [
        msgspec.structs.replace(t, prompt_tokens=None, token_rewards=None, completion=None)  # type: ignore[arg-type]
        for t in (one, other)
    ]
    arrays = [
        (t.prompt_tokens, t.completion.tokens, t.completion.behaviour_logprobs, t.completion.versions, t.token_rewards)
        for t in (one, other)
    ]
    ends = [(t.completion.finish_reason, t.completion.spans) for t in (one, other)]
    return (
        msgspec.structs.astuple(plain[0]) == msgspec.structs.astuple(plain[1])
        and ends[0] == ends[1]
        and all((a is b is None) or np.array_equal(a, b) for a, b in zip(*arrays, strict=True))
    )


def _adorned(trajectory: Trajectory) -> Trajectory:
    """Fill the fields that random groups leave empty."""
    rewards = np.linspace(0, 1, len(trajectory.completion.tokens), dtype=np.float32)
    return msgspec.structs.replace(
        trajectory, reward_parts={"right": 1 / 3}, answer="é\n7", token_rewards=rewards if trajectory.group_id else None
    )


@given(seed=st.integers(0, 2**32), num_groups=st.integers(1, 6), turns=st.booleans())
def test_a_batch_is_read_back_in_order_and_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, seed: int, num_groups: int, turns: bool
) -> None:
    batch = replaced(ragged_groups(seed, num_groups=num_groups), _adorned)
    batch = with_turns(batch, seed) if turns else batch
    batch = [Group(g.group_id, 5, g.trajectories, f"source {g.group_id}", 2, 7 + g.group_id) for g in batch[::-1]]
    path = tmp_path_factory.mktemp("batch") / "step-000001-0.msgpack"
    path.write_bytes(encode_batch(batch))
    read = read_batch(path)
    assert [msgspec.structs.astuple(msgspec.structs.replace(g, trajectories=())) for g in read] == [
        msgspec.structs.astuple(msgspec.structs.replace(g, trajectories=())) for g in batch
    ]
    for one, other in zip(read, batch, strict=True):
        assert all(_same(*pair) for pair in zip(one.trajectories, other.trajectories, strict=True))


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_damaged_or_cut_batch_is_refused(tmp_path_factory: pytest.TempPathFactory, at: float, bit: int) -> None:
    path = tmp_path_factory.mktemp("batch") / "step-000001-0.msgpack"
    content = encode_batch(ragged_groups())
    place = int(at * len(content))
    for broken in (content[:place], content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"step-000001-0.msgpack: the batch is damaged"):
            read_batch(path)


@pytest.mark.parametrize("change", [-1, 1, 10**12])
def test_groups_that_claim_other_trajectories_are_refused(tmp_path: Path, change: int) -> None:
    """The digest has no key: here it is right, and the counts are wrong."""
    content = msgspec.msgpack.decode(encode_batch(ragged_groups())[16:])
    content["groups"][0][-1] += change
    body = msgspec.msgpack.encode(content)
    path = tmp_path / "step-000001-0.msgpack"
    path.write_bytes(hashlib.blake2b(body, digest_size=16).digest() + body)
    with pytest.raises(DataError, match="trajectories, as the groups say"):
        read_batch(path)


@pytest.mark.parametrize(
    ("place", "value"),
    [((0, 0), 7), ((0, 0), 2**63), ((0, 1), -1), ((0, 3), 2**60), ((0, 4), -1)],
    ids=["another group", "huge id", "deadline", "epoch", "item"],
)
def test_numbers_that_no_learner_records_are_refused(tmp_path: Path, place: tuple[int, int], value: int) -> None:
    content = msgspec.msgpack.decode(encode_batch(ragged_groups())[16:])
    content["groups"][place[0]][place[1]] = value
    body = msgspec.msgpack.encode(content)
    path = tmp_path / "step-000001-0.msgpack"
    path.write_bytes(hashlib.blake2b(body, digest_size=16).digest() + body)
    with pytest.raises(DataError, match=r"step-000001-0.msgpack"):
        read_batch(path)


def test_a_batch_without_groups_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step-000001-0.msgpack").write_bytes(encode_batch([]))
    with pytest.raises(DataError, match=r"step-000001-0.msgpack"):
        read_batch(tmp_path / "step-000001-0.msgpack")


def test_a_batch_takes_the_documented_bytes() -> None:
    batch = [long_group(5000)]
    num_prompt_tokens, num_tokens = 2, 2 * 4999
    assert len(encode_batch(batch)) < 8 * num_tokens + 4 * num_prompt_tokens + 300


def test_refused_batches_are_kept_before_the_batch_of_the_step(tmp_path: Path) -> None:
    _record(tmp_path, 1, 2, 2, 3)
    names = {step: [path.name for path in paths] for step, paths in list_batches(tmp_path).items()}
    assert names == {
        1: ["step-000001-0.msgpack"],
        2: ["step-000002-0.msgpack", "step-000002-1.msgpack"],
        3: ["step-000003-0.msgpack"],
    }
    assert read_start(list_starts(tmp_path)[0]) == _start()


def test_a_resume_removes_the_batches_after_the_checkpoint(tmp_path: Path) -> None:
    _record(tmp_path, *range(1, 12), 12, 12)
    (tmp_path / ".step-000012-2.msgpack.unfinished").write_bytes(b"of a killed learner")
    cut_batches(tmp_path, 8)
    _record(tmp_path, 9, 10, start=8)
    assert list(list_batches(tmp_path)) == list(range(1, 11))
    assert list(list_starts(tmp_path)) == [0, 8]
    cut_batches(tmp_path, 8)  # the second resume from the same checkpoint
    assert list(list_starts(tmp_path)) == [0]
    cut_batches(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_costs_batches_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    get_logger("areal_rloo").addHandler(caplog.handler)
    recorder = BatchRecorder(tmp_path / "batches", _start())
    with disk_of(700):  # room for the start, not for a batch
        for step in (1, 2):
            recorder.append([long_group(5000)], policy_version=step - 1)
        recorder.append([long_group(5)], policy_version=2)
        recorder.append([long_group(5000)], policy_version=3)
        recorder.append([long_group(5)], policy_version=4)
        recorder.close()
    get_logger("areal_rloo").removeHandler(caplog.handler)
    assert "2 batches are missing" in caplog.text
    assert "3 batches are missing" in caplog.text
    assert list(list_batches(tmp_path / "batches")) == [3, 5]
    assert sorted(path.name for path in (tmp_path / "batches").glob(".*")) == []


def test_a_start_that_the_disk_refused_is_written_later(tmp_path: Path) -> None:
    recorder = BatchRecorder(tmp_path / "batches", _start())
    (tmp_path / "batches").touch()  # no folder can be made here
    recorder.append(ragged_groups(), policy_version=0)
    recorder.append(ragged_groups(), policy_version=1)  # the first write has ended
    (tmp_path / "batches").unlink(missing_ok=True)
    recorder.append(ragged_groups(), policy_version=2)
    recorder.append(ragged_groups(), policy_version=3)
    recorder.close()
    assert list(list_starts(tmp_path / "batches")) == [0]
    assert list(list_batches(tmp_path / "batches"))[-2:] == [3, 4]
