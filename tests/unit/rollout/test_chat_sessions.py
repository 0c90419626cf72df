"""Sessions of the chat endpoint: training sees exactly the generated ids, for any conversation of an agent."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_endpoint import (
    CHATML,
    TEMPLATES,
    Recorder,
    ScriptedEngine,
    ask,
    assert_trained_ids_are_generated_ids,
    chat_format,
    connected,
    embedded,
    endpoint,
    trajectories_of,
    until,
    user,
)

from areal_rloo.models.files import load_tokenizer
from areal_rloo.rollout.chat_api import ApiError, ChatRequest, read_request
from areal_rloo.rollout.sessions import Session
from areal_rloo.trajectory import Completion


def _request(*messages: dict[str, Any]) -> ChatRequest:
    return read_request(json.dumps({"messages": messages}).encode())


@TEMPLATES
def test_a_long_conversation_is_one_trajectory_of_the_generated_ids(
    folder: Path, engine: Recorder, template: str | None
) -> None:
    async def run() -> None:
        async with connected(engine, chat_format(folder, template)) as (session, client):
            messages: list[Any] = [{"role": "system", "content": "Add."}, user("3+5=?\n")]
            for turn in range(4):
                answered = await ask(client, messages, logprobs=True)
                _, completion = engine.completions_of(0)[turn]
                said = [token.logprob for token in answered.choices[0].logprobs.content]
                assert said == completion.behaviour_logprobs.tolist()
                assert answered.usage.completion_tokens == len(completion.tokens)
                assert answered.choices[0].finish_reason == completion.finish_reason
                messages.append(user(f"And then {turn}?"))
        (trajectory,) = trajectories_of(session)
        assert len(trajectory.completion.spans) == 7
        assert tuple(trajectory.prompt_tokens.tolist()) == engine.completions_of(0)[0][0]
        assert_trained_ids_are_generated_ids([trajectory], engine.completions_of(0))

    asyncio.run(run())


def test_the_synchronous_client_is_served(folder: Path, engine: Recorder) -> None:
    def converse(base_url: str, key: str) -> None:
        with openai.OpenAI(base_url=base_url, api_key=key) as client:
            messages: list[Any] = [user("3+5=?\n")]
            for _ in range(3):
                answered = client.chat.completions.create(model="gpt-of-old", messages=messages)
                assert answered.model == "gpt-of-old"
                messages += [answered.choices[0].message.model_dump(), user("Again.")]
            assert [model.id for model in client.models.list()] == ["policy"]

    async def run() -> None:
        async with endpoint(engine, chat_format(folder)) as there:
            session, key = there.open()
            await asyncio.to_thread(converse, there.server.base_url, key)
        assert len(session.conversations) == 1
        assert_trained_ids_are_generated_ids(trajectories_of(session), engine.completions_of(0))

    asyncio.run(run())


@TEMPLATES
def test_messages_between_turns_are_formatted_once(folder: Path, template: str | None) -> None:
    tokenizer = load_tokenizer(str(folder))
    engine = ScriptedEngine(tokenizer, ["8", "10"])

    async def run() -> None:
        async with connected(engine, chat_format(folder, template)) as (session, client):
            messages: list[Any] = [user("3+5=?\n")]
            await ask(client, messages)
            messages.append(user("areal-rloo-completion?"))  # also where it says what the format marks turns with
            await ask(client, messages)
        (trajectory,) = trajectories_of(session)
        text = tokenizer.decode([*trajectory.prompt_tokens.tolist(), *trajectory.completion.tokens.tolist()])
        if template is None:
            assert text == "3+5=?\n8<eos>\nareal-rloo-completion?\n10<eos>"
        else:
            assert text == (
                "<|im_start|>user\n3+5=?\n<eos>\n<|im_start|>assistant\n8<eos>\n"
                "<|im_start|>user\nareal-rloo-completion?<eos>\n<|im_start|>assistant\n10<eos>"
            )

    asyncio.run(run())


def test_a_rewritten_history_starts_another_trajectory(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (session, client):
            messages: list[Any] = [user("3+5=?\n")]
            await ask(client, messages)
            await ask(client, [user("3+5=?\n"), {"role": "assistant", "content": "I said."}, user("So?")])
        assert len(session.conversations) == 2
        assert_trained_ids_are_generated_ids(trajectories_of(session), engine.completions_of(0))

    asyncio.run(run())


@pytest.mark.parametrize("together", [True, False])
def test_branches_from_a_turn_train_on_the_turn_once(folder: Path, engine: Recorder, together: bool) -> None:
    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (session, client):
            messages: list[Any] = [user("3+5=?\n")]
            await ask(client, messages)
            branches = [ask(client, [*messages, user(f"Branch {n}")]) for n in range(3)]
            if together:
                await asyncio.gather(*branches)
            else:
                for branch in branches:
                    await branch
        first, *others = trajectories_of(session)
        assert len(first.completion.spans) == 3
        for other in others:
            begun = (*first.prompt_tokens.tolist(), *first.completion.tokens[: first.completion.spans[0]].tolist())
            assert tuple(other.prompt_tokens[: len(begun)].tolist()) == begun
            assert other.completion.spans == ()
        assert_trained_ids_are_generated_ids([first, *others], engine.completions_of(0))

    asyncio.run(run())


def test_equal_conversations_continue_separately(folder: Path) -> None:
    engine = ScriptedEngine(load_tokenizer(str(folder)), ["8", "8", "nine", "ten"])

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (session, client):
            both: list[list[Any]] = [[user("3+5=?\n")], [user("3+5=?\n")]]
            for messages in both:
                await ask(client, messages)
            for messages in both:
                await ask(client, [*messages, user("So?")])
        assert [len(trajectory.completion.spans) for trajectory in trajectories_of(session)] == [3, 3]
        assert_trained_ids_are_generated_ids(trajectories_of(session), engine.completions_of(0))

    asyncio.run(run())


def test_ending_a_session_aborts_and_refuses_running_requests(folder: Path, engine: Recorder) -> None:
    engine.holds = True

    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (session, client):
            asked = asyncio.create_task(ask(client, [user("3+5=?\n")]))
            await until(lambda: engine.calls)
            session.end("for a test")
            with pytest.raises(openai.ConflictError, match="for a test"):
                await asked
            assert engine.aborted == ["0/0/0"]
            assert not session.conversations

    asyncio.run(run())


class _Gate:
    """A `TurnEngine` that finishes a completion when the test sets `made`."""

    max_new_tokens = 100

    def __init__(self) -> None:
        self.made: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Completion:
        return await self.made


def test_a_completion_after_its_session_s_end_is_not_trained_on(folder: Path) -> None:
    async def run() -> None:
        gate = _Gate()
        session = Session("0-0", gate, chat_format(folder), context_tokens=100)
        request = _request(user("3+5=?\n"))
        asked = asyncio.create_task(session.complete(request))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tokens = np.ones(1, dtype=np.int32)
        gate.made.set_result(Completion(tokens, np.zeros(1, dtype=np.float32), tokens, "stop"))
        await asyncio.sleep(0)  # the engine has answered, and the one who asked has not looked yet
        session.end("for a test")
        with pytest.raises(ApiError, match="has ended"):
            await asked
        assert not session.conversations

    asyncio.run(run())


def test_a_disconnect_aborts_the_completion_and_frees_the_turn(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with connected(engine, chat_format(folder)) as (session, client):
            messages: list[Any] = [user("3+5=?\n")]
            await ask(client, messages)
            messages.append(user("So?"))
            engine.holds = True
            asked = asyncio.create_task(ask(client, list(messages)))
            await until(lambda: len(engine.calls) == 2)
            asked.cancel()
            await until(lambda: engine.aborted)
            engine.holds = False
            await ask(client, messages)
        assert engine.aborted == ["0/0/1"]
        assert len(session.conversations) == 1
        answered = [call for call in engine.completions_of(0) if call[1].finish_reason != "abort"]
        assert_trained_ids_are_generated_ids(trajectories_of(session), answered)

    asyncio.run(run())


def test_parallel_sessions_do_not_mix(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with endpoint(engine, chat_format(folder, CHATML)) as there:
            sessions = [there.open(group_id) for group_id in range(12)]

            async def converse(group_id: int, key: str) -> None:
                async with there.client(key) as client:
                    messages: list[Any] = [user(f"{group_id % 3}+5=?\n")]  # some ask the same
                    for turn in range(3):
                        await ask(client, messages)
                        messages.append(user(f"And {turn}?"))

            await asyncio.gather(*(converse(group_id, key) for group_id, (_, key) in enumerate(sessions)))
            assert there.server.statistics().num_completions == 36
        for group_id, (session, _) in enumerate(sessions):
            assert len(session.conversations) == 1
            assert_trained_ids_are_generated_ids(trajectories_of(session), engine.completions_of(group_id))

    asyncio.run(run())


# A call of a session: which of its conversations so far it goes on from (none: a fresh one), and how.
CALLS = st.tuples(st.integers(0, 2), st.none() | st.integers(0, 5), st.sampled_from(["go on", "rewrite", "again"]))


@settings(max_examples=60)
@given(rounds=st.lists(st.lists(CALLS, min_size=1, max_size=4), min_size=1, max_size=4))
@pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "chatml"])
def test_interleaved_sessions_train_only_on_generated_ids(
    template: str | None, rounds: list[list[tuple[int, int | None, str]]], shared_engine: Recorder, folder: Path
) -> None:
    chat = chat_format(folder, template)
    shared_engine.calls.clear()

    async def run() -> None:
        async with endpoint(shared_engine, chat) as there:
            sessions = [there.open(group_id)[0] for group_id in range(3)]
            histories: list[list[list[dict[str, Any]]]] = [[] for _ in sessions]

            async def call(group_id: int, base: int | None, how: str) -> None:
                known = histories[group_id]
                messages = [dict(m) for m in known[base % len(known)]] if known and base is not None else []
                if messages and how == "rewrite":
                    messages[-1]["content"] += "!"
                if messages and how == "again":
                    messages = messages[:-1]  # the same messages once more: another completion of one prompt
                else:
                    messages.append(user(f"{len(messages)}?"))
                request = _request(*messages)
                turn = await sessions[group_id].complete(request)
                known.append([*messages, {"role": "assistant", "content": turn.message.content}])

            for calls in rounds:
                await asyncio.gather(*(call(*one) for one in calls))
            for group_id, session in enumerate(sessions):
                assert_trained_ids_are_generated_ids(trajectories_of(session), shared_engine.completions_of(group_id))

    asyncio.run(run())


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Iterator[Recorder]:
    made = embedded(folder)
    yield made
    made.close()


def test_a_session_knows_the_conversation_of_its_last_turn(folder: Path, engine: Recorder) -> None:
    async def run() -> None:
        async with endpoint(engine, chat_format(folder)) as there:
            session: Session = there.open()[0]
            for text in ("one", "two", "three"):
                await session.complete(_request(user(text)))
            assert session.last is session.conversations[-1]
            last = engine.completions_of(0)[-1][1]
            np.testing.assert_array_equal(session.last.last.tokens, last.tokens)

    asyncio.run(run())
