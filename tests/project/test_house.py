"""The rules of the house that no linter knows: vocabulary, sizes, what the README says against the tree."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_rloo.config import load_config
from areal_rloo.telemetry.metrics import PREFIX, metric_names

REPO = Path(__file__).resolve().parents[2]
SOURCES = sorted((REPO / "areal_rloo").rglob("*.py"))

# The words DESIGN's glossary rules out, as whole words of a snake_case identifier.
NEVER = {
    "old", "prox", "coef", "lag", "age", "query", "queries", "response", "responses", "experience", "experiences",
    "mb", "logp", "logps", "refit", "nsamples", "traj",
}  # fmt: skip
NEVER_WHOLE = {"log_probs", "log_prob", "n_samples", "imp_weight", "behave_imp_weight", "old_logprobs", "model_version"}


def _identifiers(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPO)))
def test_no_identifier_uses_a_word_the_glossary_rules_out(path: Path) -> None:
    wrong = [
        f"line {line}: {name}"
        for line, name in _identifiers(path)
        if NEVER & set(name.lower().strip("_").split("_")) or name.strip("_") in NEVER_WHOLE
    ]
    assert not wrong


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPO)))
def test_files_and_functions_fit_one_sitting(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 70, node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPO)))
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_stage_table_of_the_readme_names_files_that_exist_in_the_order_of_the_loop() -> None:
    rows = re.findall(r"^\| (\w+) \| `([^`]+)` \|", (REPO / "README.md").read_text(), re.MULTILINE)
    stages = ["prompt", "rollout", "reward", "wire", "buffer", "advantage", "loss", "optimizer", "weights"]
    assert [stage for stage, _ in rows] == stages
    for _, file in rows:
        assert (REPO / file).is_file(), file


def _commands(document: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (REPO / document).read_text(), re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_commands_in_the_documents_work(document: str) -> None:
    targets = set(re.findall(r"^(\w+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    commands = _commands(document)
    assert commands
    for command in commands:
        if command.startswith("make "):
            assert command.split()[1] in targets, command
        elif ".launcher." in command:
            arguments = [*command.removeprefix(".venv/bin/").split()[1:], "--dry-run"]
            if "gsm8k" in command and "rollout.engine" not in command:
                arguments.append("rollout.engine=embedded")
            arguments = [a for a in arguments if a != "--resume"]
            ended = subprocess.run([sys.executable, *arguments], cwd=REPO, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load_by_name_and_are_short(path: Path) -> None:
    load_config(path.name)
    assert path.read_text().count("\n") < 80


@pytest.mark.parametrize("module", ["trajectory", "config", "errors"])
def test_nouns_and_config_import_without_torch_and_numpy(module: str) -> None:
    heavy = {"torch", "numpy", "transformers", "zmq"}
    code = f"import sys, areal_rloo.{module}; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


def test_tasks_and_the_launcher_import_without_torch() -> None:
    code = "import sys, areal_rloo.tasks, areal_rloo.launcher.local; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


def test_the_import_contracts_hold() -> None:
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=REPO, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout


def test_dashboards_and_alert_rules_name_only_metrics_that_exist() -> None:
    known = set(metric_names())
    monitoring = REPO / "launcher" / "monitoring"
    files = [*monitoring.rglob("*.json"), *monitoring.rglob("*.yml")]
    named = {name for file in files for name in re.findall(rf"\b{PREFIX}\w+", file.read_text())}
    assert named
    assert named <= known
    json.loads((monitoring / "grafana" / "dashboard.json").read_text())
