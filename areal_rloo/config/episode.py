"""The section `rollout.episode`, and `episode` of a source: how a prompt becomes trajectories."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from areal_rloo.config.section import (
    Finite,
    ManyCount,
    PositiveInt,
    Probability,
    Seconds,
    Section,
)
from areal_rloo.errors import shown

TOOLS = ("calculator", "python")
BUILT_IN = ("single_turn", "multi_turn", "tool_use", "agent")
OF_SOURCES = BUILT_IN[:3]  # a sample is a single trajectory with the prompt of its lease
_READERS = {  # option of an episode: the built-in types that read the option
    "max_turns": ("multi_turn", "tool_use"),
    **dict.fromkeys(("feedback", "success_reward", "turn_discount"), ("multi_turn",)),
    **dict.fromkeys(("tools", "mcp_servers", "tool_timeout_s", "python"), ("tool_use",)),
    **dict.fromkeys(("num_agents", "agent_timeout_s", "max_trajectories"), ("agent",)),
}


class PythonToolConfig(Section, frozen=True):
    """Limits of a program of the policy. The program has no network, no other process, and an own folder."""

    cpu_s: Seconds = 5.0  # processor time of a program
    wall_s: Seconds = 10.0  # time of a program
    memory_bytes: PositiveInt = 512 * 2**20  # memory of a program


class SourceEpisodeConfig(Section, frozen=True):
    """How a sample of a source is generated, in place of `rollout.episode`. Keys left out have their defaults."""

    # single_turn, multi_turn or tool_use; in rollout.episode also agent, or module:Class or file.py:Class of yours
    type: str = "single_turn"
    max_turns: PositiveInt = 4  # multi_turn and tool_use: most turns of the policy
    max_turn_tokens: PositiveInt | None = None  # of a turn; null: all remaining tokens
    feedback: str = "That is not right. Try again."  # multi_turn: user message after a turn with too low a reward
    success_reward: Finite = 1.0  # multi_turn: stop at this reward or more
    turn_discount: Probability = 1.0  # multi_turn: factor on the reward for each turn before the last
    # tool_use: the tools that the policy may call: calculator, python, or your functions, module:function or
    # path/to/file.py:function, with typed arguments and a docstring; see docs/tasks.md.
    tools: tuple[str, ...] = ("calculator",)
    # tool_use: MCP servers whose tools the policy may call: a URL, or the command of a server, for every worker
    mcp_servers: tuple[str, ...] = ()
    # tool_use: of a call of your function or of a server's tool; then the policy gets an error
    tool_timeout_s: Seconds = 60.0
    python: PythonToolConfig = PythonToolConfig()


class EpisodeConfig(SourceEpisodeConfig, frozen=True):
    """How a sample is generated. `rollout.sampling.max_new_tokens` limits all turns of a sample together."""

    agent: str | None = None  # agent: module:function or path/to/file.py:function; talks to the chat endpoint
    num_agents: ManyCount | None = None  # agent: open sessions of a worker; null: twice rollout.num_slots
    agent_timeout_s: Seconds = 600.0  # agent: of a session; then the sample is dropped
    max_trajectories: ManyCount = 64  # agent, or a class of yours: of a sample; with more, the sample is dropped
    # From the start of an episode to the reward, with the wait for a slot; then the sample is dropped. Begins anew when
    # an evaluation sample ends. The default is for episodes that hang: 64k tokens at 15 tokens/s take 71 minutes.
    timeout_s: Seconds = 7200.0

    def of_source(self, own: SourceEpisodeConfig | None) -> EpisodeConfig:
        """The episode of a source: the own if there is one, with the timeout of all."""
        return self if own is None else EpisodeConfig(timeout_s=self.timeout_s, **msgspec.structs.asdict(own))

    @property
    def built_in(self) -> bool:
        return self.type in BUILT_IN

    @property
    def has_prompt(self) -> bool:
        """True if a sample is a single trajectory with the prompt of its lease. Agents and users choose their own."""
        return self.built_in and self.type != "agent"

    @property
    def most_trajectories(self) -> int:
        """Trajectories of a sample at most."""
        return 1 if self.has_prompt else self.max_trajectories


def episode_mistakes(key: str, episode: SourceEpisodeConfig) -> Iterator[str]:
    """Check dependent options of an episode with this key; give the text of each error."""
    if isinstance(episode, EpisodeConfig):
        yield from _type_mistakes(episode)
        built_in = episode.built_in
    else:
        built_in = episode.type in OF_SOURCES
        if not built_in:
            words = f"expected one of {', '.join(OF_SOURCES)}, got '{shown(episode.type)}'"
            yield f"{key}.type: {words}; an agent or a class of yours is for all sources, in rollout.episode.type"
    defaults = type(episode)()
    for name in episode.__struct_fields__:
        readers = _READERS.get(name)
        if built_in and readers and episode.type not in readers and getattr(episode, name) != getattr(defaults, name):
            yield f"{key}.{name}: nothing reads it with type={episode.type}; leave it out"
    if episode.type == "tool_use" and "python" not in episode.tools and episode.python != defaults.python:
        yield f"{key}.python: nothing reads it with tools={list(episode.tools)}; leave it out, or add python"
    for index, tool in enumerate(episode.tools):
        if tool not in TOOLS and ":" not in tool:
            words = f"expected {', '.join(TOOLS)} or your function, as module:function or file.py:function"
            more = [*episode.tools[:index], f"my_tools.py:{tool}", *episode.tools[index + 1 :]]
            yield f"{key}.tools.{index}: {words}, got '{shown(tool)}'; for example {key}.tools=[{', '.join(more)}]"
    names = {tool.rpartition(":")[2] for tool in episode.tools}
    if len(names) != len(episode.tools) or not (episode.tools or episode.mcp_servers):
        yield f"{key}.tools: expected different tools, at least one, got {list(episode.tools)}"
    for index, address in enumerate(episode.mcp_servers):
        if not _is_address(address) or address in episode.mcp_servers[:index]:
            words = "expected different servers, each as http://host:port/path or as a command"
            yield f"{key}.mcp_servers.{index}: {words}, got '{shown(address)}'"


def _is_address(text: str) -> bool:
    try:
        return bool(shlex.split(text))
    except ValueError:  # a quote without an end
        return False


def _type_mistakes(episode: EpisodeConfig) -> Iterator[str]:
    if not episode.built_in and ":" not in episode.type:
        yield f"rollout.episode.type: expected one of {', '.join(BUILT_IN)}, or module:Class, got '{episode.type}'"
    if episode.type == "agent" and episode.agent is None:
        yield "rollout.episode.agent: type=agent needs a function, module:function or path/to/file.py:function"
    if episode.type != "agent" and episode.agent is not None:
        yield (
            f"rollout.episode.agent: expected rollout.episode.type=agent with {episode.agent}, got {episode.type}; set "
            "the type, or leave the agent out"
        )
    if episode.type == "agent" and episode.agent_timeout_s > episode.timeout_s:
        yield (
            f"rollout.episode.agent_timeout_s: expected at most rollout.episode.timeout_s={episode.timeout_s:g}, got "
            f"{episode.agent_timeout_s:g}; raise timeout_s"
        )
