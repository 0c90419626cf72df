"""Tools that a model may call: arguments in, text for the model out.

Mistakes of the model (a missing argument, a wrong expression, a failing program) become text for the model. An
exception means a mistake of this package or of the machine.

- `functions`: functions of the user as tools.
- `mcp_servers`: tools of MCP servers.
- `calculator`: computes arithmetic expressions exactly.
- `programs`: runs Python programs of the model, and tries again if a sandbox fails.
- `sandbox`: runs a Python program in a locked process.
- `sandbox_child`: the locked process.
- `landlock`: rules for files, enforced by the kernel.
- `seccomp`: rules for system calls, enforced by the kernel.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from areal_rloo.config import SourceEpisodeConfig
from areal_rloo.errors import ConfigError
from areal_rloo.tasks.tools.calculator import calculate
from areal_rloo.tasks.tools.functions import FunctionTool
from areal_rloo.tasks.tools.mcp_servers import mcp_tools
from areal_rloo.tasks.tools.programs import Programs
from areal_rloo.tasks.tools.sandbox import SandboxLimits


class Tool(Protocol):
    """A function that the model may call."""

    @property
    def schema(self) -> dict[str, object]:
        """The schema in OpenAI's format, for `apply_chat_template(tools=...)`."""

    async def call(self, arguments: Mapping[str, object]) -> str:
        """Call the tool; return `error: ...` for wrong arguments."""


@dataclass(frozen=True, slots=True)
class TextTool:
    """A function of a text, with a description for the model."""

    name: str
    description: str
    argument: str  # name of the argument, a string
    argument_description: str
    function: Callable[[str], Awaitable[str]]

    @property
    def schema(self) -> dict[str, object]:
        parameters = {
            "type": "object",
            "properties": {self.argument: {"type": "string", "description": self.argument_description}},
            "required": [self.argument],
            "additionalProperties": False,
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, object]) -> str:
        value = arguments.get(self.argument)
        extra = sorted(set(arguments) - {self.argument})
        if self.argument not in arguments:
            return f"error: {self.name} needs the argument '{self.argument}'{_named('; there is no', extra)}"
        if extra:
            return f"error: {self.name} takes only the argument '{self.argument}'{_named(', not', extra)}"
        if not isinstance(value, str):
            return f"error: the argument '{self.argument}' of {self.name} is a string, not {type(value).__name__}"
        return await self.function(value)


def _named(before: str, names: list[str]) -> str:
    """List some names chosen by the model, limited in number and length."""
    return f"{before} {', '.join(ascii(name[:40]) for name in names[:3])}" if names else ""


async def _calculator(expression: str) -> str:
    return calculate(expression)


_CALCULATOR = TextTool(
    name="calculator",
    description="Compute an arithmetic expression exactly: + - * / // % **, parentheses and decimals.",
    argument="expression",
    argument_description="the expression, for example (1,250 + 3.5) * 4",
    function=_calculator,
)


def _python(limits: SandboxLimits) -> Tool:
    return TextTool(
        name="python",
        description=(
            "Run a Python program and see what it prints. Every call starts afresh; there is no network, no other "
            "process or thread, and no file but those it writes itself."
        ),
        argument="code",
        argument_description="the whole program; print what you want to see",
        function=Programs(limits).run,
    )


def make_tools(episode: SourceEpisodeConfig, key: str = "rollout.episode") -> dict[str, Tool]:
    """Make the tools of an episode, by name; empty for a type without tools. `key`: of the episode, for errors.

    Raises:
        ConfigError: a function of the user cannot be imported, or is no tool; a server cannot be reached; or two tools
            have the same name.
    """
    if episode.type != "tool_use":
        return {}
    chosen = episode.python
    limits = SandboxLimits(cpu_s=chosen.cpu_s, wall_s=chosen.wall_s, memory_bytes=chosen.memory_bytes)
    tools: dict[str, Tool] = {}
    for path in episode.tools:
        if path == "calculator":
            tools[path] = _CALCULATOR
        elif path == "python":
            tools[path] = _python(limits)
        else:
            function = FunctionTool(f"{key}.tools", path, timeout_s=episode.tool_timeout_s)
            tools[function.name] = function
    for index, address in enumerate(episode.mcp_servers):
        where = f"{key}.mcp_servers.{index}"
        for tool in mcp_tools(where, address, timeout_s=episode.tool_timeout_s):
            if tool.name in tools:
                raise ConfigError(
                    f"{where}: {address}: there is another tool with the name '{tool.name}'; leave one out"
                )
            tools[tool.name] = tool
    return tools


def tool_schemas(episode: SourceEpisodeConfig) -> list[dict[str, object]]:
    """Return the schemas of an episode's tools, for prompts."""
    return [tool.schema for tool in make_tools(episode).values()]
