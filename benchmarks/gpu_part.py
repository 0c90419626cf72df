"""The frame of a part of the GPU check: its options, its rows, and its results as JSON on lines of their own.

    python -m benchmarks.gpu_PART [--device cuda] [--small]

`--device cpu --small` runs the same code with a small model. A part that raises an error has failed, and says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pynvml
import torch

from areal_rloo.models.device import grow_segments

REPO = Path(__file__).resolve().parents[1]
GIB = 2**30
MARK = "gpu-part: "  # begins a line with all results so far


@dataclass
class Part:
    """A part while it runs. `failures` are wrong results, `short` are goals that were not reached."""

    device: torch.device
    small: bool
    folder: Path  # empty, and removed afterwards
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    hardware: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def row(self, table: str, **values: Any) -> None:
        """Add a row to a table of the page."""
        self.tables.setdefault(table, []).append(values)
        self.say(done=False)

    def check(self, right: bool, words: str) -> None:
        """Note a wrong result, which fails the part."""
        if not right:
            self.failures.append(words)

    def goal(self, reached: bool, words: str) -> None:
        """Note a goal that was not reached, which the page names."""
        if not reached:
            self.short.append(words)

    def say(self, *, done: bool) -> None:
        """Print all so far: a part that is killed keeps the rows that it had."""
        names = ("hardware", "tables", "notes", "short", "failures")
        print(f"{MARK}{json.dumps({'done': done, **{name: getattr(self, name) for name in names}})}", flush=True)


def run(measure: Callable[[Part], None], *, growing: bool = False) -> None:
    """Run a part with the options of the command line; print the result, and exit with 1 if the part failed.

    `growing`: torch's blocks of GPU memory grow, as those of a learner do, and those of an engine do not.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a small model, to try the check out on a CPU")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    if growing:
        grow_segments(device)
    with tempfile.TemporaryDirectory() as folder:
        part = Part(device, arguments.small, Path(folder))
        try:
            part.hardware |= describe(device)
            measure(part)
        except Exception as error:  # noqa: BLE001 - a part that raises has failed; the others go on
            traceback.print_exc()
            part.failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    part.say(done=True)
    os._exit(1 if part.failures else 0)  # a thread of a failed part must not keep the GPU


def describe(device: torch.device) -> dict[str, Any]:
    """Name the device, the driver and the versions that decide the results."""
    named: dict[str, Any] = {"torch": str(torch.__version__), "python": sys.version.split()[0]}
    if device.type != "cuda":
        return {"device": "cpu", "num_cores": len(os.sched_getaffinity(0)), **named}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / GIB, 1),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        **named,
    }


def _driver() -> str:
    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()
