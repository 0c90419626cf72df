"""Test checkpoints: complete or absent, and everything in them is restored."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import checkpoint_state, save, stream, trained

from areal_rloo.config import load_config
from areal_rloo.errors import CheckpointError
from areal_rloo.learner.building import build_rank
from areal_rloo.learner.checkpoint import Checkpoints, _seal, worth_keeping
from areal_rloo.learner.checkpoint_folder import list_checkpoints
from areal_rloo.learner.optimizer import schedule_factor
from areal_rloo.learner.state import capture, restore_ledger
from areal_rloo.models.files import load_tokenizer
from areal_rloo.models.loading import load_policy
from areal_rloo.telemetry.records import EvalRecord

CPU = torch.device("cpu")
TESTS = Path(__file__).resolve().parents[2]  # a program that starts there finds support/


def test_a_checkpoint_restores_state_and_its_model_loads(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, tiny_folders["qwen2"], 3)
    newest = checkpoints.load_newest()
    assert newest is not None
    path, state = newest
    assert path.name == "step-000003"
    prompts = stream()
    ledger = restore_ledger(state, prompts)
    assert ledger.counts().buffered == 1
    assert ledger.counts().in_flight == 3
    both = ledger.groups[1].samples[0].trajectories
    assert [trajectory.completion.spans for trajectory in both] == [(), (1, 1)]
    assert state.totals.trained_tokens == 7
    following, expected = prompts.take(), [stream().take() for _ in range(1)]
    assert following is not None
    assert following.item_index not in {group.prompt.item_index for group in ledger.groups.values()}
    assert expected[0] is not None
    weights = load_policy(str(path / "model"), device=CPU).state_dict()
    expected_weights = trained(tiny_folders["qwen2"]).own.policy.causal.state_dict()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)
    assert (state.kl_coefficient, state.num_optimizer_steps) == (0.1, 2)


def test_a_captured_state_copies_no_token_and_stays_as_it_was() -> None:
    """The loop of the intake waits for the capture, and not for the tokens."""
    prompts = stream()
    ledger = restore_ledger(checkpoint_state(3), prompts)
    expected = capture(ledger, prompts).encoded()
    captured = capture(ledger, prompts)
    assert captured.buffered[0] is ledger.groups[1].samples[0].trajectories[0]
    ledger.drop_sample((1, 0), "test")
    prompts.take()
    assert captured.encoded() == expected != capture(ledger, prompts).encoded()


@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.optimizer={schedule: cosine, warmup_steps: 1}",),
        ("learner.optimizer.state_dtype=bfloat16",),
        ("learner.lora={rank: 4}",),
        ("algorithm.kl.coefficient=0.1", "model.reference.refresh_every_n_versions=2"),
        ("learner.lora={rank: 4}", "algorithm.kl.coefficient=0.1", "model.reference.refresh_every_n_versions=2"),
    ],
)
def test_a_restored_rank_continues_bit_for_bit(
    tmp_path: Path, tiny_folders: dict[str, Path], overrides: tuple[str, ...]
) -> None:
    """Compare a further step: weights, moments, rate, random numbers and a refreshed reference."""
    if "lora" in overrides[0]:
        pytest.importorskip("peft", reason="the extra peft is not installed")
    folder = tiny_folders["qwen2"]
    team = trained(folder, *overrides)
    if team.own.reference is not None:
        with torch.no_grad():
            next(team.own.reference.policy.parameters()).add_(1)
    (tmp_path / "shards").mkdir()
    written = team.save_shards(tmp_path / "shards")
    drawn = torch.rand(3)
    with torch.no_grad():  # training continues during the write
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


def test_a_checkpoint_has_the_adapters_apart_and_merged(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    pytest.importorskip("peft", reason="the extra peft is not installed")
    save(Checkpoints(tmp_path), tiny_folders["qwen2"], 3, "learner.lora={rank: 4}")
    folder = tmp_path / "step-000003"
    base, merged = (
        load_policy(str(path), device=CPU).state_dict() for path in (tiny_folders["qwen2"], folder / "model")
    )
    adapters = load_file(folder / "adapters" / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    up, down = (adapters[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "BA")
    assert (up @ down).abs().max() > 0
    torch.testing.assert_close(merged[f"{name}.weight"], base[f"{name}.weight"] + 8 * up @ down)
    settings = json.loads((folder / "adapters" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 32)
    assert settings["base_model_name_or_path"] == str(tiny_folders["qwen2"]), "not `tiny`"
    assert "adapters/adapter_model.safetensors" in json.loads((folder / "checksums.json").read_text())


@pytest.mark.parametrize(
    "override",
    [
        "learner.optimizer={learning_rate: 5e-3, betas: [0.8, 0.99], weight_decay: 0.1}",
        "learner.optimizer={schedule: linear, learning_rate: 1e-2}",
        "model.dtype=bfloat16",
        "learner.gradient_checkpointing=true",
        "learner.offload=optimizer",
        "algorithm.kl.coefficient=0.1",
    ],
)
def test_options_that_may_change_on_a_resume_fit_the_saved_state(
    tmp_path: Path, tiny_folders: dict[str, Path], override: str
) -> None:
    (tmp_path / "shards").mkdir()
    trained(tiny_folders["qwen2"]).save_shards(tmp_path / "shards").result()
    config = load_config("quickstart.yaml", [override, "learner.num_train_steps=8", "learner.num_minibatches=1"])
    rank = build_rank(config, model_path=str(tiny_folders["qwen2"]), device=CPU)
    rank.load(tmp_path / "shards", num_optimizer_steps=2)
    options = config.learner.optimizer
    for group in rank.optimizer.param_groups:
        assert group["lr"] == pytest.approx(schedule_factor(2, options, 8) * options.learning_rate)
        assert group["betas"] == options.betas
    assert {group["weight_decay"] for group in rank.optimizer.param_groups} == {0.0, options.weight_decay}
    assert all(float(state["step"]) == 2 for state in rank.optimizer.state.values())


def test_shards_of_another_model_are_refused(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    trained(tiny_folders["qwen2"]).save_shards(tmp_path).result()
    other = build_rank(load_config("quickstart.yaml"), model_path=str(tiny_folders["llama"]), device=CPU)
    with pytest.raises(CheckpointError, match="does not fit this model and optimizer"):
        other.load(tmp_path, num_optimizer_steps=2)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path)
    for version in (1, 2, 3):
        save(checkpoints, tiny_folders["qwen2"], version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_checksums_without_the_state_make_no_whole_checkpoint(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path)
    for version in (1, 2):
        save(checkpoints, tiny_folders["qwen2"], version)
    (tmp_path / "step-000002" / "checksums.json").write_text("{}")
    newest = checkpoints.load_newest()
    assert newest is not None
    assert newest[0].name == "step-000001"


@pytest.mark.parametrize("place", [5, -10])  # in a name of checksums.json: bytes that are not UTF-8
@pytest.mark.parametrize("file", ["state.msgpack", "model/model.safetensors", "checksums.json"])
def test_a_damaged_checkpoint_is_skipped_for_the_previous(
    tmp_path: Path, tiny_folders: dict[str, Path], file: str, place: int
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for version in (1, 2):
        save(checkpoints, tiny_folders["qwen2"], version)
    damaged = tmp_path / "step-000002" / file
    content = bytearray(damaged.read_bytes())
    content[place] ^= 0x80
    damaged.write_bytes(bytes(content))
    newest = checkpoints.load_newest()
    assert newest is not None
    assert newest[0].name == "step-000001"
    (tmp_path / "step-000001" / "state.msgpack").unlink()
    for _ in range(2):  # a second resume must not begin a run anew in this folder
        with pytest.raises(CheckpointError, match=r"every checkpoint is damaged; start again with another run\.folder"):
            checkpoints.load_newest()


def test_a_resume_says_its_step_the_damaged_file_and_the_lost_steps(
    tmp_path: Path, tiny_folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    checkpoints = Checkpoints(tmp_path)
    for version in (15, 20):
        save(checkpoints, tiny_folders["qwen2"], version)
    checkpoints.load_newest()
    assert [record for record in caplog.messages if record.startswith("resume: ")] == ["resume: from step 20"]
    caplog.clear()
    (tmp_path / "step-000020" / "model" / "model.safetensors").write_bytes(b"")
    checkpoints.load_newest()
    assert [record for record in caplog.messages if record.startswith("resume: ")] == [
        "resume: from step 15 (steps lost: 5), because step-000020 is damaged: model/model.safetensors has another "
        "checksum"
    ]


def test_rewriting_a_checkpoint_keeps_it_complete_at_all_times(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    """A drain may follow a checkpoint of the same version. A kill between the two renames restores the first."""
    checkpoints = Checkpoints(tmp_path)
    for _ in range(2):
        path = save(checkpoints, tiny_folders["qwen2"], 3)
        assert path is not None
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-000003"]
    path.rename(tmp_path / ".replaced-step-000003")
    newest = Checkpoints(tmp_path).load_newest()
    assert newest is not None
    assert newest[0] == path


def test_an_unfinished_checkpoint_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-step-000009" / "model").mkdir(parents=True)
    assert Checkpoints(tmp_path).load_newest() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 2])
def test_a_checkpoint_after_a_damaged_later_version_stays(
    tmp_path: Path, tiny_folders: dict[str, Path], keep: int
) -> None:
    for version in (40, 50):
        save(Checkpoints(tmp_path), tiny_folders["qwen2"], version)
    (tmp_path / "step-000050" / "state.msgpack").write_bytes(b"damaged")
    for began_at, version in ((40, 42), (42, 44), (44, 50)):
        checkpoints = Checkpoints(tmp_path)
        newest = checkpoints.load_newest()
        assert newest is not None
        assert newest[1].policy_version == began_at
        assert save(checkpoints, tiny_folders["qwen2"], version, f"checkpoint.keep={keep}") is not None
        assert (tmp_path / f"step-{version:06d}").is_dir()
    assert (tmp_path / "set-aside-step-000050" / "state.msgpack").read_bytes() == b"damaged"
    assert len(list(tmp_path.glob("step-*"))) == keep


def test_a_fresh_run_sets_checkpoints_of_an_earlier_run_aside(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    (tmp_path / "step-000050").mkdir()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.begin()
    save(checkpoints, tiny_folders["qwen2"], 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set-aside-step-000050", "step-000002"]


def test_a_failed_write_leaves_the_previous_checkpoint_complete(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, tiny_folders["qwen2"], 1)
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from support.checkpoints import save, Checkpoints\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.exit(0 if save(Checkpoints(Path(sys.argv[1])), Path(sys.argv[2]), 2) is None else 1)"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tiny_folders["qwen2"])]
    ended = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    newest = checkpoints.load_newest()
    assert newest is not None
    assert newest[0].name == "step-000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_another_checkpoint_format_is_refused_with_a_remedy(tmp_path: Path, tiny_folders: dict[str, Path]) -> None:
    folder = save(Checkpoints(tmp_path), tiny_folders["qwen2"], 3)
    assert folder is not None
    (folder / "state.msgpack").write_bytes(msgspec.msgpack.encode({"format": 2, "stream": {"epoch": 0}}))
    (folder / "checksums.json").unlink()
    _seal(folder)
    with pytest.raises(
        CheckpointError, match="format 2, this version reads 11; resume with the version that wrote the checkpoint"
    ):
        Checkpoints(tmp_path).load_newest()


def test_a_save_killed_at_any_byte_leaves_the_previous_checkpoint(
    tmp_path: Path, tiny_folders: dict[str, Path]
) -> None:
    """Kill the save 50 times, each at another byte of a file or between two operations."""
    folder = tiny_folders["qwen2"]
    assert save(Checkpoints(tmp_path), folder, 1) is not None
    command = [sys.executable, "-m", "support.checkpoints_to_kill", str(tmp_path), str(folder), "50"]
    ended = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert len(rows) == 50
    assert sum(killed == "1" for killed, *_ in rows) >= 25, "the others had written all before"
    assert len({size for _, size, *_ in rows}) > 4, "it died at many places"
    assert len({num_files for _, _, num_files, _ in rows}) > 3, "and in several files"
    for killed, size, _, newest in rows:
        assert newest == "step-000001" or killed == "0" or size == "0", "a later one is there after its rename alone"


def _evaluations(eval_record: EvalRecord, **accuracies: Sequence[float | None]) -> list[EvalRecord]:
    """Make the evaluations of each set, of versions 10, 20 and so on; None: not evaluated."""
    return [
        msgspec.structs.replace(eval_record, name=name, policy_version=10 * number, accuracy=accuracy, reward=accuracy)
        for name, of_set in accuracies.items()
        for number, accuracy in enumerate(of_set, 1)
        if accuracy is not None
    ]


@pytest.mark.parametrize(
    ("accuracies", "options", "kept"),
    [
        ({"a": [0.5, 0.9, 0.7, 0.6]}, (), {20}),
        ({"a": [0.5, 0.9, 0.7, 0.9]}, (), {40}),  # the newest of equals
        ({"a": [0.5, 0.9, 0.7, 0.6], "b": [0.5, 0.1, 0.7, 0.6]}, (), {30}),  # the mean of the sets
        ({"a": [0.5, 0.9, 0.7, 0.6], "b": [0.5, None, 0.6, 0.6]}, (), {30}),  # not all sets yet
        ({"a": [0.5, math.nan, 0.7, 0.6]}, (), {30}),
        ({"a": [0.5, None, 0.7, None, 0.99]}, (), {30}),  # version 50 has no checkpoint
        ({"a": [0.5, 0.4, 0.3, 0.2], "removed": [0.9, 0.9, None, None]}, (), {10}),  # by a resume
        ({}, (), set()),
        ({"a": [0.5, 0.9, 0.7, 0.6]}, ("checkpoint.keep_best=false",), set()),
        ({"a": [0.5, 0.9, 0.7, 0.6]}, ("checkpoint.keep_every_n_steps=15",), {20, 30}),
        ({}, ("checkpoint.keep_every_n_steps=20",), {20, 40}),
    ],
)
def test_the_best_and_every_kth_checkpoint_are_worth_keeping(
    accuracies: dict[str, list[float | None]], options: tuple[str, ...], kept: set[int], eval_record: EvalRecord
) -> None:
    sets = ", ".join(f"{{task: arithmetic, name: {name}}}" for name in accuracies if name != "removed")
    evaluated = f"data.eval=[{sets}]" if sets else "data.eval=null"
    config = load_config("quickstart.yaml", ["checkpoint.every_n_steps=5", evaluated, *options])
    evaluations = _evaluations(eval_record, **accuracies)
    assert worth_keeping([1, 10, 20, 30, 40], evaluations, config) == kept


def test_a_run_keeps_the_best_checkpoint_beside_the_newest(
    tmp_path: Path, tiny_folders: dict[str, Path], eval_record: EvalRecord
) -> None:
    """The evaluation of a version may end after its checkpoint is written."""
    checkpoints, evaluations, folder = Checkpoints(tmp_path), list[EvalRecord](), tiny_folders["qwen2"]
    config, tokenizer = load_config("quickstart.yaml", ["checkpoint.keep=1"]), load_tokenizer(str(folder))
    team = trained(folder)
    for version, accuracy in ((10, 0.5), (20, 0.9), (30, 0.2), (40, 0.1)):
        checkpoints.save(checkpoint_state(version), config, team, tokenizer, lambda: evaluations)
        evaluations.append(
            msgspec.structs.replace(eval_record, policy_version=version, accuracy=accuracy, reward=accuracy)
        )
        assert checkpoints.wait()
    assert list(list_checkpoints(tmp_path)) == [20, 40]
