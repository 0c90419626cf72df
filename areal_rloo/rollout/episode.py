"""What an episode is: how one sample of a group becomes trajectories, turn by turn.

    prompt ─► engine ─► completion ─► (a tool, a verifier, a user: their tokens are appended) ─► engine ─► ... ─► reward

An episode runs as a task of the rollout worker's loop and waits for its turns and its reward; many run at a time. The
ids that go to the engine for the next turn are those of the turn before, with what others said behind them: nothing is
tokenized twice, and the ids trained on are the ids that were generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from areal_rloo.errors import EpisodeError
from areal_rloo.rewards.request import Purpose, RewardRequest, Scored
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Completion, Item, SampleId, Trajectory


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a leased group: what its episode begins with."""

    sample_id: SampleId
    purpose: Purpose
    item: Item
    prompt_tokens: tuple[int, ...]


class TurnEngine(Protocol):
    """The engine as one episode sees it."""

    async def generate(self, tokens: Sequence[int], *, max_new_tokens: int | None = None) -> Completion:
        """Sample what comes after these tokens, as the run (or the evaluation set) says.

        Raises:
            EpisodeError: there is no room for another token.
            EngineError: the engine is gone; the end of the worker, not of the sample.
        """

    @property
    def max_new_tokens(self) -> int:
        """Tokens a whole completion may have, all turns together."""


class Rewards(Protocol):
    """What completions are worth."""

    async def score(self, request: RewardRequest) -> Scored:
        """The reward of one completion.

        Raises:
            RewardError: there is none; says why.
        """


class Episode(Protocol):
    """One object serves all samples of a worker, so it keeps nothing between them.

    An episode of your own is a class, named in `rollout.episode.type` as `module:Class` or `path/to/file.py:Class`, and
    made with the run's config. One that serves or holds something is an async context manager too: it is entered before
    the worker's first sample, and left after its last.
    """

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        """Everything the sample gives, at least one trajectory, all of them with the sample's reward.

        What it raises drops the sample with a reason, and no other.
        """


class Conversation:
    """One trajectory as it grows."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self._prompt = tuple(prompt_tokens)
        self._completions: list[Completion] = []
        self._others: list[tuple[int, ...]] = []  # what was said after each of the completions

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids so far: what the engine is to go on from."""
        return (*self._prompt, *self._completion_tokens())

    @property
    def num_completion_tokens(self) -> int:
        """After the prompt, whoever wrote them."""
        return len(self._completion_tokens())

    @property
    def last(self) -> Completion:
        """The policy's last turn."""
        return self._completions[-1]

    async def take_turn(self, engine: TurnEngine) -> None:
        """The policy's next turn, in what is left of the tokens of all."""
        left = engine.max_new_tokens - self.num_completion_tokens
        self.add(await engine.generate(self.tokens, max_new_tokens=left))

    def reply(self, tokens: Sequence[int], engine: TurnEngine) -> bool:
        """What others say to the policy's turn; False, and nothing is said, where no room for another would be left."""
        if self.num_completion_tokens + len(tokens) >= engine.max_new_tokens:
            return False
        self.add_others(tokens)
        return True

    def add(self, completion: Completion) -> None:
        """The policy's turn."""
        assert len(self._others) == len(self._completions), "two turns of the policy with nothing between them"
        self._completions.append(completion)

    def add_others(self, tokens: Sequence[int]) -> None:
        """What a tool or a user says to the policy's turn; never trained on."""
        assert len(self._others) == len(self._completions) - 1, "somebody else speaks after a turn of the policy"
        assert len(tokens) > 0, "somebody else says something"
        self._others.append(tuple(tokens))

    def request(self, sample: Sample, chat: ChatFormat) -> RewardRequest:
        """What a reward is asked about it."""
        turns = tuple(chat.text(completion.tokens.tolist()) for completion in self._completions)
        return RewardRequest(
            purpose=sample.purpose,
            item=sample.item,
            completion=turns[-1],
            turns=turns,
            prompt_ids=self._prompt,
            completion_ids=self._completion_tokens(),
            finish_reason=self.last.finish_reason,
        )

    def trajectory(self, sample: Sample, scored: Scored) -> Trajectory:
        """It, with the reward of its sample."""
        return Trajectory(
            *sample.sample_id,
            np.array(self._prompt, dtype=np.int32),
            self._joined(),
            scored.reward,
            scored.parts,
            self._token_rewards(scored),
            scored.answer,
        )

    def _completion_tokens(self) -> tuple[int, ...]:
        tokens: list[int] = []
        for index, completion in enumerate(self._completions):
            tokens += completion.tokens.tolist()
            tokens += self._others[index] if index < len(self._others) else ()
        return tuple(tokens)

    def _joined(self) -> Completion:
        """One completion of all turns. What stands behind the last one is left out: nothing came of it."""
        if len(self._completions) == 1:
            return self.last
        tokens, logprobs, versions, spans = [], [], [], []
        for index, completion in enumerate(self._completions):
            tokens.append(completion.tokens)
            logprobs.append(completion.behaviour_logprobs)
            versions.append(completion.versions)
            spans.append(len(completion.tokens))
            if index < len(self._completions) - 1:
                others = np.array(self._others[index], dtype=np.int32)
                tokens.append(others)
                logprobs.append(np.zeros(len(others), dtype=np.float32))
                versions.append(np.full(len(others), completion.versions[-1], dtype=np.int32))
                spans.append(len(others))
        return Completion(
            np.concatenate(tokens),
            np.concatenate(logprobs),
            np.concatenate(versions),
            self.last.finish_reason,
            tuple(spans),
        )

    def _token_rewards(self, scored: Scored) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
        if scored.token_rewards is None and scored.turn_rewards is None:
            return None
        num_tokens = len(self._joined().tokens)
        rewards = np.zeros(num_tokens, dtype=np.float32)
        if scored.token_rewards is not None:
            _check_number("token_rewards", len(scored.token_rewards), num_tokens, "completion tokens")
            rewards += np.array(scored.token_rewards, dtype=np.float32)
        if scored.turn_rewards is not None:
            _check_number("turn_rewards", len(scored.turn_rewards), len(self._completions), "turns")
            end = 0
            for index, (reward, completion) in enumerate(zip(scored.turn_rewards, self._completions, strict=True)):
                end += len(completion.tokens)
                rewards[end - 1] += reward
                end += len(self._others[index]) if index < len(self._completions) - 1 else 0
        return rewards


class SingleTurn:
    """A prompt, a completion, its reward."""

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        conversation = Conversation(sample.prompt_tokens)
        conversation.add(await engine.generate(sample.prompt_tokens))
        return [conversation.trajectory(sample, await rewards.score(conversation.request(sample, chat)))]


def _check_number(what: str, num: int, expected: int, of_what: str) -> None:
    if num != expected:
        raise EpisodeError("reward_wrong_type", f"{what}: expected one for each of the {expected} {of_what}, got {num}")
