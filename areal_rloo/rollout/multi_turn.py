"""The episodes of several turns: `MultiTurn` retries until a verifier is satisfied, `ToolUse` runs the policy's calls.

    completion with <tool_call>{"name": "calculator", "arguments": {"expression": "3+5"}}</tool_call>
        ─► the tool, with its own limits ─► <tool_response>8</tool_response> ─► the policy's next turn

Calls have the format of Hermes, which Qwen and other models write. A call that cannot be read, and a call of an unknown
tool, get an error message as the result, so the policy can correct the call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import msgspec

from areal_rloo.config import Config
from areal_rloo.rewards.request import Scored
from areal_rloo.rollout.episode import Conversation, Rewards, Sample, TurnEngine
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.tools import make_tools
from areal_rloo.telemetry.trace import sample_span
from areal_rloo.trajectory import Message, Trajectory
from areal_rloo.waiting import cancel

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_ROUNDING = 1e-9  # rounding error of a weighted sum of reward parts


class MultiTurn:
    """The policy tries again until a verifier, the source's reward, is satisfied.

    The sample's reward is the reward of the last turn. In training each earlier turn multiplies the reward by
    `turn_discount`; an evaluation only measures if the last turn is right.
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


class ToolUse:
    """The policy calls tools; the first turn without a call is the answer."""

    def __init__(self, config: Config) -> None:
        self._settings = config.rollout.episode
        self._tools = make_tools(self._settings)

    async def run(self, sample: Sample, engine: TurnEngine, rewards: Rewards, chat: ChatFormat) -> Sequence[Trajectory]:
        conversation = Conversation(sample.prompt_tokens)
        for turn in range(self._settings.max_turns):
            await conversation.take_turn(engine)
            calls = tool_calls(chat.text(conversation.last.tokens.tolist()))
            if not calls or turn + 1 == self._settings.max_turns or conversation.last.finish_reason != "stop":
                break
            messages = [Message("tool", result) for result in await self._results(calls)]
            said = chat.between(messages, last_token=int(conversation.last.tokens[-1]))
            if not conversation.reply(said, engine):
                break
        return [conversation.trajectory(sample, await rewards.score(conversation.request(sample, chat)))]

    async def _results(self, calls: Sequence[str]) -> list[str]:
        """Call tools in parallel; the first failure cancels the others."""
        results = [asyncio.create_task(self._call(call), name="call of a tool") for call in calls]
        try:
            return await asyncio.gather(*results)
        finally:
            await cancel(results)

    async def _call(self, text: str) -> str:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"error: the call is not valid JSON: {error}"
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
            return 'error: expected {"name": "...", "arguments": {...}}'
        tool = self._tools.get(str(call.get("name")))
        if tool is None:
            named = ascii(str(call.get("name"))[:40])  # the policy may write any name
            return f"error: there is no tool {named}; there are {', '.join(self._tools)}"
        with sample_span("tool", tool=str(call["name"])):
            return await tool.call(call.get("arguments", {}))


def tool_calls(text: str) -> list[str]:
    """Return the text between each pair of marks, in order; a call without its closing mark is left out."""
    closed = text.split(_CLOSES)[:-1]
    return [call.strip() for _, mark, call in (part.partition(_OPENS) for part in closed) if mark]
