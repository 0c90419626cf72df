"""Search for a schedule that breaks an invariant, and shorten the schedules found.

    python tests/simulation/search.py --schedules 100000 [--seed 0] [--processes 2]
    python tests/simulation/search.py --tell SEED

Every schedule has a seed of its own. Exit code 1 if a schedule fails; its shortened story is printed.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.simulated_run import CONFIGS, Simulation
from simulation.world import Schedule

_CHUNK = 250
_LAST_LINES = 60


def failure_of(schedule: Schedule) -> str | None:
    """Return why a schedule fails; None if it does not."""
    try:
        Simulation(schedule).run()
    except Exception as error:  # noqa: BLE001 - an assertion of any part is a finding
        return f"{type(error).__name__}: {error}"
    return None


def silenced() -> None:
    """Prepare a process: the parts log their warnings."""
    logging.disable(logging.CRITICAL)


def first_failure(seeds: Sequence[int]) -> tuple[int, str] | None:
    """Run schedules; return the first seed that fails, and why."""
    for seed in seeds:
        reason = failure_of(Schedule.drawn(seed, len(CONFIGS)))
        if reason is not None:
            return seed, reason
    return None


def shortened(schedule: Schedule) -> Schedule:
    """Leave out every fault that the failure does not need."""
    size = max(1, len(schedule.faults) // 2)
    while schedule.faults:
        for at in range(0, len(schedule.faults), size):
            shorter = schedule.without(schedule.faults[at : at + size])
            if failure_of(shorter) is not None:
                schedule = shorter
                break
        else:
            if size == 1:
                break
            size //= 2
        size = max(1, min(size, len(schedule.faults) // 2))
    return schedule


def story_of(schedule: Schedule) -> Iterator[str]:
    """Tell a schedule that fails, shortened."""
    schedule = shortened(schedule)
    yield f"seed {schedule.seed}: {schedule.num_workers} workers, config {schedule.config_index}, "
    yield f"together={schedule.together}, evaluates={schedule.evaluates}"
    yield from (str(fault) for fault in schedule.faults)
    simulation = Simulation(schedule, tells=True)
    try:
        simulation.run()
    except Exception as error:  # noqa: BLE001 - the end of the story
        yield from simulation.story.lines[-_LAST_LINES:]
        yield f"{simulation.clock.now_s:7.3f}  {type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others follow")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--tell", type=int, help="tell this schedule alone")
    arguments = parser.parse_args()
    silenced()
    if arguments.tell is not None:
        print(*story_of(Schedule.drawn(arguments.tell, len(CONFIGS))), sep="\n")
        return 0
    started_s, failures = time.monotonic(), 0
    ends = arguments.seed + arguments.schedules
    chunks = [range(first, min(first + _CHUNK, ends)) for first in range(arguments.seed, ends, _CHUNK)]
    with multiprocessing.get_context("spawn").Pool(arguments.processes, silenced) as pool:
        for found in pool.imap_unordered(first_failure, chunks):
            if found is not None:
                failures += 1
                print(found, flush=True)
                if failures == 1:
                    print(*story_of(Schedule.drawn(found[0], len(CONFIGS))), sep="\n", flush=True)
    print(f"{arguments.schedules} schedules from seed {arguments.seed} in {time.monotonic() - started_s:.0f} s: "
          f"{failures or 'none'} failed")  # fmt: skip
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
