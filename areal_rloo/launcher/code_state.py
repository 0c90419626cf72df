"""The code of a run: version, commit and digest. A resume by other code says so."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import msgspec

from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError

_PACKAGE = Path(__file__).resolve().parents[1]


class CodeState(msgspec.Struct, frozen=True):
    """The code of the package. None: not installed, or no git checkout."""

    version: str | None
    commit: str | None  # of the checkout; the files may differ
    digest: str  # of all files

    def __str__(self) -> str:
        return f"version {self.version or '?'}, commit {self.commit or '?'}, digest {self.digest}"


class _Start(msgspec.Struct):
    """A line of environment.jsonl."""

    code: CodeState


def code_state(package: Path = _PACKAGE) -> CodeState:
    """Read the state of the code on this disk."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    try:
        version = importlib.metadata.version("areal-rloo")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return CodeState(version, _commit(package), digest.hexdigest()[:12])


def changed_code(earlier: bytes, now: CodeState) -> str:
    """Say how the code differs from the last start in environment.jsonl; empty if the code is the same."""
    lines = earlier.splitlines()
    try:
        before = from_json(lines[-1], _Start).code if lines else now
    except DecodeError:  # of a version without this record
        return f"resume: an earlier version of areal_rloo began this run; now {now}"
    return "" if before.digest == now.digest else f"resume: the code of areal_rloo has changed: {before} -> {now}"


def _commit(package: Path) -> str | None:
    """Return the commit of a checkout with the package; None for an installed package in another checkout."""
    if not (package.parent / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(package), "rev-parse", "--short=12", "HEAD"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.stdout.strip() or None
