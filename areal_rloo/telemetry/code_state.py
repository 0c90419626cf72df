"""The code of a process: version, commit and digest. A resume by other code says so; CodeDiffers is the alarm."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import shutil
import subprocess
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar

import msgspec

from areal_rloo.config import Config, dump_config
from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError
from areal_rloo.telemetry.metric import Label, Metric

T = TypeVar("T")

_DIGEST = 12  # hex digits
_GIT_S = 10.0  # of a checkout on a slow network disk
STARTS_NAME = "environment.jsonl"  # in the run folder: a line for each start
_PACKAGE = Path(__file__).resolve().parents[1]


class CodeState(msgspec.Struct, frozen=True):
    """The code of the package. None: not installed, or no git checkout."""

    version: str | None
    commit: str | None  # of the checkout; with -dirty if tracked files differ
    digest: str  # of all modules

    def __str__(self) -> str:
        return f"version {self.version or '?'}, commit {self.commit or '?'}, digest {self.digest}"


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The run and the code of a process, as labels."""

    metrics_prefix: ClassVar[str] = "run_"

    folder: Annotated[str, Label("folder")]
    seed: Annotated[str, Label("seed")]
    config: Annotated[str, Label("config")]  # a digest
    version: Annotated[str, Label("version")]
    commit: Annotated[str, Label("commit")]
    code: Annotated[str, Label("code")]  # a digest
    info: Annotated[int, Metric("1: the labels name the run, its config, and the code of this process")] = 1


def run_info(config: Config, run_folder: Path) -> RunInfo:
    """Describe the run of this process."""
    code = code_state()
    return RunInfo(
        folder=run_folder.resolve().name,
        seed=str(config.run.seed),
        config=hashlib.sha256(dump_config(config).encode()).hexdigest()[:_DIGEST],
        version=code.version or "",
        commit=code.commit or "",
        code=code.digest,
    )


class _Start(msgspec.Struct):
    """A line of environment.jsonl."""

    code: CodeState


def code_state(package: Path = _PACKAGE) -> CodeState:
    """Read the state of the code on this disk."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.name.startswith(".") or not path.is_file():
            continue  # the lock of an editor, or a folder
        with contextlib.suppress(OSError):  # no process can import the module
            code = path.read_bytes()
            digest.update(f"{path.relative_to(package)}\0{len(code)}\0".encode() + code)
    try:
        version = importlib.metadata.version("areal-rloo")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return CodeState(version, _commit(package), digest.hexdigest()[:_DIGEST])


def newest_start(starts: bytes, kind: type[T]) -> T | None:
    """Read the last line of environment.jsonl; None if there is no line, or a line of a version without the fields."""
    try:
        return from_json(starts.splitlines()[-1], kind)
    except (IndexError, DecodeError):
        return None


def changed_code(earlier: bytes, now: CodeState) -> str:
    """Say how the code differs from the last start in environment.jsonl; empty if the code is the same."""
    if not earlier:
        return ""
    start = newest_start(earlier, _Start)
    if start is None:
        return f"resume: an earlier version of areal_rloo began this run; now {now}"
    before = start.code
    return "" if before.digest == now.digest else f"resume: the code of areal_rloo has changed: {before} -> {now}"


def _commit(package: Path) -> str | None:
    """Return the commit of a checkout with the package; None for an installed package in another checkout."""
    if not (package.parent / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() or None
