"""Any JSON in any field of a server's answer: the request fails or the server is refused, and the engine lives."""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.faulty_server import FakeSGLang, FakeVLLM, engine_on_faulty, fake_sample
from support.model_versions import model_of
from support.server_answers import ANSWERS, READERS
from support.server_support import in_buckets, request

from areal_rloo.engines.server import UpdateGroup
from areal_rloo.errors import ConfigError, EngineError, GenerationError

_ODD = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, 1e-3, 0.5, -9999.0, -1e38),
    *("", "abc", "1", "99999999999", "9" * 5000, "٣", [], {}, [1], {"a": 1}, [[]]),
)
_NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.sampled_from(_ODD) | st.booleans() | _NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def _paths(answer: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(answer, dict | list):
        for key in answer if isinstance(answer, dict) else range(len(answer)):
            yield from _paths(answer[key], (*path, key))


def _changed(answer: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(answer)
    within = changed
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = value
    return dict(changed)


def _try(name: str, answer: dict[str, Any]) -> int:
    """Read an answer; return 1 if it was refused."""
    try:
        READERS[name](answer)
    except (EngineError, ConfigError):
        return 1
    return 0


@pytest.mark.parametrize("name", ANSWERS)
def test_an_odd_value_in_any_field_is_refused_or_read(name: str) -> None:
    refused = sum(_try(name, _changed(ANSWERS[name], path, odd)) for path in _paths(ANSWERS[name]) for odd in _ODD)
    assert (refused > 50) == ("digests" not in name), "digests that cannot be read are a difference, not an error"


@pytest.mark.parametrize("name", ANSWERS)
@given(data=st.data())
def test_random_values_in_fields_are_refused_or_read(name: str, data: st.DataObject) -> None:
    answer = ANSWERS[name]
    for _ in range(data.draw(st.integers(1, 3))):
        answer = _changed(answer, data.draw(st.sampled_from([*_paths(answer)])), data.draw(_JSON))
    assert _try(name, answer) in (0, 1)


@pytest.mark.parametrize("kind", [FakeSGLang, FakeVLLM])
def test_an_odd_answer_fails_its_request_alone(kind: type[FakeSGLang], tiny_folders: dict[str, Path]) -> None:
    class Odd(kind):  # type: ignore[misc, valid-type]
        async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
            answer: dict[str, Any] = await super()._generate(body)
            if body["input_ids"] == [3, 4]:
                answer["meta_info"]["weight_versions"] = [{"version": "9" * 5000, "start": 0, "end": 5}]
            return answer

    async def main() -> None:
        layouts, _ = in_buckets(model_of(tiny_folders["qwen2"]))
        async with asyncio.timeout(60), engine_on_faulty(tiny_folders["qwen2"], Odd(), timeout_s=5.0) as (engine, _):
            group = UpdateGroup("127.0.0.1", 1, "group-1", 1, 2, "gloo", 5.0)
            await asyncio.wrap_future(engine.update_from_group(1, group, layouts, [fake_sample(1)]))
            odd, other = engine.submit(
                [request(name, prompt=prompt, max_new_tokens=5) for name, prompt in (("a", (3, 4)), ("b", (5, 6)))]
            )
            with pytest.raises(GenerationError, match="request a: expected versions up to 2147483647, got 999"):
                await asyncio.wrap_future(odd)
            assert len((await asyncio.wrap_future(other)).tokens) == 5
            assert engine.server_statistics().restarts == 0

    asyncio.run(main())
