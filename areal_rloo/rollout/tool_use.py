"""An episode in which the policy calls tools: its calls are run, and it goes on from what they give.

    completion with <tool_call>{"name": "calculator", "arguments": {"expression": "3+5"}}</tool_call>
        ─► the tool, in its own limits ─► <tool_response>8</tool_response> ─► the policy's next turn

The format is that of Hermes, which Qwen and others write. A call that cannot be read, or of a tool that is not there,
is answered with what is wrong with it, as an error of the tool is: the policy may mend it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from areal_rloo.config import Config
from areal_rloo.rollout.episode import Conversation, Rewards, Sample, TurnEngine
from areal_rloo.tasks.chat import ChatFormat
from areal_rloo.tasks.tools import make_tools
from areal_rloo.trajectory import Message, Trajectory

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"


class ToolUse:
    """The episode; a turn without a call is the answer."""

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
            results = await asyncio.gather(*(self._call(call) for call in calls))
            messages = [Message("tool", result) for result in results]
            said = chat.between(messages, last_token=int(conversation.last.tokens[-1]))
            if not conversation.reply(said, engine):
                break
        return [conversation.trajectory(sample, await rewards.score(conversation.request(sample, chat)))]

    async def _call(self, text: str) -> str:
        try:
            call = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"error: the call is not valid JSON: {error}"
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
            return 'error: expected {"name": "...", "arguments": {...}}'
        tool = self._tools.get(str(call.get("name")))
        if tool is None:
            named = ascii(str(call.get("name"))[:40])  # the policy's, so it may be anything
            return f"error: there is no tool {named}; there are {', '.join(self._tools)}"
        return await tool.call(call.get("arguments", {}))


def tool_calls(text: str) -> list[str]:
    """What stands between each pair of marks, in order; a call that is not closed is none."""
    calls = []
    _, mark, rest = text.partition(_OPENS)
    while mark:
        call, closed, rest = rest.partition(_CLOSES)
        if not closed:
            break
        calls.append(call.strip())
        _, mark, rest = rest.partition(_OPENS)
    return calls
