"""Check rules that no linter knows: sizes, docstrings, and the paths and commands of the documents."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
SOURCES = sorted((REPO / "areal_rloo").rglob("*.py"))
PYTHON = [*SOURCES, *(path for folder in ("benchmarks", "examples", "tests") for path in (REPO / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", sorted(PYTHON), ids=lambda path: str(path.relative_to(REPO)))
def test_files_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno <= 60, node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPO)))
def test_every_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_stage_table_of_the_readme_follows_the_loop() -> None:
    rows = re.findall(r"^\| (\w+) \| (`areal_rloo/.+?) \|", (REPO / "README.md").read_text(), re.MULTILINE)
    stages = [
        "prompt",
        "lease",
        "wire",
        "episode",
        "reward",
        "batch",
        "step",
        "advantage",
        "loss",
        "optimizer",
        "weights",
    ]
    assert [stage for stage, _ in rows] == stages
    for _, files in rows:
        assert all((REPO / file).is_file() for file in re.findall(r"`([^`]+)`", files)), files


DOCUMENTS = [
    REPO / "README.md",
    REPO / "ARCHITECTURE.md",
    REPO / "CONTRIBUTING.md",
    REPO / "SECURITY.md",
    *sorted((REPO / "docs").glob("*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_of_a_document_exist(document: Path) -> None:
    text = document.read_text()
    paths = re.findall(r"`((?:areal_rloo|tests|examples|launcher|configs|benchmarks|docs)/[\w./-]*)`", text)
    assert [path for path in paths if not ((REPO / path).exists() or (REPO / "areal_rloo" / path).exists())] == []
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_readme_has_at_most_120_lines() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= 120


def _commands(document: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (REPO / document).read_text(), re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/agents.md"])
def test_commands_in_the_documents_work(document: str) -> None:
    commands = _commands(document)
    assert commands
    for command in commands:
        if command.startswith("make "):
            dry = [*shlex.split(command), "--dry-run"]
        elif ".launcher." in command or "areal-rloo run" in command:
            arguments = [word for word in shlex.split(command)[1:] if word != "--resume"]
            start = [sys.executable] if ".launcher." in command else [sys.executable, "-m", "areal_rloo"]
            dry = [*start, *arguments, "--dry-run"]
            if "gsm8k" in command and "rollout.engine" not in command:
                dry.append("rollout.engine=embedded")
        elif "areal-rloo" in command:
            dry = [sys.executable, "-m", "areal_rloo", shlex.split(command)[1], "--help"]
        else:
            continue
        ended = subprocess.run(dry, cwd=REPO, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr


def test_tasks_launcher_and_cached_warm_start_import_no_torch() -> None:
    modules = "areal_rloo.tasks, areal_rloo.launcher.local, areal_rloo.learner.warm_start"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPO)))
def test_every_task_and_thread_has_a_name(path: Path) -> None:
    """The stacks of a process name its tasks and threads. `ensure_future` gives no name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            assert node.func.attr != "ensure_future", node.lineno
            if node.func.attr in ("create_task", "Thread"):
                assert any(keyword.arg == "name" for keyword in node.keywords), node.lineno
