"""Any body of a chat request is read, or refused with a reason: no other exception, whatever an agent sends."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.chat_endpoint import CHATML

from areal_rloo.config import DataConfig, SamplingConfig
from areal_rloo.errors import DataError
from areal_rloo.models.tiny import make_tiny_tokenizer
from areal_rloo.rollout.chat_api import ApiError, assistant_message, read_request
from areal_rloo.tasks.chat import ChatFormat

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def _object(required: dict[str, Any], optional: dict[str, Any]) -> Any:
    """Make objects whose values are right, for the most part."""
    usual = st.fixed_dictionaries(required, optional=optional)
    keys = st.sampled_from([*required, *optional])
    return st.builds(lambda value, key, other: {**value, key: other}, usual, keys, _ANY) | usual


_NAME = st.sampled_from(["add", "", "\n", "x" * 100])
_CALL = _object(
    {"function": _object({"name": _NAME}, {"arguments": st.sampled_from(["{}", "[1]", "{", "null", "1e999"])})},
    {"id": st.text(max_size=3), "type": st.just("function")},
)
_MESSAGE = _object(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    {
        "content": st.text(max_size=20) | st.none() | st.lists(_object({"type": st.just("text"), "text": _NAME}, {})),
        "tool_calls": st.lists(_CALL, max_size=2),
        "tool_call_id": st.text(max_size=3),
        "name": _NAME,
    },
)
_PARAMETERS = _object({"type": st.just("object")}, {"properties": st.dictionaries(_NAME, _ANY, max_size=2)})
_TOOL = _object(
    {
        "type": st.just("function"),
        "function": _object({"name": _NAME}, {"parameters": _PARAMETERS, "description": _ANY}),
    },
    {},
)
_BODY = _object(
    {"messages": st.lists(_MESSAGE, min_size=1, max_size=3)},
    {
        "tools": st.lists(_TOOL, max_size=2),
        "max_tokens": st.integers(),
        "temperature": st.floats(),
        "stop": _ANY,
        "response_format": _ANY,
        "tool_choice": _ANY,
        "n": st.integers(),
    },
)
_FRAGMENTS = st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "add"', "}", "[", '"', "a", ","])


def _format(template: str | None) -> ChatFormat:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, DataConfig())


# The last one accepts mappings alone, as the templates of some models.
_PICKY = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{{ call.function.arguments|items|list }}{% endfor %}{% endfor %}"
)
_FORMATS = [_format(None), _format(CHATML), _format(_PICKY)]


@settings(max_examples=300)
@given(_BODY, st.sampled_from(_FORMATS))
@example(
    {"messages": [{"role": "user"}], "tools": [{"type": "function", "function": {"name": "f", "parameters": None}}]},
    _FORMATS[0],
)
@example(
    {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
    _FORMATS[2],
)
def test_a_request_of_any_content_is_encoded_or_refused(body: Any, chat: ChatFormat) -> None:
    try:
        request = read_request(json.dumps(body).encode())
        assert request.limit is None or request.limit > 0
        request.other_sampling(SamplingConfig())
        chat.conversation(request.conversation, request.tools or [])
    except (ApiError, DataError) as error:
        assert len(str(error)) < 2000


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        read_request(body)


@pytest.mark.parametrize(
    "nested", ["[" * 100_000, '{"messages":' * 100_000, '{"messages": [{"role": "user", "content": [']
)
def test_nested_json_is_refused(nested: str) -> None:
    with pytest.raises(ApiError, match="the request's body"):
        read_request(nested.encode())


@given(st.lists(_FRAGMENTS, max_size=9))
def test_any_text_of_the_policy_becomes_a_message(fragments: list[str]) -> None:
    body = {
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    message = assistant_message("".join(fragments), read_request(json.dumps(body).encode()))
    assert message.role == "assistant"
    assert all(isinstance(json.loads(call.arguments), dict) for call in message.tool_calls)
