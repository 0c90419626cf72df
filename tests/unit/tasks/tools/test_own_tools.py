"""Functions of the user as tools: the schema, checked arguments, results, exceptions and timeouts."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from areal_rloo.config import EpisodeConfig
from areal_rloo.errors import ConfigError, EpisodeError
from areal_rloo.tasks.tools import Tool, make_tools, tool_schemas

MODULE = '''
import asyncio, enum, sys, time, typing
from typing import Literal
from areal_rloo.errors import EpisodeError

def search(query: str, limit: int = 3, *, order: Literal["new", "old"] = "new") -> list[str]:
    """Search the wiki, and return
    the best pages.

    Args:
        query: the words
            to look for
        limit (int): the most pages

    Returns:
        pages: texts
    """
    return [f"{query} {number} {order}" for number in range(limit)]

async def later(seconds: float | None) -> dict[str, float | None]:
    "Wait."
    await asyncio.sleep(seconds or 0)
    return {"seconds": seconds}

def blocks(seconds: float) -> str:
    "Block."
    time.sleep(seconds)
    return "woke"

def fails(how: str) -> str:
    "Fail."
    if how == "drop":
        raise EpisodeError("no_wiki", "the wiki is gone")
    if how == "exit":
        sys.exit("bye")
    if how == "own timeout":
        raise TimeoutError("the wiki is slow")
    raise KeyError("x\\ny")

def returns(what: str) -> object:
    "Return."
    return {"none": None, "set": {1}, "half": "\\ud83d", "long": "a" * 70_000, "text": "plain ü"}[what]

def bare(query): "No type."
def silent(query: str): ...
def many(*queries: str): "Many."
def odd(query: object()): "Odd."
def strange(query: type): "Strange."
def misspelt(query: "typing.Strng"): "Misspelt."
def unended(query: "list[str"): "Unended."

class Color(enum.Enum):
    RED = "red"

def paint(color: Color, more: list[int] = [1, 2], *, names: dict[str, int] = {"a": 1}) -> list:
    "Paint."
    more.append(3)
    return [color.value, more, names]
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "my.py").write_text(MODULE)
    return tmp_path / "my.py"


def _tool(path: Path, name: str, **more: Any) -> Tool:
    episode = EpisodeConfig(type="tool_use", tools=("calculator", f"{path}:{name}"), **more)
    return make_tools(episode)[name]


def _said(tool: Tool, **arguments: object) -> str:
    return asyncio.run(tool.call(arguments))


def test_signature_and_docstring_become_the_schema(path: Path) -> None:
    schemas = tool_schemas(EpisodeConfig(type="tool_use", tools=(f"{path}:search", "calculator")))
    assert [schema["function"]["name"] for schema in schemas] == ["search", "calculator"]  # type: ignore[index]
    assert schemas[0]["function"] == {
        "name": "search",
        "description": "Search the wiki, and return the best pages.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "the words to look for"},
                "limit": {"type": "integer", "description": "the most pages"},
                "order": {"enum": ["new", "old"]},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    }


def test_checked_arguments_reach_plain_and_async_functions(path: Path) -> None:
    search = _tool(path, "search")
    assert _said(search, query="ü", limit=2) == '["ü 0 new", "ü 1 new"]'
    assert _said(search, query="a", limit=1, order="old") == '["a 0 old"]'
    assert _said(_tool(path, "later"), seconds=None) == '{"seconds": null}'
    for arguments, words in (
        ({}, "Object missing required field `query`"),
        ({"query": 3}, "Expected `str`, got `int` - at `$.query`"),
        ({"query": "a", "limit": "3"}, "Expected `int`, got `str` - at `$.limit`"),
        ({"query": "a", "order": "odd"}, "Invalid enum value 'odd' - at `$.order`"),
        ({"query": "a", "page": 1}, "Object contains unknown field `page`"),
    ):
        assert _said(search, **arguments) == f"error: wrong arguments of search: {words}"  # type: ignore[arg-type]


def test_a_default_may_be_a_list_which_no_call_changes_for_the_next(path: Path) -> None:
    paint = _tool(path, "paint")
    assert _said(paint, color="red") == _said(paint, color="red") == '["red", [1, 2, 3], {"a": 1}]'


def test_a_reference_in_a_schema_is_found_from_its_root(path: Path) -> None:
    (schema,) = tool_schemas(EpisodeConfig(type="tool_use", tools=(f"{path}:paint",)))
    parameters = schema["function"]["parameters"]  # type: ignore[index]
    assert parameters["properties"]["color"] == {"$ref": "#/$defs/Color"}
    assert parameters["$defs"]["Color"]["enum"] == ["red"]


@pytest.mark.parametrize(
    ("what", "said"),
    [("none", "null"), ("set", "{1}"), ("half", "\\ud83d"), ("text", "plain ü")],
)
def test_any_result_becomes_a_text(what: str, said: str, path: Path) -> None:
    assert _said(_tool(path, "returns"), what=what) == said


def test_a_long_result_is_shortened(path: Path) -> None:
    assert _said(_tool(path, "returns"), what="long") == "a" * 65536 + "... (4464 characters more)"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("other", "error: KeyError: 'x\\ny'"),
        ("exit", "error: SystemExit: bye"),
        ("own timeout", "error: TimeoutError: the wiki is slow"),
    ],
)
def test_an_exception_is_the_answer_for_the_policy(how: str, said: str, path: Path) -> None:
    assert _said(_tool(path, "fails"), how=how) == said


def test_a_tool_may_drop_the_sample(path: Path) -> None:
    with pytest.raises(EpisodeError, match="the wiki is gone"):
        _said(_tool(path, "fails"), how="drop")


@pytest.mark.parametrize("name", ["later", "blocks"])
def test_a_call_without_end_is_an_error_after_the_timeout(name: str, path: Path) -> None:
    assert _said(_tool(path, name, tool_timeout_s=0.05), seconds=20.0) == f"error: {name} took more than 0.05 s"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "bare",
            "expected arguments with names and types, as in `def search(query: str, limit: int = 3)`, got 'query' w",
        ),
        ("silent", "expected a docstring, which tells the policy about the tool"),
        (
            "many",
            "expected arguments with names and types, as in `def search(query: str, limit: int = 3)`, got '*querie",
        ),
        ("odd", "argument 'query': expected a type that JSON has, "),
        (
            "strange",
            "argument 'query': expected a type that JSON has, such as str, int, float, bool, list[str] or dict[str, "
            "int], got type",
        ),
        ("misspelt", "they cannot be read: module 'typing' has no attribute 'Strng'"),
        ("unended", "they cannot be read: Forward reference must be an expression"),
        ("serach", "my.py has no function 'serach'; did you mean 'search'?"),
    ],
)
def test_a_function_that_is_no_tool_is_refused_with_the_key(name: str, words: str, path: Path) -> None:
    episode = EpisodeConfig(type="tool_use", tools=(f"{path}:{name}",))
    with pytest.raises(ConfigError, match=rf"^data\.train\.0\.episode\.tools: .*{re.escape(words)}"):
        make_tools(episode, "data.train.0.episode")
