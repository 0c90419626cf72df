"""Pass the records of a run on to trackers: TensorBoard, Weights & Biases, MLflow, trackio.

Each tracker has a process, which reads metrics.jsonl. A tracker that fails or hangs gets no more numbers, and neither
the run nor another tracker notices. A tracker is imported only if `telemetry.trackers` names it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from areal_rloo.config import Config, load_config
from areal_rloo.parent_death import bound_to_this_process
from areal_rloo.session_leader import SessionLeader
from areal_rloo.telemetry.metric import declared_metrics
from areal_rloo.telemetry.metrics import RecordTail
from areal_rloo.telemetry.records import EvalRecord, Record
from areal_rloo.telemetry.stacks import show_on_signal
from areal_rloo.telemetry.tracker_libraries import TRACKERS, Row
from areal_rloo.telemetry.trajectories import FILE_NAME, TrajectoryRecord, TrajectoryTail
from areal_rloo.waiting import wait_until

_CLOSE_S = 30.0  # for what is still to be written or sent
_KILL_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.05
_EVERY_S = 1.0
_MOST_WORDS = 300
_LAST_BYTES = 2**16  # of a log, in which the last words are
_TABLE_EVERY, _MOST_ROWS, _MOST_CHARACTERS = 10, 8, 2000

# Names of the same numbers in other systems, for their dashboards. {set} is an evaluation set.
_TRL = {
    "reward_mean": "train/reward",
    "reward_std": "train/reward_std",
    "zero_variance_group_share": "train/frac_reward_zero_std",
    "completion_tokens_mean": "train/completions/mean_length",
    "completion_tokens_max": "train/completions/max_length",
    "truncated_share": "train/completions/clipped_ratio",
    "entropy": "train/entropy",
    "reference_kl_k3": "train/kl",
    "ratio_clipped_share": "train/clip_ratio/region_mean",
    "gradient_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "loss": "train/loss",
    "train_step_s": "train/step_time",
    "generated_tokens": "train/num_tokens",
    "reward": "eval/{set}_reward",
}
_VERL = {
    "reward_mean": "critic/rewards/mean",
    "advantage_mean": "critic/advantages/mean",
    "advantage_max": "critic/advantages/max",
    "advantage_min": "critic/advantages/min",
    "completion_tokens_mean": "response_length/mean",
    "completion_tokens_max": "response_length/max",
    "truncated_share": "response_length/clip_ratio",
    "entropy": "actor/entropy",
    "proximal_kl_k1": "actor/ppo_kl",
    "ratio_clipped_share": "actor/pg_clipfrac",
    "gradient_norm": "actor/grad_norm",
    "learning_rate": "actor/lr",
    "loss": "actor/pg_loss",
    "train_step_s": "timing_s/step",
    "model_flops_share": "perf/mfu/actor",
    "num_train_steps": "training/global_step",
    "reward": "val-core/{set}/reward/mean@1",
}
_NAMES: Mapping[str, Mapping[str, str]] = {"areal_rloo": {}, "trl": _TRL, "verl": _VERL}


class Trackers:
    """The processes that pass records on, one for each tracker. The launcher starts and ends them."""

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None], *, resume: bool) -> None:
        """`say` gets a line for the user about a failing tracker. With `resume`, the records so far are known."""
        self._say, self._folder, self._processes = say, folder, dict[str, SessionLeader]()
        more = ["--resume"] if resume else []
        for name in config.telemetry.trackers:
            self._log(name).parent.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "areal_rloo.telemetry.trackers", name, str(folder), *more]
            with self._log(name).open("ab") as log:
                child = subprocess.Popen(
                    bound_to_this_process(command, signal.SIGTERM),
                    stdin=subprocess.DEVNULL,  # no tracker asks the user for a key
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._processes[name] = SessionLeader(child)  # and ends the processes of the library, too

    def look(self) -> None:
        """Say which trackers have ended; the run goes on without them."""
        for name, process in [*self._processes.items()]:
            if process.exit_code() is not None:
                del self._processes[name]
                log = self._log(name)
                self._say(f"telemetry.trackers: {name} has ended, and gets no more numbers: {_last_line(log)} ({log})")

    def close(self) -> None:
        """Let the trackers write or send the rest; kill a hanging one."""
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.signal(signal.SIGTERM)
        wait_until(
            lambda: all(process.exit_code() is not None for process in processes.values()),
            timeout_s=_CLOSE_S,
            look_every_s=_LOOK_EVERY_S,
        )
        for name, process in processes.items():
            if process.exit_code() is None:
                self._say(
                    f"telemetry.trackers: no end of {name} after {_CLOSE_S:g} s; the last numbers may be missing there"
                )
            process.kill(_KILL_TIMEOUT_S)

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"tracker-{name}.out"


def _last_line(log: Path) -> str:
    lines: list[str] = []
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no words")[:_MOST_WORDS]


def main(arguments: Sequence[str]) -> None:
    """Pass the records of a run on to a tracker until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    show_on_signal()
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    folder = options.run_folder.resolve()
    config, tail = load_config(str(folder / "config.yaml")), RecordTail(folder / "metrics.jsonl")
    tables = Tables(TrajectoryTail(folder / FILE_NAME, from_end=options.resume))
    if options.resume:
        tail.read()  # an earlier launcher's tracker has these
    tracker = TRACKERS[options.name](config, folder)
    print(f"{options.name} gets the numbers of {folder}", flush=True)  # noqa: T201 - into the log
    is_last = False
    while not is_last:
        is_last = ended.wait(_EVERY_S)
        for record in tail.read():
            tracker.log(dict(numbers_of(record, names=config.telemetry.tracker_names)), record.policy_version)
        for step, rows in tables.read(ends=is_last):
            try:
                tracker.table(rows, step)
            except Exception as error:  # noqa: BLE001 - of a library, a disk, a server: the numbers go on
                print(f"no more tables of samples: {type(error).__name__}: {error}", flush=True)  # noqa: T201
                tables = Tables(None)
                break
    tracker.close()


class Tables:
    """Chooses a few trained samples of every 10th step, and of the last; none without a tail."""

    def __init__(self, tail: TrajectoryTail | None) -> None:
        self._tail, self._given = tail, -_TABLE_EVERY
        self._step, self._rows = -1, list[Row]()  # the newest step so far, perhaps without its last samples

    def read(self, *, ends: bool) -> list[tuple[int, list[Row]]]:
        """Give the complete tables, by step."""
        tables = []
        for record in () if self._tail is None else self._tail.read():
            step = record.policy_version + 1
            if record.dropped is not None:
                continue
            if step != self._step:
                if self._step >= self._given + _TABLE_EVERY:
                    tables.append(self._take())
                self._given = min(self._given, step - 1)  # a learner that went back
                self._step, self._rows = step, []
            if len(self._rows) < _MOST_ROWS:
                self._rows.append(_row(record))
        if ends and self._rows and self._step > self._given:
            tables.append(self._take())
        return tables

    def _take(self) -> tuple[int, list[Row]]:
        self._given = self._step
        return self._step, self._rows


def _row(record: TrajectoryRecord) -> Row:
    return Row(
        sample=record.name,
        source=record.source,
        prompt=_cut(record.prompt),
        completion=_cut(record.completion),
        reward=record.reward,
        advantage=record.advantage,
        staleness=record.staleness,
        ends=record.finish_reason,
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} ..."


def numbers_of(record: Record, *, names: str) -> Iterator[tuple[str, float]]:
    """Give the numbers of a record by name, without those that could not be measured.

    Each has the name of the field in metrics.jsonl, after `train/` or `evaluation/<set>/`, and before the label. With
    `names` of `trl` or `verl`, some numbers come a second time, by the names of this system.
    """
    of_set = record.name if isinstance(record, EvalRecord) else None
    group = "train" if of_set is None else f"evaluation/{of_set}"
    known = {field: name for field, name in _NAMES[names].items() if (field == "reward") == (of_set is not None)}
    for declared in declared_metrics(type(record)):
        value = attrgetter(declared.field)(record)
        by_label = value if isinstance(value, dict) else {None: value}
        for label, number in by_label.items():
            if math.isfinite(number):
                suffix = "" if label is None else f"/{label}"
                yield f"{group}/{'/'.join(declared.path)}{suffix}", float(number)
        if declared.field in known and math.isfinite(value):
            yield known[declared.field].format(set=of_set), float(value)


if __name__ == "__main__":
    main(sys.argv[1:])
