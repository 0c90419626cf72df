"""Tables of the documents."""

import re
from pathlib import Path

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def document(name: str) -> str:
    """Return the text of a page of docs/."""
    return (_DOCS / name).read_text(encoding="utf-8")


def table(title: str, text: str) -> list[list[str]]:
    """Return the cells of the first table under a heading, without the header."""
    section = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, title
    rows = [line for line in section.group(1).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]
