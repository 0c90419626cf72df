"""docs/tasks.md matches the code: configs load, tables agree, commands parse, links exist."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest
import yaml
from support.documents import BLOCK

from areal_rloo.config import EpisodeConfig, load_config
from areal_rloo.config.episode import BUILT_IN
from areal_rloo.inspect.__main__ import parse_arguments
from areal_rloo.tasks.loading import TASKS
from areal_rloo.tasks.tools import make_tools

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
BLOCKS = BLOCK.findall(TEXT)


def _first_column(heading: str) -> set[str]:
    _, _, table = TEXT.partition(f"| {heading} |")
    return set(re.findall(r"^\| `([^`]+)` \|", table.partition("\n\n")[0], re.MULTILINE))


@pytest.mark.parametrize("block", [text for kind, text in BLOCKS if kind == "yaml"])
def test_configs_in_the_document_load(block: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(block), "learner": {"microbatch_tokens": 16384}}))
    assert load_config(str(path)).data.train_sources


def test_tables_in_the_document_match_the_code() -> None:
    assert _first_column("Task") == {*TASKS, "file.py:Class"}
    assert _first_column("Type") == {*BUILT_IN, "file.py:Class"}


def test_commands_in_the_document_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    for name in ("config.yaml", "trajectories.jsonl"):
        (tmp_path / "runs" / "latest" / name).touch()
    commands = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    assert commands
    for command in commands:
        _, is_inspect, arguments = command.partition("areal-rloo inspect ")
        if is_inspect:
            parse_arguments(shlex.split(arguments))
        else:
            program, name, option, config, *overrides = shlex.split(command)
            assert (program, name, option) == ("areal-rloo", "run", "--config")
            assert load_config(config, overrides)


def test_the_tool_of_the_document_is_one(tmp_path: Path) -> None:
    (block,) = [text for kind, text in BLOCKS if kind == "python"]
    (tmp_path / "tools.py").write_text(block)
    (tool,) = make_tools(EpisodeConfig(type="tool_use", tools=(f"{tmp_path / 'tools.py'}:search",))).values()
    assert asyncio.run(tool.call({"query": "x", "limit": 1})) == '["x: page 0"]'


def test_links_in_the_document_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (Path(__file__).resolve().parents[2] / "docs" / target).exists(), target
