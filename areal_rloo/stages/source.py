"""The config and the model of a command line: `RUN_FOLDER [--step N]` or `--config X`, and overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_rloo.config import (
    Config,
    check_overrides,
    check_run,
    import_entry,
    is_override,
    load_config,
    override_of,
)
from areal_rloo.errors import CheckpointError, ConfigError
from areal_rloo.learner.checkpoint_folder import folder_of, list_checkpoints
from areal_rloo.learner.warm_start import prepare_tiny_model
from areal_rloo.program import Parser

_TINY, _MODEL = "tiny", "model"


@dataclass(frozen=True, slots=True)
class Source:
    """A config whose `model.path` is the model, and where both come from.

    Attributes:
        config: resolved.
        run_folder: of the checkpoint; None for a config file.
        version: of the checkpoint; 0 for a config file.
    """

    config: Config
    run_folder: Path | None
    version: int


def parse(parser: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Source]:
    """Add the arguments of a source to a parser, and read a command line.

    Raises:
        UserError: an argument is wrong, or the run or the checkpoint does not exist.
    """
    parser.add_argument("run_folder", type=Path, nargs="?", metavar="RUN_FOLDER", help="a run; such as runs/latest")
    parser.add_argument("--config", help="instead of a run: a path, or the name of a shipped config")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of the run: the checkpoint of step N; default: the newest"
    )
    options, rest = parser.parse_known_args(arguments)
    if options.run_folder is not None and is_override(str(options.run_folder)) and not options.run_folder.exists():
        rest = [str(options.run_folder), *rest]  # an override
        options.run_folder = None
    check_overrides(rest)
    if (options.run_folder is None) == (options.config is None):
        raise ConfigError("expected either a RUN_FOLDER or --config X.yaml; see --help")
    if options.run_folder is None:
        if options.step is not None:
            raise ConfigError("argument '--step': expected with a RUN_FOLDER, whose checkpoint it names")
        return options, Source(_with_tiny(load_config(options.config, rest)), None, 0)
    return options, of_run(options.run_folder, options.step, rest)


def of_run(run_folder: Path, step: int | None, overrides: Sequence[str] = ()) -> Source:
    """Return the config of a run with the model of a checkpoint.

    Raises:
        UserError: the folder has no run, or the run no such checkpoint.
    """
    folder = run_folder.resolve()
    if (folder / "config.json").is_file():
        raise ConfigError(f"{run_folder}: a model, not a run; name a config: --config X.yaml model.path={run_folder}")
    check_run(folder)
    version, path = checkpoint_of(folder, step)
    config = load_config(str(folder / "config.yaml"), [*overrides, override_of("model.path", path / _MODEL)])
    import_entry(config.run.entry)
    return Source(config, folder, version)


def checkpoint_of(run_folder: Path, step: int | None) -> tuple[int, Path]:
    """Return version and folder of a checkpoint; the newest without `step`.

    Raises:
        CheckpointError: there is none.
    """
    found = list_checkpoints(folder_of(run_folder))
    if not found:
        raise CheckpointError(f"{run_folder}: expected a run with a checkpoint, got none; train a step first")
    version = max(found) if step is None else step
    if version not in found:
        have = ", ".join(map(str, found))
        raise CheckpointError(f"argument '--step': expected a step with a checkpoint ({have}), got {step}")
    return version, found[version]


def _with_tiny(config: Config) -> Config:
    """Make the built-in model, if the config names it."""
    import_entry(config.run.entry)
    if config.model.path != _TINY:
        return config
    path = prepare_tiny_model(config).path
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))
