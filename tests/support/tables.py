"""Tables of the documents, and the result files that they show."""

import json
import re
from pathlib import Path
from typing import Any

_REPO = Path(__file__).resolve().parents[2]


def document(name: str) -> str:
    """Return the text of a page of docs/."""
    return (_REPO / "docs" / name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    """Return a result file of the benchmarks."""
    return json.loads((_REPO / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def table(title: str, text: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without the header."""
    section = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, title
    rows = [line for line in section.group(1).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
