"""Every block of every document is checked: commands exist, configs load, Python runs in a test of the document."""

import ast
import functools
import importlib.util
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.documents import BLOCK

from areal_rloo.__main__ import PROGRAMS
from areal_rloo.config.load import find_config, load_config
from areal_rloo.config.overrides import is_override

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*REPO.glob("*.md"), *(REPO / "docs").glob("*.md")])
# Output and diagrams. tests/project/test_deployment.py compares the `text` of deploy.md with a dry run.
SHOWN = {"", "text", "console"}
# Tests that run the Python of a document.
RUN_BY = {
    "algorithms.md": "test_algorithms_document.py",
    "library.md": "test_library_document.py",
    "rewards.md": "test_rewards_document.py",
    "tasks.md": "test_tasks_document.py",
    "tutorial.md": "test_tutorial.py",
}
OTHERS = {
    *("python3", "git", "source", "cd", "ssh", "scp", "curl", "eval", "export"),
    *("ray", "kubectl", "docker", "sbatch", "scancel", "scontrol", "enroot", "apptainer", "prometheus", "chronyc"),
    *("iperf3", "all_reduce_perf", "vllm", "tensorboard"),
}


def _blocks(kinds: set[str]) -> list[Any]:
    return [
        pytest.param(path, kind, block, id=f"{path.name}-{number}")
        for path in DOCUMENTS
        for number, (kind, block) in enumerate(BLOCK.findall(path.read_text()))
        if kind in kinds
    ]


def _commands() -> list[Any]:
    lines = (
        (path, line)
        for path, _, block in (parameter.values for parameter in _blocks({"bash"}))
        for line in block.replace("\\\n", " ").splitlines()
    )
    found = dict.fromkeys((path.name, shlex.join(shlex.split(line, comments=True))) for path, line in lines)
    return [pytest.param(shlex.split(line), id=f"{name}: {line[:60]}") for name, line in found if line]


def test_every_block_is_of_a_kind_that_a_test_checks() -> None:
    kinds = {(path.name, kind) for path in DOCUMENTS for kind, _ in BLOCK.findall(path.read_text())}
    assert {kind for _, kind in kinds} <= SHOWN | {"bash", "yaml", "python"}
    assert {name for name, kind in kinds if kind == "python"} == set(RUN_BY)
    for name, test in RUN_BY.items():
        assert name in (REPO / "tests" / "project" / test).read_text()


@functools.cache
def _help(*words: str) -> str:
    command = [sys.executable, "-m", *words, "--help"]
    return subprocess.run(command, cwd=REPO, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_a_document_names_what_exists(command: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", command[0]):  # variables of the environment
        command = command[1:]
    first, *words = command
    program = Path(first).name
    if program == "make":
        targets = [word for word in words if "=" not in word]
        known = re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE)
        assert targets and set(targets) <= set(known)
    elif program == "areal-rloo":
        assert words[0] in PROGRAMS or words[0].startswith("--")
        if not words[0].startswith("--"):
            _check_arguments(["areal_rloo", words[0]], words[1:])
    elif program == "python" and words[:1] == ["-m"]:
        at = words.index("areal_rloo") if "areal_rloo" in words else 1
        if words[1] == "pip":
            _check_install(words[2:])
        elif words[at] == "areal_rloo":
            assert words[at + 1] in PROGRAMS
        else:
            assert importlib.util.find_spec(words[1]) is not None
    elif program == "pip":
        _check_install(words)
    else:
        assert program in OTHERS, "an unknown program; name it in OTHERS, or correct the document"


def _check_arguments(program: list[str], words: list[str]) -> None:
    shown = _help(*program) + (_help("areal_rloo.launcher.slurm") + _help("areal_rloo.launcher.ray"))
    flags = {word.partition("=")[0] for word in words if word.startswith("--") and "." not in word.partition("=")[0]}
    assert {flag for flag in flags if flag not in shown} == set()
    if "--config" in words:
        config = words[words.index("--config") + 1]
        overrides = [word for word in words if is_override(word) and not word.startswith("--over")]
        if (REPO / config).is_file() or (REPO / "configs" / config).is_file():
            load_config(str(find_config(config)), [o for o in overrides if "," not in o or "[" in o or "{" in o])


def _check_install(words: list[str]) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"areal-rloo\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


@pytest.mark.parametrize(("path", "kind", "block"), _blocks({"yaml"}))
def test_a_config_of_a_document_loads(path: Path, kind: str, block: str, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    within = path.name == "algorithms.md"  # there, the keys of the section
    config.write_text(f"algorithm:\n{textwrap.indent(block, '  ')}" if within else block)
    assert load_config(str(config)), kind


def test_messages_of_the_troubleshooting_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (.+?) \|", (REPO / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [part.strip() for row in rows for text in re.findall(r"`([^`]+)`", row) for part in text.split("...")]
    sources = [*(REPO / "areal_rloo").rglob("*.py")]
    # A message may go on in the next line of the source.
    code = " ".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sources)
    words = [part.removeprefix("health: ").removeprefix("1, ") for part in quoted if part]
    assert words and [part for part in words if part not in code] == []


@pytest.mark.parametrize(("path", "kind", "block"), _blocks({"python"}))
def test_the_python_of_a_document_compiles(path: Path, kind: str, block: str) -> None:
    assert ast.parse(block, str(path)).body, kind
