"""The chat endpoint with the real `openai` client: accepted requests, refused requests, and answers."""

import asyncio
import json
import resource
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from support.chat_endpoint import (
    ADD,
    TEMPLATES,
    Recorder,
    ScriptedEngine,
    ask,
    assert_trained_ids_are_generated_ids,
    chat_format,
    connected,
    endpoint,
    trajectories_of,
    user,
)
from support.patience import PATIENCE_S

from areal_rloo.models.files import load_tokenizer
from areal_rloo.rollout import chat_server


@TEMPLATES
def test_tool_calls_go_to_the_agent_and_come_back_as_one_trajectory(folder: Path, template: str | None) -> None:
    tokenizer = load_tokenizer(str(folder))
    called = 'Let me see.\n<tool_call>{"name": "add", "arguments": {"b": 5, "a": 3}}</tool_call>'
    engine = ScriptedEngine(tokenizer, [called, "It is 8."])

    async def run() -> None:
        async with connected(engine, chat_format(folder, template)) as (session, client):
            messages: list[Any] = [user("3+5=?\n")]
            choice = (await ask(client, messages, tools=[ADD])).choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Let me see."
            (call,) = choice.message.tool_calls
            assert call.function.name == "add"
            assert json.loads(call.function.arguments) == {"a": 3, "b": 5}
            # An agent that writes the message down itself: other order, other blanks, no content.
            echoed = {"tool_calls": [call.model_dump()], "content": "Let me see.", "role": "assistant"}
            echoed["tool_calls"][0]["function"]["arguments"] = '{"b":5,   "a":3}'
            result = {"role": "tool", "tool_call_id": call.id, "content": "8"}
            ended = (await ask(client, [messages[0], echoed, result], tools=[ADD])).choices[0]
            assert (ended.finish_reason, ended.message.content) == ("stop", "It is 8.")
            assert ended.message.tool_calls is None
        (trajectory,) = trajectories_of(session)
        assert_trained_ids_are_generated_ids([trajectory], engine.completions_of(0))
        text = tokenizer.decode(trajectory.completion.tokens.tolist())
        assert text.startswith(called + "<eos>\n")
        assert text.count("<tool_response>") == 1
        prompt = tokenizer.decode(trajectory.prompt_tokens.tolist())
        assert "add()" in prompt or '"add"' in prompt  # as the plain format or the template names it

    asyncio.run(run())


@pytest.mark.parametrize("content", ["", None])
def test_a_message_of_calls_is_recognized_in_every_client_s_spelling(folder: Path, content: str | None) -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    engine = ScriptedEngine(load_tokenizer(str(folder)), [call + call, "8"])

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (session, client):
            messages: list[Any] = [user("3+5=?\n")]
            message = (await ask(client, messages, tools=[ADD])).choices[0].message
            assert message.content is None
            assert len({call.id for call in message.tool_calls}) == 2
            messages[-1] = {**message.model_dump(), "content": content}
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "8"} for call in message.tool_calls]
            await ask(client, messages, tools=[ADD])
        assert len(session.conversations) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ("<tool_call>add 3 and 5</tool_call>", {"tools": [ADD]}),
        ('<tool_call>{"name": "add", "arguments": [3, 5]}</tool_call>', {"tools": [ADD]}),
        ('<tool_call>{"name": "add", "arguments": {}}', {"tools": [ADD]}),
        ('<tool_call>{"name": "add"}</tool_call><tool_call>add</tool_call>', {"tools": [ADD]}),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', {"tools": [ADD], "tool_choice": "none"}),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', {}),
    ],
    ids=["no JSON", "arguments of a wrong type", "not closed", "one of two", "calls refused", "no tools"],
)
def test_text_that_is_no_call_stays_text(folder: Path, said: str, options: dict[str, Any]) -> None:
    engine = ScriptedEngine(load_tokenizer(str(folder)), [said])

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (_, client):
            choice = (await ask(client, [user("3+5=?\n")], **options)).choices[0]
            assert (choice.finish_reason, choice.message.content) == ("stop", said)
            assert choice.message.tool_calls is None

    asyncio.run(run())


@TEMPLATES
def test_a_first_prompt_may_contain_tool_calls(folder: Path, template: str | None) -> None:
    tokenizer = load_tokenizer(str(folder))
    engine = ScriptedEngine(tokenizer, ["8"])
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    messages = [
        user("3+5=?\n"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "8"}]},
    ]

    async def run() -> None:
        async with connected(engine, chat_format(folder, template)) as (_, client):
            await ask(client, messages)
        text = tokenizer.decode(engine.completions_of(0)[0][0])
        assert '{"name": "add", "arguments": {"a": 3}}' in text
        assert "<tool_response>" in text

    asyncio.run(run())


def test_a_stream_has_the_same_content_as_a_single_answer(folder: Path) -> None:
    call = 'So: <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
    engine = ScriptedEngine(load_tokenizer(str(folder)), [call, "8"])

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (session, client):
            messages: list[Any] = [user("3+5=?\n")]
            async with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            assert message.content == "So:"
            assert message.tool_calls[0].function.arguments == '{"a": 3}'
            result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "8"}
            messages += [message.model_dump(exclude_none=True), result]
            chunks = await client.chat.completions.create(
                model="policy", messages=messages, tools=[ADD], stream=True, stream_options={"include_usage": True}
            )
            parts = [chunk async for chunk in chunks]
            assert "".join(choice.delta.content or "" for part in parts for choice in part.choices) == "8"
            assert parts[-1].usage.completion_tokens == 2
            assert [c.finish_reason for part in parts for c in part.choices] == [None, "stop"]
        assert len(session.conversations) == 1
        assert_trained_ids_are_generated_ids(trajectories_of(session), engine.completions_of(0))

    asyncio.run(run())


def test_a_request_may_lower_but_not_raise_the_token_limit(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (_, client):
            await ask(client, [user("3+5=?\n")], max_tokens=3)
            await ask(client, [user("3+5=?\n")], max_completion_tokens=2)
            await ask(client, [user("3+5=?\n")], max_tokens=10_000)
        limits = [request.sampling.max_new_tokens for request, _ in engine.calls]
        assert limits == [3, 2, 8]  # 8: `rollout.episode.max_turn_tokens`

    asyncio.run(run())


def test_all_turns_together_respect_the_run_s_token_limit(folder: Path) -> None:
    engine = ScriptedEngine(load_tokenizer(str(folder)), ["abcdef", "abcdef", "abc"])

    async def run() -> None:
        async with connected(engine, chat_format(folder), max_new_tokens=30) as (_, client):
            messages: list[Any] = [user("3+5=?\n")]
            for _ in range(3):
                await ask(client, messages, max_tokens=10_000)
                messages.append(user("So?"))
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, messages)
        assert refused.value.code == "context_length_exceeded"
        # A turn has 7 tokens, what is said between turns 5; `rollout.episode.max_turn_tokens` is 8.
        assert [request.sampling.max_new_tokens for request, _ in engine.calls] == [8, 8, 30 - 7 - 5 - 7 - 5]

    asyncio.run(run())


def test_another_temperature_is_ignored_and_logged_once(
    folder: Path, engine: Recorder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where another test has set up logs, they no longer reach pytest's handler.
    monkeypatch.setattr(chat_server.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(chat_server.logger, "propagate", False)

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (_, client):
            await ask(client, [user("3+5=?\n")], temperature=1, top_p=1.0, presence_penalty=0)
            assert not caplog.records
            for _ in range(2):
                await ask(client, [user("3+5=?\n")], temperature=0.2, seed=7)
        assert {request.sampling.temperature for request, _ in engine.calls} == {1.0}
        said = [record.getMessage() for record in caplog.records]
        assert [line.partition(":")[0] for line in said] == [
            "an agent asks for temperature=0.2",
            "an agent asks for seed=7",
        ]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("n", {"n": 2}),
        ("stop", {"stop": ["\n"]}),
        ("max_tokens", {"max_tokens": 0}),
        ("tool_choice", {"tools": [ADD], "tool_choice": "required"}),
        ("tools[0]", {"tools": [{"type": "web_search"}]}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 5}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("logit_bias", {"logit_bias": {"5": 100}}),
        ("functions", {"functions": [{"name": "add"}]}),
        ("temperature", {"extra_body": {"temperature": "hot"}}),
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"role": "wizard", "content": "3+5"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("messages[0].tool_calls", {"messages": [{**user("3"), "tool_calls": [{"function": {"name": "add"}}]}]}),
        ("messages", {"messages": [user("")]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_options_are_refused_with_the_field_s_name(
    folder: Path, engine: Recorder, field: str, options: dict[str, Any]
) -> None:
    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (session, client):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(**{"model": "m", "messages": [user("3")], **options})
        assert field in str(refused.value)
        assert refused.value.type == "invalid_request_error"
        assert not session.conversations
        assert not engine.calls

    asyncio.run(run())


def test_an_unknown_key_is_refused(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with endpoint(engine, chat_format(folder)) as there, there.client("sk-nobody") as client:
            there.open()
            with pytest.raises(openai.AuthenticationError) as refused:
                await ask(client, [user("3+5=?\n")])
        assert refused.value.code == "invalid_api_key"

    asyncio.run(run())


def test_a_conversation_that_is_too_long_is_refused_without_ending_it(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with connected(engine, chat_format(folder), context_tokens=60) as (session, client):
            messages: list[Any] = [user("3+5=?\n")]
            await ask(client, messages)
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client, [*messages, user("x" * 60)])
            assert refused.value.code == "context_length_exceeded"
            await ask(client, [*messages, user("So?")])
            num_tokens = session.conversations[0].tokens
            assert len(num_tokens) <= 60
        assert len(session.conversations) == 1  # what was refused took the place from nobody
        assert_trained_ids_are_generated_ids(trajectories_of(session), engine.completions_of(0))

    asyncio.run(run())


def _post(url: str, key: str, body: bytes) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, body, {"Authorization": f"Bearer {key}"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answered:
            return answered.status, json.load(answered)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_a_reward_is_posted_once_and_ends_the_session(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with endpoint(engine, chat_format(folder)) as there:
            session, key = there.open()
            url = there.server.base_url
            refused_ones = (
                "NaN",
                "Infinity",
                "-1e999",
                "1" + 400 * "0",
                "true",
                '"1"',
                "null",
                '1, "parts": {"a": 1e999}',
            )
            for body in (b"{}", b"", *(f'{{"reward": {reward}}}'.encode() for reward in refused_ones)):
                status, refused = await asyncio.to_thread(_post, f"{url}/reward", key, body)
                assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
            status, _ = await asyncio.to_thread(_post, f"{url}/sessions/7-7/reward", key, b'{"reward": 1}')
            assert status == 404
            body = b'{"reward": 0.5, "parts": {"right": 1}}'
            status, said = await asyncio.to_thread(_post, f"{url}/sessions/0-0/reward", key, body)
            assert (status, said) == (200, {"session": "0-0", "reward": 0.5})
            status, refused = await asyncio.to_thread(_post, f"{url}/reward", key, body)
            assert (status, refused["error"]["code"]) == (409, "session_ended")
            async with there.client(key) as client:
                num_refused = there.server.statistics().num_refused
                with pytest.raises(openai.ConflictError):
                    await ask(client, [user("3+5=?\n")])
                assert there.server.statistics().num_refused == num_refused + 1  # the client does not try again
        assert session.posted is not None
        assert (session.posted.reward, session.posted.parts) == (0.5, {"right": 1.0})

    asyncio.run(run())


def test_an_unknown_path_is_refused_in_json(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with endpoint(engine, chat_format(folder)) as there:
            status, refused = await asyncio.to_thread(_post, f"{there.server.base_url}/embeddings", "", b"{}")
            assert status == 404
            assert "/v1/embeddings" in refused["error"]["message"]

    asyncio.run(run())


def test_a_request_that_never_arrives_whole_is_refused(
    engine: Recorder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_server, "_CLIENT_S", 0.2)

    async def run() -> None:
        async with endpoint(engine, chat_format(folder)) as there:
            _, key = there.open()
            port = int(there.server.base_url.split(":")[2].partition("/")[0])
            for path in ("chat/completions", "reward"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = (
                    f"POST /v1/{path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\nContent-Length: 9\r\n\r\n{{"
                )
                writer.write(head.encode())
                assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
                writer.close()
            assert there.server.statistics().num_refused == 2

    asyncio.run(run())


def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_server, "_CLIENT_S", 0.1)

    async def run() -> None:
        with pytest.raises(ConnectionResetError, match="did not read"):
            await chat_server._written(asyncio.sleep(3600))

    asyncio.run(run())


def test_connections_without_a_key_make_room_for_agents(
    folder: Path, engine: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))  # of descriptors; half of them for connections

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (_, client):
            await ask(client, [user("1+2=?\n")])
            port = client.base_url.port
            strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
            await ask(client, [user("3+4=?\n")])  # on the same connection
            async with asyncio.timeout(PATIENCE_S):
                for reader, _ in strangers[:80]:
                    assert await reader.read() == b""
            for _, writer in strangers:
                writer.close()

    asyncio.run(run())
