"""Describe the machine of a benchmark for the result file."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


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


def write(output: str | None, result: dict[str, Any]) -> None:
    """Write a result with the hardware, if the user named an output file."""
    if output is not None:
        Path(output).write_text(json.dumps({"hardware": describe(), **result}, indent=2) + "\n")


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def status_bytes(key: str) -> int:
    """Return a size of this process from /proc: VmRSS is now, VmHWM the peak. getrusage would include the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024
