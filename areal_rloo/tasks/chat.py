"""From messages to token ids, and from one turn to the next: through the tokenizer's chat template, or as plain text.

What the policy wrote is never tokenized again: a conversation goes on with the ids that the engine saw, and only the
text between two of the policy's turns is encoded.

    prompt ids ─► the policy's ids ─► `between` (end of turn, tool or user message, start of turn) ─► the policy's ids
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from areal_rloo.config import DataConfig
from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Item, Message
from areal_rloo.trajectory import ToolCall

ToolSchema = Mapping[str, Any]
"""A function as OpenAI's API describes one: {"type": "function", "function": {name, description, parameters}}."""

_MARK = "areal-rloo-completion"  # stands for a completion while its surroundings are rendered
_PLAIN_TOOLS = """You can call:
{functions}
by ending with <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>
"""


class ChatFormat:
    """How prompts and the text between turns are written for one model."""

    def __init__(self, tokenizer: Any, data: DataConfig, *, tools: Sequence[ToolSchema] = ()) -> None:
        """
        Args:
            tokenizer: of the model; a transformers tokenizer.
            data: whether its chat template is used, and the system prompt.
            tools: the functions that the policy may call.

        Raises:
            DataError: a template is asked for that the tokenizer has not, or it cannot write a tool's result.
        """
        has_template = tokenizer.chat_template is not None
        if data.chat_template and not has_template:
            raise DataError("data.chat_template: true, but the model's tokenizer has no chat template; set it to null")
        self._tokenizer = tokenizer
        self._system_prompt = data.system_prompt
        self._tools = list(tools)
        self.uses_template = has_template if data.chat_template is None else data.chat_template
        self._special_ids = frozenset(tokenizer.all_special_ids)
        if self._tools:  # a template that cannot write a result says so now, and not in the first turn
            self.between([Message("tool", "0")], last_token=int(tokenizer.eos_token_id))

    def prompt(self, item: Item) -> tuple[int, ...]:
        """Token ids of an item's prompt, up to where the policy goes on."""
        return self.conversation(item.messages, self._tools)

    def conversation(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Token ids of messages, up to where the policy goes on; the configured system prompt comes before them."""
        if self._system_prompt and not (messages and messages[0].role == "system"):
            messages = (Message("system", self._system_prompt), *messages)
        text = self._rendered(messages, tools) if self.uses_template else _plain(messages, tools)
        return tuple(self._tokenizer.encode(text, add_special_tokens=not self.uses_template))

    def between(self, messages: Sequence[Message], *, last_token: int) -> tuple[int, ...]:
        """Token ids from the end of a completion to where the policy goes on after these messages.

        Args:
            messages: what a tool or a user says.
            last_token: the completion's last token; what closes a turn is not written twice.
        """
        if self.uses_template:
            stand_ins = (Message("user", "."), Message("assistant", _MARK))
            text = self._rendered((*stand_ins, *messages), self._tools).partition(_MARK)[2]
            if last_token in self._special_ids:  # a turn that was cut has no end that could be there twice
                text = text.removeprefix(str(self._tokenizer.decode([last_token])))
        else:
            text = "\n" + "".join(_plain_message(message) for message in messages)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def encode(self, text: str, *, end: bool = False) -> list[int]:
        """Token ids of a text as the policy would write it; `end` adds the token that ends its turn."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, int(self._tokenizer.eos_token_id)] if end else list(ids)

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, special ones left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each token says by itself, special ones too."""
        return [str(self._tokenizer.decode([token])) for token in tokens]

    def _rendered(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        conversation = [_for_template(message) for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    conversation, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
                )
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise DataError(
                f"data.chat_template: the model's template refuses the roles {roles}: {error}; set it to false for "
                "plain prompts"
            ) from error


def _plain(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
    """Messages without a template: a system prompt on a line of its own, examples with an empty line behind them."""
    text = ""
    if tools:
        text = _PLAIN_TOOLS.format(functions="\n".join(_signature(tool["function"]) for tool in tools))
    for message in messages:
        match message.role:
            case "system":
                text += f"{message.content}\n"
            case "assistant":
                text += f"{_with_calls(message)}\n\n"
            case "user":
                text += message.content
            case "tool":
                text += _plain_message(message)
    return text


def _signature(function: Mapping[str, Any]) -> str:
    """`name(argument, ...): what it does`, as short as a model without a template for tools can have it."""
    arguments = function.get("parameters", {}).get("properties", {})
    description = function.get("description")
    return f"{function['name']}({', '.join(arguments)})" + (f": {description}" if description else "")


def _plain_message(message: Message) -> str:
    if message.role == "tool":
        return f"<tool_response>{message.content}</tool_response>\n"
    return f"{_with_calls(message)}\n"


def _with_calls(message: Message) -> str:
    """A message's content, and its calls as the policy writes them."""
    calls = [
        f"<tool_call>{json.dumps({'name': call.name, 'arguments': _arguments(call)})}</tool_call>"
        for call in message.tool_calls
    ]
    return "\n".join([message.content, *calls] if message.content else calls)


def _for_template(message: Message) -> dict[str, Any]:
    """A message as chat templates read one."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        made["name"] = message.name
    return made


def _arguments(call: ToolCall) -> Any:
    """As an object, which templates write as JSON themselves; what is no JSON stays as it is."""
    try:
        return json.loads(call.arguments)
    except ValueError:
        return call.arguments
