"""A real MCP server: `python tests/support/mcp_tools.py` over pipes, with a port over HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "woke"


@server.tool()
def pages(query: str) -> list[str]:
    """Find pages."""
    return [f"{query} {number}" for number in range(2)]


@server.tool()
def identity() -> int:
    """Tell the process."""
    return os.getpid()


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
