"""The JSON of the chat endpoint, in the format of OpenAI's API: reads and checks requests, writes turns.

    body ─► ChatRequest (messages converted, options checked) ─► ... ─► Turn ─► completion object, or a stream of chunks

Pure functions, used by the server on the worker's event loop. An option is obeyed or refused, with one exception:
options of the sampling distribution are ignored. The learner assumes that tokens are sampled as `rollout.sampling`
says, so an agent that asks for another temperature gets the temperature of the run.
"""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from areal_rloo.config import SamplingConfig
from areal_rloo.decoding import from_json
from areal_rloo.errors import DecodeError
from areal_rloo.rollout.multi_turn import tool_calls
from areal_rloo.trajectory import Completion, Message, ToolCall

_MARK = "<tool_call>"
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class ApiError(Exception):
    """A refused request, in the format that OpenAI's clients read."""

    def __init__(self, status: int, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.code, "param": None}}


class _TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct, kw_only=True):
    """A request's body. Other fields belong to services that a run does not have; they are ignored."""

    messages: list[_Message]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    logit_bias: dict[str, float] | None = None
    functions: list[Any] | None = None

    @property
    def limit(self) -> int | None:
        """The requested limit of tokens."""
        limits = (self.max_tokens, self.max_completion_tokens)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The messages in a canonical form: equal messages compare equal, however a client writes them."""
        return tuple(_message(message) for message in self.messages)

    def other_sampling(self, sampling: SamplingConfig) -> dict[str, Any]:
        """Return the sampling options that differ from the run's."""
        runs = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        neutral: dict[str, Any] = {**runs, "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": None}
        return {key: getattr(self, key) for key, value in neutral.items() if getattr(self, key) not in (None, value)}


@dataclass(frozen=True, slots=True)
class Turn:
    """The policy's answer to a request: the tokens, the message made of them, and the text of each token."""

    num_prompt_tokens: int
    completion: Completion
    message: Message
    pieces: list[str]

    @property
    def finish_reason(self) -> str:
        if self.completion.finish_reason != "stop":
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"

    @property
    def usage(self) -> dict[str, int]:
        prompt, num = self.num_prompt_tokens, len(self.completion.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": num, "total_tokens": prompt + num}


def read_request(body: bytes) -> ChatRequest:
    """Read and check a request.

    Raises:
        ApiError: a field is missing, has a wrong type, or asks for something impossible; names the field.
    """
    request = read_json(body, ChatRequest)
    _check_messages(request)
    form = request.response_format or {"type": "text"}
    # field, value, true if the value is refused, the expected value
    options: tuple[tuple[str, object, object, str], ...] = (
        ("max_tokens", request.limit, request.limit is not None and request.limit < 1, "1 or more"),
        ("n", request.n, request.n not in (None, 1), "1; send another request for another completion"),
        ("tool_choice", request.tool_choice, request.tool_choice not in (None, "auto", "none"), "auto or none"),
        ("top_logprobs", request.top_logprobs, request.top_logprobs, "0; other tokens' logprobs are unknown"),
        ("stop", request.stop, request.stop, "none; let the agent cut the content"),
        ("response_format", form, form.get("type") != "text", "text; the policy's output is not constrained"),
        ("logit_bias", request.logit_bias, request.logit_bias, "none; the learner does not know a bias"),
        ("functions", request.functions, request.functions, "none; name them in tools"),
    )
    for field, value, refused, expected in options:
        if refused:
            raise _wrong(field, expected, value)
    return request


def read_json(body: bytes, kind: type[_Struct]) -> _Struct:
    """Decode a body as a struct.

    Raises:
        ApiError: the body is no JSON, or has another structure; names the field.
    """
    try:
        return from_json(body, kind)
    except DecodeError as error:
        raise ApiError(400, f"the request's body: {error}", code="invalid_value") from error


def assistant_message(text: str, request: ChatRequest) -> Message:
    """Make a message of the policy's text. If one call cannot be read, the whole text becomes the content."""
    calls = _calls(text) if request.tools and request.tool_choice != "none" else ()
    if not calls:
        return Message("assistant", text)
    return Message("assistant", text.partition(_MARK)[0].strip(), calls)


def completion_object(turn: Turn, request: ChatRequest) -> dict[str, Any]:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "refusal": None, **_told(turn.message)},
        "finish_reason": turn.finish_reason,
        "logprobs": _logprobs(turn) if request.logprobs else None,
    }
    return {**_head("chat.completion", request), "choices": [choice], "usage": turn.usage}


def completion_chunks(turn: Turn, request: ChatRequest) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream: the whole message, then the finish reason, then the usage if requested."""
    head = _head("chat.completion.chunk", request)
    told = _told(turn.message)
    if "tool_calls" in told:
        told["tool_calls"] = [{"index": index, **call} for index, call in enumerate(told["tool_calls"])]
    logprobs = _logprobs(turn) if request.logprobs else None
    delta = {"role": "assistant", **told}
    yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish_reason, "logprobs": None}]}
    if request.stream_options is not None and request.stream_options.include_usage:
        yield {**head, "choices": [], "usage": turn.usage}


def _check_messages(request: ChatRequest) -> None:
    if not request.messages:
        raise _wrong("messages", "at least one", [])
    for index, message in enumerate(request.messages):
        if message.tool_calls and message.role != "assistant":
            raise _wrong(f"messages[{index}].tool_calls", "tool calls only in an assistant's message", message.role)
    for index, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise _wrong(f"tools[{index}]", '{"type": "function", "function": {"name": ...}}', tool)
        parameters = function.get("parameters", {})
        if not isinstance(parameters, dict) or not isinstance(parameters.get("properties", {}), dict):
            raise _wrong(f"tools[{index}].function.parameters", "a JSON schema of an object", parameters)


def _message(message: _Message) -> Message:
    content = message.content or ""
    return Message(
        "system" if message.role == "developer" else message.role,
        content if isinstance(content, str) else "".join(part.text for part in content),
        tuple(ToolCall(c.id, c.function.name, _canonical(c.function.arguments)) for c in message.tool_calls or ()),
        message.tool_call_id,
        message.name,
    )


def _calls(text: str) -> tuple[ToolCall, ...]:
    calls = []
    for written in tool_calls(text):
        try:
            call = json.loads(written)
        except (ValueError, RecursionError):
            return ()
        if not isinstance(call, dict):
            return ()
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(arguments, dict) or not isinstance(name, str) or not name.isprintable():
            return ()
        calls.append(ToolCall(f"call_{secrets.token_hex(12)}", name, json.dumps(arguments, sort_keys=True)))
    return tuple(calls)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _told(message: Message) -> dict[str, Any]:
    if not message.tool_calls:
        return {"content": message.content}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {"content": message.content or None, "tool_calls": calls}


def _logprobs(turn: Turn) -> dict[str, Any]:
    """Write the logprobs of every sampled token, the stop token included."""
    pairs = zip(turn.pieces, turn.completion.behaviour_logprobs.tolist(), strict=True)
    tokens = [{"token": piece, "logprob": logprob, "bytes": None, "top_logprobs": []} for piece, logprob in pairs]
    return {"content": tokens, "refusal": None}


def _head(kind: str, request: ChatRequest) -> dict[str, Any]:
    created = int(datetime.datetime.now(datetime.UTC).timestamp())
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": created, "model": request.model}


def _wrong(field: str, expected: str, got: object) -> ApiError:
    return ApiError(400, f"{field}: expected {expected}; got {got!r:.200}", code="invalid_value")
