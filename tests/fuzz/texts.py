"""Fuzz texts from outside: configs, the answers of a policy, and the requests of agents."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fuzz.targets import Target, work_folder

from areal_rloo.config import dump_config, load_config
from areal_rloo.errors import ConfigError
from areal_rloo.rollout.chat_api import ApiError, read_request
from areal_rloo.tasks.answers import answer_key, answer_reward, extract_answer, gold_answer, last_number
from areal_rloo.tasks.math import extract_boxed

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def _try_config(content: bytes) -> None:
    path = work_folder() / "fuzzed.yaml"
    path.write_bytes(content)
    try:
        config = load_config(str(path))
    except ConfigError as error:
        assert "\n" not in str(error), "a mistake is a single line"
        return
    path.write_text(dump_config(config))
    assert load_config(str(path)) == config


def _try_answer(content: bytes) -> None:
    text = content.decode(errors="replace")
    for number in (extract_answer(text), last_number(text)):
        assert number is None or number.is_finite()
    if gold_answer(text) is not None:
        assert answer_reward(text, text) == float(extract_answer(text) is not None)
    for fallback in (False, True):
        key = answer_key(text, fallback=fallback)
        assert key is None or answer_key(f"#### {key}") == key
    boxed = extract_boxed(text)
    assert boxed is None or boxed in text


def _try_chat_request(content: bytes) -> None:
    try:
        request = read_request(content)
    except ApiError as error:
        assert 400 <= error.status < 500
        return
    assert request.messages


def _chat_requests() -> list[bytes]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": [{"type": "text", "text": "1+1=?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    rich = {"model": "policy", "messages": messages, "tools": [tool], "stream": True, "max_tokens": 9, "temperature": 1}
    return [msgspec.json.encode(rich), msgspec.json.encode({"model": "m", "messages": messages[:1], "logprobs": True})]


_ANSWERS = (
    "3+5=8\n#### 8",
    "#### -US$1,234.50 dollars.",
    "#### \\(\\boxed{**1e3**}\\)",
    "so \\boxed{\\frac{1}{2}} and \\boxed 7$",
    "#### ٣٤٫٥ km/h",
)

TARGETS = {
    "configs": Target(_try_config, lambda: [path.read_bytes() for path in sorted(_CONFIGS.glob("*.yaml"))]),
    "answers": Target(_try_answer, lambda: [text.encode() for text in _ANSWERS]),
    "chat_requests": Target(_try_chat_request, _chat_requests),
}
