"""How many more tokens per second does asynchronous training (eta = 1, 4) train than synchronous training?

The quickstart's task on the quickstart's model with a tiny learning rate, so every run has the same load. The named
alternative is eta = 0: learner and rollout worker alternate, with all cores each or with half of the cores each. A run
of each setting decides which is faster, because a tiny model may gain nothing from more cores. Asynchronous: half of
the cores each, at the same time. The first steps of each run do not count.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from functools import partial
from pathlib import Path

from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import TrainRecord
from benchmarks.harness import LEAST_ROUNDS, Benchmark, Case

NOT_COUNTED = 3  # steps


def cases(quick: bool) -> Generator[Case]:
    cores = len(os.sched_getaffinity(0))
    half = max(1, cores // 2)
    num_steps = 2 if quick else 4
    of_alone = half if quick else max((cores, half), key=lambda threads: trained_tokens_per_s(0, threads, 2))
    contestants = {"eta_0": partial(trained_tokens_per_s, 0, of_alone, num_steps)}
    for eta in (1,) if quick else (1, 4):
        contestants[f"eta_{eta}"] = partial(trained_tokens_per_s, eta, half, num_steps)
    ratios = [(name, "eta_0") for name in contestants if name != "eta_0"]
    facts = {"threads_of_eta_0": of_alone, "threads_of_others": half, "steps": num_steps}
    rounds = 2 if quick else LEAST_ROUNDS
    yield Case(
        "quickstart", "trained tokens/s", contestants, ratios, rounds, larger_is_better=True, warm_up=False, facts=facts
    )


def trained_tokens_per_s(max_staleness: int, threads: int, num_steps: int, *overrides: str) -> float:
    """Run the quickstart's load on these threads each; return the speed of `num_steps` steps after the first."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "run"
        subprocess.run(
            [
                *(sys.executable, "-m", "areal_rloo.launcher.local", "--config", "quickstart.yaml"),
                f"run.folder={folder}",
                f"algorithm.max_staleness={max_staleness}",
                f"algorithm.pipeline_depth={max(1, max_staleness)}",
                f"learner.num_threads={threads}",
                f"rollout.num_threads={threads}",
                f"learner.num_train_steps={num_steps + NOT_COUNTED}",
                "learner.optimizer.learning_rate=1e-9",
                "evaluation.every_n_versions=0",
                "data.eval=null",
                "checkpoint.every_n_steps=0",
                "telemetry.progress=false",
                *overrides,
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        records = [r for r in read_records(folder / "metrics.jsonl") if isinstance(r, TrainRecord)]
    counted = records[NOT_COUNTED:]
    return sum(r.trained_tokens for r in counted) / (counted[-1].wall_s - records[NOT_COUNTED - 1].wall_s)


BENCHMARK = Benchmark("async_vs_sync", __doc__, cases)
