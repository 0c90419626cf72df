"""The episodes that come with the package, and how a run's is made from its config."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from areal_rloo.config import Config, import_function
from areal_rloo.errors import ConfigError
from areal_rloo.rewards.request import Scored
from areal_rloo.rollout.agent import Agent
from areal_rloo.rollout.episode import Conversation, Episode, Rewards, Sample, SingleTurn, TurnEngine
from areal_rloo.rollout.tool_use import ToolUse
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.trajectory import Message, Trajectory


def make_episode(config: Config) -> Episode:
    """The episode of `rollout.episode`.

    Raises:
        ConfigError: it is an import path, and cannot be imported or called with the config.
    """
    settings = config.rollout.episode
    match settings.type:
        case "single_turn":
            return SingleTurn()
        case "multi_turn":
            return MultiTurn(config)
        case "tool_use":
            return ToolUse(config)
        case "agent":
            return Agent(config)
        case path:
            made = import_function("rollout.episode.type", path)
            try:
                episode: Episode = made(config)
            except Exception as error:
                raise ConfigError(
                    f"rollout.episode.type: {path} cannot be made from the config: {type(error).__name__}: {error}"
                ) from error
            return episode


def serving(episode: Episode) -> AbstractAsyncContextManager[object]:
    """What is around all the samples of a worker: the episode itself where it is a context manager, else nothing."""
    return episode if isinstance(episode, AbstractAsyncContextManager) else contextlib.nullcontext()


_ROUNDING = 1e-9  # by which a weighted sum of parts may miss what it should be


class MultiTurn:
    """The policy tries again while a verifier says that it is wrong.

    The verifier is the source's reward. The sample's reward is that of the last turn, in training times `turn_discount`
    for each turn before it; an evaluation wants to know whether it was right.
    """

    def __init__(self, config: Config) -> None:
        self._settings = config.rollout.episode
        self._feedback = (Message("user", self._settings.feedback),)

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        conversation = Conversation(sample.prompt_tokens)
        for turn in range(self._settings.max_turns):
            await conversation.take_turn(engine)
            scored = await rewards.score(conversation.request(sample, chat))
            if turn + 1 == self._settings.max_turns or self._ends(conversation, scored):
                break
            said = chat.between(self._feedback, last_token=int(conversation.last.tokens[-1]))
            if not conversation.reply(said, engine):
                break
        discount = self._settings.turn_discount**turn if sample.purpose == "train" else 1.0
        return [conversation.trajectory(sample, msgspec.structs.replace(scored, reward=scored.reward * discount))]

    def _ends(self, conversation: Conversation, scored: Scored) -> bool:
        return scored.reward >= self._settings.success_reward - _ROUNDING or conversation.last.finish_reason != "stop"
