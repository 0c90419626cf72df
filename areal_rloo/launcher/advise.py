"""`python -m areal_rloo.launcher.advise --config X.yaml [--from RUN_FOLDER ...] [--devices N] [key=value ...]`

Measure the speeds of a run, and print how to split N devices between learner ranks and rollout workers, which depth of
the pipeline to choose, and the forecast. A device is a GPU, or the cores of a process. Starts nothing. Five train steps
are enough. Two runs with other numbers of slots show the speed of decoding by batch size; then the advice has a number
of slots between the two. A run with one rank and one with several show the cost of the exchange between ranks. Memory
is not looked at: `--dry-run` of a launcher refuses a split that does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from areal_rloo.advice.calibration import LEAST_RECORDS, Load, calibrated, merged, setup_of
from areal_rloo.advice.forecast import best_setup, bottleneck, forecast, splits
from areal_rloo.advice.simulation import Setup
from areal_rloo.config import Config, check_launched, check_unique, load_config
from areal_rloo.errors import ConfigError
from areal_rloo.program import Parser, run_main
from areal_rloo.telemetry.bound import newest
from areal_rloo.telemetry.metrics import read_records
from areal_rloo.telemetry.records import EvalRecord, Record, TrainRecord

_LATEST = Path("runs/latest")
_MOST_STEPS = 50  # of a run: the newest
_NO_EXCHANGE = "for the cost of the exchange between ranks, name a run with one rank and one with several with --from"
_SAME = (  # the speeds of a run are of these values
    *("model.path", "algorithm.group_size", "rollout.engine", "rollout.tensor_parallel"),
    *("model.tiny", "model.dtype", "learner.gradient_checkpointing", "learner.lora"),
    *("rollout.sampling.max_new_tokens", "rollout.episode.type"),
)


def main(arguments: Sequence[str]) -> int:
    """Print the advice.

    Raises:
        UserError: the config is wrong, a folder has too few steps, or its run is of another model or task.
    """
    parser = Parser(prog="areal-rloo advise", description="Advise on a split.", overrides=True)
    parser.add_argument("--config", required=True, help="a path, or the name of a shipped config")
    parser.add_argument("--from", dest="folders", type=Path, action="append", metavar="RUN_FOLDER")
    parser.add_argument("--devices", type=int, metavar="N", help="of learner and workers together")
    options, overrides = parser.parse_known_args(arguments)
    check_unique(overrides)
    config = load_config(options.config, overrides)
    if config.rollout.takes_turns:
        raise ConfigError("rollout.share_devices: expected devices for each half, got in_turns; there is no split")
    folders = options.folders or [_LATEST]
    runs = [_read(folder, config) for folder in folders]
    steps = [_measured(records) for records, _ in runs]
    load = merged([calibrated(found, of_run) for found, (_, of_run) in zip(steps, runs, strict=True)], steps)
    setup = setup_of(config, [record for record in runs[0][0] if isinstance(record, EvalRecord)])
    per_worker = config.rollout.tensor_parallel
    here = setup.num_ranks + per_worker * setup.num_workers
    num_devices = here if options.devices is None else options.devices
    choices = splits(
        num_devices,
        per_worker=per_worker,
        rank_step=config.learner.num_replicas,
        most_ranks=config.samples_per_step,
    )
    if not choices:
        raise ConfigError(f"argument '--devices': expected enough for a rank and a worker, got {num_devices}")
    measured = {of_run.rollout.num_slots for _, of_run in runs}
    sizes = [num for num in (2**power for power in range(11)) if min(measured) < num < max(measured)]
    slots = sorted({*measured, *sizes}) if load.sizes_differ and len(measured) > 1 else [setup.num_slots]
    best, found = best_setup(load, setup, choices, slots=slots)
    measured_ranks = {of_run.learner.num_ranks for _, of_run in runs}
    for line in (
        f"measured in {', '.join(map(str, folders))}: {_speeds(load, setup)}",
        f"as configured: {_counts(setup)}: {forecast(load, setup).words()}",
        f"best for {num_devices:,} devices{_unused(num_devices, best, per_worker)}: {_counts(best)}: {found.words()}",
        bottleneck(load, best, wait_share=found.wait_share, idle_share=found.idle_share, is_forecast=True),
        f"options: learner.num_ranks={best.num_ranks} rollout.num_workers={best.num_workers} "
        f"algorithm.pipeline_depth={best.pipeline_depth} rollout.num_slots={best.num_slots}",
        *(["for advice on rollout.num_slots, name a second run with other slots with --from"] * (len(slots) == 1)),
        *([_NO_EXCHANGE] * (len(choices) > 1 and not (1 in measured_ranks and max(measured_ranks) > 1))),
    ):
        print(line)  # noqa: T201 - the output of the command
    return 0


def _read(folder: Path, config: Config) -> tuple[list[Record], Config]:
    """Read the records and the config of a run.

    Raises:
        UserError: there is no run, or the config has another model or task.
    """
    check_launched(folder)
    of_run = load_config(str(folder / "config.yaml"))
    for key in _SAME:
        asked, measured = attrgetter(key)(config), attrgetter(key)(of_run)
        if asked != measured:
            raise ConfigError(f"{key}: expected {measured} as in {folder}, got {asked}; name a run of this config")
    return read_records(folder / "metrics.jsonl"), of_run


def _measured(records: Sequence[Record]) -> list[TrainRecord]:
    """Return the newest steps between two starts of the learner that are enough to measure speeds."""
    steps = [record for record in records if isinstance(record, TrainRecord)]
    found = measured = newest(steps, _MOST_STEPS)
    while found and len(found) < LEAST_RECORDS:
        steps = steps[: -len(found)]
        found = newest(steps, _MOST_STEPS)
    return found or measured


def _unused(num_devices: int, setup: Setup, per_worker: int) -> str:
    num = num_devices - setup.num_ranks - per_worker * setup.num_workers
    return f", {num:,} of them unused" * (num > 0)


def _speeds(load: Load, setup: Setup) -> str:
    speeds, num = load.speeds, setup.num_slots
    exchange = f"several ranks need another {1e6 * speeds.exchange_token_s:.1f} s for a million tokens, "
    return (
        f"a worker decodes {num / (speeds.decode_fixed_s + num * speeds.decode_each_s):,.0f} tokens/s in {num} slots, "
        f"a rank trains {1 / speeds.train_token_s:,.0f} tokens/s and needs {speeds.train_fixed_s:.2f} s a step more, "
        f"{exchange * (speeds.exchange_token_s > 0)}"
        f"a broadcast takes {speeds.broadcast_s:.2f} s, completions have {load.lengths.mean():.0f} tokens"
    )


def _counts(setup: Setup) -> str:
    return (
        f"learner ranks {setup.num_ranks}, workers {setup.num_workers}, slots {setup.num_slots}, "
        f"max_staleness {setup.max_staleness}, pipeline_depth {setup.pipeline_depth}"
    )


if __name__ == "__main__":
    sys.exit(run_main(main))
