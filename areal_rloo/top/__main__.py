"""The command: a run folder in, a screen that follows the run; with `--once`, a single look."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from areal_rloo.config import check_launched, load_config
from areal_rloo.learner.stretches import breaks_of
from areal_rloo.program import Parser, run_main
from areal_rloo.telemetry.health import Health
from areal_rloo.telemetry.metrics import RecordTail
from areal_rloo.telemetry.records import Record, TrainRecord
from areal_rloo.telemetry.targets import Targets
from areal_rloo.top.fleet import Fleet
from areal_rloo.top.screen import screen

_EVERY_S = 2.0
_BETWEEN_S = 1.0


def main(arguments: Sequence[str]) -> int:
    """Follow the run in a folder until Ctrl-C.

    Raises:
        UserError: the folder has no run.
    """
    parser = Parser(prog="areal-rloo top", description="Follow a run on the terminal.")
    parser.add_argument("run_folder", type=Path, metavar="RUN_FOLDER", help="such as runs/latest")
    parser.add_argument("--once", action="store_true", help="print the state and end")
    options = parser.parse_args(arguments)
    try:
        _follow(options.run_folder, once=options.once)
    except KeyboardInterrupt:
        return 130
    return 0


def _follow(folder: Path, *, once: bool) -> None:
    check_launched(folder)
    config = load_config(str(folder / "config.yaml"))
    health, tail, fleet = Health(config, breaks_of(folder)), RecordTail(folder / "metrics.jsonl"), Fleet()
    records = list[Record]()
    newest = -1  # step

    def shown() -> RenderableType:
        nonlocal records, newest
        for record in tail.read():
            health.look(record)
            if isinstance(record, TrainRecord):
                if record.policy_version <= newest:  # a learner that went back takes its steps again
                    records = [one for one in records if one.policy_version < record.policy_version]
                newest = record.policy_version
            records.append(record)
        return screen(folder, config, records, fleet.look(Targets(config, folder).read()), health.present)

    if once or not sys.stdout.isatty():
        fleet.look(Targets(config, folder).read())  # a rate needs two looks
        time.sleep(_BETWEEN_S)
        Console().print(shown())
        return
    with Live(auto_refresh=False) as live:
        while True:
            live.update(shown(), refresh=True)
            time.sleep(_EVERY_S)


if __name__ == "__main__":
    sys.exit(run_main(main))
