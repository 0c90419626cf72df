"""A wrong config ends a launcher with a single line, exit code 2 and nothing left behind: one for each key, and more.

Every case runs in this process through the same `run_main` as the command. tests/integration/test_launcher_mistakes.py
runs some cases as commands.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.wrong_configs import BY_HAND, FILES, of_every_key

from areal_rloo.errors import HostLostError, PreflightError, UserError
from areal_rloo.launcher import local
from areal_rloo.program import run_main

EVERY_KEY = list(of_every_key())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, without GPUs; a test must leave it as it was."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield tmp_path
    assert {path.name for path in tmp_path.iterdir()} <= {"my.yaml"}


@pytest.mark.parametrize(("error", "code"), [(PreflightError, 2), (HostLostError, 1)])
def test_only_a_mistake_ends_with_code_2(
    error: type[UserError], code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Programs start a run with code 1 again, and leave one with code 2 to a person."""

    def main(arguments: Sequence[str]) -> int:
        raise error("the node\nis gone")

    monkeypatch.setattr(sys, "argv", ["local"])
    assert run_main(main) == code
    assert capfd.readouterr().err.splitlines() == ["error: the node is gone"]


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Run the local launcher as the command does; give the line on standard error."""
    monkeypatch.setattr(sys, "argv", ["local", *arguments])
    assert run_main(local.main) == 2
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert "Traceback" not in output.err
    assert output.err.rstrip("\n").isprintable()
    return output.err


def test_the_table_has_at_least_200_wrong_configs() -> None:
    assert len(EVERY_KEY) + len(BY_HAND) + len(FILES) >= 200


@pytest.mark.parametrize(("override", "key"), EVERY_KEY)
def test_a_wrong_value_of_any_key_is_refused(
    override: str, key: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refused(["--config", "quickstart.yaml", "--dry-run", override], monkeypatch, capfd)
    assert key in line


@pytest.mark.parametrize(("overrides", "words"), BY_HAND)
def test_a_value_without_a_meaning_is_refused_by_a_dry_run(
    overrides: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = refused(["--config", "quickstart.yaml", "--dry-run", *overrides.split(" & ")], monkeypatch, capfd)
    assert words in line
    assert "hunter2" not in line


@pytest.mark.parametrize(("text", "words"), FILES)
def test_a_wrong_file_is_refused_by_a_dry_run(
    folder: Path, text: str, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.yaml").write_text(text, encoding="utf-8")
    line = refused(["--config", "my.yaml", "--dry-run"], monkeypatch, capfd)
    assert line.startswith("error: my.yaml:")
    assert words in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: --config; expected areal-rloo run"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "quickstart.yaml", "--json"], "argument '--json': expected with --dry-run"),
        (["--config", "quickstart.yaml", "run.seed"], "argument 'run.seed': expected key.path=value"),
        (["--config", "n" * 300], "File name too long"),
        (["--config", "."], ".: this is a folder; expected a config file"),
        (["--config", "quickstart.yaml", "--entry", "no.py"], "run.entry: no.py cannot be imported"),
    ],
)
def test_a_wrong_command_line_is_refused_with_one_line(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(arguments, monkeypatch, capfd)
