"""Does a dry run take longer for a larger cluster?

The plan is gsm8k_rloo.yaml over 1, 16 and 128 hosts of 8 GPUs, with all counts `auto`, as a whole process. The named
alternative is the plan of a single host; `python` is a Python that does nothing. The facts count the processes of each
plan, which the benchmark reads from the JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from benchmarks.harness import Benchmark, Case, timed

DRY_RUN = [sys.executable, "-m", "areal_rloo.launcher.slurm", "--config", "gsm8k_rloo.yaml", "--dry-run", "--json"]
ENVIRONMENT = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # only the first plan compiles the modules
AUTO = ["rollout.num_workers=auto", "learner.num_ranks=auto"]


def cases(quick: bool) -> Generator[Case]:
    facts: dict[str, Any] = {}
    contestants: dict[str, Callable[[], float]] = {
        f"{num}_hosts": partial(_plan, num, facts) for num in ((1, 16) if quick else (1, 16, 128))
    }
    contestants["python"] = partial(timed, partial(subprocess.run, [sys.executable, "-c", ""], check=True))
    ratios = [(name, "1_hosts") for name in contestants if name != "1_hosts"]
    yield Case("dry_run", "s", contestants, ratios, rounds=2 if quick else 5, turns=1 if quick else 3, facts=facts)


def _plan(num_hosts: int, facts: dict[str, Any]) -> float:
    size = (f"launcher.num_hosts={num_hosts}", "launcher.gpus_per_host=8", "launcher.cores_per_host=96")
    said = ""

    def work() -> None:
        nonlocal said
        ended = subprocess.run([*DRY_RUN, *AUTO, *size], env=ENVIRONMENT, capture_output=True, check=True, text=True)
        said = ended.stdout

    seconds = timed(work)
    facts[f"processes_of_{num_hosts}_hosts"] = len(json.loads(said)["processes"])
    return seconds


BENCHMARK = Benchmark("plan", __doc__, cases)
