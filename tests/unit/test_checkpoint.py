"""Checkpoints: whole or not there, and everything in them comes back."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from areal_rloo.config import load_config
from areal_rloo.errors import CheckpointError
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import (
    Checkpoints,
    LearnerState,
    Totals,
    _seal,
    capture,
    restore_ledger,
)
from areal_rloo.learner.ledger import Ledger
from areal_rloo.learner.prompts import PromptStream
from areal_rloo.learner.team import Team
from areal_rloo.models.files import load_tokenizer
from areal_rloo.models.loading import load_policy
from areal_rloo.tasks import Item, Source
from areal_rloo.trajectory import Completion, Trajectory

CPU = torch.device("cpu")


def _stream() -> PromptStream:
    return PromptStream(
        [Source("all", [Item(str(n)) for n in range(9)])],
        lambda item: (int(item.text) + 1,),
        seed=0,
        num_epochs=None,
    )


def checkpoint_state(version: int) -> LearnerState:
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
    return capture(
        ledger,
        stream,
        policy_version=version,
        seed=0,
        totals=Totals(trained_tokens=7),
        kl_coefficient=0.1,
        num_optimizer_steps=2,
    )


def trained(folder: Path, *overrides: str) -> Team:
    """A learner of one rank whose weights and moments are not what they began as."""
    config = load_config("quickstart.yaml", ["learner.optimizer.learning_rate=1e-2", *overrides])
    rank = build_rank(config, model_path=str(folder), device=CPU)
    for step in range(2):
        for number, parameter in enumerate(p for p in rank.policy.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(100 * step + number)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        rank.optimizer.step()
        rank.schedule.step()
    rank.optimizer.zero_grad(set_to_none=True)
    return Team(rank)


def save(checkpoints: Checkpoints, folder: Path, version: int) -> Path | None:
    """Where it is, or None where the disk refused."""
    checkpoints.save(checkpoint_state(version), team=trained(folder), tokenizer=load_tokenizer(str(folder)))
    return checkpoints.folder / f"step-{version:06d}" if checkpoints.wait() else None


def test_a_checkpoint_comes_back_and_its_model_loads_anywhere(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, tiny_folders["qwen2"], 3)
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
    weights = load_policy(str(path / "model"), device=CPU).state_dict()
    expected_weights = trained(tiny_folders["qwen2"]).own.policy.causal.state_dict()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert (state.kl_coefficient, state.num_optimizer_steps) == (0.1, 2)


@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.optimizer={schedule: cosine, warmup_steps: 1}",),
        ("learner.optimizer.state_dtype=bfloat16",),
        ("learner.lora={rank: 4}",),
        ("algorithm.kl.coefficient=0.1", "model.reference.refresh_every_n_versions=2"),
    ],
)
def test_a_rank_goes_on_to_the_bit(tmp_path: Path, tiny_folders: dict[str, Path], overrides: tuple[str, ...]) -> None:
    """Weights, moments, rate, random numbers and a reference that changes: one step more is the same step."""
    if "lora" in overrides[0]:
        pytest.importorskip("peft", reason="the extra peft is not installed")
    folder = tiny_folders["qwen2"]
    team = trained(folder, *overrides)
    if team.own.reference is not None:
        with torch.no_grad():
            next(team.own.reference.policy.parameters()).add_(1)
    written = team.save_shards(tmp_path / "shards")
    drawn = torch.rand(3)
    with torch.no_grad():  # training goes on while it is written
        kept = [(tensor, tensor.clone()) for tensor in team.own.state().values()]
        for tensor, _ in kept:
            tensor.zero_()
        written.result()
        for tensor, before in kept:
            tensor.copy_(before)
    torch.manual_seed(1)
    config = load_config("quickstart.yaml", ["learner.optimizer.learning_rate=1e-2", *overrides])
    again = build_rank(config, model_path=str(folder), device=CPU)
    again.load(tmp_path / "shards", num_optimizer_steps=2)
    assert torch.equal(torch.rand(3), drawn)
    for rank in (team.own, again):
        for parameter in (p for p in rank.policy.parameters() if p.requires_grad):
            parameter.grad = torch.ones_like(parameter)
        rank.optimizer.step()
        rank.schedule.step()
    assert again.schedule.get_last_lr() == team.own.schedule.get_last_lr()
    for name, parameter in team.own.policy.named_parameters():
        assert torch.equal(parameter, again.policy.get_parameter(name)), name
    if team.own.reference is not None:
        assert again.reference is not None
        pairs = zip(team.own.reference.policy.parameters(), again.reference.policy.parameters(), strict=True)
        assert all(torch.equal(own, theirs) for own, theirs in pairs)


def test_shards_of_another_model_are_refused_with_what_does_not_fit(
    tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    trained(tiny_folders["qwen2"]).save_shards(tmp_path / "shards").result()
    other = build_rank(load_config("quickstart.yaml"), model_path=str(tiny_folders["llama"]), device=CPU)
    with pytest.raises(CheckpointError, match="does not fit this model and optimizer"):
        other.load(tmp_path / "shards", num_optimizer_steps=2)


def test_only_the_newest_are_kept(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (1, 2, 3):
        save(checkpoints, tiny_folders["qwen2"], version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("file", ["state.msgpack", "shards/__0_0.distcp", "model/model.safetensors", "checksums.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, tiny_folders: dict[str, Path], file: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (1, 2):
        save(checkpoints, tiny_folders["qwen2"], version)
    damaged = tmp_path / "step-000002" / file
    damaged.write_bytes(damaged.read_bytes()[:-10])
    newest = checkpoints.load_newest()
    assert newest is not None
    assert newest[0].name == "step-000001"
    (tmp_path / "step-000001" / "state.msgpack").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        checkpoints.load_newest()


def test_a_checkpoint_that_is_written_again_is_whole_at_every_moment(
    tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    """As when a drain follows a checkpoint of the same version; killed between two renames, the one before is back."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for _ in range(2):
        path = save(checkpoints, tiny_folders["qwen2"], 3)
        assert path is not None
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-000003"]
    path.rename(tmp_path / ".replaced-step-000003")
    newest = Checkpoints(tmp_path, keep=2).load_newest()
    assert newest is not None
    assert newest[0] == path


def test_an_unfinished_checkpoint_is_not_there(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    (tmp_path / ".unfinished-000009" / "model").mkdir(parents=True)
    assert Checkpoints(tmp_path, keep=2).load_newest() is None


def test_a_disk_that_refuses_leaves_the_checkpoint_before_whole(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, tiny_folders["qwen2"], 1)
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from tests.unit.test_checkpoint import save, Checkpoints\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.exit(0 if save(Checkpoints(Path(sys.argv[1]), keep=2), Path(sys.argv[2]), 2) is None else 1)"
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
    folder = save(Checkpoints(tmp_path, keep=2), tiny_folders["qwen2"], 3)
    assert folder is not None
    (folder / "state.msgpack").write_bytes(msgspec.msgpack.encode({"format": 2, "stream": {"epoch": 0}}))
    (folder / "checksums.json").unlink()
    _seal(folder)
    with pytest.raises(CheckpointError, match="format 2, this version reads 4; resume with the version that wrote it"):
        Checkpoints(tmp_path, keep=2).load_newest()


def test_a_save_that_is_killed_at_any_byte_leaves_the_checkpoint_before(
    tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    """50 times, each at another number of written bytes, SIGKILL."""
    folder = tiny_folders["qwen2"]
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert save(checkpoints, folder, 1) is not None
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    offsets = np.random.default_rng(0).integers(0, size, 50).tolist()
    command = [sys.executable, "-m", "tests.unit.checkpoints_to_kill", str(tmp_path), str(folder), *map(str, offsets)]
    repo = Path(__file__).resolve().parents[2]
    ended = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert len(rows) == 50
    assert sum(killed == "1" for killed, *_ in rows) >= 40
    assert len({size for _, size, *_ in rows}) > 10, "it died at many places"
    assert len({num_files for _, _, num_files, _ in rows}) > 3, "and in several files"
    for killed, size, _, newest in rows:
        assert newest == "step-000001" or killed == "0" or size == "0", "a later one is there after its rename alone"
