"""The episodes of a run: made from `rollout.episode` and the episodes of sources.

The episode of `rollout.episode` is entered before the first sample if it serves something.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from areal_rloo.config import Config, import_named
from areal_rloo.errors import ConfigError, raised
from areal_rloo.rollout.agent import Agent
from areal_rloo.rollout.episode import Episode, Rewards, Sample, SingleTurn, TurnEngine
from areal_rloo.rollout.multi_turn import MultiTurn, ToolUse
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Trajectory


class BySource:
    """Runs the episode of a sample's source."""

    def __init__(self, of_run: Episode, of_source: Mapping[str, Episode]) -> None:
        """`of_source`: the episodes of sources with their own, by label."""
        self.of_run, self._of_source = of_run, of_source

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        label = sample.item.source
        return await self._of_source.get(label, self.of_run).run(sample, engine, rewards, chat.of_source(label))


def make_episode(config: Config) -> Episode:
    """Make the episode that `rollout.episode.type` names, and the episodes of sources.

    Raises:
        ConfigError: as `make_own_episode`.
    """
    of_source: dict[str, Episode] = {}
    for label, settings in config.episodes.items():
        if settings is not config.rollout.episode:
            rollout = msgspec.structs.replace(config.rollout, episode=settings)
            of_source[label] = _made(msgspec.structs.replace(config, rollout=rollout))
    return BySource(_made(config), of_source) if of_source else _made(config)


def _made(config: Config) -> Episode:
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
    """Return the context manager around all samples of a worker: the run's episode if it is one, else an empty one."""
    of_run = episode.of_run if isinstance(episode, BySource) else episode
    return of_run if isinstance(of_run, AbstractAsyncContextManager) else contextlib.nullcontext()
