"""The user's code in a run: each part named in a config by an import path, with a digest of the file.

A line of environment.jsonl has the parts of a start. The start says them, the report shows them, and a resume says
which files have changed: the config alone would look the same.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from areal_rloo.config import Config, SourceEpisodeConfig
from areal_rloo.telemetry.code_state import newest_start

_DIGEST = 12  # hex digits


class OwnPart(msgspec.Struct, frozen=True):
    """The value of a config key, and a digest of the named file alone. None: there is no such file here."""

    path: str
    digest: str | None

    def __str__(self) -> str:
        return f"{self.path} (digest {self.digest or '?'})"


OwnCode = dict[str, OwnPart]
"""By config key."""


class _Start(msgspec.Struct):
    """A line of environment.jsonl."""

    own_code: OwnCode


def own_code(config: Config) -> OwnCode:
    """Find the parts of a config by the user; imports no module of the user."""
    return {key: OwnPart(path, _digest(path, config.run.entry)) for key, path in _paths(config) if path is not None}


def own_code_lines(code: OwnCode) -> list[str]:
    """Describe each part in a line."""
    return [f"your code: {key}={part}" for key, part in code.items()]


def recorded_own_code(starts: bytes) -> OwnCode:
    """Read the parts of the last start in environment.jsonl; empty if the record is unreadable or has none."""
    start = newest_start(starts, _Start)
    return {} if start is None else start.own_code


def changed_own_code(earlier: bytes, now: OwnCode) -> list[str]:
    """Say which files differ from the last start in environment.jsonl; a changed path is a changed option instead."""
    before = recorded_own_code(earlier)
    return [
        f"resume: {key}: {part.path} has changed (digest {before[key].digest or '?'} -> {part.digest or '?'}); the run "
        "goes on with the present file"
        for key, part in now.items()
        if key in before and before[key].path == part.path and before[key].digest != part.digest
    ]


def _paths(config: Config) -> Iterator[tuple[str, str | None]]:
    algorithm, data, episode = config.algorithm, config.data, config.rollout.episode
    yield "run.entry", config.run.entry
    for key, source in (*data.keyed_train_sources, *data.keyed_eval_sources):
        yield f"{key}.task", source.task if ":" in source.task else None
        for index, reward in enumerate(source.rewards):
            yield f"{key}.rewards.{index}.function", reward.function
        if source.episode is not None:
            yield from _tools(f"{key}.episode", source.episode)
    yield "data.curriculum", data.curriculum
    yield "rollout.episode.type", None if episode.built_in else episode.type
    yield "rollout.episode.agent", episode.agent
    yield from _tools("rollout.episode", episode)
    yield "algorithm.group_filter", algorithm.group_filter
    yield "algorithm.advantages", algorithm.advantages
    yield "algorithm.sample_weights", algorithm.sample_weights
    yield "algorithm.loss.kind", None if algorithm.loss.built_in else algorithm.loss.kind


def _tools(key: str, episode: SourceEpisodeConfig) -> Iterator[tuple[str, str | None]]:
    for index, tool in enumerate(episode.tools):
        yield f"{key}.tools.{index}", tool if ":" in tool else None


def _digest(path: str, entry: str | None) -> str | None:
    module = path.rpartition(":")[0] or path
    module = entry if module == "entry" and entry is not None else module
    file = Path(module) if module.endswith(".py") else _file_of(module)
    try:
        return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGEST]
    except OSError:
        return None


def _file_of(module: str) -> Path | None:
    """Find the file of a module without an import: in a folder of the search path, or in the working folder."""
    names = module.split(".")
    for folder in dict.fromkeys((str(Path.cwd()), *sys.path)):
        inside = Path(folder, *names)
        for file in (inside.with_name(f"{names[-1]}.py"), inside / "__init__.py"):
            if file.is_file():
                return file
    return None
