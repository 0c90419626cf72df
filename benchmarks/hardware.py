"""Describe the machine, the commit and the date of a benchmark for the result file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

_REPO = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """Return the processor, the cores and the versions of the main libraries."""
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "pyzmq": version("pyzmq"),
    }


def commit() -> str | None:
    """Return the commit of this checkout, with `-changed` if files differ, and None without git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    # results are left out: those of the benchmark before are not part of the code
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return f"{head}-changed" if changed else head


def now() -> str:
    """Return the date and the time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write(output: str | None, result: dict[str, Any]) -> None:
    """Write a result with date, commit and hardware, if the user named an output file."""
    if output is not None:
        described = {"date": now(), "commit": commit(), "hardware": describe(), **result}
        Path(output).write_text(json.dumps(described, indent=2) + "\n")


def _git(*arguments: str) -> str | None:
    try:
        ended = subprocess.run(["git", *arguments], cwd=_REPO, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if ended.returncode else ended.stdout.strip()


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def status_bytes(key: str) -> int:
    """Return a size of this process from /proc: VmRSS is now, VmHWM the peak. getrusage would include the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024
