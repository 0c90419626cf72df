"""Pass the records of a run on to trackers: TensorBoard, Weights & Biases, MLflow, trackio.

Each tracker has a process, which reads metrics.jsonl. A tracker that fails or hangs gets no more numbers, and neither
the run nor another tracker notices. A tracker is imported only if `telemetry.trackers` names it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import msgspec

from areal_rloo.config import Config, load_config
from areal_rloo.parent_death import signal_on_parent_death
from areal_rloo.session_leader import SessionLeader
from areal_rloo.telemetry.metric import declared_metrics
from areal_rloo.telemetry.metrics import RecordTail
from areal_rloo.telemetry.records import EvalRecord, Record
from areal_rloo.waiting import wait_until

_PROJECT = "areal_rloo"
_CLOSE_S = 30.0  # for what is still to be written or sent
_KILL_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.05
_EVERY_S = 1.0
_MOST_WORDS = 300

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
    "accuracy": "eval/{set}_reward",
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
    "accuracy": "val-core/{set}/reward/mean@1",
}
_NAMES: Mapping[str, Mapping[str, str]] = {"areal_rloo": {}, "trl": _TRL, "verl": _VERL}


class Tracker(Protocol):
    """A place for the numbers of a run. The constructor may connect, and takes the config and the run folder."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Take the numbers of a train step or of an evaluation. A learner that went back gives a step again."""

    def close(self) -> None:
        """Write or send the rest."""


class Trackers:
    """The processes that pass records on, one for each tracker. The launcher starts and ends them."""

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None], *, resume: bool) -> None:
        """`say` gets a line for the user about a failing tracker. With `resume`, the records so far are known."""
        self._say, self._folder, self._processes = say, folder, dict[str, SessionLeader]()
        more = ["--resume"] if resume else []
        for name in config.telemetry.trackers:
            self._log(name).parent.mkdir(exist_ok=True)
            with self._log(name).open("ab") as log:
                child = subprocess.Popen(
                    [sys.executable, "-m", "areal_rloo.telemetry.trackers", name, str(folder), *more],
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
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "no words")[:_MOST_WORDS]


def main(arguments: Sequence[str]) -> None:
    """Pass the records of a run on to a tracker until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal_on_parent_death(signal.SIGTERM)
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    folder = options.run_folder.resolve()
    config, tail = load_config(str(folder / "config.yaml")), RecordTail(folder / "metrics.jsonl")
    if options.resume:
        tail.read()  # an earlier launcher's tracker has these
    tracker = _TRACKERS[options.name](config, folder)
    print(f"{options.name} gets the numbers of {folder}", flush=True)  # noqa: T201 - into the log
    is_last = False
    while not is_last:
        is_last = ended.wait(_EVERY_S)
        for record in tail.read():
            tracker.log(dict(numbers_of(record, names=config.telemetry.tracker_names)), record.policy_version)
    tracker.close()


def numbers_of(record: Record, *, names: str) -> Iterator[tuple[str, float]]:
    """Give the numbers of a record by name, without those that could not be measured.

    Each has the name of the field in metrics.jsonl, after `train/` or `evaluation/<set>/`, and before the label. With
    `names` of `trl` or `verl`, some numbers come a second time, by the names of this system.
    """
    of_set = record.name if isinstance(record, EvalRecord) else None
    group = "train" if of_set is None else f"evaluation/{of_set}"
    known = {field: name for field, name in _NAMES[names].items() if (field == "accuracy") == (of_set is not None)}
    for declared in declared_metrics(type(record)):
        value = attrgetter(declared.field)(record)
        by_label = value if isinstance(value, dict) else {None: value}
        for label, number in by_label.items():
            if math.isfinite(number):
                suffix = "" if label is None else f"/{label}"
                yield f"{group}/{'/'.join(declared.path)}{suffix}", float(number)
        if declared.field in known and math.isfinite(value):
            yield known[declared.field].format(set=of_set), float(value)


class _TensorBoard:
    """Event files in the folder `tensorboard` of the run folder: `tensorboard --logdir runs`."""

    def __init__(self, config: Config, folder: Path) -> None:
        from tensorboard.summary import Writer  # noqa: PLC0415 - an extra

        self._writer = Writer(str(folder / "tensorboard"))

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; a resume goes on with it. WANDB_MODE=offline keeps the numbers in the run folder."""

    def __init__(self, config: Config, folder: Path) -> None:
        import wandb  # noqa: PLC0415 - an extra

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=folder.name,
            id=_digest(folder),
            resume="allow",
            dir=str(folder),
            config=msgspec.to_builtins(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        # Steps of wandb only grow; with a separate axis, a learner that went back may give a step again.
        self._run.define_metric("policy_version")
        self._run.define_metric("*", step_metric="policy_version")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log({**numbers, "policy_version": step})

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in the folder `mlflow` of the run folder; a resume goes on with it."""

    def __init__(self, config: Config, folder: Path) -> None:
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else a database is needed
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").as_uri())
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tag = {"areal_rloo.folder": _digest(folder)}
        before = self._client.search_runs(
            [experiment], f"tags.`areal_rloo.folder` = '{_digest(folder)}'", max_results=1
        )
        run = before[0] if before else self._client.create_run(experiment, run_name=folder.name, tags=tag)
        self._id = run.info.run_id
        if not before:
            for key, value in _flat(msgspec.to_builtins(config)):
                self._client.log_param(self._id, key, str(value)[:500])

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            parts = [re.sub(r"[^\w. -]", "_", part) for part in name.split("/")]
            path = "/".join(part for part in parts if part.strip("."))  # a label may be a path or a URL
            self._client.log_metric(self._id, path, number, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    """A run of trackio, in the folder of trackio; `trackio show` opens the page."""

    def __init__(self, config: Config, folder: Path) -> None:
        import trackio  # noqa: PLC0415 - an extra

        builtins = msgspec.to_builtins(config)
        self._run = trackio.init(project=_PROJECT, name=folder.name, config=builtins, resume="allow", embed=False)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: Mapping[str, Callable[[Config, Path], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _MLflow,
    "trackio": _Trackio,
}


def _digest(folder: Path) -> str:
    """Name a run for all its launchers; folders of different users can have the same name."""
    return hashlib.sha256(bytes(folder)).hexdigest()[:16]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Give the keys of a config with dots."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


if __name__ == "__main__":
    main(sys.argv[1:])
