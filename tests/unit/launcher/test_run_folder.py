"""The run folder for launchers: closed to others, files whole after a kill, and the newest checkpoint."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.errors import CheckpointError, PreflightError
from areal_rloo.launcher.placement import Host, Placement
from areal_rloo.launcher.run_folder import choose_folder, has_results, is_finished, newest_checkpoint, write_beginning
from areal_rloo.launcher.start import begin, hold, leaves_nothing
from areal_rloo.telemetry.summary import forget_earlier_summary, has_earlier_summary, restore_earlier_summary
from areal_rloo.wire.security import load_keys

HOST = Host("here", "127.0.0.1", 2, (), 0)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_newest_checkpoint_has_the_highest_version(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name in ("step-999999", "step-1000000", "step-1000001 (copy)", "set-aside-step-1000002"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == "step-1000000"


@pytest.mark.parametrize("num_files", range(5))
def test_keys_of_a_killed_launcher_are_made_whole_by_the_next(tmp_path: Path, num_files: int) -> None:
    config = load_config("quickstart.yaml")
    (tmp_path / "whole").mkdir()
    write_beginning(tmp_path / "whole", config, [HOST])
    written = sorted((tmp_path / "whole" / "keys").iterdir())
    left = tmp_path / "killed" / ".keys.unfinished"
    left.mkdir(parents=True)
    for path in written[:num_files]:
        (left / path.name).write_bytes(path.read_bytes()[:7])
    write_beginning(tmp_path / "killed", config, [HOST])
    keys = tmp_path / "killed" / "keys"
    assert load_keys(keys, end="learner").peer_public == load_keys(keys, end="worker").public
    assert all(len(path.read_bytes()) == 40 for path in keys.iterdir())
    assert {oct(path.stat().st_mode & 0o777) for path in keys.iterdir()} == {"0o600"}
    assert oct(keys.stat().st_mode & 0o777) == "0o700"
    assert not left.exists()


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_a_new_run_folder_is_closed_to_other_users(tmp_path: Path) -> None:
    hold(tmp_path / "runs" / "mine", load_config("quickstart.yaml"), resume=False)
    assert mode_of(tmp_path / "runs" / "mine") == 0o700
    assert mode_of(tmp_path / "runs") == 0o755


@pytest.mark.parametrize("error", [PreflightError("no GPU is free"), KeyboardInterrupt()], ids=["mistake", "ctrl-c"])
def test_an_end_before_the_beginning_removes_the_new_folders(tmp_path: Path, error: BaseException) -> None:
    folder = tmp_path / "runs" / "mine"
    with pytest.raises(type(error)), leaves_nothing(folder):
        hold(folder, load_config("quickstart.yaml"), resume=False)
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    config = load_config("quickstart.yaml", [f"run.folder={tmp_path}"])
    for name in ("lost+found", ".snapshot"):  # of the file system
        (tmp_path / name).mkdir()
    assert choose_folder(config, resume=False) == tmp_path
    (tmp_path / "config.yaml").touch()
    words = r"run\.folder: .* holds other files, such as config\.yaml; expected an empty folder or the folder of a run"
    with pytest.raises(PreflightError, match=words):
        choose_folder(config, resume=False)


def test_a_run_that_has_not_trained_may_start_again(tmp_path: Path) -> None:
    config = load_config("quickstart.yaml", [f"run.folder={tmp_path}"])
    write_beginning(tmp_path, config, [HOST])
    assert choose_folder(config, resume=False) == tmp_path


def test_an_earlier_summary_is_aside_until_the_learner_begins(tmp_path: Path) -> None:
    config, summary = load_config("quickstart.yaml"), tmp_path / "summary.json"
    summary.write_text('{"exit_reason": "completed"}')
    for _ in range(2):  # the first launcher is killed before the learner begins
        write_beginning(tmp_path, config, [HOST])
        assert not is_finished(tmp_path)
        assert has_earlier_summary(tmp_path)
    assert restore_earlier_summary(tmp_path)
    assert is_finished(tmp_path)
    write_beginning(tmp_path, config, [HOST])
    forget_earlier_summary(tmp_path)
    assert not restore_earlier_summary(tmp_path)
    assert not summary.exists()


@pytest.mark.usefixtures("usual_umask")
def test_a_folder_with_a_pipe_for_its_records_has_results(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert has_results(tmp_path)


def test_a_run_folder_of_the_user_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o750)
    hold(tmp_path / "mine", load_config("quickstart.yaml"), resume=False)
    assert mode_of(tmp_path / "mine") == 0o750


def test_a_submission_to_slurm_makes_a_closed_run_folder(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "sbatch").chmod(0o700)
    command = [sys.executable, "-m", "areal_rloo.launcher.slurm", "--config", "quickstart.yaml"]
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([*command, f"run.folder={tmp_path / 'mine'}"], env=environment, umask=0o022, check=True)
    assert mode_of(tmp_path / "mine") == 0o700


def test_latest_points_here_after_a_kill_of_the_same_pid(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder.parent / f".latest-{os.getpid()}").symlink_to("other")
    write_beginning(folder, load_config("quickstart.yaml"), [HOST])
    assert (folder.parent / "latest").resolve() == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == ["latest", "mine"]


def test_a_newest_run_without_a_checkpoint_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, runs = load_config("quickstart.yaml"), tmp_path / "runs"
    for name in ("quickstart-20260101-000000", "quickstart-20260102-000000"):
        (runs / name).mkdir(parents=True)
        write_beginning(runs / name, config, [HOST])
    words = r"quickstart-20260102-000000, has no checkpoint, so nothing was trained there; "
    with pytest.raises(CheckpointError, match=f"{words}start again without --resume"):
        choose_folder(config, resume=True)
    (runs / "quickstart-20260101-000000" / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=f"{words}resume an earlier run with run.folder=.*quickstart-20260101"):
        choose_folder(config, resume=True)
    (runs / "quickstart-20260102-000000" / "checkpoints" / "step-000001").mkdir(parents=True)
    assert choose_folder(config, resume=True) == runs / "quickstart-20260102-000000"


def test_a_resume_without_a_checkpoint_says_that_the_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(load_config("quickstart.yaml"), Placement((HOST,), (), ()), tmp_path, ports=(1, 2), resume=True)
    assert "has no checkpoint, so --resume begins from the beginning" in capsys.readouterr().err


@pytest.mark.parametrize(("version", "said"), [(99, False), (100, True)])
def test_a_resume_of_a_complete_run_says_that_nothing_is_left_to_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], version: int, said: bool
) -> None:
    (tmp_path / "checkpoints" / f"step-{version:06d}").mkdir(parents=True)
    config = load_config("quickstart.yaml", ["learner.num_train_steps=100"])
    begin(config, Placement((HOST,), (), ()), tmp_path, ports=(1, 2), resume=True)
    words = "nothing is left to train: step-000100 has all learner.num_train_steps=100"
    assert (words in capsys.readouterr().err) == said


def test_a_resume_with_fewer_steps_than_trained_is_refused_unwritten(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000101").mkdir(parents=True)
    (tmp_path / "summary.json").write_text("of the complete run")
    config = load_config("quickstart.yaml", ["learner.num_train_steps=100"])
    words = r"learner\.num_train_steps: expected at least 101, the train steps of step-000101, got 100; raise it"
    with pytest.raises(CheckpointError, match=words):
        begin(config, Placement((HOST,), (), ()), tmp_path, ports=(1, 2), resume=True)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "summary.json"}
