"""Damage and change every file of a real checkpoint: no code runs, and a resume goes on from the checkpoint before."""

import errno
import json
import math
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import save, stream

from areal_rloo.config import load_config
from areal_rloo.errors import CheckpointError, DataError, DecodeError, UserError
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import Checkpoints, _seal, read_checkpoint
from areal_rloo.learner.rank import LearnerRank
from areal_rloo.learner.state import LearnerState, restore_ledger
from areal_rloo.trajectory import Completion
from areal_rloo.wire.turns import RecordedTurn, encode_turns

SHARD = "shards/rank-0-of-1.safetensors"
Damage = Callable[[Path, random.Random], None]


class Payload:
    """Makes a folder when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_folders: dict[str, Path]) -> Path:
    """Two checkpoints, to be copied."""
    folder = tmp_path_factory.mktemp("saved")
    for version in (1, 2):
        save(Checkpoints(folder), tiny_folders["qwen2"], version)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def rank(tiny_folders: dict[str, Path]) -> LearnerRank:
    return build_rank(load_config("quickstart.yaml"), model_path=str(tiny_folders["qwen2"]), device=torch.device("cpu"))


def files(checkpoint: Path) -> list[str]:
    """List the files of a checkpoint."""
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def fresh(saved: Path, folder: Path) -> Path:
    """Restore both checkpoints; return the newer."""
    shutil.rmtree(folder)
    return shutil.copytree(saved, folder) / "step-000002"


def reseal(checkpoint: Path) -> None:
    (checkpoint / "checksums.json").unlink(missing_ok=True)
    _seal(checkpoint)


def resume(folder: Path, rank: LearnerRank) -> tuple[str, LearnerState]:
    """Resume as a learner does; return the checkpoint's name and the state."""
    newest = Checkpoints(folder).load_newest()
    assert newest is not None
    path, state = newest
    rank.load(path / "shards", num_optimizer_steps=state.num_optimizer_steps)
    restore_ledger(state, stream())
    return path.name, state


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def swap(path: Path, chance: random.Random) -> None:
    others = [other for other in path.parents[0].rglob("*") if other.is_file() and other != path]
    other = chance.choice(others or [path.parents[1] / "state.msgpack"])
    content = path.read_bytes()
    shutil.copyfile(other, path)
    other.write_bytes(content)


def of_another_version(path: Path, chance: random.Random) -> None:
    older = Path(str(path).replace("step-000002", "step-000001"))
    path.write_bytes(older.read_bytes() + b" " * (older.read_bytes() == path.read_bytes()))


def empty(path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def remove(path: Path, chance: random.Random) -> None:
    path.unlink()


def become_a_pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def become_endless(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "damage", [flip, truncate, swap, of_another_version, empty, remove, become_a_pipe, become_endless]
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_read(
    saved: Path, folder: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(damage.__name__)
    for name in files(saved / "step-000002"):
        for _ in range(4):
            damage(fresh(saved, folder) / name, chance)
            caplog.clear()
            newest = Checkpoints(folder).load_newest()
            assert newest is not None
            assert (newest[0].name, newest[1].policy_version) == ("step-000001", 1), name
            (line,) = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
            assert "\n" not in line
            assert name in line or name == "checksums.json" or damage is swap, line  # then another file may be named


@pytest.mark.parametrize("dump", [pickle.dump, torch.save])
@pytest.mark.parametrize("resealed", [False, True])
def test_no_file_of_a_checkpoint_runs_code(
    saved: Path, folder: Path, rank: LearnerRank, dump: Callable[..., None], *, resealed: bool
) -> None:
    marker = folder.parent / "marker"
    for name in files(saved / "step-000002"):
        checkpoint = fresh(saved, folder)
        with (checkpoint / name).open("wb") as file:
            dump(Payload(marker), file)
        if resealed:
            reseal(checkpoint)
        assert not marker.exists()
        resumed, state = resume(folder, rank)
        assert not marker.exists(), name
        unread = resealed and (name.startswith("model/") or name == "checksums.json")  # for engines and people
        assert resumed == f"step-{state.policy_version:06d}"
        assert resumed == "step-000001" or unread, name


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.randoms(use_true_random=False), name=st.sampled_from(["state.msgpack", SHARD]))
def test_a_file_changed_on_purpose_gives_a_state_or_a_line(
    saved: Path, folder: Path, rank: LearnerRank, choice: random.Random, name: str
) -> None:
    """The checksums have no key: here they are right, and the content is wrong."""
    checkpoint = fresh(saved, folder)
    content = bytearray((checkpoint / name).read_bytes())
    most = len(content) if name == "state.msgpack" else 8 + int.from_bytes(content[:8], "little")  # of the header
    for _ in range(choice.randrange(1, 4)):
        start = choice.randrange(most)
        content[start : start + choice.randrange(4)] = choice.randbytes(choice.randrange(4))
    (checkpoint / name).write_bytes(content)
    reseal(checkpoint)
    try:
        resumed, state = resume(folder, rank)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert resumed == f"step-{state.policy_version:06d}"


def changed_state(**fields: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update(fields)


def changed_ledger(**fields: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["ledger"].update(fields)


def without_samples(state: dict[str, Any]) -> None:
    state["ledger"]["groups"][0]["samples"] = []
    state["ledger"]["admitted"] -= 2


def group_beyond_the_wire(state: dict[str, Any]) -> None:
    state["ledger"]["groups"][0]["group_id"] = 2**50
    state["ledger"]["admitted_groups"] = 2**50 + 1


def attempts_beyond_the_wire(state: dict[str, Any]) -> None:
    state["ledger"]["groups"][0]["samples"][0]["num_attempts"] = 2**64 - 1


def admitted_after(version: int, **fields: int) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["ledger"]["groups"][0].update(fields | {"admission_version": version})


def with_tokens_of_version(version: int) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        counts = np.array([header[4:7] for header in state["headers"]])  # tokens of prompts, tokens, version runs
        columns = np.frombuffer(b"".join(state["columns"]), "<i4").copy()
        columns[(counts @ [1, 2, 2]).sum() - 2] = version  # of the last run
        state["columns"] = [columns.tobytes()]

    return change


def with_a_partial_of_version(version: int) -> Callable[[dict[str, Any]], None]:
    one = Completion(np.array([1]), np.array([-1.0]), np.array([version]), "abort")

    def change(state: dict[str, Any]) -> None:
        samples = [sample for group in state["ledger"]["groups"] for sample in group["samples"]]
        samples[-1]["partial"] = encode_turns([RecordedTurn(b"", one)])

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed_state(num_optimizer_steps=-(2**63)),
        changed_state(num_optimizer_steps=2**64 - 1),
        changed_state(kl_coefficient=math.nan),
        changed_state(kl_coefficient=-1.0),
        changed_state(totals={"wall_s": math.inf}),
        changed_state(totals={"generated_tokens": 2**64 - 1}),
        changed_state(totals={"staleness_tokens": {0: -1}}),
        changed_state(history=[["learner", -1]]),
        changed_state(history=[]),
        changed_state(history=[["learner", 10**9]]),
        changed_state(history=[["learner", 1], ["another", 0]]),
        changed_ledger(dropped={"a\nb": 0}),
        changed_ledger(dropped={f"reason_{'a' * number}": 0 for number in range(33)} | {"a" * 41: 0}),
        admitted_after(10**9),
        admitted_after(1, deadline=0),
        with_tokens_of_version(10**9),
        with_a_partial_of_version(10**9),
        changed_ledger(admitted=2**64 - 1, trained=2**64 - 5),
        changed_ledger(dropped_groups=-1),
        group_beyond_the_wire,
        attempts_beyond_the_wire,
        without_samples,
    ],
)
def test_numbers_that_no_learner_counts_are_refused(
    saved: Path,
    folder: Path,
    change: Callable[[dict[str, Any]], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = fresh(saved, folder)
    state = msgspec.msgpack.decode((checkpoint / "state.msgpack").read_bytes(), strict=False)
    change(state)
    (checkpoint / "state.msgpack").write_bytes(msgspec.msgpack.encode(state))
    reseal(checkpoint)
    newest = Checkpoints(folder).load_newest()
    assert newest is not None
    assert newest[0].name == "step-000001"
    (line,) = [record.getMessage() for record in caplog.records if "is damaged" in record.getMessage()]
    assert "state.msgpack" in line


@pytest.mark.parametrize("returned", [[[0, 9]], [[0, -1]], [[-1, 0]]])
def test_a_returned_prompt_that_does_not_exist_is_refused_at_once(
    saved: Path, folder: Path, returned: list[list[int]]
) -> None:
    checkpoint = fresh(saved, folder)
    state = msgspec.msgpack.decode((checkpoint / "state.msgpack").read_bytes())
    state["stream"]["returned"] = returned
    (checkpoint / "state.msgpack").write_bytes(msgspec.msgpack.encode(state))
    reseal(checkpoint)
    newest = Checkpoints(folder).load_newest()
    assert newest is not None
    if newest[0] == checkpoint:
        with pytest.raises(DataError, match="expected items 0 to 8, got"):
            restore_ledger(newest[1], stream())


def test_a_config_in_another_encoding_is_named(saved: Path, folder: Path) -> None:
    checkpoint = fresh(saved, folder)
    (checkpoint / "config.yaml").write_bytes(b"\xff")
    reseal(checkpoint)
    with pytest.raises(DecodeError, match=r"config\.yaml"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EIO])
def test_only_a_file_that_is_damaged_costs_steps(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A shortage of the machine passes: the checkpoint stays, and the process ends with the code of another try."""
    opened, failed = os.open, list[str]()

    def fails_once(path: Any, *arguments: Any, **options: Any) -> int:
        if "step-000002" in str(path) and not failed:
            failed.append(str(path))
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", fails_once)
    if number == errno.EIO:  # the medium may be damaged
        found = Checkpoints(folder).load_newest()
        assert found is not None
        assert found[0].name == "step-000001"
        return
    with pytest.raises(CheckpointError, match=r"step-000002: cannot be read now: .*; resume again") as caught:
        Checkpoints(folder).load_newest()
    assert failed
    assert caught.value.exit_code == 1
    found = Checkpoints(folder).load_newest()
    assert found is not None
    assert found[0].name == "step-000002"


def test_a_name_with_a_line_break_gives_a_single_line(saved: Path, folder: Path) -> None:
    checkpoint = fresh(saved, folder)
    (checkpoint / "checksums.json").write_bytes(b'{"state\\n.msgpack": ""}')
    with pytest.raises(DecodeError) as caught:
        read_checkpoint(checkpoint)
    assert str(caught.value).isprintable()


def _claims() -> Iterator[tuple[str, bytes]]:
    for shape, end in (([10**12], 4 * 10**12), ([2**62, 8], 64), ([10**12], 64)):
        header = json.dumps({"policy.x": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
        yield SHARD, len(header).to_bytes(8, "little") + header + bytes(64)
    yield SHARD, (2**62).to_bytes(8, "little") + b"{}"
    for start in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000):
        yield "state.msgpack", start
        yield "state.msgpack", b"\x82\xa6format\x08\xa7columns" + start
    yield "checksums.json", b"[" * 100_000
    yield "checksums.json", b"{}"
    yield "checksums.json", b'{"/dev/zero": "", "../step-000001/state.msgpack": "", "state.msgpack": ""}'


@pytest.mark.parametrize(("name", "content"), list(_claims()))
def test_a_file_that_claims_much_takes_no_memory(saved: Path, folder: Path, name: str, content: bytes) -> None:
    checkpoint = fresh(saved, folder)
    (checkpoint / name).write_bytes(content)
    if name != "checksums.json":
        reseal(checkpoint)
    status = Path("/proc/self/status")

    def kibibytes(key: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(key)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # reset the recorded peak
    before = kibibytes("VmRSS")
    newest = Checkpoints(folder).load_newest()
    assert kibibytes("VmHWM") - before < 32 * 1024
    assert newest is not None
    assert newest[0].name == "step-000001"


def test_the_files_of_a_checkpoint_have_the_mode_of_the_umask(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    before = os.umask(0o027)
    try:
        checkpoint = save(Checkpoints(tmp_path), tiny_folders["qwen2"], 1)
    finally:
        os.umask(before)
    assert checkpoint is not None
    assert {(checkpoint / name).stat().st_mode & 0o777 for name in files(checkpoint)} == {0o640}
