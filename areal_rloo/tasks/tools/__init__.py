"""Tools that a model may call while it answers: arguments in, text for the model out.

A mistake of the model's (a missing argument, an expression that is none, a program that fails) is told to the model in
that text; an exception is a mistake of ours or of the machine's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from areal_rloo.config import EpisodeConfig
from areal_rloo.tasks.tools.calculator import calculate
from areal_rloo.tasks.tools.sandbox import SandboxLimits, run_python


@dataclass(frozen=True, slots=True)
class Tool:
    """A function on one text, as a model is told of it and as it is called."""

    name: str
    description: str
    argument: str  # its name; the value is a string
    argument_description: str
    function: Callable[[str], Awaitable[str]]

    @property
    def schema(self) -> dict[str, object]:
        """In the style of OpenAI's functions, as `apply_chat_template(tools=...)` takes it."""
        parameters = {
            "type": "object",
            "properties": {self.argument: {"type": "string", "description": self.argument_description}},
            "required": [self.argument],
            "additionalProperties": False,
        }
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, object]) -> str:
        """What the tool says to these arguments; `error: ...` where they are not the ones it takes."""
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
    """Some names that the model chose, however many and long they are."""
    return f"{before} {', '.join(ascii(name[:40]) for name in names[:3])}" if names else ""


async def _calculator(expression: str) -> str:
    return calculate(expression)


_CALCULATOR = Tool(
    name="calculator",
    description="Compute an arithmetic expression exactly: + - * / // % **, parentheses and decimals.",
    argument="expression",
    argument_description="the expression, for example (1,250 + 3.5) * 4",
    function=_calculator,
)


def _python(limits: SandboxLimits) -> Tool:
    # Time counts from a program's start: no more of them than cores, or they would time out for each other's sake.
    turnstile = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def run(code: str) -> str:
        async with turnstile:
            return (await run_python(code, limits)).text

    return Tool(
        name="python",
        description=(
            "Run a Python program and see what it prints. Every call starts afresh; there is no network, no other "
            "process or thread, and no file but those it writes itself."
        ),
        argument="code",
        argument_description="the whole program; print what you want to see",
        function=run,
    )


def make_tools(episode: EpisodeConfig) -> dict[str, Tool]:
    """The tools of an episode by name, with the limits it sets; none where its type has none."""
    if episode.type != "tool_use":
        return {}
    chosen = episode.python
    limits = SandboxLimits(cpu_s=chosen.cpu_s, wall_s=chosen.wall_s, memory_bytes=chosen.memory_bytes)
    return {name: _CALCULATOR if name == "calculator" else _python(limits) for name in episode.tools}


def tool_schemas(episode: EpisodeConfig) -> list[dict[str, object]]:
    """What the prompts of an episode say of its tools."""
    return [tool.schema for tool in make_tools(episode).values()]
