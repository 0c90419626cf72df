"""A reward over HTTP, against a real server on loopback."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from areal_rloo.errors import RewardError
from areal_rloo.rewards.request import RewardRequest, Worth
from areal_rloo.rewards.service import RewardServices
from areal_rloo.trajectory import Item, Message

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Scenario = Callable[[RewardServices, str], Awaitable[Any]]

REQUEST = RewardRequest(
    purpose="eval",
    item=Item((Message("user", "1+1"),), "2", source="mine", fields={"difficulty": 3}),
    completion="2",
    turns=("a", "2"),
    prompt_ids=(1, 2),
    completion_ids=(3, 4, 5),
    finish_reason="length",
)


def _run(handler: Handler, scenario: Scenario, *, num_at_once: int = 64, deadline_s: float = 5.0) -> Any:
    """Return the result of a scenario with a server that answers with the handler."""

    async def with_server() -> Any:
        app = web.Application()
        app.router.add_post("/score", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        services = RewardServices(num_at_once=num_at_once, deadline_s=deadline_s, returns="token")
        try:
            return await scenario(services, f"http://127.0.0.1:{port}/score")
        finally:
            await services.close()
            await runner.cleanup()

    return asyncio.run(with_server())


def _answering(body: str, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=body, status=status)

    return handler


async def _once(services: RewardServices, url: str) -> Worth:
    return await services.score(REQUEST, url)


def test_a_service_gets_the_whole_completion_and_its_answer_is_the_reward() -> None:
    got = {}

    async def handler(request: web.Request) -> web.Response:
        got.update(await request.json())
        return web.json_response({"reward": 0.5, "turn_rewards": [0, 0.5], "because": "half right"})

    assert _run(handler, _once) == Worth(reward=0.5, turn_rewards=(0, 0.5))
    assert got == {
        "prompt": [{"role": "user", "content": "1+1"}],
        "completion": "2",
        "turns": ["a", "2"],
        "prompt_ids": [1, 2],
        "completion_ids": [3, 4, 5],
        "finish_reason": "length",
        "answer": "2",
        "purpose": "eval",
        "source": "mine",
        "fields": {"difficulty": 3},
    }


@pytest.mark.parametrize(
    ("handler", "reason", "told"),
    [
        (_answering("down" * 1000, 500), "reward_error", r"status 500: (down){125}$"),
        (_answering("no such page", 404), "reward_error", "status 404: no such page"),
        (_answering("fine"), "reward_wrong_type", 'expected {"reward": number} as JSON, got fine'),
        (_answering("1.0"), "reward_wrong_type", 'expected {"reward": number} as JSON, got 1.0'),
        (_answering('{"score": 1}'), "reward_wrong_type", "expected a number under 'reward', got the keys score"),
        (_answering('{"reward": "1"}'), "reward_wrong_type", "expected a number, got str"),
        (_answering('{"reward": NaN}'), "reward_out_of_range", "the reward is nan"),
    ],
)
def test_a_value_that_is_no_reward_is_refused_with_the_reason(handler: Handler, reason: str, told: str) -> None:
    with pytest.raises(RewardError, match=told) as caught:
        _run(handler, _once)
    assert caught.value.reason == reason


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_short_outage_of_a_service_drops_nothing(status: int) -> None:
    answered = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal answered
        answered += 1
        return web.json_response({"reward": 1}) if answered > 2 else web.Response(status=status)

    assert _run(handler, _once, deadline_s=60.0).reward == 1
    assert answered == 3


def test_a_broken_connection_is_retried() -> None:
    broken = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal broken
        if broken < 2:
            broken += 1
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"reward": 1})

    assert _run(handler, _once, deadline_s=60.0).reward == 1


def test_a_service_restart_is_waited_for() -> None:
    async def scenario() -> float:
        app = web.Application()
        app.router.add_post("/score", _answering('{"reward": 1}'))
        runner = web.AppRunner(app)
        await runner.setup()
        first = web.TCPSite(runner, "127.0.0.1", 0)
        await first.start()
        port = runner.addresses[0][1]
        await first.stop()  # nobody listens now
        services = RewardServices(num_at_once=1, deadline_s=60.0, returns="token")
        waiting = asyncio.create_task(services.score(REQUEST, f"http://127.0.0.1:{port}/score"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        worth = await waiting
        await services.close()
        await runner.cleanup()
        return worth.reward

    assert asyncio.run(scenario()) == 1


def test_requests_that_wait_until_they_can_start_are_counted() -> None:
    async def scenario(services: RewardServices, url: str) -> None:
        scores = [asyncio.create_task(services.score(REQUEST, url)) for _ in range(3)]
        while not services.statistics().num_queued:  # noqa: ASYNC110 - until all have come
            await asyncio.sleep(0)
        assert services.statistics().num_queued == 2
        scores[2].cancel()
        await asyncio.gather(*scores, return_exceptions=True)
        assert services.statistics().num_queued == 0

    _run(_answering('{"reward": 1}'), scenario, num_at_once=1)


def test_a_long_outage_ends_at_the_deadline_with_the_last_failure() -> None:
    with pytest.raises(RewardError, match="no reward within 1 s; the last attempt: status 503: loading") as caught:
        _run(_answering("loading", 503), _once, deadline_s=1.0)
    assert caught.value.reason == "reward_timeout"


def test_a_hanging_request_times_out_and_drops_only_its_sample() -> None:
    async def handler(request: web.Request) -> web.Response:
        if (await request.json())["completion"] == "hang":
            await asyncio.sleep(3600)
        return web.json_response({"reward": 1})

    async def scenario(services: RewardServices, url: str) -> list[float | str]:
        async def outcome(completion: str) -> float | str:
            try:
                return (await services.score(msgspec.structs.replace(REQUEST, completion=completion), url)).reward
            except RewardError as failure:
                return failure.reason

        return list(await asyncio.gather(*map(outcome, ["a", "hang", "b", "c"])))

    assert _run(handler, scenario, deadline_s=6.0) == [1, "reward_timeout", 1, 1]


def test_requests_beyond_the_limit_wait_and_keep_their_deadline() -> None:
    """40 of 0.1 s, two at a time, with a deadline of 1 s: the last waits for two."""
    running = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1
        return web.json_response({"reward": json.loads(await request.text())["fields"]["number"]})

    async def scenario(services: RewardServices, url: str) -> list[float]:
        requests = [msgspec.structs.replace(REQUEST, item=Item("", fields={"number": n})) for n in range(40)]
        return [worth.reward for worth in await asyncio.gather(*(services.score(one, url) for one in requests))]

    assert _run(handler, scenario, num_at_once=2, deadline_s=1.0) == list(range(40))
    assert most == 2


def test_an_answer_without_end_is_cut_off_and_drops_its_sample() -> None:
    sent_bytes = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes
        stream = web.StreamResponse()
        await stream.prepare(request)
        with contextlib.suppress(ConnectionError):
            while sent_bytes < 2**30:
                await stream.write(bytes(2**20))
                sent_bytes += 2**20
        return stream

    with pytest.raises(RewardError, match="the answer has more than 16777216 bytes") as caught:
        _run(handler, _once, deadline_s=60.0)
    assert caught.value.reason == "reward_error"
    assert sent_bytes < 2**28


def test_a_compressed_answer_is_not_unpacked() -> None:
    async def handler(request: web.Request) -> web.Response:
        body = gzip.compress(b'{"reward": 1}')
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    with pytest.raises(RewardError, match="as JSON") as caught:
        _run(handler, _once)
    assert caught.value.reason == "reward_wrong_type"


@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirect_is_refused_with_its_target(status: int) -> None:
    async def handler(request: web.Request) -> web.Response:
        if "moved" in request.query_string:
            return web.json_response({"reward": 1})
        return web.Response(status=status, headers={"Location": "/score?moved"})

    with pytest.raises(RewardError, match=f"status {status}, a redirect to '/score.moved'; set url") as caught:
        _run(handler, _once)
    assert caught.value.reason == "reward_error"
