"""HTTP calls of a server, their two errors, and a look into the server's OpenAPI document."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

import aiohttp
import msgspec

from areal_rloo.decoding import from_json, read_body
from areal_rloo.errors import DecodeError, EngineError

Json = Mapping[str, Any]
_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0
_GATEWAY_STATUSES = (401, 403, 404, 407, 408, 425, 429)
_METRICS_TIMEOUT_S = 5.0
_MAX_CHARACTERS = 500  # of a server's message in ours
_MOST_BYTES = 64 * 2**20  # of an answer: the logprobs of half a million tokens
_PIECE_BYTES = 1 << 16
_MOST_REFERENCES = 8  # from the schema of a body to another


class ServerGoneError(EngineError):
    """The server gave no answer, a broken answer, or no answer before the timeout."""


class ServerRefusedError(EngineError):
    """The server answered with an error status, or with a redirect, which we never follow.

    Attributes:
        of_gateway: a gateway may give this status in place of a starting, busy or absent server. So the status
            says nothing about the request.
        retry_after_s: the server's Retry-After; None without a number of seconds.
    """

    def __init__(self, status: int, words: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"HTTP {status}: {words}")
        self.status = status
        self.words = words
        self.of_gateway = status in _GATEWAY_STATUSES
        self.retry_after_s = retry_after_s


class ServerClient:
    """The calls of a server. Created and used on the same event loop."""

    def __init__(self, url: str, *, api_key: str | None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            headers={**self._headers, "Content-Type": "application/json", "Accept-Encoding": "identity"},
            # The slots limit the number of requests. The server closes a connection after 5 s without a request; a POST
            # that takes such a connection at that moment fails, so connections are closed earlier here.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            auto_decompress=False,  # a few compressed bytes can become gigabytes
        )

    async def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        return _parsed(path, await self._ask("GET", path, None, timeout_s))

    async def text(self, path: str, *, timeout_s: float) -> str:
        return (await self._ask("GET", path, None, timeout_s)).decode(errors="replace")

    async def post(self, path: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> None:
        await self._ask("POST", path, body or {}, timeout_s)

    async def ask(self, path: str, body: dict[str, Any], *, timeout_s: float | None) -> dict[str, Any]:
        """Post, and return the answer. Without a timeout the caller cancels the call (`sending.Sending`)."""
        return _parsed(path, await self._ask("POST", path, body, timeout_s))

    def metrics_text(self) -> str:
        """Return /metrics; empty if the server does not answer. Blocks, so call from another thread."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
        asked = urllib.request.Request(f"{self.url}/metrics", headers=self._headers)
        ends_s = time.monotonic() + _METRICS_TIMEOUT_S
        text = bytearray()
        try:
            with direct.open(asked, timeout=_METRICS_TIMEOUT_S) as reply:
                while piece := reply.read1(_PIECE_BYTES):
                    text += piece
                    if len(text) > _MOST_BYTES or time.monotonic() > ends_s:
                        return ""
        except (OSError, HTTPException):
            return ""
        return text.decode(errors="replace")

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        data = None if body is None else msgspec.json.encode(body)
        try:
            asking = self._session.request(method, self.url + path, data=data, timeout=timeout, allow_redirects=False)
            async with asking as reply:
                content = await read_body(reply.content, most_bytes=_MOST_BYTES)
        except TimeoutError as error:
            raise ServerGoneError(f"{path}: no answer within {timeout_s or _CONNECT_TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGoneError(f"{path}: {type(error).__name__}: {error}") from error
        except RuntimeError as error:
            if not self._session.closed:
                raise
            raise ServerGoneError(f"{path}: the connection was closed") from error
        if content is None:
            raise ServerGoneError(f"{path}: the answer has more than {_MOST_BYTES} bytes")
        if reply.status >= 300:
            after = reply.headers.get("Retry-After", "")
            retry_after_s = float(after) if after.isascii() and after.isdecimal() else None  # the other form is a date
            raise ServerRefusedError(reply.status, f"{path}: {_words(content)}", retry_after_s)
        return content


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Refuse every redirect: the API key is for this server."""


def paths_of(description: Json) -> Json:
    """Return the endpoints of an OpenAPI document; none if the answer is no such document."""
    paths = description.get("paths")
    return paths if isinstance(paths, dict) else {}


def fields_of(description: Json, path: str) -> Json:
    """Return the fields of the body of POST `path`; none if the document has no such body."""
    try:
        schema = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = next((option for option in schema.get("anyOf", ()) if "$ref" in option), schema)  # an optional body
        for _ in range(_MOST_REFERENCES):  # a reference may refer to itself
            if "$ref" in schema:
                schema = description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return dict(schema["properties"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def _parsed(path: str, content: bytes) -> dict[str, Any]:
    try:
        return from_json(content, dict[str, Any])
    except DecodeError as error:
        raise ServerGoneError(f"{path}: expected a JSON object, got {content[:_MAX_CHARACTERS]!r}") from error


def _words(content: bytes) -> str:
    """Return the message of a refusal, without the JSON around."""
    try:
        said: Any = from_json(content, object)
    except DecodeError:
        said = content.decode(errors="replace")
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if key in said), str(said))
    return " ".join(str(said).split())[:_MAX_CHARACTERS]
