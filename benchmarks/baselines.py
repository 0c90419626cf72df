"""Baselines: what staleness costs RLOO, GRPO and REINFORCE++ on three tasks.

    python -m benchmarks.baselines [--output benchmarks/results/baselines.json] [--minutes N]

Each run is a job of `learning.py`: the staleness of every token is fixed, so results do not depend on the machine. With
a pipeline of depth 1, tokens are one version old under any larger bound; at full depth, they are as old as the bound.
So a bound of 0, then depth 1 under 2, 8 or 16, then full depth at 2, 8 and 16 are five values of the staleness. The
presets have their own advantages and means; the KL to the reference is off. `chain_sum` and `count_primes` are of
reasoning-gym (the extra `rg`), with tiny models that begin with about half of the answers correct, as the quickstart's
does.

A run takes minutes, and there are 135. Each is written when it has ended, and the same command continues with the
missing runs. `--minutes` ends earlier.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from areal_rloo.config import SourceConfig, TinyModelConfig, WarmStartConfig, load_config
from areal_rloo.learner.demonstrations import Example, train_on_demonstrations
from areal_rloo.learner.warm_start import prepare_tiny_model, tiny_model_folder
from areal_rloo.models.tiny import make_tiny_model, save_tiny_model
from areal_rloo.tasks import make_task
from benchmarks import hardware
from benchmarks.learning import SEEDS, Job, Outcome, over_seeds, run

RESULTS = Path(__file__).resolve().parent / "results"
NUM_STEPS, GROUPS_PER_STEP = 40, 16
STALENESS = (0, 1, 2, 8, 16)  # 1: depth 1; above: full depth
PRESETS: Mapping[str, tuple[str, ...]] = {
    "rloo": ("algorithm.preset=rloo",),
    "grpo": ("algorithm.preset=grpo", "algorithm.kl.coefficient=0"),
    "reinforce_plus_plus": ("algorithm.preset=reinforce_plus_plus", "algorithm.kl.coefficient=0"),
}
_NUM_VALIDATION = 200
_ERROR_RATE = 0.1


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A dataset of reasoning-gym, small enough for a tiny model."""

    parameters: Mapping[str, Any]
    max_prompt_tokens: int  # bytes
    max_new_tokens: int

    def source(self, **more: Any) -> SourceConfig:
        return SourceConfig(task="reasoning_gym", parameters={**self.parameters, **more})

    def overrides(self) -> tuple[str, ...]:
        train, evaluation = self.source(), self.source(size=_NUM_VALIDATION)
        return (
            f"data.train={json.dumps({'task': train.task, 'parameters': train.parameters})}",
            f"data.eval={json.dumps({'task': evaluation.task, 'parameters': evaluation.parameters})}",
            "data.deduplicate=true",  # train on no held-out prompt
            f"data.max_prompt_tokens={self.max_prompt_tokens}",
            f"rollout.sampling.max_new_tokens={self.max_new_tokens}",
        )


PUZZLES: Mapping[str, Puzzle | None] = {
    "arithmetic": None,  # the quickstart's
    "chain_sum": Puzzle(
        {"dataset": "chain_sum", "min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}, 224, 32
    ),
    "count_primes": Puzzle({"dataset": "count_primes", "min_n": 1, "max_n": 60}, 176, 24),
}


def model_of(name: str) -> str:
    """Return the folder of the tiny model for a task; made on first use, as the quickstart's model is."""
    puzzle = PUZZLES[name]
    if puzzle is None:
        return prepare_tiny_model(load_config("quickstart.yaml")).path
    folder = tiny_model_folder(load_config("quickstart.yaml")).parent / f"baseline-{name}"
    if folder.is_dir():
        return str(folder)
    recipe, start = TinyModelConfig(), WarmStartConfig(until_accuracy=0.6, batch_size=16)
    task, rng = make_task("data.train", puzzle.source(), seed=10**6), random.Random(0)
    items = task.items("train")

    def example(index: int, *, error_rate: float) -> Example:
        wrong = rng.random() < error_rate
        answered = items[rng.randrange(len(items))] if wrong else items[index]
        return items[index].text, task.demonstration(answered)

    def draw(num: int) -> list[Example]:
        return [example(rng.randrange(_NUM_VALIDATION, len(items)), error_rate=_ERROR_RATE) for _ in range(num)]

    model = make_tiny_model(recipe)
    examples = [example(index, error_rate=0.0) for index in range(_NUM_VALIDATION)]
    accuracy = train_on_demonstrations(model, start, draw, examples)
    print(f"{name}: a model with greedy accuracy {accuracy:.3f}", flush=True)
    unfinished = folder.with_name(f".{folder.name}")
    unfinished.mkdir(parents=True, exist_ok=True)
    save_tiny_model(model, unfinished)
    unfinished.rename(folder)
    return str(folder)


def jobs_of(name: str, model: str) -> list[Job]:
    """List the runs of a task: those of the first seed first, so that an early end leaves whole comparisons."""
    puzzle = PUZZLES[name]
    overrides = () if puzzle is None else puzzle.overrides()
    make = partial(Job, model=model, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    return [
        make(f"{name}/{preset}", (*overrides, *options), seed, staleness)
        for seed in SEEDS
        for staleness in STALENESS
        for preset, options in PRESETS.items()
    ]


def _timed(job: Job) -> tuple[Outcome, float]:
    began_s = time.process_time()
    return run(job), time.process_time() - began_s


def run_missing(jobs: Sequence[Job], records: Path, *, minutes: float) -> None:
    """Run all jobs without a record, one for each core at a time; write each record when its job has ended."""
    ends_s = time.monotonic() + 60 * minutes
    done = {(record["run"], record["seed"], record["staleness"]) for record in _read(records)}
    left = [job for job in jobs if (job.name, job.seed, job.eta) not in done]
    num_cores = hardware.describe()["num_cores"]
    running: dict[Future[tuple[Outcome, float]], Job] = {}
    with ProcessPoolExecutor(num_cores, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        while running or (left and time.monotonic() < ends_s):
            while left and len(running) < num_cores and time.monotonic() < ends_s:
                job = left.pop(0)
                running[pool.submit(_timed, job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, (outcome, cpu_s) = running.pop(future), future.result()
                record = {
                    "run": job.name,
                    "seed": job.seed,
                    "staleness": job.eta,
                    "accuracies": outcome.accuracies,
                    "effective_sample_share": round(outcome.effective_sample_share, 4),
                    "core_s": round(cpu_s, 1),
                    "commit": hardware.commit(),
                }
                with records.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(f"{job.name} seed {job.seed} staleness {job.eta}: {outcome.final:.3f}, {cpu_s:.0f} s", flush=True)


def _read(records: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []


def table_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each task, preset and staleness with a run of every seed."""
    rows = []
    for run_name in dict.fromkeys(record["run"] for record in records):
        for staleness in STALENESS:
            found = [record for record in records if (record["run"], record["staleness"]) == (run_name, staleness)]
            if {record["seed"] for record in found} != set(SEEDS):
                continue
            curves = [record["accuracies"] for record in found]
            task, preset = run_name.split("/")
            rows.append(
                {
                    "task": task,
                    "preset": preset,
                    "staleness": staleness,
                    "start": curves[0][0],
                    **over_seeds(final=[sum(curve[-2:]) / 2 for curve in curves]),
                    "core_s": round(sum(record["core_s"] for record in found) / len(found), 1),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", default=str(RESULTS / "baselines.json"))
    parser.add_argument("--minutes", type=float, default=10_000.0)
    arguments = parser.parse_args()
    output = Path(arguments.output)
    records = output.with_suffix(".jsonl")
    jobs = [job for name in PUZZLES for job in jobs_of(name, model_of(name))]
    run_missing(jobs, records, minutes=arguments.minutes)
    found = _read(records)
    table = table_of(found)
    for row in table:
        print(*(f"{key}={value}" for key, value in row.items()))
    setup = {"num_steps": NUM_STEPS, "groups_per_step": GROUPS_PER_STEP, "seeds": list(SEEDS)}
    hardware.write(str(output), {**setup, "runs": len(found), "of": len(jobs), "table": table})


if __name__ == "__main__":
    main()
