"""Findings of a check in a given situation."""

import os
from pathlib import Path

from areal_rloo.config import Config, load_config
from areal_rloo.launcher.doctor import Check, Finding, Situation

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


def downloaded(model: Path, home: Path) -> Path:
    """Move a model folder to where the hub's client keeps org/name, and return its place."""
    cached = home / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots").mkdir()
    return model.rename(cached / "snapshots" / "abc")
