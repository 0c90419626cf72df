"""Compare the forecasts of `areal_rloo.advice` with real runs: steps 6 to 25 against a calibration on steps 1 to 5.

    python -m benchmarks.advice [--repeats N] [--runs FOLDER] [--output benchmarks/results/advice.json]

Quickstart-like runs on two cores, a core each for learner and worker; a tiny learning rate, so every step has the same
load. A run that FOLDER has is not repeated. Of several runs of a config, the run with the steadiest slowdown counts.

A forecast says that the machine stays as fast as in steps 1 to 5. On a shared machine, other programs take turns on
the cores. So the time of our threads on the kernel's run queues is measured, too. The slowdown of a process is
(running + waiting to run) / running. `equal_load` is the forecast with the speeds of both halves scaled by their
slowdowns in steps 6 to 25 over those in steps 2 to 5. `model` is the forecast with the speeds of steps 6 to 25 itself:
the error of the model alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_rloo.advice.calibration import Load, calibrated, setup_of
from areal_rloo.advice.forecast import FIRST, LAST, Forecast, forecast
from areal_rloo.advice.simulation import Speeds
from areal_rloo.config import load_config
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord
from benchmarks import hardware

BASE = (
    *("learner.num_threads=1", "rollout.num_threads=1", f"learner.num_train_steps={LAST + 1}"),
    *("learner.groups_per_step=24", "learner.optimizer.learning_rate=1e-9"),
    *("evaluation.every_n_versions=0", "data.eval=null", "checkpoint.every_n_steps=0", "telemetry.progress=false"),
)
RUNS: dict[str, tuple[str, ...]] = {
    "8 slots": ("rollout.num_slots=8",),
    "16 slots": ("rollout.num_slots=16",),
    "32 slots": ("rollout.num_slots=32",),
    "64 slots": ("rollout.num_slots=64",),
    "16 slots, eta 0": ("rollout.num_slots=16", "algorithm.max_staleness=0"),
    "64 slots, eta 0": ("rollout.num_slots=64", "algorithm.max_staleness=0"),
    "16 slots, depth 2": ("rollout.num_slots=16", "algorithm.max_staleness=2", "algorithm.pipeline_depth=2"),
    "64 slots, depth 4": ("rollout.num_slots=64", "algorithm.max_staleness=4", "algorithm.pipeline_depth=4"),
    "64 slots, checkpointing": ("rollout.num_slots=64", "learner.gradient_checkpointing=true"),
    "16 slots, 48 groups": ("rollout.num_slots=16", "learner.groups_per_step=48"),
    "32 slots, 48 tokens": ("rollout.num_slots=32", "rollout.sampling.max_new_tokens=48"),
    "32 slots, groups of 4, wait": (
        *("rollout.num_slots=32", "algorithm.group_size=4", "learner.groups_per_step=48"),
        *("algorithm.max_staleness=2", "algorithm.pipeline_depth=2", "algorithm.stale_tokens=wait"),
    ),
}
HALVES = {"learner": "areal_rloo.learner", "rollout": "areal_rloo.rollout"}
Scheduled = dict[str, tuple[int, int]]  # by half: nanoseconds on a core, and waiting for a core


def command(folder: Path, overrides: tuple[str, ...]) -> list[str]:
    """Return the command of a run with `BASE`; an override wins."""
    options = {option.partition("=")[0]: option for option in (*BASE, *overrides)}  # the last of each key
    launcher = [sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"]
    return [*launcher, f"run.folder={folder}", *options.values()]


def train_records(folder: Path) -> list[TrainRecord]:
    """Read the train steps of a run."""
    return [record for record in read_records(folder / "metrics.jsonl") if isinstance(record, TrainRecord)]


def measured_tokens_per_s(records: list[TrainRecord]) -> float:
    """Return the trained tokens a second of the counted steps."""
    before, counted = records[FIRST - 2], records[FIRST - 1 : LAST]
    return sum(record.trained_tokens for record in counted) / (counted[-1].wall_s - before.wall_s)


def run(folder: Path, overrides: tuple[str, ...]) -> None:
    """Run, and write the times of the threads at some steps beside the records."""
    process = subprocess.Popen(command(folder, overrides), stdout=subprocess.DEVNULL)
    records, times = folder / "metrics.jsonl", dict[int, Scheduled]()
    while process.poll() is None:
        num = records.read_bytes().count(b"\n") if records.exists() else 0
        for step in (1, FIRST - 1, LAST):
            if num >= step and step not in times:
                times[step] = _scheduled(folder)
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{folder}: exit code {process.returncode}")
    (folder / "scheduled.json").write_text(json.dumps(times))


def _scheduled(folder: Path) -> Scheduled:
    """Add up the times of all threads of both halves of the run in this folder."""
    found: Scheduled = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().decode().split("\0")
            halves = [half for half, module in HALVES.items() if words[1:3] == ["-m", module]]
            if not halves or f"--run-folder={folder}" not in words:
                continue
            threads = [thread.read_text().split() for thread in process.glob("task/*/schedstat")]
            before = found.get(halves[0], (0, 0))
            found[halves[0]] = (
                before[0] + sum(int(on_core) for on_core, _, _ in threads),
                before[1] + sum(int(queued) for _, queued, _ in threads),
            )
    return found


def slowdowns(folder: Path, first: int, last: int) -> dict[str, float]:
    """Return the slowdown of each half between two steps."""
    times = json.loads((folder / "scheduled.json").read_text())
    result = {}
    for half in HALVES:
        running, waiting = (
            now - before for before, now in zip(times[str(first)][half], times[str(last)][half], strict=True)
        )
        result[half] = (running + waiting) / running
    return result


def _change(folder: Path) -> float:
    """Return by which share the slowdown of a half changed at most, from the calibrated steps to the counted steps."""
    early, late = slowdowns(folder, 1, FIRST - 1), slowdowns(folder, FIRST - 1, LAST)
    return max(abs(late[half] / early[half] - 1) for half in HALVES)


def compare(name: str, folder: Path) -> dict[str, Any]:
    """Compare the forecasts of a run with its steps 6 to 25."""
    records = train_records(folder)
    config = load_config(str(folder / "config.yaml"))
    before, counted = records[FIRST - 2], records[FIRST - 1 : LAST]
    tokens, seconds = sum(record.trained_tokens for record in counted), counted[-1].wall_s - before.wall_s
    calibration, setup = calibrated(records[: FIRST - 1], config), setup_of(config)
    early, late = slowdowns(folder, 1, FIRST - 1), slowdowns(folder, FIRST - 1, LAST)
    scaled = _scaled(calibration, **{half: late[half] / early[half] for half in HALVES})
    measured = {
        "tokens_per_s": measured_tokens_per_s(records),
        "staleness": sum(record.staleness_mean * record.trained_tokens for record in counted) / tokens,
        "wait_share": sum(record.wait_s for record in counted) / seconds,
    }
    forecasts = {
        "plain": forecast(calibration, setup),
        "equal_load": forecast(scaled, setup),
        "model": forecast(calibrated(records[FIRST - 2 : LAST], config), setup),
    }
    return {
        "run": name,
        "slowdown_before": early,
        "slowdown_after": late,
        "measured": measured,
        **{kind: _errors(found, measured) for kind, found in forecasts.items()},
    }


def _scaled(load: Load, *, learner: float, rollout: float) -> Load:
    speeds = load.speeds
    slower = Speeds(
        decode_fixed_s=speeds.decode_fixed_s * rollout,
        decode_each_s=speeds.decode_each_s * rollout,
        train_fixed_s=speeds.train_fixed_s * learner,
        train_token_s=speeds.train_token_s * learner,
        broadcast_s=speeds.broadcast_s * learner,
    )
    return replace(load, speeds=slower)


def _errors(found: Forecast, measured: dict[str, float]) -> dict[str, float]:
    return {
        "tokens_per_s": found.tokens_per_s,
        "error": found.tokens_per_s / measured["tokens_per_s"] - 1,
        "staleness": found.staleness,
        "staleness_difference": found.staleness - measured["staleness"],
        "wait_share": found.wait_share,
    }


def _rounded(numbers: Any) -> Any:
    if isinstance(numbers, dict):
        return {key: _rounded(value) for key, value in numbers.items()}
    return round(numbers, 4) if isinstance(numbers, float) else numbers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--runs", type=Path, help="keeps the run folders")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        base, rows = arguments.runs or Path(scratch), []
        for name, overrides in RUNS.items():
            repeats = range(arguments.repeats)
            folders = [base / f"{name.replace(',', '').replace(' ', '_')}-{number}" for number in repeats]
            for folder in folders:
                if not (folder / "scheduled.json").exists():
                    run(folder, overrides)
            rows.append(_rounded(compare(name, min(folders, key=_change))))
            print(json.dumps(rows[-1]), flush=True)
    summary = {}
    for kind in ("plain", "equal_load", "model"):
        errors = [abs(row[kind]["error"]) for row in rows]
        staleness = [abs(row[kind]["staleness_difference"]) for row in rows]
        summary[kind] = {
            **{"error_median": statistics.median(errors), "error_worst": max(errors)},
            **{"staleness_median": statistics.median(staleness), "staleness_worst": max(staleness)},
        }
    print(json.dumps(summary))
    result = {"counted_steps": [FIRST, LAST], "summary": _rounded(summary), "runs": rows}
    hardware.write(arguments.output, result)


if __name__ == "__main__":
    main()
