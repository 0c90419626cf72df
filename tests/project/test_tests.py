"""Check the tests themselves: every test asserts, directly or through a helper; and each file can be collected."""

import ast
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))
SUPPORT = sorted((TESTS / "support").glob("*.py"))
ASSERTING_CALLS = {".raises", ".assert_close", ".assert_allclose", ".assert_array_equal"}  # of pytest, torch, numpy

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _functions(path: Path) -> dict[str, Function]:
    """Return the functions of a file by name, and the methods by name after a dot."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    methods = {child for node in nodes if isinstance(node, ast.ClassDef) for child in node.body}
    return {f".{node.name}" if node in methods else node.name: node for node in nodes if isinstance(node, Function)}


@cache
def _calls(function: Function) -> set[str]:
    """Return the names of called functions, and the names of called methods after a dot."""
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    methods = {f".{node.attr}" for node in called if isinstance(node, ast.Attribute)}
    return methods | {node.id for node in called if isinstance(node, ast.Name)}


@cache
def _asserts(function: Function) -> bool:
    here = any(isinstance(node, ast.Assert) for node in ast.walk(function))
    return here or bool(_calls(function) & ASSERTING_CALLS)


def _asserting(*paths: Path) -> set[str]:
    """Return the functions of these files that assert, directly or through each other."""
    named = [item for path in paths for item in _functions(path).items()]
    found = {name for name, function in named if _asserts(function)}
    while more := {name for name, function in named if _calls(function) & found} - found:
        found |= more
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_every_test_asserts(path: Path) -> None:
    tests = {name for name in _functions(path) if name.startswith("test_")}
    assert tests - _asserting(path, *SUPPORT) == set()


def test_no_two_files_have_the_same_name() -> None:
    """Pytest refuses the second, but only where one run collects both."""
    assert [name for name, num in Counter(path.name for path in FILES).items() if num > 1] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_test_leaves_another_working_folder_behind(path: Path) -> None:
    """`monkeypatch.chdir` returns; a later test of the same process would start programs elsewhere."""
    nodes = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert "os.chdir" not in {ast.unparse(node) for node in nodes}


def test_a_test_without_an_assertion_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_nothing.py"
    path.write_text("def test_a():\n    asyncio.run(f())\n\ndef f():\n    g()\n\ndef g():\n    assert True\n")
    assert _asserting(path) == {"f", "g", "test_a"}
    path = tmp_path / "test_nothing_either.py"
    path.write_text("def run():\n    assert True\n\ndef test_a():\n    asyncio.run(None)\n")
    assert _asserting(path) == {"run"}


@pytest.mark.parametrize(("num_gpus", "outcomes"), [(0, "ss"), (1, "ps"), (2, "ps"), (3, "pp")])
def test_a_gpu_test_skips_with_fewer_gpus_than_it_needs(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, num_gpus: int, outcomes: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    items = [
        pytest.Function.from_parent(request.node.parent, name=name, callobj=_is_our_conftest)
        for name in ("one", "three")
    ]
    items[0].add_marker(pytest.mark.gpu)
    items[1].add_marker(pytest.mark.gpu(3))
    (hook,) = [plugin for plugin in request.config.pluginmanager.get_plugins() if _is_our_conftest(plugin)]
    hook.pytest_collection_modifyitems(request.config, items)
    skips = ["p" if item.get_closest_marker("skip") is None else "s" for item in items]
    assert "".join(skips) == outcomes


def _is_our_conftest(plugin: object) -> bool:
    return getattr(plugin, "__file__", None) == str(TESTS / "conftest.py")


def test_no_test_begins_after_the_minutes_of_a_run() -> None:
    some = f"{Path(__file__).relative_to(TESTS.parent)}::{test_no_two_files_have_the_same_name.__name__}"
    for minutes, words in ((0, "1 skipped"), (9, "1 passed")):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--minutes={minutes}", some]
        of_this_run = ("AREAL_RLOO_TESTS_BEGAN_S", "PYTEST_ADDOPTS")  # with its folder, which the other would empty
        alone = {name: value for name, value in os.environ.items() if name not in of_this_run}
        ended = subprocess.run(command, cwd=TESTS.parent, env=alone, capture_output=True, text=True, check=False)
        assert words in ended.stdout, ended.stdout + ended.stderr
