"""Tools of MCP servers: an episode names a server by a URL, or by a command that starts one (docs/tasks.md).

    McpTool.call ─► McpServer, one for all calls of this process ─► connection (HTTP, or pipes to a process)

A process asks a server for its tools once. A connection that broke is made anew, and the call is repeated once: a
server may get a call twice. Errors of a tool and a timeout become text for the model. A server that cannot be reached
drops the sample, because the model has no part in this.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal_rloo.errors import ConfigError, EpisodeError, first_line, install
from areal_rloo.tasks.tools.functions import as_text
from areal_rloo.telemetry.logs import get_logger
from areal_rloo.waiting import call_within, cancel

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

logger = get_logger(__name__)

_PATIENCE_S = 20.0  # to connect, and to list the tools: a command may import much
_MOST_PAGES = 100  # of a list of tools
_CLOSED = -32000  # JSON-RPC code of the SDK: the connection ended before the answer


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server."""

    name: str
    schema: dict[str, object]
    server: McpServer

    async def call(self, arguments: Mapping[str, object]) -> str:
        """Call the tool; return the result as text, or `error: ...`.

        Raises:
            EpisodeError: the server cannot be reached.
        """
        return await self.server.call(self.name, arguments)


def mcp_tools(key: str, address: str, *, timeout_s: float) -> list[McpTool]:
    """Ask the server at an address, which the config's `key` names, for its tools. Blocks; asks once in a process.

    Raises:
        ConfigError: the server cannot be reached, or the library is missing.
    """
    try:
        listed = _listed(address)
    except ImportError as error:
        raise ConfigError(f"{key}: needs the `mcp` library: {install('mcp')}", absent=True) from error
    except Exception as error:
        words = f"{key}: {address}: cannot list the tools of the server: {_reason(error)}"
        raise ConfigError(f"{words}; start the server, or correct the address") from error
    server = _server(address, timeout_s)
    return [McpTool(tool.name, _schema(tool), server) for tool in listed]


class McpServer:
    """A server, and the connection of this process."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._connection: _Connection | None = None

    async def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Call a tool, as `McpTool.call`."""
        failure: Exception | None = None
        for _ in range(2):
            connection = self._connected()
            client = await connection.client()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return _said(await client.call_tool(name, dict(arguments)))
            except TimeoutError:
                return f"error: {name} took more than {self._timeout_s:g} s"
            except _sdk().MCPError as error:
                if error.code != _CLOSED:
                    return f"error: {as_text(error.message)}"
                failure = error
            except Exception as error:  # noqa: BLE001 - of the SDK, of its HTTP library, of the operating system
                failure = error
            await connection.close()
        assert failure is not None
        raise EpisodeError("episode_error", f"the MCP server {self._address}: {_reason(failure)}")

    def _connected(self) -> _Connection:
        if self._connection is None or not self._connection.is_open:
            self._connection = _Connection(self._address)
        return self._connection


class _Connection:
    """A connection of the running event loop. A task holds it, because the task that opened it must close it."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._client: asyncio.Future[Client] = self._loop.create_future()
        self._task = asyncio.create_task(self._hold(), name=f"MCP server {address[:40]}")

    @property
    def is_open(self) -> bool:
        return not self._task.done() and self._loop is asyncio.get_running_loop()

    async def client(self) -> Client:
        """Wait until the connection is there.

        Raises:
            EpisodeError: it cannot be made.
        """
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.shield(self._client)
        except TimeoutError as error:
            self._task.cancel()
            reason = f"no connection within {_PATIENCE_S:g} s"
            raise EpisodeError("episode_error", f"the MCP server {self._address}: {reason}") from error

    async def close(self) -> None:
        await cancel([self._task])

    async def _hold(self) -> None:
        try:
            async with _client(self._address) as client:
                self._client.set_result(client)
                await self._loop.create_future()  # until cancelled, or the connection breaks
        except asyncio.CancelledError:
            self._client.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - of the SDK, of its HTTP library, of the operating system
            logger.warning("the MCP server %s: %s", self._address, _reason(error))
            if not self._client.done():
                text = f"the MCP server {self._address}: {_reason(error)}"
                self._client.set_exception(EpisodeError("episode_error", text))


@functools.cache
def _server(address: str, timeout_s: float) -> McpServer:
    return McpServer(address, timeout_s)


@functools.cache
def _listed(address: str) -> Sequence[Tool]:
    _sdk()  # its absence is told from errors of the server
    return call_within(2 * _PATIENCE_S, lambda: asyncio.run(_list(address)))


async def _list(address: str) -> Sequence[Tool]:
    async with asyncio.timeout(_PATIENCE_S), _client(address) as client:
        page = await client.list_tools()
        tools = list(page.tools)
        for _ in range(_MOST_PAGES):
            if not page.next_cursor:
                break
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
        return tools


def _sdk() -> Any:
    import mcp  # noqa: PLC0415 - an extra

    return mcp


def _client(address: str) -> Client:
    is_url = address.startswith(("http://", "https://"))
    client: Client = _sdk().Client(address if is_url else _process(address), cache=None)
    return client


def _process(command: str) -> object:
    """Return how the SDK starts a server. `python` is this interpreter, which has the libraries of the run."""
    program, *arguments = shlex.split(command)
    program = sys.executable if program == "python" else program
    return _sdk().StdioServerParameters(command=program, args=arguments, env=dict(os.environ))


def _schema(tool: Tool) -> dict[str, object]:
    """Return the schema in OpenAI's format."""
    function = {"name": tool.name, "description": tool.description or "", "parameters": dict(tool.input_schema)}
    return {"type": "function", "function": function}


def _said(result: CallToolResult) -> str:
    """Write a result for the model: the texts, and the kind of every other part."""
    parts: list[Any] = list(result.content)
    said = "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in parts)
    if not parts and result.structured_content is not None:
        said = as_text(result.structured_content)
    return as_text(f"error: {said}" if result.is_error else said)


def _reason(error: BaseException) -> str:
    """Describe the first error of a tree of errors, which task groups make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {_PATIENCE_S:g} s"
    return first_line(error)
