"""Measure the memory of every process of a run: healthy, with a slow learner, and with slow rollouts.

    python -m benchmarks.memory [--healthy MINUTES] [--slow-learner MINUTES] [--slow-rollouts MINUTES] [--output FILE]

Each case is a run of the local launcher on a tiny model: two workers with the embedded engine, evaluations and
checkpoints. The slow half is 100 times slower than the other half: `memory_user_code.py` sleeps in an optimizer step,
or in an episode. 0 minutes leave a case out. The cases run at the same time: only the healthy run computes much.

Every second, each process gives its private memory (USS; programs elsewhere on the machine change the shares of a PSS),
descriptors and threads; `/dev/shm` is the memory of the run's segments. A line per process gives the medians of the
middle third and of the last third, and the Theil-Sen slope over both thirds. A process is flat if it grows, by this
slope, by at most 1 % or 1 MiB in both thirds together.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from areal_rloo.telemetry.bound import idle_share
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord
from benchmarks import hardware

USER_CODE = Path(__file__).resolve().parent / "memory_user_code.py"
TINY = (
    *("model.tiny.warm_start=null", "model.tiny.hidden_size=48", "model.tiny.num_layers=2"),
    *("rollout.num_workers=2", "rollout.num_slots=16", "rollout.sampling.max_new_tokens=24"),
    *("algorithm.group_size=4", "learner.groups_per_step=4", "learner.num_train_steps=1000000"),
    *("learner.num_minibatches=1", "learner.optimizer.schedule=constant", "learner.optimizer.learning_rate=1e-9"),
    *("data.eval.num_prompts=16", "evaluation.every_n_versions=20", "checkpoint.every_n_steps=50"),
    *("telemetry.progress=false", "wire.stall_timeout_s=600"),
)
# Seconds of a step and of a sample: 100 times as long as the other half of a healthy run works for a batch.
SLOW_LEARNER_S = 8.0
SLOW_ROLLOUTS_S = 16.0
FLAT_SHARE = 0.01
FLAT_BYTES = 2**20
MIB = 2**20
_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    """A run to measure."""

    name: str
    learner_sleep_s: float = 0.0
    sample_sleep_s: float = 0.0

    @property
    def variables(self) -> dict[str, str]:
        return {
            "BENCHMARK_LEARNER_SLEEP_S": str(self.learner_sleep_s),
            "BENCHMARK_SAMPLE_SLEEP_S": str(self.sample_sleep_s),
        }


@dataclass(slots=True)
class Series:
    """The samples of a process, or of the run's part of `/dev/shm`."""

    times_s: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        third = len(self.times_s) // 3
        middle, last = self.num_bytes[third : 2 * third], self.num_bytes[2 * third :]
        slope = theil_sen(self.times_s[third:], self.num_bytes[third:])
        growth = slope * (self.times_s[-1] - self.times_s[third])
        level = statistics.median(middle)
        return {
            "middle_third_mib": round(level / MIB, 2),
            "last_third_mib": round(statistics.median(last) / MIB, 2),
            "highest_mib": round(max(self.num_bytes) / MIB, 2),
            "slope_kib_per_minute": round(60 * slope / 1024, 1),
            "flat": growth <= max(FLAT_BYTES, FLAT_SHARE * level),
            "descriptors": _ends(self.descriptors, third),
            "threads": _ends(self.threads, third),
            "mib_by_minute": [round(statistics.median(values) / MIB, 2) for values in self._minutes()],
        }

    def _minutes(self) -> list[list[int]]:
        minutes: dict[int, list[int]] = defaultdict(list)
        for time_s, value in zip(self.times_s, self.num_bytes, strict=True):
            minutes[int(time_s // 60)].append(value)
        return list(minutes.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--healthy", type=float, default=10.0, metavar="MINUTES")
    parser.add_argument("--slow-learner", type=float, default=10.0, metavar="MINUTES")
    parser.add_argument("--slow-rollouts", type=float, default=10.0, metavar="MINUTES")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    cases = [
        (Case("healthy"), arguments.healthy),
        (Case("slow learner", learner_sleep_s=SLOW_LEARNER_S), arguments.slow_learner),
        (Case("slow rollouts", sample_sleep_s=SLOW_ROLLOUTS_S), arguments.slow_rollouts),
    ]
    chosen = [(case, minutes) for case, minutes in cases if minutes > 0]
    with ThreadPoolExecutor(len(chosen)) as threads:
        measured = list(threads.map(lambda pair: measure(*pair), chosen))
    results = {case.name: result for (case, _), result in zip(chosen, measured, strict=True)}
    for name, result in results.items():
        _print(name, result)
    hardware.write(arguments.output, {"flat_share": FLAT_SHARE, "flat_bytes": FLAT_BYTES, "cases": results})
    if not all(row["flat"] for result in results.values() for row in result["processes"].values()):
        sys.exit("error: the memory of a process grows")


def measure(case: Case, minutes: float, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run a case for these minutes after the first train step."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        command = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"]
        plugin = (f"run.entry={USER_CODE}", f"rollout.episode.type={USER_CODE}:PatientEpisode")
        launcher = subprocess.Popen(
            [*command, f"run.folder={folder}", *TINY, *plugin, *overrides],
            env={**os.environ, **case.variables},
            stdout=subprocess.DEVNULL,
        )
        try:
            while not _steps(folder):
                assert launcher.poll() is None, f"the run ended with code {launcher.returncode}"
                time.sleep(0.2)
            series = sample(psutil.Process(launcher.pid), 60 * minutes)
            records = _steps(folder)
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
    return {"minutes": minutes, **_speed(records), "processes": {n: s.row() for n, s in sorted(series.items())}}


def sample(launcher: psutil.Process, duration_s: float) -> dict[str, Series]:
    """Sample the launcher, all descendants and their segments in shared memory, by name."""
    series: dict[str, Series] = defaultdict(Series)
    began_s = time.monotonic()
    ends_s = began_s + duration_s
    while time.monotonic() < ends_s:
        now_s = time.monotonic()
        folders: set[Path] = set()
        for process in (launcher, *launcher.children(recursive=True)):
            try:
                with process.oneshot():
                    row = series[_name_of(process)]
                    num_bytes, descriptors = process.memory_full_info().uss, process.num_fds()
                    threads = process.num_threads()
                folders |= _segment_folders(process.pid)
            except psutil.Error:
                continue  # has just ended
            row.times_s.append(now_s - began_s)
            row.num_bytes.append(num_bytes)
            row.descriptors.append(descriptors)
            row.threads.append(threads)
        shared = series["/dev/shm"]
        shared.times_s.append(now_s - began_s)
        shared.num_bytes.append(sum(_num_bytes(path) for folder in folders for path in folder.iterdir()))
        time.sleep(max(0.0, now_s + _EVERY_S - time.monotonic()))
    return {name: row for name, row in series.items() if len(row.times_s) > 0.5 * len(series["/dev/shm"].times_s)}


def theil_sen(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope of all pairs that are at least a third of the time apart."""
    step = max(1, len(times_s) // 200)
    points = list(zip(times_s[::step], values[::step], strict=True))
    apart_s = (times_s[-1] - times_s[0]) / 3
    slopes = [(y - x) / (t - s) for i, (s, x) in enumerate(points) for t, y in points[i:] if t - s > apart_s]
    return statistics.median(slopes)


def _name_of(process: psutil.Process) -> str:
    """Name a process by module, and by the number of the worker or the id of the process."""
    words = process.cmdline()
    module = next((word for word in words if word.startswith("areal_rloo.")), "")
    options = [word.partition("=")[2] for word in words if word.startswith(("--worker-id=", "--rank="))]
    if any(word.endswith("keeper.py") for word in words):
        return f"keeper {process.pid}"
    if "pidfd" in " ".join(words):  # a program without a file
        return "guard"
    number = options[0] if options else "" if "launcher" in module else str(process.pid)
    return f"{module.removeprefix('areal_rloo.') or words[0]} {number}".strip()


def _segment_folders(pid: int) -> set[Path]:
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            path = descriptor.readlink()
        except OSError:
            continue
        if path.is_relative_to("/dev/shm") and path.parent.name.startswith("areal_rloo-"):
            found.add(path.parent)
    return found


def _num_bytes(path: Path) -> int:
    try:
        return 512 * path.stat().st_blocks
    except FileNotFoundError:
        return 0


def _steps(folder: Path) -> list[TrainRecord]:
    path = folder / "metrics.jsonl"
    return [record for record in read_records(path) if isinstance(record, TrainRecord)] if path.exists() else []


def _speed(records: Sequence[TrainRecord]) -> dict[str, float]:
    """Give the samples trained, and the times of a step: all, and the part in which each half worked."""
    first, last = records[0], records[-1]
    steps = max(1, last.num_train_steps - first.num_train_steps)
    wall_s = (last.wall_s - first.wall_s) / steps
    learner_s = wall_s - (last.learner_idle_s - first.learner_idle_s) / steps
    rollout_s = wall_s * (1 - idle_share(last, first))
    return {
        "trained_samples": last.ledger.trained,
        "step_s": round(wall_s, 4),
        "learner_busy_s": round(learner_s, 4),
        "rollout_busy_s": round(rollout_s, 4),
    }


def _ends(values: Sequence[int], third: int) -> list[int]:
    return [values[third], values[-1], max(values)] if values else []


def _print(name: str, result: dict[str, Any]) -> None:
    numbers = ", ".join(f"{key} {value}" for key, value in result.items() if key != "processes")
    print(f"{name}: {numbers}")
    print("process                          MiB: middle     last  highest   KiB/min  flat   descriptors  threads")
    for process, row in result["processes"].items():
        print(
            f"{process:32} {row['middle_third_mib']:11.1f} {row['last_third_mib']:8.1f} {row['highest_mib']:8.1f} "
            f"{row['slope_kib_per_minute']:9.1f}  {'yes' if row['flat'] else 'NO ':4}  {row['descriptors']}  "
            f"{row['threads']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
