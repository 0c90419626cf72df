"""Check the plain English of the package and the documents; CONTRIBUTING.md has the rule with examples."""

import ast
import re
from pathlib import Path

import pytest
from support.english import above_limits, words_of

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "areal_rloo"
DOCUMENTS = [REPO / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]


def test_comments_and_docstrings_of_the_package_are_plain() -> None:
    assert above_limits(sorted(PACKAGE.rglob("*.py"))) == {}


def test_prose_of_the_documents_is_plain() -> None:
    assert above_limits([*DOCUMENTS, *sorted((REPO / "docs").glob("*.md"))]) == {}


def test_only_comments_and_docstrings_of_code_count(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text('"""First."""\n\nit = "what"  # Second\n\n\ndef f() -> None:\n    """Third."""\n')
    assert sorted(words_of(path)) == ["first", "second", "third"]


def test_only_prose_of_documents_counts(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("Read `it` in [this](what.md).\n\n| what |\n|---|\n\n   ```bash\n   make it\n   ```\n\nEnd.\n")
    assert words_of(path) == ["read", "in", "this", "end"]


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in PACKAGE.rglob("__init__.py")), ids=lambda path: path.name
)
def test_the_docstring_of_a_package_names_every_module(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    named = {Path(name).stem for name in re.findall(r"`([^`\s]+)`", docstring)}
    assert modules - named == set()


def test_test_names_are_under_70_characters() -> None:
    names = {
        node.name: path.relative_to(REPO)
        for path in sorted((REPO / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }
    assert [f"{path}: {name}" for name, path in names.items() if len(name) >= 70] == []
