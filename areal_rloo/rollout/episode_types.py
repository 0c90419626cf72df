"""The episode of a run: made from `rollout.episode`, and entered before the first sample if it serves something."""

from __future__ import annotations

import contextlib
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
        ConfigError: the type is an import path that cannot be imported, or cannot be called with the config.
    """
    path = config.rollout.episode.type
    built_in: dict[str, Callable[[Config], Episode]] = {"multi_turn": MultiTurn, "tool_use": ToolUse, "agent": Agent}
    built_in["single_turn"] = lambda _: SingleTurn()
    if path in built_in:
        return built_in[path](config)
    made = import_named("rollout.episode.type", path, kind="class")
    try:
        return made(config)  # type: ignore[no-any-return]
    except (Exception, SystemExit) as error:
        raise ConfigError(f"rollout.episode.type: {path} cannot be made from the config: {raised(error)}") from error


def serving(episode: Episode) -> AbstractAsyncContextManager[object]:
    """Return the context manager around all samples of a worker: the episode if it is one, else an empty context."""
    return episode if isinstance(episode, AbstractAsyncContextManager) else contextlib.nullcontext()
