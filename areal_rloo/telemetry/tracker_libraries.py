"""The libraries of trackers: TensorBoard, Weights & Biases, MLflow, trackio. Each is imported only when it is used."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from areal_rloo.config import Config

_PROJECT = "areal_rloo"


class Tracker(Protocol):
    """A place for the numbers of a run. The constructor may connect, and takes the config and the run folder."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Take the numbers of a train step or of an evaluation. A learner that went back gives a step again."""

    def table(self, rows: Sequence[Row], step: int) -> None:
        """Take a few samples of a step."""

    def close(self) -> None:
        """Write or send the rest."""


class Row(NamedTuple):
    """A sample in a table; texts are shortened."""

    sample: str
    source: str
    prompt: str
    completion: str
    reward: float | None
    advantage: float | None
    staleness: int | None
    ends: str  # finish reason


class _TensorBoard:
    """Event files in the folder `tensorboard` of the run folder: `tensorboard --logdir runs`."""

    def __init__(self, config: Config, folder: Path) -> None:
        from tensorboard.summary import Writer  # noqa: PLC0415 - an extra
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._writer = Writer(str(folder / "tensorboard"))
        self._tables = EventFileWriter(str(folder / "tensorboard"), filename_suffix=".samples")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def table(self, rows: Sequence[Row], step: int) -> None:
        import numpy as np  # noqa: PLC0415 - the launcher does without it
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.plugins.text.summary_v2 import text_pb  # noqa: PLC0415

        cells = [Row._fields, *([str(value) for value in row] for row in rows)]
        summary = text_pb("samples", np.array(cells, dtype=object))
        self._tables.add_event(Event(wall_time=datetime.now(UTC).timestamp(), step=step, summary=summary))
        self._tables.flush()

    def close(self) -> None:
        self._tables.close()
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

    def table(self, rows: Sequence[Row], step: int) -> None:
        import wandb  # noqa: PLC0415

        shown = wandb.Table(columns=list(Row._fields), data=[list(row) for row in rows])
        self._run.log({"samples": shown, "policy_version": step})

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

    def table(self, rows: Sequence[Row], step: int) -> None:
        text = msgspec.json.format(msgspec.json.encode([row._asdict() for row in rows])).decode()
        self._client.log_text(self._id, text, f"samples/step-{step:06d}.json")

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

    def table(self, rows: Sequence[Row], step: int) -> None:
        import trackio  # noqa: PLC0415

        shown = trackio.Table(columns=list(Row._fields), data=[list(row) for row in rows])
        self._run.log({"samples": shown}, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Config, Path], Tracker]] = {
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
