"""Checkpoints: whole or not there, and everything in them comes back."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from areal_rloo.config import load_config
from areal_rloo.errors import CheckpointError
from areal_rloo.learner.checkpoint import (
    Checkpoints,
    LearnerState,
    Totals,
    _seal,
    capture,
    load_optimizer,
    restore_ledger,
)
from areal_rloo.learner.ledger import Ledger
from areal_rloo.learner.prompts import PromptStream
from areal_rloo.learner.train_step import TrainStep
from areal_rloo.models.loading import load_policy, load_tokenizer
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Trajectory


def _stream() -> PromptStream:
    return PromptStream(
        [Source("all", [Item(str(n)) for n in range(9)])],
        lambda item: (int(item.text) + 1,),
        seed=0,
        num_epochs=None,
    )


def _state(version: int) -> LearnerState:
    """A ledger with a group in flight and a group half finished."""
    stream, ledger = _stream(), Ledger()
    for _ in range(2):
        prompt = stream.take()
        assert prompt is not None
        ledger.admit(prompt, group_size=2, admission_version=version, deadline=version + 1)
    completion = Completion(
        np.array([5, 6], np.int32), np.array([-1, -2], np.float32), np.array([0, 1], np.int32), "stop"
    )
    ledger.lease((1, 0), "rollout-0")
    parted = msgspec.structs.replace(completion, spans=(1, 1))
    ledger.finish([Trajectory(1, 0, np.array([3], np.int32), made, 0.5) for made in (completion, parted)])
    return capture(ledger, stream, policy_version=version, seed=0, totals=Totals(trained_tokens=7), kl_coefficient=0.1)


def _save(
    checkpoints: Checkpoints, folder: Path, version: int, reference: PreTrainedModel | None = None
) -> Path | None:
    train_step = TrainStep(
        load_policy(str(folder), device=torch.device("cpu")), load_config("quickstart.yaml"), device=torch.device("cpu")
    )
    return checkpoints.save(
        _state(version),
        model=train_step.model,
        reference=reference,
        tokenizer=load_tokenizer(str(folder)),
        optimizer={"optimizer": train_step.optimizer.state_dict(), "schedule": train_step.schedule.state_dict()},
    )


def test_a_checkpoint_comes_back_and_its_model_loads_anywhere(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    _save(checkpoints, tiny_folders["qwen2"], 3)
    newest = checkpoints.load_newest()
    assert newest is not None
    path, state = newest
    assert path.name == "step-000003"
    stream = _stream()
    ledger = restore_ledger(state, stream)
    assert ledger.counts().buffered == 1
    assert ledger.counts().in_flight == 3
    both = ledger.groups[1].samples[0].trajectories
    assert [trajectory.completion.spans for trajectory in both] == [(), (1, 1)]
    assert state.totals.trained_tokens == 7
    following, expected = stream.take(), [_stream().take() for _ in range(1)]
    assert following is not None
    assert following.item_index not in {group.prompt.item_index for group in ledger.groups.values()}
    assert expected[0] is not None
    weights = load_policy(str(path / "model"), device=torch.device("cpu")).state_dict()
    original = load_policy(str(tiny_folders["qwen2"]), device=torch.device("cpu")).state_dict()
    assert all(torch.equal(weights[name], original[name]) for name in original)
    assert load_optimizer(path).keys() == {"optimizer", "schedule"}
    assert state.kl_coefficient == 0.1
    assert not (path / "reference").exists()


def test_a_reference_that_the_run_changes_is_in_the_checkpoint(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    reference = load_policy(str(tiny_folders["qwen2"]), device=torch.device("cpu"))
    with torch.no_grad():
        next(reference.parameters()).add_(1)
    path = _save(Checkpoints(tmp_path, keep=2), tiny_folders["qwen2"], 3, reference)
    assert path is not None
    weights = load_policy(str(path / "reference"), device=torch.device("cpu")).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.state_dict().items())


def test_only_the_newest_are_kept(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (1, 2, 3):
        _save(checkpoints, tiny_folders["qwen2"], version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("file", ["state.msgpack", "optimizer.pt", "model/model.safetensors", "checksums.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, tiny_folders: dict[str, Path], file: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (1, 2):
        _save(checkpoints, tiny_folders["qwen2"], version)
    damaged = tmp_path / "step-000002" / file
    damaged.write_bytes(damaged.read_bytes()[:-10])
    newest = checkpoints.load_newest()
    assert newest is not None
    assert newest[0].name == "step-000001"
    (tmp_path / "step-000001" / "state.msgpack").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        checkpoints.load_newest()


def test_an_unfinished_checkpoint_is_not_there(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    (tmp_path / ".unfinished-000009" / "model").mkdir(parents=True)
    assert Checkpoints(tmp_path, keep=2).load_newest() is None


def test_a_disk_that_refuses_leaves_the_checkpoint_before_whole(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    _save(checkpoints, tiny_folders["qwen2"], 1)
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from tests.unit.test_checkpoint import _save, Checkpoints\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.exit(0 if _save(Checkpoints(Path(sys.argv[1]), keep=2), Path(sys.argv[2]), 2) is None else 1)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tiny_folders["qwen2"])]
    repo = Path(__file__).resolve().parents[2]
    ended = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    newest = checkpoints.load_newest()
    assert newest is not None
    assert newest[0].name == "step-000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_checkpoint_of_another_format_is_named_with_what_to_do(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    folder = _save(Checkpoints(tmp_path, keep=2), tiny_folders["qwen2"], 3)
    assert folder is not None
    (folder / "state.msgpack").write_bytes(msgspec.msgpack.encode({"format": 2, "stream": {"epoch": 0}}))
    (folder / "checksums.json").unlink()
    _seal(folder)
    with pytest.raises(CheckpointError, match="format 2, this version reads 3; resume with the version that wrote it"):
        Checkpoints(tmp_path, keep=2).load_newest()
