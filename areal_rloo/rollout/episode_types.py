"""The episode of a run: made from `rollout.episode`, and entered before the first sample if it serves something."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from areal_rloo.config import Config, import_named
from areal_rloo.errors import ConfigError, raised
from areal_rloo.rollout.agent import Agent
from areal_rloo.rollout.episode import Episode, SingleTurn
from areal_rloo.rollout.multi_turn import MultiTurn, ToolUse


def make_episode(config: Config) -> Episode:
    """Make the episode that `rollout.episode.type` names.

    Raises:
        ConfigError: as `make_own_episode`.
    """
    path = config.rollout.episode.type
    built_in: dict[str, Callable[[Config], Episode]] = {"multi_turn": MultiTurn, "tool_use": ToolUse, "agent": Agent}
    built_in["single_turn"] = lambda _: SingleTurn()
    return built_in[path](config) if path in built_in else make_own_episode(config)


def make_own_episode(config: Config) -> Episode:
    """Make an episode of the user's class. A launcher tries this before a run starts (`trial.py`).

    Raises:
        ConfigError: the class cannot be imported or made from the config, or has no `run` of an episode.
    """
    key, path = "rollout.episode.type", config.rollout.episode.type
    make = import_named(key, path, kind="class")
    if not callable(getattr(make, "run", None)):
        raise ConfigError(f"{key}: expected a class with an async method run(), got {path}; see docs/tasks.md")
    try:
        made: Episode = make(config)
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        raise ConfigError(f"{key}: {path} cannot be made from the config: {raised(error)}") from error
    try:
        inspect.signature(made.run).bind(None, None, None, None)
    except (TypeError, ValueError) as error:
        expected = f"{key}: expected {path}.run(self, sample, engine, rewards, chat)"
        raise ConfigError(f"{expected}, but it cannot be called with these: {error}") from error
    return made


def serving(episode: Episode) -> AbstractAsyncContextManager[object]:
    """Return the context manager around all samples of a worker: the episode if it is one, else an empty context."""
    return episode if isinstance(episode, AbstractAsyncContextManager) else contextlib.nullcontext()
