"""HTTP to one server: JSON in, JSON out, every failure as one of two errors.

`ServerRefusedError`: it answered, and said no. `ServerGoneError`: it did not answer in time, or not in its language.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from areal_rloo.engines.sglang.capabilities import PROBE_TOKENS, Capabilities, read_capabilities, too_early
from areal_rloo.errors import EngineError

_CONNECT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 300.0  # the first request may compile kernels
_MOST_CHARACTERS = 500  # of a server's words in a message


class ServerGoneError(EngineError):
    """No answer, a broken one, or none within its time."""


class ServerRefusedError(EngineError):
    """An answer with an HTTP status of 400 or above."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"HTTP {status}: {words}")
        self.status = status
        self.words = words


class ServerClient:
    """The calls of one server. Made and used on one event loop."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers={**headers, "Content-Type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0),  # what runs at a time is bounded by the slots
        )

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """The JSON of a GET."""
        return _parsed(path, await self._ask("GET", path, None, timeout_s))

    async def text(self, path: str, *, timeout_s: float) -> str:
        """The text of a GET."""
        return (await self._ask("GET", path, None, timeout_s)).decode(errors="replace")

    async def get_status(self, path: str, *, timeout_s: float) -> None:
        """A GET of which only the status counts."""
        await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        """A command; raises where the server says that it failed."""
        await self._ask("POST", path, body, timeout_s)

    async def generate(self, body: dict[str, Any], *, timeout_s: float | None = None) -> dict[str, Any]:
        """One completion. It takes as long as it takes: whether the server is alive, its health says."""
        answer = _parsed("/generate", await self._ask("POST", "/generate", body, timeout_s))
        if not isinstance(answer, dict):
            raise ServerGoneError(f"/generate: expected a JSON object, got {str(answer)[:_MOST_CHARACTERS]}")
        return answer

    async def capabilities(self, *, timeout_s: float) -> Capabilities:
        """Ask what the server can do; generates one token.

        Raises:
            ConfigError: not what we need.
        """
        try:
            description = await self.get("/openapi.json", timeout_s=timeout_s)
            server_info = await self.get("/server_info", timeout_s=timeout_s)
            models = await self.get("/v1/models", timeout_s=timeout_s)
        except ServerRefusedError as error:
            if error.status != 404:
                raise
            raise too_early("of unknown version", f"no endpoint {str(error).partition(':')[0]}") from error
        body = {
            "input_ids": list(PROBE_TOKENS),
            "return_logprob": True,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        probe = await self.generate(body, timeout_s=_PROBE_TIMEOUT_S)
        return read_capabilities(description, server_info, models, probe=probe)

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, self.url + path, data=data, timeout=timeout) as reply:
                content = await reply.read()
        except TimeoutError as error:
            raise ServerGoneError(f"{path}: no answer within {timeout_s or _CONNECT_TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGoneError(f"{path}: {type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if not self._session.closed:
                raise
            raise ServerGoneError(f"{path}: the connection was closed") from error
        if reply.status >= 400:
            raise ServerRefusedError(reply.status, f"{path}: {_words(content)}")
        return content


def _parsed(path: str, content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise ServerGoneError(f"{path}: expected JSON, got {content[:_MOST_CHARACTERS]!r}") from error


def _words(content: bytes) -> str:
    """What a refusal says, without the JSON around it."""
    try:
        said = msgspec.json.decode(content)
    except msgspec.DecodeError:
        said = content.decode(errors="replace")
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    return " ".join(str(said).split())[:_MOST_CHARACTERS]
