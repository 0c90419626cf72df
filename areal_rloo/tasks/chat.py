"""Encode messages, and the text between two turns, as token ids: by the tokenizer's chat template, or as plain text.

Tokens of the policy are never tokenized again. A conversation continues with the ids of the engine, and only the text
between two turns of the policy is encoded.

    prompt ids ─► the policy's ids ─► `between` (end of turn, tool or user message, start of turn) ─► the policy's ids
"""

from __future__ import annotations

import copy
import heapq
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from areal_rloo.config import Config, DataConfig
from areal_rloo.errors import DataError, first_line
from areal_rloo.tasks.base import Item, LazyItems, Message
from areal_rloo.tasks.tools import tool_schemas
from areal_rloo.trajectory import ToolCall
from areal_rloo.waiting import on_daemon_thread

if TYPE_CHECKING:
    from areal_rloo.tasks.loading import Source

ToolSchema = Mapping[str, Any]
"""A function in OpenAI's format: {"type": "function", "function": {name, description, parameters}}."""

_MARK = "areal-rloo-completion"  # placeholder for a completion while the template renders the text around it
_MOST_CHARACTERS = 2**24  # of a conversation: more than any context
_LOOKED_AT = 256  # of the longest texts of a source: the longest prompt in tokens is one of them
_PROBE_S = 10.0  # for a template to render a few words, which takes milliseconds
_PROBE = (Message("user", "1+1=?"), Message("assistant", "2"), Message("user", "2+2=?"))
_PLAIN_TOOLS = """You can call:
{functions}
by ending with <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>
"""


def chat_format(tokenizer: Any, config: Config) -> ChatFormat:
    """Make the format of a run, with the tools of the episode of each source.

    Raises:
        DataError: as `ChatFormat`.
    """
    tools_of = {label: tool_schemas(episode) for label, episode in config.episodes.items()}
    return ChatFormat(tokenizer, config.data, tools=tool_schemas(config.rollout.episode), tools_of=tools_of)


class ChatFormat:
    """The format of prompts and of the text between turns, for a model."""

    def __init__(
        self,
        tokenizer: Any,
        data: DataConfig,
        *,
        tools: Sequence[ToolSchema] = (),
        tools_of: Mapping[str, Sequence[ToolSchema]] | None = None,
    ) -> None:
        """Take a transformers tokenizer, and the functions that the policy may call: for all sources, or for some.

        Raises:
            DataError: the tokenizer lacks the requested template; or the template refuses tool results or does not end;
                or the template of the config writes no chat.
        """
        self._own_template = data.chat_template if isinstance(data.chat_template, str) else None
        self._template = "the model's template" if self._own_template is None else "the template"
        has_template = self._own_template is not None or tokenizer.chat_template is not None
        if data.chat_template and not has_template:
            raise DataError("data.chat_template: true, but the model's tokenizer has no chat template; set it to null")
        self._tokenizer = tokenizer
        self._system_prompt = data.system_prompt
        self._tools = list(tools)
        self._tools_of = {label: list(own) for label, own in (tools_of or {}).items()}
        self.uses_template = has_template if data.chat_template is None else bool(data.chat_template)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        if self.uses_template:
            self._check_that_template_ends()
        if any((self._tools, *self._tools_of.values())):  # find a template without tool results before the first turn
            self.between([Message("tool", "0")], last_token=int(tokenizer.eos_token_id))

    def prompt(self, item: Item) -> tuple[int, ...]:
        """Encode the prompt of an item, up to the policy's turn."""
        return self.conversation(item.messages, self._tools_of.get(item.source, self._tools))

    def of_source(self, label: str) -> ChatFormat:
        """Return the format with the functions of a source."""
        if label not in self._tools_of:
            return self
        made = copy.copy(self)
        made._tools = self._tools_of[label]
        return made

    def conversation(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> tuple[int, ...]:
        """Encode messages, after the configured system prompt, up to the policy's turn."""
        if self._system_prompt and not (messages and messages[0].role == "system"):
            messages = (Message("system", self._system_prompt), *messages)
        text = self._rendered(messages, tools) if self.uses_template else _plain(messages, tools)
        return tuple(self._tokenizer.encode(text, add_special_tokens=not self.uses_template))

    def between(self, messages: Sequence[Message], *, last_token: int) -> tuple[int, ...]:
        """Encode the text between a completion and the policy's next turn.

        Args:
            messages: of a tool or a user.
            last_token: of the completion. If this token ends the turn, the end of turn is not encoded again.
        """
        if self.uses_template:
            stand_ins = (Message("user", "."), Message("assistant", _MARK))
            text = self._rendered((*stand_ins, *messages), self._tools).partition(_MARK)[2]
            if last_token in self._special_ids:  # a truncated turn has no end token yet
                text = text.removeprefix(str(self._tokenizer.decode([last_token])))
        else:
            text = "\n" + "".join(_plain_message(message) for message in messages)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def encode(self, text: str, *, end: bool = False) -> list[int]:
        """Encode a text as if the policy wrote the text; `end` adds the end-of-turn token."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, int(self._tokenizer.eos_token_id)] if end else list(ids)

    def turn(self, message: Message) -> list[int]:
        """Encode a message of the assistant as if the policy wrote the message, with calls and the end of turn."""
        return self.encode(_with_calls(message), end=True)

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens without special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Decode each token separately, with special tokens."""
        return [str(self._tokenizer.decode([token])) for token in tokens]

    def _rendered(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        conversation = [_for_template(message) for message in messages]
        try:
            options = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": True}
            own = {} if self._own_template is None else {"chat_template": self._own_template}
            text = str(self._tokenizer.apply_chat_template(conversation, **options, **own))
        except Exception as error:  # a template is a program of the model
            roles = ", ".join(message.role for message in messages)
            refusal = f"{self._template} refuses the roles {roles}: {first_line(error)}"
            raise DataError(f"data.chat_template: {refusal}; set it to false for plain prompts") from error
        if len(text) > _MOST_CHARACTERS:
            size = f"{self._template} makes {len(text)} characters of {len(messages)} messages"
            raise DataError(f"data.chat_template: {size}, expected at most {_MOST_CHARACTERS}; set it to false")
        return text

    def _check_that_template_ends(self) -> None:
        """Render a few words. A template is a program, and later renderings have no deadline."""
        probe = on_daemon_thread(lambda: self._rendered(_PROBE, self._tools), name="probe of the chat template")
        if not wait([probe], _PROBE_S).done:
            refusal = f"{self._template} did not render three short messages within {_PROBE_S:g} s"
            raise DataError(f"data.chat_template: {refusal}; set it to false for plain prompts")
        if self._own_template is not None and any(said.content not in probe.result() for said in _PROBE):
            refusal = f"expected a template that writes every message, got {probe.result()[:200]!r} for a short chat"
            raise DataError(f"data.chat_template: {refusal}; correct the template")


def _plain(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
    """Write messages without a template: the system prompt on its own line, an empty line after each example."""
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
    """Write `name(argument, ...): description`, a short form for models without a tool template."""
    arguments = function.get("parameters", {}).get("properties", {})
    description = function.get("description")
    return f"{function['name']}({', '.join(arguments)})" + (f": {description}" if description else "")


def _plain_message(message: Message) -> str:
    if message.role == "tool":
        return f"<tool_response>{message.content}</tool_response>\n"
    return f"{_with_calls(message)}\n"


def _with_calls(message: Message) -> str:
    """Write a message's content, then the calls in the format of the policy."""
    calls = [
        f"<tool_call>{json.dumps({'name': call.name, 'arguments': _arguments(call)})}</tool_call>"
        for call in message.tool_calls
    ]
    return "\n".join([message.content, *calls] if message.content else calls)


def _for_template(message: Message) -> dict[str, Any]:
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
    """Decode the JSON arguments, because templates encode them again; keep invalid JSON as text."""
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments


class Tokenizer:
    """Turns an item into prompt tokens, within `data.max_prompt_tokens`."""

    def __init__(self, chat: ChatFormat, data: DataConfig) -> None:
        self._chat = chat
        self._data = data
        self.num_truncated = 0  # prompts truncated so far

    def checked(self, sources: list[Source]) -> list[Source]:
        """Return the sources if their longest texts fit: an error at the start, not in the middle of the run.

        Items that are made one by one are not looked at.

        Raises:
            DataError: a prompt is too long under `data.overlong_prompts: error`; names the prompt.
        """
        known = [source.items for source in sources if not isinstance(source.items, LazyItems)]
        for items in known if self._data.overlong_prompts == "error" else ():
            for number, item in heapq.nlargest(_LOOKED_AT, enumerate(items, start=1), key=lambda one: len(one[1].text)):
                self(item, number)
        return sources

    def __call__(self, item: Item, number: int) -> tuple[int, ...] | None:
        """Return the token ids of the prompt; None for a prompt to leave out. `number`: of the item in its source.

        Raises:
            DataError: the prompt is too long under `data.overlong_prompts: error`; names the prompt.
        """
        tokens, most = self._chat.prompt(item), self._data.max_prompt_tokens
        if len(tokens) <= most:
            return tokens
        match self._data.overlong_prompts:
            case "filter":
                return None
            case "error":
                raise DataError(
                    f"data.max_prompt_tokens: expected at most {most}, got {len(tokens)} tokens for item {number} of "
                    f"the source '{item.source}', with the prompt {item.text[:60]!r}; raise it, or set "
                    "data.overlong_prompts to filter or truncate_left"
                )
            case side:
                self.num_truncated += 1
                return tuple(tokens[index] for index in kept(len(tokens), most, side))


def kept(num: int, most: int, rule: str) -> list[int]:
    """Return the places of the tokens that stay of `num`, under a rule of `data.overlong_prompts` that truncates."""
    first = {"truncate_left": 0, "truncate_middle": most // 2, "truncate_right": most}[rule]
    return [*range(first), *range(num - most + first, num)]
