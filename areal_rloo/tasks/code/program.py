"""Find the program in the text of a completion.

The program is the last block of Markdown that is marked as Python, else the last block without a mark, else the whole
text. A block that was cut off reaches to the end of the text. The time is linear in the length of any text.
"""

from __future__ import annotations

import re

from areal_rloo.tasks.code.tests import CallTests, Tests

_BLOCK = re.compile(r"^([ \t]*)```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "py", "python3")
_AFTER_THE_BODY = re.compile(r"^[^\s)\]}]", re.MULTILINE)


def find_program(completion: str, tests: Tests) -> str:
    """Return the program of a completion.

    If the tests have a stub (HumanEval), and the completion does not define the stub's function, the completion is the
    body of the function. If it does, the program begins with the imports and helpers above the stub's function.
    """
    text = _last_block(completion)
    if not isinstance(tests, CallTests) or not tests.stub:
        return text
    defined = re.compile(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(tests.names[0])}\b", re.MULTILINE)
    if defined.search(text) is None:
        end = _AFTER_THE_BODY.search(text)
        return tests.stub + (text if end is None else text[: end.start()])
    above = [place.start() for place in defined.finditer(tests.stub)]
    return (tests.stub[: above[-1]] if above else "") + text


def _last_block(completion: str) -> str:
    blocks = [(match[2].lower(), match[1], match[3]) for match in _BLOCK.finditer(completion.replace("\r\n", "\n"))]
    for marks in (_PYTHON, ("",)):
        found = [(indentation, text) for mark, indentation, text in blocks if mark in marks]
        if found:
            indentation, text = found[-1]
            return "".join(line.removeprefix(indentation) for line in text.splitlines(keepends=True))
    return completion
