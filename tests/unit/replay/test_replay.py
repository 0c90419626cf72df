"""The command `replay`: equal to the bit from the start and from a checkpoint, differences found, mistakes named."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from support.recorded_runs import RecordedRun, batch_of, without_finite_gradient

from areal_rloo.config import load_config
from areal_rloo.learner.batches import encode_batch, list_batches, list_starts, read_batch, read_start
from areal_rloo.replay.__main__ import main, parse_arguments
from areal_rloo.trajectory import Group

Batch = list[Group]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """Six steps, of which step 3 had a refused batch before; checkpoints of versions 2 and 4."""
    run = RecordedRun(tmp_path_factory.mktemp("recorded") / "run", folder)
    for step in range(1, 7):
        if step == 3:
            run.step(without_finite_gradient(batch_of(step)))
            assert run.version == 2, "the batch is finite"
        run.step(batch_of(step))
        if step in (2, 4):
            run.save()
    return run.close()


@pytest.fixture
def run_folder(recorded: Path, tmp_path: Path) -> Path:
    """A copy of the recorded run, which a test may change."""
    return shutil.copytree(recorded, tmp_path / "run")


@pytest.fixture
def ended_by_a_refusal(tmp_path: Path, folder: Path) -> Path:
    run = RecordedRun(tmp_path / "run", folder)
    run.step(batch_of(1))
    run.step(without_finite_gradient(batch_of(2)))
    return run.close()


def _change(folder: Path, step: int, change: Callable[[Batch], Batch]) -> None:
    path = list_batches(folder / "batches")[step][-1]
    before = path.read_bytes()
    path.write_bytes(encode_batch(change(read_batch(path))))
    assert path.read_bytes() != before


def _without_a_group(batch: Batch) -> Batch:
    return batch[:2] + batch[3:]


def _groups_in_another_order(batch: Batch) -> Batch:
    return [batch[1], batch[0], *batch[2:]]


def _samples_in_another_order(batch: Batch) -> Batch:
    return [msgspec.structs.replace(group, trajectories=group.trajectories[::-1]) for group in batch]


def _results(output: str) -> dict[int, str]:
    """Return the last column by step."""
    found = re.findall(r"^ +(\d+)  +\S+  +\S+  (.*)$", output, re.MULTILINE)
    return {int(step): result for step, result in found}


@pytest.mark.parametrize(
    ("options", "beginning", "steps"),
    [
        ((), "the initial model", range(1, 7)),
        (("--to", "2"), "the initial model", range(1, 3)),
        (("--from", "2"), "step-000002", range(3, 7)),
        (("--from", "3", "--to", "5"), "step-000002", range(3, 6)),
        (("--from", "5"), "step-000004", range(5, 7)),
    ],
)
def test_a_replay_equals_the_run_to_the_bit(
    run_folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], beginning: str, steps: range
) -> None:
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run_folder.rglob("*")}
    assert main([str(run_folder), *options]) == 0
    output = capsys.readouterr().out
    assert f"{beginning}: steps {steps[0]} to {steps[-1]}, on cpu, torch threads" in output
    assert list(_results(output)) == list(steps)
    assert all(result.startswith("equal, all 51 numbers") for result in _results(output).values()), output
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in run_folder.rglob("*")} == before


@pytest.mark.parametrize("change", [_without_a_group, _groups_in_another_order, _samples_in_another_order])
def test_a_changed_batch_makes_the_step_and_later_steps_different(
    run_folder: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Batch], Batch]
) -> None:
    _change(run_folder, 4, change)
    assert main([str(run_folder), "--from", "2"]) == 1
    output = capsys.readouterr().out
    equal = [step for step, result in _results(output).items() if result.startswith("equal")]
    assert equal == [3], output
    assert "1 equal to the bit, 3 different" in output
    assert main([str(run_folder), "--from", "4"]) == 0  # the checkpoint comes after the changed batch


def test_a_lost_refusal_makes_the_step_different(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finite = list_batches(run_folder / "batches")[3]
    finite[0].write_bytes(finite[1].read_bytes())
    assert main([str(run_folder), "--from", "2", "--to", "3"]) == 1
    assert _results(capsys.readouterr().out) == {3: "different: refused batches"}


def test_a_batch_that_ended_the_run_is_refused_again(
    ended_by_a_refusal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(ended_by_a_refusal)]) == 0
    assert "not finite: refused" in _results(capsys.readouterr().out)[2]


def test_changed_options_show_differences_and_exit_with_0(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = "learner.optimizer.learning_rate=1e-5"
    assert main([str(run_folder), "--from", "4", "--set", change]) == 0
    output = capsys.readouterr().out
    assert f"note: changed: {change}; the numbers may differ" in output
    assert all("learning_rate" in result for result in _results(output).values())


def test_a_changed_kl_coefficient_counts_from_a_checkpoint(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_folder), "--from", "4", "--to", "5", "--set", "algorithm.kl.coefficient=0.9"]) == 0
    assert "kl_coefficient +0." in capsys.readouterr().out


def test_another_torch_is_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = list_starts(run_folder / "batches").values()
    path.write_bytes(re.sub(rb'"torch": "[^"]*"', b'"torch": "1.0"', path.read_bytes()))
    main([str(run_folder), "--to", "1"])
    assert "note: recorded with torch 1.0, not 2." in capsys.readouterr().out


def test_a_list_names_steps_checkpoints_and_starts(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_folder / "checkpoints" / "step-000002")
    list_batches(run_folder / "batches")[5][0].unlink()
    assert main([str(run_folder), "--list"]) == 0
    output = capsys.readouterr().out
    assert "steps with batches: 1 to 4, 6 (" in output
    assert "steps with numbers in metrics.jsonl: 1 to 6\ncheckpoints of versions: 4\nstarted at version 0: " in output


def _resumed_at_4(folder: Path, change: str, to: str) -> None:
    """Write the start of a learner that resumed with another config."""
    start = read_start(list_starts(folder / "batches")[0])
    config = start.config.replace(change, to)
    assert config != start.config
    again = msgspec.structs.replace(start, policy_version=4, config=config)
    (folder / "batches" / "start-000004.json").write_bytes(msgspec.json.encode(again))


def test_a_resume_that_changed_no_deciding_option_is_replayed_through(run_folder: Path) -> None:
    _resumed_at_4(run_folder, "log_level: info", "log_level: debug")
    assert main([str(run_folder)]) == 0


def test_a_resume_with_another_option_splits_the_replay(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _resumed_at_4(run_folder, "eps_low: 0.2", "eps_low: 0.3")
    assert main([str(run_folder), "--to", "5"]) == 2
    assert (
        "resumed at version 4 with other values of algorithm.loss.eps_low; end with --to 4" in capsys.readouterr().err
    )
    assert main([str(run_folder), "--to", "4"]) == 0
    assert main([str(run_folder), "--to", "5", "--set", "learner.num_minibatches=1"]) == 0
    assert "the replay keeps the values of version 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from", "1"), "--from 1: expected an undamaged checkpoint at or below version 1 in "),
        (("--from", "4", "--to", "3"), "--to 3: expected a step after version 4, where the replay begins; the batches"),
        (("--to", "9"), "step 7: no batch; the batches of steps 1 to 6 are recorded in "),
        (("--from", "soon"), "argument --from: invalid int value: 'soon'"),
        (("--from", "-1"), "--from -1: expected a version of at least 0"),
        (("--set", "learner.num_rank=1"), "did you mean 'learner.num_ranks'?"),
        (
            ("--set", "learner.num_ranks=2"),
            "learner.num_ranks: expected 1, because a replay is a single process, got 2",
        ),
        (("--set", "learner.offload=parameters"), "learner.offload: expected none, because a replay is a single"),
        (("--model", "/nowhere/model"), "/nowhere/model: the initial model is gone; name its folder with --model"),
        pytest.param(
            ("--device", "cuda"),
            "--device cuda: this machine has no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
        ),
        (("--device", "abacus"), "argument --device: invalid choice: 'abacus'"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(
    run_folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    _assert_refused([str(run_folder), *options], words, capsys)


def test_commands_in_the_document_and_in_the_help_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    document = (Path(__file__).resolve().parents[3] / "docs" / "learner.md").read_text(encoding="utf-8")
    for text in (document, capsys.readouterr().out):
        commands = re.findall(r"(?:python -m pdb -m areal_rloo|areal-rloo) replay (runs/latest.*)", text)
        assert len(commands) == 4, text
        for command in commands:
            load_config("quickstart.yaml", parse_arguments(shlex.split(command)).overrides)


def test_folders_without_a_recorded_run_are_refused(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _assert_refused([str(tmp_path)], "no run here (config.yaml is missing)", capsys)
    shutil.rmtree(run_folder / "batches")
    _assert_refused([str(run_folder)], "no recorded batches; only a run with wire.record=true can", capsys)


def test_a_damaged_checkpoint_gives_way_to_the_previous(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / "checkpoints" / "step-000004" / "state.msgpack").write_bytes(b"")
    assert main([str(run_folder), "--from", "5"]) == 0
    assert "step-000002: steps 3 to 6" in capsys.readouterr().out


def test_a_damaged_batch_and_a_missing_start_are_named(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = list_batches(run_folder / "batches")[2][0]
    path.write_bytes(path.read_bytes()[:-1])
    assert main([str(run_folder)]) == 2
    assert f"{path}: the batch is damaged" in capsys.readouterr().err
    (start,) = list_starts(run_folder / "batches").values()
    start.write_bytes(b"{}")
    _assert_refused([str(run_folder)], f"{start}: a start of another version of areal_rloo", capsys)


def _assert_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert message in said.err
