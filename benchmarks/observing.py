"""How much throughput do scrapes of all metrics and a trace cost?

The quickstart's task, model and sizes, with a core each for learner and worker and a tiny learning rate, so every run
has the same load. `observed` records a trace (`telemetry.trace`), and every 2 s a scrape reads /metrics of each
process, as a Prometheus with a short interval does. The named alternative, `alone`, has neither. The first steps do not
count.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.async_vs_sync import trained_tokens_per_s
from benchmarks.harness import LEAST_ROUNDS, Benchmark, Case

_SCRAPE_EVERY_S = 2.0


def cases(quick: bool) -> Generator[Case]:
    half, num_steps = max(1, len(os.sched_getaffinity(0)) // 2), 2 if quick else 12
    contestants = {
        "alone": lambda: trained_tokens_per_s(1, half, num_steps, "telemetry.targets_folder=null"),
        "observed": lambda: _observed(half, num_steps),
    }
    yield Case(
        "quickstart",
        "trained tokens/s",
        contestants,
        [("observed", "alone")],
        2 if quick else LEAST_ROUNDS,
        larger_is_better=True,
        warm_up=False,
        facts={"steps": num_steps, "scrape_every_s": _SCRAPE_EVERY_S},
    )


def _observed(threads: int, num_steps: int) -> float:
    with tempfile.TemporaryDirectory() as folder, _scraped(Path(folder)):
        return trained_tokens_per_s(1, threads, num_steps, f"telemetry.targets_folder={folder}", "telemetry.trace=true")


@contextmanager
def _scraped(targets: Path) -> Iterator[None]:
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(_SCRAPE_EVERY_S):
            for path in targets.glob("*.json"):
                with contextlib.suppress(OSError, ValueError):  # the process starts, or ends
                    for target in json.loads(path.read_text())[0]["targets"]:
                        urllib.request.urlopen(f"http://{target}/metrics", timeout=5).read()

    thread = threading.Thread(target=scrape, name="scrapes")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


BENCHMARK = Benchmark("observing", __doc__, cases)
