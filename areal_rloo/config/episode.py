"""Options of an episode: how a prompt becomes trajectories."""

from __future__ import annotations

from typing import Literal

from areal_rloo.config.section import FiniteFloat, PositiveFloat, PositiveInt, Probability, Section
from areal_rloo.errors import ConfigError

_READERS = {
    "max_turns": ("multi_turn", "tool_use"),
    "feedback": ("multi_turn",),
    "success_reward": ("multi_turn",),
    "turn_discount": ("multi_turn",),
    "tools": ("tool_use",),
    "python": ("tool_use",),
    "num_agents": ("agent",),
    "timeout_s": ("agent",),
}
BUILT_IN = ("single_turn", "multi_turn", "tool_use", "agent")


class PythonToolConfig(Section, frozen=True):
    """Limits of one program that the policy runs; it has no network, no other process, and a folder of its own."""

    cpu_s: PositiveFloat = 5.0
    wall_s: PositiveFloat = 10.0
    memory_bytes: PositiveInt = 512 * 2**20


class EpisodeConfig(Section, frozen=True):
    """What runs for each sample of a group. `rollout.sampling.max_new_tokens` bounds all turns of it together."""

    type: str = "single_turn"  # or multi_turn | tool_use | agent, or module:Class or path/to/file.py:Class of your own
    max_turns: PositiveInt = 4
    max_turn_tokens: PositiveInt | None = None  # of one turn; null: all that is left
    feedback: str = "That is not right. Try again."  # multi_turn: the verifier's words, until the reward is
    success_reward: FiniteFloat = 1.0  # at least this
    turn_discount: Probability = 1.0  # multi_turn: of the reward, for each turn before the last
    tools: tuple[Literal["calculator", "python"], ...] = ("calculator",)  # tool_use
    python: PythonToolConfig = PythonToolConfig()
    agent: str | None = None  # agent: module:function or path/to/file.py:function that talks to the chat endpoint
    num_agents: PositiveInt | None = None  # agent: sessions of a worker open at a time; null: twice rollout.num_slots
    timeout_s: PositiveFloat = 600.0  # of an agent's session; then its sample is dropped

    @property
    def built_in(self) -> bool:
        return self.type in BUILT_IN


def validate_episode(episode: EpisodeConfig) -> None:
    """Check what no single field can check.

    Raises:
        ConfigError: names the key, what came, what was expected and what to do.
    """
    if not episode.built_in and ":" not in episode.type:
        raise ConfigError(
            f"rollout.episode.type: expected one of {', '.join(BUILT_IN)}, or module:Class, got '{episode.type}'"
        )
    if (episode.type == "agent") != (episode.agent is not None):
        raise ConfigError(
            f"rollout.episode.agent: expected a function exactly with type=agent, got {episode.agent} with "
            f"type={episode.type}"
        )
    defaults = EpisodeConfig()
    for key, readers in _READERS.items():
        if episode.built_in and episode.type not in readers and getattr(episode, key) != getattr(defaults, key):
            raise ConfigError(f"rollout.episode.{key}: nothing reads it with type={episode.type}; leave it out")
    if episode.type == "tool_use" and "python" not in episode.tools and episode.python != defaults.python:
        raise ConfigError(
            f"rollout.episode.python: nothing reads it with tools={list(episode.tools)}; leave it out, or add python"
        )
    if len(set(episode.tools)) != len(episode.tools) or not episode.tools:
        raise ConfigError(f"rollout.episode.tools: expected different tools, at least one, got {list(episode.tools)}")
