"""A job is requeued only with progress since the last requeue; a small program stands in for Slurm's scontrol."""

from pathlib import Path

import pytest

from areal_rloo.errors import PreflightError
from areal_rloo.launcher.slurm.job import _requeued
from areal_rloo.learner.checkpoint_folder import set_aside


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


def _refused(folder: Path) -> bool:
    with pytest.raises(PreflightError, match="stopped twice without a new checkpoint in between"):
        _requeued(folder)
    return True


def test_a_job_without_a_checkpoint_is_requeued_once(run_folder: Path) -> None:
    assert _requeued(run_folder) == 0
    assert _refused(run_folder)


def test_each_new_version_requeues_the_job_also_with_more_digits(run_folder: Path) -> None:
    for version in (999_999, 1_000_000):
        (run_folder / "checkpoints" / f"step-{version:06d}").mkdir()
        assert _requeued(run_folder) == 0
        assert _refused(run_folder)


def test_versions_after_a_damaged_checkpoint_requeue_the_job(run_folder: Path) -> None:
    checkpoints = run_folder / "checkpoints"
    for version in (40, 50):
        (checkpoints / f"step-{version:06d}").mkdir()
    assert _requeued(run_folder) == 0
    set_aside(checkpoints / "step-000050")
    for version in (42, 50):
        (checkpoints / f"step-{version:06d}").mkdir()
        assert _requeued(run_folder) == 0
        assert _refused(run_folder)
