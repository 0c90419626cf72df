"""Findings of a check in a given situation."""

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_rloo.config import Config, load_config
from areal_rloo.launcher.doctor import Check, Finding, Situation
from areal_rloo.models import equality

REPO = Path(__file__).resolve().parents[2]
BARE = {"PATH": os.environ["PATH"]}
HUGE = 10**12  # parameters, which no machine of these days has room for


def config(*overrides: str) -> Config:
    return load_config("quickstart.yaml", overrides)


def found(check: Check, *overrides: str, folder: Path | None = None, **environment: str) -> list[Finding]:
    situation = Situation(config(*overrides), folder, environment={**BARE, **environment})
    return list(check(situation))


def only(check: Check, state: str, *overrides: str, folder: Path | None = None, **environment: str) -> Finding:
    """Return the single finding in this state; check that every finding except ok has a fix."""
    every = found(check, *overrides, folder=folder, **environment)
    assert all(finding.fix for finding in every if finding.state != "ok"), every
    (finding,) = [finding for finding in every if finding.state == state]
    assert (finding.error is not None) == (state == "wrong")
    return finding


def check_copies_here(patch: pytest.MonkeyPatch) -> None:
    """Check small copies of models in this process; a process of its own imports torch for 5 s."""

    def last_line(command: Sequence[str], *, timeout_s: float) -> tuple[bool, str]:
        assert command[1:3] == ["-m", equality.__name__] and timeout_s > 0
        error = io.StringIO()
        with contextlib.redirect_stderr(error):
            code = equality.main(command[3:])
        return code == 0, error.getvalue().strip().rpartition("\n")[2]

    patch.setattr("areal_rloo.launcher.doctor.inputs.last_line", last_line)


def downloaded(model: Path, home: Path) -> Path:
    """Move a model folder to where the hub's client keeps org/name, and return its place."""
    cached = home / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    return model.rename(cached / "snapshots" / "abc")
