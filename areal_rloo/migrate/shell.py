"""Read the settings of a shell script without running it.

    text ─► words, line by line ─► variables filled in ─► `key.path=value` and `--key value ...`

A script may choose a value by `if`, `case` or `&&`. Such a setting is doubtful: the user must say which value counts.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(r"\$\{(\w+)(?:(:?)-([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()$]*(?:\([^()$]*\)[^()$]*)*)\)\)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_HYDRA = re.compile(r"[+~]{0,2}(\w+(?:\.\w+)+)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ENDS = re.compile(r"\|(?!\|)|&(?!&)|\d*[<>]")
_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_TESTS = ("[", "[[", "test")
_SILENT = ("echo", "printf", "set")  # commands whose words are no settings
_MOST_DEPTH = 10  # of variables in variables
_MOST_CHARACTERS = 10_000  # of a word with all variables filled in
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(slots=True)
class Script:
    """The settings of a script, the values of variables, and the names that depend on a branch."""

    settings: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=lambda: {"HOME": str(Path.home())})
    doubtful: set[str] = field(default_factory=set)


def read_shell(text: str) -> Script:
    """Read a script.

    Raises:
        ValueError: a quotation does not end.
    """
    script, depth, chosen = Script(), 0, set[str]()  # variables that depend on a branch
    for line in _lines(text):
        depth = max(0, depth + (line[0] in _OPENS) - (line[0] in _CLOSES))
        chooses = line[0] in _TESTS or "||" in line
        for part in _parts(line):
            if part and part[0] not in _SILENT:
                _read_line(part, script, chosen, in_branch=depth > 0 or chooses)
    return script


def _parts(line: list[str]) -> Iterator[list[str]]:
    """Split a line at `&&` and `||`."""
    part: list[str] = []
    for word in line:
        if word in ("&&", "||"):
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _read_line(line: list[str], script: Script, chosen: set[str], *, in_branch: bool) -> None:
    name = ""  # of the option whose values follow
    for word in line:
        if _ENDS.match(word):  # a pipe, a redirection, the background
            return
        filled = _filled(word, script.variables)
        used = {found[1] or found[4] for found in _VARIABLE.finditer(word)}
        doubtful = in_branch or bool(used & chosen)
        if (option := _OPTION.fullmatch(filled)) is not None:
            name = option[1].replace("-", "_")
            script.settings[name] = True if option[2] is None else typed(option[2])
            setting = name
            name = name if option[2] is None else ""
        elif (hydra := _HYDRA.fullmatch(filled.lstrip("("))) is not None:
            setting, name = hydra[1], ""
            script.settings[setting] = typed(hydra[2])
        elif not name and (assigned := _ASSIGNMENT.fullmatch(filled)) is not None:
            variable = assigned[1]
            if doubtful and script.variables.get(variable) != assigned[2]:
                chosen.add(variable)
            if len(assigned[2]) <= _MOST_CHARACTERS:
                script.variables[variable] = assigned[2]
            continue
        elif name and not filled.startswith("-") and not filled.endswith(".py"):
            setting = name
            script.settings[name] = _with(script.settings[name], typed(filled))
        else:
            name = ""
            continue
        if doubtful:
            script.doubtful.add(setting)


def _with(before: Any, value: Any) -> Any:
    """Add a value to those of an option, which is True as long as there is none; a list grows in place."""
    if isinstance(before, list):
        before.append(value)
        return before
    return value if before is True else [before, value]


def _lines(text: str) -> Iterator[list[str]]:
    """Give the words of each command; a backslash at the end of a line continues the command."""
    text = _ARITHMETIC.sub(lambda found: re.sub(r"[ \t]", "", found[0]), text.replace("\\\n", " "))
    lexer = shlex.shlex(_without_comments(text), posix=True, punctuation_chars="\n;")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    line: list[str] = []
    for word in lexer:
        if set(word) <= set("\n;"):
            if line:
                yield line
            line = []
        elif word not in ("export", "then", "else", "do", "(", ")"):
            line.append(word)
    if line:
        yield line


def _without_comments(text: str) -> str:
    """Remove comments: `#` at the beginning of a word and outside quotes."""
    kept, quote, before = [], "", "\n"
    in_comment = False
    for character in text:
        if in_comment and character != "\n":
            continue
        in_comment = not quote and character == "#" and before in " \t\n"
        if in_comment:
            continue
        if character in "'\"" and before != "\\" and quote in ("", character):
            quote = "" if quote else character
        kept.append(character)
        before = character
    return "".join(kept)


def _filled(word: str, variables: dict[str, str]) -> str:
    """Fill in the variables and the arithmetic of a word; the rest stays as it is written."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[4], found[3]
        known = variables.get(name)
        if known is None or (known == "" and found[2]):
            return found[0] if default is None else default
        return known

    for _ in range(_MOST_DEPTH):
        filled = _ARITHMETIC.sub(partial(_computed, variables), _VARIABLE.sub(value, word))
        if filled == word or len(filled) > _MOST_CHARACTERS:
            break
        word = filled
    return word


def _computed(variables: dict[str, str], found: re.Match[str]) -> str:
    """Compute an integer expression; one with other parts stays as it is written."""

    def number(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in variables:
            return int(variables[node.id])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](number(node.left), number(node.right))
        raise ValueError

    try:
        result = number(ast.parse(found[1].strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return found[0]
    return str(result) if abs(result) < 2**62 else found[0]


def typed(value: Any) -> Any:
    """Read a text as YAML would: numbers, booleans, lists."""
    if not isinstance(value, str):
        return value
    if len(value) > _MOST_CHARACTERS:
        return value
    try:
        read = float(value) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):
        return value
    return value if isinstance(read, int) and abs(read) >= 2**62 else read
