"""Episodes: the contract, a conversation as it grows, the episode of a single turn, and the engine of an episode.

    prompt ─► engine ─► completion ─► (tokens of a tool, a verifier or a user are appended) ─► engine ─► ... ─► reward

Input: a sample. Output: trajectories. An episode runs as a task on the rollout worker's event loop and waits for its
turns and its reward; many episodes run at a time. The ids of previous turns and of the others' messages begin the next
request, so nothing is tokenized twice, and training uses exactly the generated ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from areal_rloo.engines.base import Engine, GenerationRequest, SamplingParameters, integers
from areal_rloo.errors import EngineError, EpisodeError, SampleError, UserError
from areal_rloo.rewards.request import RewardRequest, Scored
from areal_rloo.rollout.partial import Journal
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.telemetry.trace import sample_span
from areal_rloo.trajectory import Completion, Item, Purpose, SampleId, Trajectory

_SEED_STEP = 0x9E3779B97F4A7C15  # odd: all turns of a sample, and turns of other samples, get different seeds


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a leased group: the input of an episode."""

    sample_id: SampleId
    purpose: Purpose
    item: Item
    prompt_tokens: tuple[int, ...]


class TurnEngine(Protocol):
    """The engine as one episode sees it."""

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Completion:
        """Sample a completion of these tokens with the sampling options of the run (or of the evaluation set).

        Raises:
            SampleError: a token is no id of the vocabulary, or the context has no room for another token.
            EngineError: the engine is gone; this ends the worker, not only the sample.
        """

    @property
    def max_new_tokens(self) -> int:
        """Limit of tokens after the prompt, all turns together."""


class Rewards(Protocol):
    """Scores completions."""

    async def score(self, request: RewardRequest) -> Scored:
        """Compute the reward of a completion.

        Raises:
            RewardError: the completion has no reward; says why.
        """


class Episode(Protocol):
    """Turns samples into trajectories. One object serves all samples of a worker, so it must keep no state of a sample.

    To use your own episode, name a class in `rollout.episode.type` as `module:Class` or `path/to/file.py:Class`. The
    class is called with the run's config. If the object is also an async context manager, the worker enters the object
    before the first sample and exits after the last.
    """

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        """Return the trajectories of a sample: at least one, all with the sample's reward.

        An exception drops this sample with a reason, and no other sample.
        """


class Conversation:
    """One trajectory as it grows: turns of the policy, and between them the tokens of others."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self._prompt = tuple(prompt_tokens)
        self._parts: list[Completion] = []  # in turn: a turn of the policy, tokens of others

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids so far, which the engine continues."""
        return (*self._prompt, *self._completion_tokens)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens after the prompt, of the policy and of others."""
        return sum(len(part.tokens) for part in self._parts)

    @property
    def last(self) -> Completion:
        """The policy's last turn."""
        return self._turns[-1]

    async def take_turn(self, engine: TurnEngine) -> None:
        """Generate the policy's next turn within the remaining tokens."""
        left = engine.max_new_tokens - self.num_completion_tokens
        self.add(await engine.generate(self.tokens, max_new_tokens=left))

    def reply(self, tokens: Sequence[int], engine: TurnEngine) -> bool:
        """Append tokens of others; if they leave no room for another turn, append nothing and return False."""
        if self.num_completion_tokens + len(tokens) >= engine.max_new_tokens:
            return False
        self.add_others(tokens)
        return True

    def add(self, completion: Completion) -> None:
        """Append a turn of the policy."""
        assert len(self._parts) % 2 == 0, "two turns of the policy need tokens of others between them"
        self._parts.append(completion)

    def add_others(self, tokens: Sequence[int]) -> None:
        """Append tokens of a tool or a user; they are never trained on."""
        assert len(self._parts) % 2 == 1, "tokens of others follow a turn of the policy"
        assert len(tokens) > 0, "tokens of others are not empty"
        logprobs = np.zeros(len(tokens), dtype=np.float32)
        versions = np.full(len(tokens), self.last.versions[-1], dtype=np.int32)
        self._parts.append(Completion(np.array(tokens, dtype=np.int32), logprobs, versions, self.last.finish_reason))

    def request(self, sample: Sample, chat: ChatFormat) -> RewardRequest:
        """Make the reward request for this conversation."""
        turns = tuple(chat.text(completion.tokens.tolist()) for completion in self._turns)
        return RewardRequest(
            purpose=sample.purpose,
            item=sample.item,
            completion=turns[-1],
            turns=turns,
            prompt_ids=self._prompt,
            completion_ids=self._completion_tokens,
            finish_reason=self.last.finish_reason,
        )

    def trajectory(self, sample: Sample, scored: Scored) -> Trajectory:
        """Make the trajectory, with the reward of the sample."""
        return Trajectory(
            *sample.sample_id,
            np.array(self._prompt, dtype=np.int32),
            self._joined(),
            scored.reward,
            scored.parts,
            self._token_rewards(scored),
            scored.answer,
        )

    @property
    def _turns(self) -> list[Completion]:
        return self._parts[::2]

    @property
    def _completion_tokens(self) -> tuple[int, ...]:
        return tuple(token for part in self._parts for token in part.tokens.tolist())

    def _answered(self) -> list[Completion]:
        """Return all parts without the tokens after the last turn, which the policy never answered."""
        return self._parts[: 2 * len(self._turns) - 1]

    def _joined(self) -> Completion:
        parts = self._answered()
        if len(parts) == 1:
            return self.last
        return Completion(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.behaviour_logprobs for part in parts]),
            np.concatenate([part.versions for part in parts]),
            self.last.finish_reason,
            tuple(len(part.tokens) for part in parts),
        )

    def _token_rewards(self, scored: Scored) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
        if scored.token_rewards is None and scored.turn_rewards is None:
            return None
        ends = np.cumsum([len(part.tokens) for part in self._answered()])
        rewards = np.zeros(ends[-1], dtype=np.float32)
        if scored.token_rewards is not None:
            _check_length("token_rewards", len(scored.token_rewards), len(rewards), "completion tokens")
            rewards += np.array(scored.token_rewards, dtype=np.float32)
        if scored.turn_rewards is not None:
            _check_length("turn_rewards", len(scored.turn_rewards), len(self._turns), "turns")
            rewards[ends[::2] - 1] += np.array(scored.turn_rewards, dtype=np.float32)  # at the last token of each turn
        return rewards


class SingleTurn:
    """The episode of one prompt, one completion, and its reward."""

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        conversation = Conversation(sample.prompt_tokens)
        conversation.add(await engine.generate(sample.prompt_tokens))
        return [conversation.trajectory(sample, await rewards.score(conversation.request(sample, chat)))]


class Submitter:
    """Submits the requests of all episodes to an engine. Make and use it on one event loop.

    Requests of one iteration of the loop go to the engine together, so the samples of a group share a prefill.
    """

    def __init__(self, engine: Engine, *, context_tokens: int) -> None:
        self.context_tokens = context_tokens
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._collected: list[tuple[GenerationRequest, asyncio.Future[Future[Completion]]]] = []

    async def complete(self, aborted: list[asyncio.Future[Completion]], request: GenerationRequest) -> Completion:
        """Generate one completion. Cancelling this wait aborts the request: `aborted` gets the future of its tokens.

        Raises:
            EngineError: the engine is gone.
            GenerationError: the engine cannot make this completion, but can make others.
        """
        if not self._collected:
            self._loop.call_soon(self._submit)
        submitted: asyncio.Future[Future[Completion]] = self._loop.create_future()
        self._collected.append((request, submitted))
        made: asyncio.Future[Completion] | None = None
        try:
            made = asyncio.wrap_future(await submitted)
            made.add_done_callback(lambda done: done.cancelled() or done.exception())  # an aborted wait reads no error
            return await asyncio.shield(made)  # the engine ends its future itself
        except asyncio.CancelledError:
            self._engine.abort([request.request_id])
            aborted += [made] if made is not None else []
            raise
        except (SampleError, UserError):
            raise
        except Exception as error:
            raise EngineError(str(error)) from error

    def _submit(self) -> None:
        collected, self._collected = [pair for pair in self._collected if not pair[1].done()], []
        try:
            futures = self._engine.submit([request for request, _ in collected])
            for (_, submitted), future in zip(collected, futures, strict=True):
                submitted.set_result(future)
        except Exception as error:  # noqa: BLE001 - raised again by `complete`; here nothing could catch the error
            for submitted in (submitted for _, submitted in collected if not submitted.done()):
                submitted.set_exception(error)


@dataclass(slots=True, kw_only=True)
class SampleEngine:
    """The engine as the episode of one sample sees it; implements `TurnEngine`."""

    submitter: Submitter
    name: str  # unique: another lease of the same sample has another name
    sampling: SamplingParameters
    min_version: int = 0
    pinned: bool = False
    max_turn_tokens: int | None = None
    journal: Journal = field(default_factory=Journal)
    num_turns: int = 0

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.max_new_tokens

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Completion:
        limits = [limit for limit in (self.max_new_tokens, self.max_turn_tokens, max_new_tokens) if limit is not None]
        room = min(self.submitter.context_tokens - len(tokens), *integers("max_new_tokens", limits))
        if room < 1:
            raise EpisodeError("context_full", f"{len(tokens)} tokens leave no room for another")
        turn, seed, least = self.num_turns, self.sampling.seed, min(self.sampling.min_new_tokens, room)
        self.num_turns += 1
        seed = None if seed is None else seed ^ (turn * _SEED_STEP)
        sampling = msgspec.structs.replace(self.sampling, max_new_tokens=room, min_new_tokens=least, seed=seed)
        name, ids = f"{self.name}/{turn}", integers("tokens", tokens)
        request = GenerationRequest(name, ids, sampling, min_version=self.min_version, pinned=self.pinned)
        with sample_span("generate", self.name, prompt_tokens=len(tokens)) as details:
            made = await self.journal.continued(request, partial(self.submitter.complete, self.journal.aborted))
            details["tokens"], details["last_version"] = len(made.tokens), made.versions[-1:].tolist()
        return made


def _check_length(name: str, num: int, expected: int, noun: str) -> None:
    if num != expected:
        told = f"{name}: expected one number for each of the {expected} {noun}, got {num}"
        raise EpisodeError("reward_wrong_type", told)
