"""A gateway before a server refuses calls for a time: every request waits, and none fails."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.faulty_server import FakeSGLang, FakeVLLM, engine_on_faulty, fake_sample
from support.model_versions import model_of
from support.patience import PATIENCE_S
from support.server_support import in_buckets, request

from areal_rloo.engines.server import ServerEngine, UpdateGroup
from areal_rloo.engines.server.client import ServerClient
from areal_rloo.engines.server.supervision import ExternalServer

_LABELS = ("/model_info", "/weight_info")  # the first call of a connection
_GENERATE = ("/generate", "/inference/v1/generate")


class Gateway:
    """Answers in place of a server, until `num_refusals` calls of the paths were refused."""

    def __init__(self, fake: FakeSGLang, status: int, **headers: str) -> None:
        self._answer, fake.answer = fake.answer, self.answer  # type: ignore[method-assign]
        self._status = status
        self._headers = headers
        self.awaited: tuple[str, ...] = ()
        self.only: tuple[str, ...] | None = None
        self.num_refusals = 0
        self.asked: list[tuple[str, float]] = []

    async def answer(self, asked: web.Request) -> web.StreamResponse:
        self.asked.append((asked.path, time.monotonic()))
        if self.num_refusals == 0 or (self.only is not None and asked.path not in self.only):
            return await self._answer(asked)
        self.num_refusals -= asked.path in self.awaited
        return web.json_response({"message": "gateway"}, status=self._status, headers=self._headers)


async def _update(engine: ServerEngine, folder: Path) -> None:
    layouts, _ = in_buckets(model_of(folder))
    group = UpdateGroup("127.0.0.1", 1, "group-1", 1, 2, "gloo", 5.0)
    await asyncio.wrap_future(engine.update_from_group(1, group, layouts, [fake_sample(1)]))


async def _complete(engine: ServerEngine, num_requests: int) -> None:
    for future in engine.submit([request(f"r{index}", max_new_tokens=5) for index in range(num_requests)]):
        assert len((await asyncio.wrap_future(future)).tokens) == 5


@pytest.mark.parametrize("status", [401, 403, 404, 408, 425, 429])
@pytest.mark.parametrize("kind", [FakeSGLang, FakeVLLM])
def test_requests_wait_while_a_gateway_refuses_all(
    kind: type[FakeSGLang], status: int, tiny_folders: dict[str, Path]
) -> None:
    async def main() -> None:
        fake = kind()
        gateway = Gateway(fake, status)
        folder = tiny_folders["qwen2"]
        options: dict[str, Any] = {"timeout_s": 5.0, "health_timeout_s": 0.5}
        async with asyncio.timeout(60), engine_on_faulty(folder, fake, **options) as (engine, _):
            await _update(engine, folder)
            gateway.awaited, gateway.num_refusals = _LABELS, 2  # so the engine has given up the connection
            await _complete(engine, 20)
            assert engine.server_statistics().restarts == 1
            assert gateway.num_refusals == 0

    asyncio.run(main())


def test_refused_requests_fail_never_while_the_server_is_healthy(tiny_folders: dict[str, Path]) -> None:
    async def main() -> None:
        fake = FakeSGLang()
        gateway = Gateway(fake, 429)
        folder = tiny_folders["qwen2"]
        async with asyncio.timeout(60), engine_on_faulty(folder, fake, timeout_s=5.0) as (engine, _):
            await _update(engine, folder)
            gateway.awaited = gateway.only = _GENERATE
            gateway.num_refusals = 20  # more than the tries of a request without a token
            await _complete(engine, 4)
            assert gateway.num_refusals == 0
            assert engine.server_statistics().restarts == 0

    asyncio.run(main())


def test_no_call_comes_before_the_time_of_retry_after(tiny_folders: dict[str, Path]) -> None:
    async def main() -> None:
        fake = FakeSGLang()
        gateway = Gateway(fake, 429, **{"Retry-After": "1"})
        folder = tiny_folders["qwen2"]
        async with asyncio.timeout(60), engine_on_faulty(folder, fake, timeout_s=5.0) as (engine, _):
            await _update(engine, folder)
            gateway.awaited = gateway.only = _GENERATE
            gateway.num_refusals = 1
            await _complete(engine, 1)
        (first_s, second_s) = [asked_s for path, asked_s in gateway.asked if path == "/generate"]
        checks = [asked_s for path, asked_s in gateway.asked if path == "/health" and first_s < asked_s < second_s]
        assert checks, "a health check comes before the request"
        assert second_s - first_s >= 1.0

    asyncio.run(main())


def test_an_engine_closed_while_it_gives_up_a_server_leaves_no_session(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gives_up, may_go_on = threading.Event(), threading.Event()

    def slow_kill(_: ExternalServer) -> None:
        gives_up.set()
        assert may_go_on.wait(PATIENCE_S)

    async def main() -> None:
        monkeypatch.setattr(ExternalServer, "kill", slow_kill)
        async with asyncio.timeout(60), engine_on_faulty(tiny_folders["qwen2"], FakeSGLang(), timeout_s=5.0) as made:
            engine, _ = made
            connection = engine._state.connection
            assert connection is not None
            engine._state.hung = "for this test"
            assert await asyncio.to_thread(gives_up.wait, PATIENCE_S)
            asyncio.get_running_loop().call_later(0.2, may_go_on.set)  # the engine is closed meanwhile
        assert connection.api.client._session.closed

    asyncio.run(main())


def test_a_server_is_killed_although_its_session_does_not_close(
    tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    close, killed = ServerClient.close, list[str]()

    async def fails(client: ServerClient) -> None:
        await close(client)
        raise OSError("for this test")

    async def main() -> None:
        monkeypatch.setattr(ExternalServer, "kill", lambda _: killed.append("killed"))
        async with asyncio.timeout(60), engine_on_faulty(tiny_folders["qwen2"], FakeSGLang(), timeout_s=5.0):
            monkeypatch.setattr(ServerClient, "close", fails)

    with pytest.raises(OSError, match="for this test"):
        asyncio.run(main())
    assert killed == ["killed"]
