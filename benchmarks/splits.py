"""Compare the advised split of four devices with a sweep of all splits in real runs.

    python -m benchmarks.splits [--rounds N] [--runs FOLDER] [--output benchmarks/results/splits.json]

A device is a share of a core: the kernel gives each learner rank and each worker at most 0.4 of a core (CPU quota of
cgroup v1, so this needs root), and two cores have four such devices. A load is a quickstart with a tiny learning rate.
Of each load, ten steps with two ranks and two workers, and ten with one and three, give the speeds, as `areal-rloo
advise` reads them; then each split runs for 25 steps in each of three rounds, and steps 6 to 25 count. Depth and bound
are 1. A run that FOLDER has is not repeated. `advised_over_best` is the throughput of the advised split over that of
the best one, by the medians of the rounds: single runs of the same split differ by up to 15 % on a shared machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from areal_rloo.advice.calibration import calibrated, merged, setup_of
from areal_rloo.advice.forecast import FIRST, LAST, best_setup, forecast, splits
from areal_rloo.config import load_config
from benchmarks import hardware
from benchmarks.advice import command, measured_tokens_per_s, train_records

NUM_DEVICES, MEASURED_STEPS = 4, 10
_PERIOD_US, _QUOTA_US = 10_000, 4_000  # short: ranks wait for each other in every step
_CPU = Path("/sys/fs/cgroup/cpu")
_HALVES = {"areal_rloo.learner", "areal_rloo.rollout"}
LOADS: dict[str, tuple[str, ...]] = {
    "64 slots": ("rollout.num_slots=64",),
    "8 slots": ("rollout.num_slots=8",),
}


class Devices:
    """Groups of processes, each with a share of a core."""

    def __init__(self, num: int) -> None:
        if not (_CPU / "cpu.cfs_quota_us").exists():
            raise SystemExit(f"{_CPU}: expected the CPU controller of cgroup v1, found none")
        self._folders = [_CPU / f"areal-rloo-device-{index}" for index in range(num)]
        self._free = list(self._folders)
        self._placed: set[int] = set()
        for folder in self._folders:
            folder.mkdir(exist_ok=True)
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(_QUOTA_US))

    def place(self, launcher: psutil.Process) -> None:
        """Give each new rank and worker of a launcher a device, together with the process's children."""
        for process in launcher.children():
            with contextlib.suppress(psutil.Error, OSError):  # a process that has ended
                if process.pid in self._placed or _HALVES.isdisjoint(process.cmdline()):
                    continue
                self._placed.add(process.pid)
                device = self._free.pop()
                for each in (process, *process.children(recursive=True)):
                    (device / "cgroup.procs").write_text(str(each.pid))

    def close(self) -> None:
        for folder in self._folders:
            folder.rmdir()


def run(folder: Path, *overrides: str) -> None:
    """Run on devices, unless there is such a run."""
    if (folder / "ended").exists():
        return
    devices = Devices(NUM_DEVICES)
    process = psutil.Popen(command(folder, overrides), stdout=subprocess.DEVNULL)
    while process.poll() is None:
        devices.place(process)
        time.sleep(0.05)
    devices.close()
    if process.returncode:
        raise SystemExit(f"{folder}: exit code {process.returncode}")
    (folder / "ended").touch()


def compare(name: str, base: Path, overrides: tuple[str, ...], num_rounds: int) -> dict[str, Any]:
    """Sweep the splits of a load; return what was measured and forecast of each, and the advice."""
    loads, records = [], []
    for num_ranks in (2, 1):
        folder = base / f"calibration-{num_ranks}"
        halves = _halves(num_ranks, NUM_DEVICES - num_ranks)
        run(folder, *overrides, *halves, f"learner.num_train_steps={MEASURED_STEPS}")
        config = load_config(str(folder / "config.yaml"))
        records.append(train_records(folder))
        loads.append(calibrated(records[-1], config))
    load, setup = merged(loads, records), setup_of(config)
    choices = splits(NUM_DEVICES, per_worker=1)
    best, _ = best_setup(load, setup, choices, slots=[setup.num_slots])
    measured: dict[tuple[int, int], list[float]] = {split: [] for split in choices}
    for number, split in itertools.product(range(num_rounds), choices):
        folder = base / f"{split[0]}-{split[1]}-{number}"
        run(folder, *overrides, *_halves(*split))
        measured[split].append(round(measured_tokens_per_s(train_records(folder)), 1))
        print(name, split, measured[split], flush=True)
    medians = {split: statistics.median(rates) for split, rates in measured.items()}
    advised = (best.num_ranks, best.num_workers)
    rows = [
        {
            "ranks": num_ranks,
            "workers": num_workers,
            "tokens_per_s": measured[num_ranks, num_workers],
            "forecast": round(
                forecast(load, replace(setup, num_ranks=num_ranks, num_workers=num_workers)).tokens_per_s, 1
            ),
        }
        for num_ranks, num_workers in choices
    ]
    over_best = round(medians[advised] / max(medians.values()), 3)
    return {"load": name, "advised": list(advised), "advised_over_best": over_best, "splits": rows}


def _halves(num_ranks: int, num_workers: int) -> tuple[str, str]:
    return f"learner.num_ranks={num_ranks}", f"rollout.num_workers={num_workers}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="keeps the run folders")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base = arguments.runs or Path(scratch)
        loads = [
            compare(name, base / str(index), options, arguments.rounds)
            for index, (name, options) in enumerate(LOADS.items())
        ]
    hardware.write(arguments.output, {"counted_steps": [FIRST, LAST], "loads": loads})


if __name__ == "__main__":
    main()
