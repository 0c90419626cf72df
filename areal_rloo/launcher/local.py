"""`python -m areal_rloo.launcher.local`: a whole run on this machine.

    checks ─► plan ─► warm start, if the tiny model is not there yet ─► learner and rollout workers ─► report

It restarts a rollout worker that dies, ends when the learner ends, and exits with the learner's code. The first Ctrl-C
or SIGTERM drains: a checkpoint, then exit 0; the second stops at once.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec
from rich.console import Console

from areal_rloo.config import Config, dump_config
from areal_rloo.errors import EXIT_RANK_LOST, DataError, PreflightError, UserError
from areal_rloo.launcher.cli import parse, run_main
from areal_rloo.launcher.plan import Addresses, Machine, ProcessSpec, describe, plan_preparation, plan_run
from areal_rloo.launcher.preflight import check, check_disk, check_tools, free_ports, this_machine
from areal_rloo.launcher.run_folder import choose_folder, segment_folder, write_beginning
from areal_rloo.launcher.supervisor import Supervisor
from areal_rloo.report import write_report
from areal_rloo.telemetry.logs import get_logger, setup_logs
from areal_rloo.telemetry.metrics import RecordTail
from areal_rloo.telemetry.progress import Progress

logger = get_logger(__name__)

_GRACE_S = 5.0
_LOOK_EVERY_S = 0.1


def main(arguments: Sequence[str]) -> int:
    """Plan, run, report.

    Raises:
        UserError: something to be mended before anything starts.
    """
    options = parse("local", arguments)
    config, machine = options.config, this_machine()
    check(config)
    folder = choose_folder(config, resume=options.resume)
    addresses = _addresses(config)
    preparation = plan_preparation(config, machine, folder)
    model_path = "MODEL" if preparation is not None else str(config.model.path)
    specs = plan_run(
        config,
        machine,
        run_folder=folder,
        model_path=model_path,
        addresses=addresses,
        resume=options.resume,
        warm_start_s=0.0,
    )
    if options.dry_run:
        print(dump_config(config))  # noqa: T201 - the face of the program
        print(describe([*([preparation] if preparation is not None else []), *specs]))  # noqa: T201
        return 0
    check_tools(config, folder)
    check_disk(config, folder)
    write_beginning(folder, config, machine)
    setup_logs("launcher", level=config.telemetry.log_level, file=folder / "logs" / "launcher.log")
    return _LocalRun(config, machine, folder, addresses, preparation, resume=options.resume).run()


def _addresses(config: Config) -> Addresses:
    num_metrics = 1 + config.rollout.num_workers
    wire_port, meeting_port, *metrics = free_ports(2 + num_metrics)
    first = config.telemetry.metrics_port
    return Addresses(
        wire_port=config.wire.port or wire_port,
        meeting_port=meeting_port,
        metrics_ports=tuple(first + n for n in range(num_metrics)) if first else tuple(metrics),
        segment_folder=segment_folder(uuid.uuid4().hex[:12]),
    )


class _LocalRun:
    """One run, from the first process to the last."""

    def __init__(
        self,
        config: Config,
        machine: Machine,
        folder: Path,
        addresses: Addresses,
        preparation: ProcessSpec | None,
        *,
        resume: bool,
    ) -> None:
        self._config = config
        self._machine = machine
        self._folder = folder
        self._addresses = addresses
        self._preparation = preparation
        self._resume = resume
        self._supervisor = Supervisor(folder / "logs")
        self._num_signals = 0
        self._drain_ends_s: float | None = None
        self._disk_is_full = False

    def run(self) -> int:
        """All of it; gives the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        console = Console(quiet=not self._config.telemetry.progress)
        progress = Progress(console, num_train_steps=self._config.learner.num_train_steps)
        progress.say(f"run folder: {self._folder}")
        try:
            with progress:
                model_path, warm_start_s = self._prepare(progress)
                code = self._supervise(model_path, warm_start_s, progress)
        except UserError as error:
            logger.error("%s", error)
            raise
        finally:
            self._supervisor.stop_all(_GRACE_S)
            shutil.rmtree(self._addresses.segment_folder, ignore_errors=True)
        try:
            progress.say(f"report: {write_report(self._folder)}")
        except DataError as error:  # the run is what it is, drawn or not
            progress.say(f"no report: {error}")
        return code

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    def _prepare(self, progress: Progress) -> tuple[str, float]:
        """The model's path, and the seconds its warm start took."""
        if self._preparation is None:
            return self._config.model.path, 0.0
        progress.say("preparing the tiny model (the first time that takes a minute)")
        if not self._config.warm_starts:
            progress.say("the tiny model has random weights: it is shown sums before the training, and nothing else")
        self._supervisor.start(self._preparation)
        while (code := self._supervisor.exit_code("warm_start")) is None:
            if self._num_signals:
                raise PreflightError("stopped during the warm start; nothing was trained yet")
            time.sleep(_LOOK_EVERY_S)
        if code != 0:
            words = self._supervisor.last_words("warm_start").removeprefix("error: ")
            raise PreflightError(f"the warm start ended with code {code}: {words}")
        made = msgspec.json.decode(
            (self._folder / "model.json").read_bytes(), type=dict[str, str | float | bool | None]
        )
        return str(made["path"]), float(made["warm_start_s"] or 0.0)

    def _supervise(self, model_path: str, warm_start_s: float, progress: Progress) -> int:
        """Start learner and workers, and watch until the learner has ended."""
        specs = plan_run(
            self._config,
            self._machine,
            run_folder=self._folder,
            model_path=model_path,
            addresses=self._addresses,
            resume=self._resume,
            warm_start_s=warm_start_s,
        )
        for spec in specs:
            self._supervisor.start(spec)
        num_ranks = self._config.learner.num_ranks
        ranks, workers = [spec.name for spec in specs[1:num_ranks]], [spec.name for spec in specs[num_ranks:]]
        tail = RecordTail(self._folder / "metrics.jsonl")
        failure: int | None = None
        while (code := self._supervisor.exit_code("learner")) is None:
            progress.show(tail.read())
            self._look_at_disk(progress)
            self._obey_signals(progress)
            self._look_at_ranks(ranks)
            if self._drain_ends_s is None and failure is None:
                failure = self._tend(workers, progress)
                if failure is not None:
                    self._begin_drain()
            time.sleep(_LOOK_EVERY_S)
        progress.show(tail.read())
        self._supervisor.wait([*ranks, *workers], _GRACE_S)
        if code not in (0, 2):
            code = self._blame(ranks, code, progress)
        if code == 128 + signal.SIGTERM and self._num_signals == 1:
            return 0  # drained before it had begun
        if code != 0:
            words = self._supervisor.last_words("learner")
            progress.warn(f"the learner ended with code {code}. {words}".rstrip())
            saved = any((self._folder / "checkpoints").glob("step-*"))
            remedy = "; go on from the newest checkpoint with --resume" if saved and code != 2 else ""
            progress.warn(f"logs: {self._folder / 'logs'}{remedy}")
        return code if failure is None else failure

    def _tend(self, workers: list[str], progress: Progress) -> int | None:
        """Restart dead workers; an exit code once the run cannot go on for want of them."""
        alive = 0
        for name in workers:
            if self._supervisor.exit_code(name) == 2:
                progress.warn(self._supervisor.last_words(name))
                return 2
            alive += self._supervisor.tend(name)
        if alive == 0:
            progress.warn("every rollout worker died too often (launcher.max_restarts): the run ends with a checkpoint")
            return 1
        return None

    def _blame(self, ranks: list[str], code: int, progress: Progress) -> int:
        """Say which rank ended first, where it was not rank 0; gives the exit code that tells of it."""
        for name in ranks:
            own = self._supervisor.exit_code(name)
            if own not in (None, 0, EXIT_RANK_LOST):
                progress.warn(f"{name} ended with code {own}. {self._supervisor.last_words(name)}".rstrip())
                code = 2 if own == 2 else code
        return code

    def _look_at_ranks(self, ranks: list[str]) -> None:
        """A learner that lost a rank can neither train nor save; it may be waiting for a batch and not know it yet."""
        if any(self._supervisor.exit_code(name) for name in ranks):
            self._supervisor.wait(["learner"], _GRACE_S)  # it may know, and say more
            self._supervisor.signal("learner", signal.SIGKILL)

    def _look_at_disk(self, progress: Progress) -> None:
        """Say when the disk gets full: what goes missing then are the very files that would say so."""
        free, least = shutil.disk_usage(self._folder).free, self._config.launcher.min_free_disk_bytes
        full = free < least
        if full and not self._disk_is_full:
            progress.warn(
                f"{self._folder} has {free} bytes free, fewer than launcher.min_free_disk_bytes={least}: training goes "
                "on, but checkpoints, metrics and logs may be missing; free some disk"
            )
        self._disk_is_full = full

    def _obey_signals(self, progress: Progress) -> None:
        if self._num_signals > 0 and self._drain_ends_s is None:
            progress.say("draining: a checkpoint, then the end; once more stops at once")
            self._begin_drain()
        if self._num_signals > 1 or (self._drain_ends_s is not None and time.monotonic() > self._drain_ends_s):
            self._supervisor.signal("learner", signal.SIGKILL)

    def _begin_drain(self) -> None:
        self._drain_ends_s = time.monotonic() + self._config.launcher.drain_timeout_s
        self._supervisor.signal("learner", signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run_main(main))
