"""Pass the records of a run on to trackers: TensorBoard, Weights & Biases, MLflow, trackio.

The launcher does this, on a separate thread. A tracker that fails or hangs gets no more numbers, and metrics.jsonl has
them all. A tracker is imported only if `telemetry.trackers` names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import msgspec

from areal_rloo.config import Config
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.telemetry.metric import declared_metrics
from areal_rloo.telemetry.records import EvalRecord, Record

logger = get_logger(__name__)

_PROJECT = "areal_rloo"
_CLOSE_S = 30.0  # for what is still to be written or sent

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
    """Passes records on, in their order."""

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        """`say` gets a line for the user about a failing tracker, and is called on another thread."""
        self._say, self._records = say, SimpleQueue[Record | None]()
        names = config.telemetry.trackers
        arguments = (config, folder.resolve())
        self._threads = (
            [threading.Thread(target=self._run, args=arguments, name="trackers", daemon=True)] if names else []
        )
        for thread in self._threads:
            thread.start()

    def take(self, records: list[Record]) -> list[Record]:
        """Queue records, without waiting; return them."""
        for record in records if self._threads else ():
            self._records.put(record)
        return records

    def close(self) -> None:
        """Wait for the last records, but not for a hanging tracker."""
        self._records.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
            if thread.is_alive():
                self._say(f"telemetry.trackers: no end after {_CLOSE_S:g} s; the last numbers may be missing there")

    def _run(self, config: Config, folder: Path) -> None:
        trackers: dict[str, Tracker] = {}
        for name in config.telemetry.trackers:
            with self._without(name, trackers):
                trackers[name] = _TRACKERS[name](config, folder)
        while (record := self._records.get()) is not None:
            numbers = dict(numbers_of(record, names=config.telemetry.tracker_names))
            for known, tracker in [*trackers.items()]:
                with self._without(known, trackers):
                    tracker.log(numbers, record.policy_version)
        for known, tracker in [*trackers.items()]:
            with self._without(known, trackers):
                tracker.close()

    @contextlib.contextmanager
    def _without(self, name: str, trackers: dict[str, Tracker]) -> Iterator[None]:
        """Go on without this tracker if it fails."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - code of others, which may raise anything
            trackers.pop(name, None)
            self._say(f"telemetry.trackers: {name} fails, and gets no more numbers: {error!r}")


def numbers_of(record: Record, *, names: str) -> Iterator[tuple[str, float]]:
    """Give the numbers of a record by name, without those that could not be measured.

    Each has the name of the field in metrics.jsonl, after `train/` or `evaluation/<set>/`, and before the label. With
    `names` of `trl` or `verl`, some numbers come a second time, by the names of this system.
    """
    group, known = "train", _NAMES[names]
    if isinstance(record, EvalRecord):
        group = f"evaluation/{record.name}"
    for declared in declared_metrics(type(record)):
        value: Any = record
        for part in declared.path:
            value = getattr(value, part)
        by_label = value if isinstance(value, dict) else {None: value}
        for label, number in by_label.items():
            if math.isfinite(number):
                suffix = "" if label is None else f"/{label}"
                yield f"{group}/{'/'.join(declared.path)}{suffix}", float(number)
        is_own = isinstance(record, EvalRecord) == (declared.field == "accuracy")
        if declared.field in known and is_own and math.isfinite(value):
            yield known[declared.field].format(set=group.removeprefix("evaluation/")), float(value)


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
            self._client.log_metric(self._id, re.sub(r"[^\w/. -]", "_", name), number, step=step)

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
