"""A chat endpoint to test, with a real engine on a tiny random model or a scripted engine."""

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from areal_rloo.algorithm.loss import written_by_policy
from areal_rloo.config import DataConfig, SamplingConfig, SourceConfig
from areal_rloo.engines.base import Engine, EngineStatistics, GenerationRequest, SamplingParameters
from areal_rloo.engines.embedded import EmbeddedEngine
from areal_rloo.models.files import load_tokenizer
from areal_rloo.rewards.request import RewardRequest, Scored
from areal_rloo.rollout.chat_server import ChatServer
from areal_rloo.rollout.episode import Sample, SampleEngine, Submitter
from areal_rloo.rollout.sessions import Session
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Completion, Item, Trajectory

DATA = DataConfig(train=SourceConfig(task="arithmetic"), eval=None, max_prompt_tokens=600)
CONTEXT_TOKENS = 1200
# ChatML, as Qwen's tokenizers have it; the tiny tokenizer closes turns with <eos>.
CHATML = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<eos>\\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><eos>\\n' }}"
    "{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
    "{%- endfor %}{{ '<eos>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = pytest.mark.parametrize("template", [None, CHATML], ids=["plain", "chatml"])
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
# A random model seldom says <eos>; with a few bytes that end a turn, turns end in both ways.
STOPS = (1, *range(20, 40))


class Recorder:
    """An engine that records requests and completions. With `holds`, the engine starts no request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[tuple[GenerationRequest, Future[Completion]]] = []
        self.aborted: list[str] = []
        self.holds = False

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        if self.holds:  # they wait for weights that never come
            requests = [dataclasses.replace(request, min_version=99) for request in requests]
        futures = self.engine.submit(requests)
        self.calls += zip(requests, futures, strict=True)
        return futures

    def abort(self, request_ids: Iterable[str]) -> None:
        names = list(request_ids)
        self.aborted += names
        self.engine.abort(names)

    def unfinished(self) -> Future[dict[str, Completion]]:
        return self.engine.unfinished()

    def load_weights(self, policy_version: int, weights: Any) -> Future[int]:
        return self.engine.load_weights(policy_version, weights)

    def statistics(self) -> EngineStatistics:
        return self.engine.statistics()

    def close(self) -> None:
        self.engine.close()

    def completions_of(self, group_id: int, sample_index: int = 0) -> list[tuple[tuple[int, ...], Completion]]:
        """Return the prompts and completions of a sample's agent, as the engine saw them."""
        return [
            (request.prompt_tokens, future.result())
            for request, future in self.calls
            if request.request_id.startswith(f"{group_id}/{sample_index}/") and future.done()
        ]


class ScriptedEngine(Recorder):
    """Generate these texts in turn, each with <eos>. Logprobs count down, so every token has a different logprob."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        self.calls = []
        self.aborted = []
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self._num_tokens = 0

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        futures = []
        for request in requests:
            tokens = np.array([*self._tokenizer.encode(self._texts.pop(0)), 1], dtype=np.int32)
            logprobs = -np.arange(self._num_tokens, self._num_tokens + len(tokens), dtype=np.float32) / 64
            self._num_tokens += len(tokens)
            future: Future[Completion] = Future()
            future.set_result(Completion(tokens, logprobs, np.zeros(len(tokens), dtype=np.int32), "stop"))
            self.calls.append((request, future))
            futures.append(future)
        return futures

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += request_ids


class RefusingRewards:
    """Rewards for agents that return a reward: no request may arrive."""

    async def score(self, request: RewardRequest) -> Scored:
        raise AssertionError(f"nobody asks what {request.completion!r} is worth")


def embedded(folder: Path) -> Recorder:
    engine = EmbeddedEngine(
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_slots=8,
        context_tokens=CONTEXT_TOKENS,
    )
    return Recorder(engine)


def chat_format(folder: Path, template: str | None = None) -> ChatFormat:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, DATA)


def a_sample(group_id: int, item: Item | None = None) -> Sample:
    return Sample((group_id, 0), "train", item or Item("1+2=?\n", "#### 3"), (5, 6, 7))


def sample_engine(submitter: Submitter, group_id: int, *, max_new_tokens: int = 600) -> SampleEngine:
    sampling = SamplingParameters(max_new_tokens=max_new_tokens, seed=group_id, stop_token_ids=STOPS)
    return SampleEngine(submitter=submitter, name=f"{group_id}/0", sampling=sampling, max_turn_tokens=8)


class Endpoint:
    """A server that opens sessions; the group tells samples apart."""

    def __init__(self, server: ChatServer, submitter: Submitter, chat: ChatFormat) -> None:
        self.server = server
        self.submitter = submitter
        self.chat = chat

    def open(
        self, group_id: int = 0, *, context_tokens: int = CONTEXT_TOKENS, max_new_tokens: int = 600
    ) -> tuple[Session, str]:
        engine = sample_engine(self.submitter, group_id, max_new_tokens=max_new_tokens)
        session = Session(f"{group_id}-0", engine, self.chat, context_tokens=context_tokens)
        return session, self.server.open_session(session)

    def client(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.server.base_url, api_key=key)


@contextlib.asynccontextmanager
async def endpoint(engine: Recorder, chat: ChatFormat) -> AsyncIterator[Endpoint]:
    server = ChatServer(SamplingConfig())
    await server.start()
    try:
        yield Endpoint(server, Submitter(engine, context_tokens=CONTEXT_TOKENS), chat)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def connected(
    engine: Recorder, chat: ChatFormat, **limits: int
) -> AsyncIterator[tuple[Session, openai.AsyncOpenAI]]:
    """Serve an endpoint, open a single session, and connect a client to the session."""
    async with endpoint(engine, chat) as there:
        session, key = there.open(**limits)
        async with there.client(key) as client:
            yield session, client


def trajectories_of(session: Session, group_id: int = 0) -> list[Trajectory]:
    scored = Scored(reward=1.0, parts={})
    return [conversation.trajectory(a_sample(group_id), scored) for conversation in session.conversations]


def assert_trained_ids_are_generated_ids(
    trajectories: Sequence[Trajectory], calls: Sequence[tuple[tuple[int, ...], Completion]]
) -> None:
    """Check that training sees every turn once, after the ids of the turn's prompt and with the turn's logprobs."""
    trained: Counter[tuple[object, ...]] = Counter()
    for trajectory in trajectories:
        completion = trajectory.completion
        mask = written_by_policy(completion.spans, len(completion.tokens))
        assert not completion.behaviour_logprobs[~mask].any()
        begin = 0
        for index, num in enumerate(completion.spans or (len(completion.tokens),)):
            here = slice(begin, begin + num)
            if index % 2 == 0:
                before = (*trajectory.prompt_tokens.tolist(), *completion.tokens[:begin].tolist())
                trained[_turn(before, completion, here)] += 1
            begin += num
    assert trained == Counter(_turn(prompt, completion, slice(None)) for prompt, completion in calls)


def _turn(before: tuple[int, ...], completion: Completion, here: slice) -> tuple[object, ...]:
    tokens, logprobs = completion.tokens[here], completion.behaviour_logprobs[here]
    return (before, tuple(tokens.tolist()), logprobs.tobytes(), tuple(completion.versions[here].tolist()))


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens on the engine's thread
        await asyncio.sleep(0.005)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    """Take a turn; append the client's message object, as agents do."""
    answered = await client.chat.completions.create(model="policy", messages=messages, **options)
    messages.append(answered.choices[0].message)
    return answered
