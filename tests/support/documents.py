"""The fenced blocks of a document."""

import re

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def the_block(text: str, kind: str) -> str:
    """Return the only block of a kind."""
    (block,) = [content for found, content in BLOCK.findall(text) if found == kind]
    return str(block)
