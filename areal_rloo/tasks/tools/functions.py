"""Tools that are functions of the user: the schema comes from the signature and the docstring.

    def search(query: str, limit: int = 3) -> str:
        '''Search the wiki, and return the first sentences of the best pages.

        Args:
            query: the words to look for
            limit: the most pages
        '''

Arguments of the model are checked against the types. Plain functions run in a thread for each call, async functions on
the worker's event loop. Wrong arguments, an exception and a timeout become text for the model; a `SampleError` of the
function drops the sample.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from areal_rloo.config import import_function
from areal_rloo.errors import ArealRlooError, ConfigError, described, first_line
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.waiting import on_daemon_thread

logger = get_logger(__name__)

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(
    r"^(\w+)(?: *\([^)\n]*\))?:(.*(?:\n[ \t]+.*)*)", re.MULTILINE
)  # of a section without indentation
_MOST_CHARACTERS = 2**16  # of a result; more would fill any context


class FunctionTool:
    """A function of the user as a tool."""

    def __init__(self, key: str, path: str, *, timeout_s: float) -> None:
        """Import the function at `path`, which the config's `key` names.

        Raises:
            ConfigError: the function cannot be imported, or has no docstring or an argument without a type.
        """
        self._function = import_function(key, path)
        self._timeout_s = timeout_s
        self.name = path.rpartition(":")[2]
        self._is_async = inspect.iscoroutinefunction(self._function)
        where = f"{key}: {path}"
        description, about = _documented(where, self._function)
        hints, required = _arguments(where, self._function)
        properties = {name: _schema(f"{where}: argument {name!r}", hint) for name, (hint, _) in hints.items()}
        try:
            fields = [
                (name, hint) if name in required else (name, hint, _default(default))
                for name, (hint, default) in hints.items()
            ]
            self._arguments = msgspec.defstruct(self.name, fields, forbid_unknown_fields=True, kw_only=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: the arguments cannot be read: {first_line(error)}") from error
        for name in properties.keys() & about.keys():
            properties[name]["description"] = about[name]
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        if kinds := {kind: one for schema in properties.values() for kind, one in schema.pop("$defs", {}).items()}:
            parameters["$defs"] = kinds  # a reference begins at the root of the schema
        function = {"name": self.name, "description": description, "parameters": parameters}
        self.schema: dict[str, object] = {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, object]) -> str:
        """Call the function; return the result as text, or `error: ...`.

        Raises:
            SampleError: of the function.
        """
        try:
            given = msgspec.convert(dict(arguments), self._arguments)
        except msgspec.ValidationError as error:
            return f"error: wrong arguments of {self.name}: {error}"
        values = {name: getattr(given, name) for name in self._arguments.__struct_fields__}
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return as_text(await self._value(values))
        except ArealRlooError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code
            if deadline.expired():
                return f"error: {self.name} took more than {self._timeout_s:g} s"
            logger.warning("the tool %s: %s", self.name, described(error))
            return f"error: {type(error).__name__}: {first_line(error)}"

    async def _value(self, values: Mapping[str, object]) -> object:
        if self._is_async:
            return await self._function(**values)
        return await asyncio.wrap_future(on_daemon_thread(lambda: self._function(**values), name="tool"))


def _default(value: Any) -> Any:
    """Give each call a container of its own, because a call may change it."""
    return msgspec.field(default_factory=value.copy) if isinstance(value, list | dict | set) else value


def _schema(where: str, hint: Any) -> dict[str, Any]:
    try:
        return msgspec.json.schema(hint)
    except (TypeError, ValueError) as error:
        words = "expected a type that JSON has, such as str, int, float, bool, list[str] or dict[str, int]"
        raise ConfigError(f"{where}: {words}, got {inspect.formatannotation(hint)}") from error


def _documented(where: str, function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Split the docstring into the description for the model, and the descriptions of arguments."""
    text = inspect.getdoc(function) or ""
    first, *rest = _SECTION.split(text)
    if not first.strip():
        raise ConfigError(f"{where}: expected a docstring, which tells the policy about the tool")
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    arguments = next((sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), "")
    about = {name: " ".join(words.split()) for name, words in _ARGUMENT.findall(textwrap.dedent(arguments))}
    return " ".join(first.split()), about


def _arguments(where: str, function: Callable[..., Any]) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Return type and default of each argument, and the names of those without a default."""
    expected = f"{where}: expected arguments with names and types, as in `def search(query: str, limit: int = 3)`"
    try:
        parameters = inspect.signature(function).parameters.values()
        hints = typing.get_type_hints(function)
    except Exception as error:  # an annotation in quotes is an expression of the user
        raise ConfigError(f"{expected}; they cannot be read: {first_line(error)}") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{expected}, got '{parameter}'")
        if parameter.name not in hints:
            raise ConfigError(f"{expected}, got '{parameter.name}' without a type")
    found = {parameter.name: (hints[parameter.name], parameter.default) for parameter in parameters}
    return found, [name for name, (_, default) in found.items() if default is inspect.Parameter.empty]


def as_text(value: object) -> str:
    """Write a result for the model: a text as it is, other values as JSON if possible, shortened."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    text = value.encode(errors="backslashreplace").decode()
    left_out = len(text) - _MOST_CHARACTERS
    return text if left_out <= 0 else f"{text[:_MOST_CHARACTERS]}... ({left_out} characters more)"
