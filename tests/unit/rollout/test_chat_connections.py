"""The chat endpoint disconnects clients that send no whole head of a request, and no others."""

import asyncio
from pathlib import Path

import pytest
from support.chat_endpoint import (
    Recorder,
    chat_format,
    connected,
)
from support.patience import PATIENCE_S

from areal_rloo.rollout import chat_server


def test_a_client_with_half_a_head_is_disconnected(
    folder: Path, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_server, "_CLIENT_S", 0.1)

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (_, client):
            for sent in (b"", b"GET /health HTTP/1.1\r\nX: a"):
                reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
                writer.write(sent)
                async with asyncio.timeout(PATIENCE_S):
                    assert await reader.read() == b""
                writer.close()

    asyncio.run(run())


def test_a_client_may_rest_between_requests(folder: Path, engine: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "_CLIENT_S", 0.1)

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (_, client):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            for _ in range(2):
                writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
                await asyncio.sleep(0.3)
            writer.close()

    asyncio.run(run())
