"""A file fits one sitting, a function one screen."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("areal_rloo", "benchmarks") for path in (ROOT / folder).rglob("*.py"))

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
Function = ast.FunctionDef | ast.AsyncFunctionDef


def num_lines(function: Function) -> int:
    """Lines from `def` to the end, without the docstring: saying more about a function is not to be discouraged."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_or_function_is_too_long(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = []
    if len(text.splitlines()) > MOST_FILE_LINES:
        found.append(f"{path.name}: {len(text.splitlines())} lines, at most {MOST_FILE_LINES}")
    found += [
        f"{path.name}:{node.lineno}: {node.name}: {num_lines(node)} lines, at most {MOST_FUNCTION_LINES}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Function) and num_lines(node) > MOST_FUNCTION_LINES
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path}: no module docstring"
