"""Compare the quickstart with TRL's RLOOTrainer and with a synchronous loop: the same model, task and optimizer.

    python -m benchmarks.trl_peer --trl .venv-trl/bin/python [--output benchmarks/results/trl_peer.json]

    speed      samples a second after the first steps, with a learning rate so small that all runs have the same load
    long_tail  likewise, with lengths of a long tail: the model is random and has 258 tokens, of which one ends a
               completion, so lengths are geometric with a mean of about 250, at most 1,000; 96 completions a step; the
               reward is a coin
    learning   seconds to a greedy held-out accuracy of 0.95, with the learning rate of the quickstart, the accuracy at
               the end, and the peak of memory
    limit      samples a second if all cores did nothing but the arithmetic of the model, as fast as in a product of
               large matrices: for every sample one pass to generate and three to train, without padding

`.venv-trl` is made by `python -m venv .venv-trl && .venv-trl/bin/pip install -c constraints.txt -e . trl datasets`.
Each system has both cores: ours a core for each half, TRL both in turn. `synchronous` is ours with `max_staleness=0`
and both cores for each half: generation and training in turn. Runs are interleaved, and results are medians. The
seconds leave out the start of the processes. Evaluations count for ours, because the engine decodes them beside the
training; TRL's clock is stopped meanwhile. Each part is written when it has ended, beside the parts of earlier runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from areal_rloo.config import load_config
from areal_rloo.learner.warm_start import prepare_tiny_model
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord, TrainRecord
from benchmarks import hardware

_SPEED_STEPS, _NOT_COUNTED = 16, 4
_LEARNING_STEPS = 40
_GOAL = 0.95
_STILL = 1e-9  # a learning rate
_HALVES = ("learner", "rollout")
_LONG_TAIL = ("rollout.sampling.max_new_tokens=1000", "learner.groups_per_step=12")
_COIN = f"data.train.rewards=[{{function: {Path(__file__).with_name('coin.py')}:coin}}]"


System = Callable[[str, Sequence[str], int, float], "list[Point]"]
"""Takes the folder of a model, overrides, the number of train steps and a learning rate."""


class Point(NamedTuple):
    step: int
    seconds: float  # since the first step began
    accuracy: float | None
    peak_bytes: float  # of the process, or of all processes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl", type=Path, default=Path(".venv-trl/bin/python"), help="has TRL and areal_rloo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=["speed", "long_tail", "learning", "limit"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    model = prepare_tiny_model(load_config("quickstart.yaml")).path
    cores = len(os.sched_getaffinity(0))
    systems: dict[str, System] = {
        "asynchronous": partial(_ours, max(1, cores // 2), 1),
        "synchronous": partial(_ours, cores, 0),
        "trl": partial(_trl, arguments.trl),
    }
    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "speed": lambda: _speed(systems, model, (), arguments.repeats),
            "long_tail": lambda: _speed(systems, _random_model(model, folder), _LONG_TAIL, arguments.repeats),
            "learning": lambda: _learning(systems, model, arguments.repeats),
            "limit": lambda: _limit(model, _random_model(model, folder)),
        }
        for part in arguments.parts:
            result = {**parts[part](), "commit": hardware.commit(), "date": hardware.now()}
            print(part, result, flush=True)
            if arguments.output is not None:
                before = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
                hardware.write(arguments.output, {**{one: before[one] for one in parts if one in before}, part: result})


def _speed(systems: dict[str, System], model: str, overrides: Sequence[str], repeats: int) -> dict[str, Any]:
    config = load_config("quickstart.yaml", overrides)
    samples = config.learner.groups_per_step * config.algorithm.group_size
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, run in systems.items():
            points = run(model, overrides, _SPEED_STEPS, _STILL)
            counted_s = points[-1].seconds - points[_NOT_COUNTED].seconds
            rates[name].append(samples * (points[-1].step - points[_NOT_COUNTED].step) / counted_s)
            print(f"{name}: {rates[name][-1]:.1f} samples/s", flush=True)
    return {
        "samples_per_s": {name: round(statistics.median(values), 1) for name, values in rates.items()},
        "range": {name: [round(min(values), 1), round(max(values), 1)] for name, values in rates.items()},
        "asynchronous_over_trl": round(statistics.median(rates["asynchronous"]) / statistics.median(rates["trl"]), 2),
    }


def _learning(systems: dict[str, System], model: str, repeats: int) -> dict[str, Any]:
    rate = load_config("quickstart.yaml").learner.optimizer.learning_rate
    seconds: dict[str, list[float | None]] = {name: [] for name in systems}
    peaks: dict[str, list[float]] = {name: [] for name in systems}
    final: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, run in systems.items():
            points = run(model, (), _LEARNING_STEPS, rate)
            reached = (point.seconds for point in points if (point.accuracy or 0.0) >= _GOAL)
            seconds[name].append(next(reached, None))
            peaks[name].append(max(point.peak_bytes for point in points))
            accuracies = [point.accuracy for point in points if point.accuracy is not None]
            final[name].append(accuracies[-1])
            print(f"{name}: {seconds[name][-1]} s to {_GOAL}; {accuracies}", flush=True)
    return {
        "seconds_to_goal": seconds,
        "final_accuracy": final,
        "peak_gib": {name: round(max(values) / 2**30, 2) for name, values in peaks.items()},
    }


def _limit(quickstart: str, random: str) -> dict[str, Any]:
    peak = _peak_flops()
    per_sample = {"speed": _flops(quickstart, ()), "long_tail": _flops(random, _LONG_TAIL)}
    return {
        "peak_gflops": round(peak / 1e9, 1),
        "mflop_of_sample": {name: round(flops / 1e6, 1) for name, flops in per_sample.items()},
        "samples_per_s": {name: round(peak / flops, 1) for name, flops in per_sample.items()},
    }


def _peak_flops() -> float:
    """Return the operations a second of all cores together, in the fastest of some products."""
    size, repeats = 2048, 10
    left, right = torch.randn(size, size), torch.randn(size, size)
    torch.mm(left, right)
    return 2 * size**3 / min(timeit.repeat(lambda: torch.mm(left, right), number=1, repeat=repeats))


def _flops(model: str, overrides: Sequence[str]) -> float:
    """Return the operations for a sample: three passes to train, as the learner counts them, and one to generate.

    The learner leaves out groups of equal rewards, in which no sample has an advantage; TRL trains on all samples.
    """
    peak = 1e12
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        subprocess.run(_command(folder, model, [*overrides, f"learner.peak_flops={peak}"], 6, _STILL), check=True)
        steps = [record for record in read_records(folder / "metrics.jsonl") if isinstance(record, TrainRecord)]
    trained = sum(step.model_flops_share * peak * step.train_step_s for step in steps)
    share = statistics.fmean(1 - step.zero_variance_group_share for step in steps)  # of samples that are trained on
    return 4 / 3 * trained / (share * steps[-1].ledger.trained)


def _random_model(tiny: str, folder: str) -> str:
    """Write a random model of the shape of the tiny model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def _ours(
    threads: int, max_staleness: int, model: str, overrides: Sequence[str], num_steps: int, rate: float
) -> list[Point]:
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        halves = [f"algorithm.max_staleness={max_staleness}", *(f"{half}.num_threads={threads}" for half in _HALVES)]
        peak = _peak_of(_command(folder, model, [*overrides, *halves], num_steps, rate))
        records = list(read_records(folder / "metrics.jsonl"))
    steps = [record for record in records if isinstance(record, TrainRecord)]
    accuracies = {record.policy_version: record.accuracy for record in records if isinstance(record, EvalRecord)}
    points = [Point(step.policy_version, step.wall_s, accuracies.get(step.policy_version), peak) for step in steps]
    return [Point(0, 0.0, accuracies.get(0), peak), *points]


def _command(folder: Path, model: str, overrides: Sequence[str], num_steps: int, rate: float) -> list[str]:
    evaluates = rate > _STILL
    return [
        *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
        *(f"run.folder={folder}", f"model.path={model}", *overrides),
        *([_COIN] if _LONG_TAIL[0] in overrides else []),
        f"learner.num_train_steps={num_steps}",
        f"learner.optimizer.learning_rate={rate}",
        f"evaluation.every_n_versions={5 if evaluates else 0}",
        *([] if evaluates else ["data.eval=null"]),
        "checkpoint.every_n_steps=0",
        "telemetry.progress=false",
    ]


def _peak_of(command: list[str]) -> float:
    """Run a command; return the peak of the memory of all its processes in bytes, shared pages counted once."""
    process = psutil.Popen(command)
    peak = 0
    while True:
        try:
            code = process.wait(0.5)
        except psutil.TimeoutExpired:
            peak = max(peak, sum(map(_memory_of, [process, *process.children(recursive=True)])))
            continue
        if code != 0:
            raise subprocess.CalledProcessError(code, command)
        return peak


def _memory_of(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0


def _trl(python: Path, model: str, overrides: Sequence[str], num_steps: int, rate: float) -> list[Point]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "steps.jsonl"
        command = [
            *(str(python), "-m", "benchmarks.trl_trainer", "--model", model),
            *("--num-steps", str(num_steps), "--learning-rate", str(rate), "--output", str(output)),
            *(["--evaluates"] if rate > _STILL else []),
            *(["--coin", *overrides] if overrides else []),
        ]
        peak = _peak_of(command)
        lines = [json.loads(line) for line in output.read_text().splitlines()]
    return [Point(line["step"], line["seconds"], line["accuracy"], peak) for line in lines]


if __name__ == "__main__":
    main()
