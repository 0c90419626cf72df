"""Make the built-in tiny model on first use: random weights, then a short supervised start on noisy demonstrations.

Runs as a separate process before learner and workers start (`python -m areal_rloo.learner.warm_start`). A cached model
of the same recipe is returned at once; torch is imported only to make a model.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import time
import uuid
from pathlib import Path

import msgspec

from areal_rloo.config import Config, TinyModelConfig, import_entry, load_config
from areal_rloo.errors import PreflightError, UserError
from areal_rloo.files import flush_to_disk, move_into_place, write_atomically
from areal_rloo.standard_streams import open_missing_streams
from areal_rloo.telemetry.logs import get_logger, setup_logs
from areal_rloo.telemetry.stacks import show_on_signal

logger = get_logger(__name__)

_RECIPE_VERSION = 1  # increment when the same options make another model


class PreparedModel(msgspec.Struct, frozen=True):
    """Path of the model, seconds of the warm start, and greedy accuracy on validation prompts."""

    path: str
    warm_start_s: float
    accuracy: float | None
    cached: bool


def prepare_tiny_model(config: Config, models: Path | None = None, *, num_threads: int | None = None) -> PreparedModel:
    """Return the model of `model.tiny` from the cache, or make it; safe if two processes do so at the same time.

    `models` is a folder that all hosts of the run can read; None for the cache of this host.
    """
    if not config.warm_starts:
        tasks = ", ".join(source.task for source in config.data.train_sources)
        logger.info("no demonstrations of %s: the tiny model keeps its random weights", tasks)
    folder = tiny_model_folder(config, models)
    if folder.is_dir():
        logger.info("the tiny model is in the cache: %s", folder)
        return PreparedModel(str(folder), 0.0, None, cached=True)
    started_s = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished, accuracy = _made(_recipe(config), folder.parent, num_threads)
    try:
        move_into_place(unfinished, folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.is_dir():  # otherwise another process was faster and made the same model
            raise
    return PreparedModel(str(folder), time.monotonic() - started_s, accuracy, cached=False)


def tiny_model_folder(config: Config, models: Path | None = None) -> Path:
    """Name the folder of the model of `model.tiny`, which may not exist yet; `models` as in `prepare_tiny_model`."""
    digest = hashlib.sha256(msgspec.json.encode((_recipe(config), _RECIPE_VERSION))).hexdigest()[:16]
    cache = Path(os.environ.get("AREAL_RLOO_CACHE") or _home() / ".cache" / "areal_rloo")
    return (models or cache / "models") / f"tiny-{digest}"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:  # no HOME, and no entry of the user, as in some containers
        raise PreflightError("model.path=tiny: no home folder for the model; set HOME or AREAL_RLOO_CACHE") from error


def _recipe(config: Config) -> TinyModelConfig:
    tiny = config.model.tiny
    return tiny if config.warm_starts else msgspec.structs.replace(tiny, warm_start=None)


def _made(recipe: TinyModelConfig, parent: Path, num_threads: int | None) -> tuple[Path, float | None]:
    """Make a folder with the model; return folder and accuracy, None without a supervised start."""
    import torch  # noqa: PLC0415 - takes seconds, like the imports below
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    from areal_rloo.learner.demonstrations import sums, train_on_demonstrations  # noqa: PLC0415
    from areal_rloo.models.tiny import make_tiny_model, save_tiny_model  # noqa: PLC0415

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    transformers_logging.disable_progress_bar()
    model, start = make_tiny_model(recipe), recipe.warm_start
    accuracy = None
    if start is not None:
        accuracy = train_on_demonstrations(model, start, *sums(start, seed=recipe.seed))
    folder = parent / f".unfinished-{uuid.uuid4().hex}"
    folder.mkdir()  # with the mode of the umask
    save_tiny_model(model, folder)
    for path in (*folder.rglob("*"), folder):
        flush_to_disk(path)
    return folder, accuracy


def main() -> int:
    """Prepare the model of a resolved config and write the result as JSON."""
    open_missing_streams()
    show_on_signal()
    parser = argparse.ArgumentParser(prog="python -m areal_rloo.learner.warm_start")
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--models", type=Path, help="folder for models, readable by all hosts")
    arguments = parser.parse_args()
    folder: Path = arguments.run_folder
    try:
        config = load_config(str(folder / "config.yaml"))
        setup_logs("warm_start", level=config.telemetry.log_level, file=folder / "logs" / "warm_start.log")
        import_entry(config.run.entry)
        prepared = prepare_tiny_model(config, arguments.models, num_threads=arguments.num_threads)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the output of this process
        return error.exit_code
    write_atomically(folder / "model.json", msgspec.json.encode(prepared))
    return 0


if __name__ == "__main__":
    sys.exit(main())
