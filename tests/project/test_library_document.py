"""The programs of docs/library.md run as they stand, and print the promised values."""

import re
import tempfile
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "library.md").read_text(encoding="utf-8")
SECTIONS = {
    title: re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
}


@pytest.fixture
def printed(
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> str:
    """The output of the program of a section; the working folder and temporary files are of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (program,) = SECTIONS[request.param]
    exec(compile(program, request.param, "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


@pytest.mark.parametrize("printed", ["Advantages and loss in a loop of your own"], indirect=True)
def test_the_loss_falls_in_a_loop_of_the_user(printed: str) -> None:
    first, *_, last = map(float, printed.split())
    assert (abs(first) < 1e-6, last < -0.1) == (True, True)


@pytest.mark.parametrize("printed", ["The engine alone"], indirect=True)
def test_the_engine_alone_gives_logprobs_and_versions(printed: str) -> None:
    assert printed.count("[1 1 1 1 1 1 1 1]") == 2
    assert len(re.findall(r"-\d+\.\d+", printed)) == 16


@pytest.mark.parametrize("printed", ["Trajectories over the wire"], indirect=True)
def test_a_trajectory_arrives_and_is_acknowledged(printed: str) -> None:
    assert printed == "[(array([5, 6], dtype=int32), 1.0)]\nAck(number=1)\n"


@pytest.mark.parametrize("printed", ["Weights to a receiver of your own"], indirect=True)
def test_a_version_arrives_at_the_receiver_of_the_user(printed: str) -> None:
    assert printed == "True\n"


def test_every_program_has_a_test() -> None:
    assert [title for title, programs in SECTIONS.items() if programs] == [
        *("Advantages and loss in a loop of your own", "The engine alone", "Trajectories over the wire"),
        "Weights to a receiver of your own",
    ]
