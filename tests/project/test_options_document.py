"""docs/options.md is current, and every option and program that a document names exists."""

import re
from pathlib import Path

import pytest

from areal_rloo.__main__ import PROGRAMS
from areal_rloo.config import Config
from areal_rloo.config.__main__ import page
from areal_rloo.config.typed import hints_of

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
SECTIONS = {key.partition(".")[0] for key in hints_of(Config)}


def test_the_document_equals_the_structs() -> None:
    assert (REPO / "docs" / "options.md").read_text() == page() + "\n", "run areal-rloo config page > docs/options.md"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_an_option_that_a_document_names_exists(path: Path) -> None:
    hints = hints_of(Config)
    text = path.read_text()
    if path.name == "algorithms.md":  # its tables have the names of other systems, too
        text = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[=:`])", text)
    unknown = [
        key for key in named if key.split(".")[0] in SECTIONS and "safetensors" not in key and not known(key, hints)
    ]
    assert unknown == []


def known(key: str, hints: dict[str, object]) -> bool:
    """Whether a key is one of the config, or stands in a mapping; positions in lists are left out."""
    plain = ".".join(part for part in key.split(".") if not part.isdecimal())
    parents = [plain.rsplit(".", count)[0] for count in range(plain.count(".") + 1)]
    return any("dict[" in str(hints.get(parent)) for parent in parents[1:]) or plain in hints


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_program_that_a_document_names_exists(path: Path) -> None:
    named = set(re.findall(r"\bareal-rloo ([a-z]+)", path.read_text()))
    assert named - set(PROGRAMS) <= {"with"}
