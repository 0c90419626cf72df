"""Why a job of Slurm does not start: each reason is said once, and only while the job prints nothing."""

import os
from pathlib import Path

import pytest

from areal_rloo.launcher.slurm.pending import Pending


class _Waiting:
    """A job whose `squeue` is a script that prints a file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answer, self.now_s, self.said = folder / "answer", 0.0, list[str]()
        (folder / "squeue").write_text(f"#!/bin/sh\ncat {self.answer}\n")
        (folder / "squeue").chmod(0o700)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        self._pending = Pending("7", self.said.append, clock=lambda: self.now_s)

    def after(self, seconds: float, *, answer: str = "", printed: bool = False) -> list[str]:
        self.answer.write_text(answer)
        self.now_s += seconds
        num = len(self.said)
        self._pending.look(printed=printed)
        return self.said[num:]


def test_each_reason_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _Waiting(tmp_path, monkeypatch)
    assert job.after(29, answer="Priority\n") == []
    assert job.after(1, answer="Priority\n") == ["job 7 waits: Priority (squeue --jobs 7)\n"]
    assert job.after(60, answer="Priority\n") == []
    assert job.after(30, answer="PartitionNodeLimit\n") == ["job 7 waits: PartitionNodeLimit (squeue --jobs 7)\n"]
    assert job.after(30, answer="None\n") == []
    assert job.after(30, answer="Priority\n") == [], "reasons may alternate for days"


def test_a_job_that_prints_does_not_wait_until_it_is_requeued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _Waiting(tmp_path, monkeypatch)
    assert job.after(30, answer="Resources\n") != []
    assert job.after(30, answer="Resources\n", printed=True) == []
    assert job.after(29, answer="Resources\n") == []
    assert job.after(1, answer="Resources\n") == ["job 7 waits: Resources (squeue --jobs 7)\n"]


def test_a_slurm_without_an_answer_is_no_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _Waiting(tmp_path, monkeypatch)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho Priority\nexit 1\n")
    assert job.after(30) == []
    (tmp_path / "squeue").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job.after(30) == []
