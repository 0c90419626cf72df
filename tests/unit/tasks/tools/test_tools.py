"""Tools as a model uses them: schemas, arguments and output."""

import asyncio

import pytest

from areal_rloo.config import EpisodeConfig
from areal_rloo.errors import PreflightError
from areal_rloo.tasks.tools import make_tools
from areal_rloo.tasks.tools.sandbox import check_sandbox

TOOLS = make_tools(EpisodeConfig(type="tool_use", tools=("calculator", "python")))


@pytest.fixture
def sandbox() -> None:
    try:
        check_sandbox()
    except PreflightError as error:
        pytest.skip(str(error))


def _call(name: str, **arguments: object) -> str:
    return asyncio.run(TOOLS[name].call(arguments))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(6 * 7)", "42"),
        ("6 * 7", "[nothing was printed]"),
        ("import numpy as np; print(np.linalg.inv(2 * np.eye(2)).tolist())", "[[0.5, 0.0], [0.0, 0.5]]"),
        ("import sympy; print(sympy.factor('x**2 - 1'))", "(x - 1)*(x + 1)"),
        ("import tempfile\nwith tempfile.TemporaryFile('w+') as f: print(f.write('é'))", "1"),
        ("open('a.csv', 'w').write('1,2'); import csv; print(list(csv.reader(open('a.csv'))))", "[['1', '2']]"),
        ("import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__, __name__)", "A __main__"),
        ("import sys; sys.exit(3)", "[error: exit status 3]"),
        ("import sys; sys.exit()", "[nothing was printed]"),
        ("print('\\ud800')", "\\ud800"),
        ("print({'b', 'a', 'c'} == set('abc'), hash('a') == hash('a'))", "True True"),
    ],
)
@pytest.mark.usefixtures("sandbox")
def test_ordinary_programs_run_as_outside_the_sandbox(code: str, text: str) -> None:
    assert _call("python", code=code) == text


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 1\n\ny = x / 0", ['File "program.py", line 3', "y = x / 0", "ZeroDivisionError: division by zero"]),
        ("def f(: pass", ["SyntaxError: invalid syntax"]),
        ("print(1)\x00", ["null bytes"]),
        ("print('\ud800')", ["error: exit status 1"]),
        ("(" * 10_000, ["error: exit status 1"]),
        ("input('?')", ["EOFError"]),
    ],
)
@pytest.mark.usefixtures("sandbox")
def test_a_failing_program_shows_only_its_own_lines(code: str, told: list[str]) -> None:
    text = _call("python", code=code)
    assert all(part in text for part in told), text
    assert "sandbox_child" not in text


@pytest.mark.usefixtures("sandbox")
def test_the_same_program_prints_the_same_output() -> None:
    """Even if the output depends on the order of hashes."""
    assert len({_call("python", code="print(list(map(str, {'a', 'b', 'c', 'd', 'e'})))") for _ in range(4)}) == 1


def test_the_calculator_computes_an_expression() -> None:
    assert _call("calculator", expression="(1,250 + 3.5) * 4") == "5014"


def test_schemas_have_the_format_of_chat_templates() -> None:
    for name, tool in TOOLS.items():
        schema = tool.schema
        assert schema["type"] == "function"
        function = schema["function"]
        assert isinstance(function, dict)
        assert (function["name"], tool.name) == (name, name)
        assert function["parameters"]["required"] == list(function["parameters"]["properties"])


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("calculator", {}, "calculator needs the argument 'expression'"),
        ("calculator", {"query": "1"}, "calculator needs the argument 'expression'; there is no 'query'"),
        (
            "calculator",
            {"expression": "1", "digits": 3},
            "calculator takes only the argument 'expression', not 'digits'",
        ),
        ("python", {"code": 3}, "the argument 'code' of python is a string, not int"),
        ("python", {"code": None}, "the argument 'code' of python is a string, not NoneType"),
    ],
)
def test_wrong_arguments_become_an_error_for_the_model(name: str, arguments: dict[str, object], error: str) -> None:
    assert asyncio.run(TOOLS[name].call(arguments)) == f"error: {error}"
