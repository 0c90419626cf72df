"""Read the settings of a shell script without running it.

    text ─► words, command by command ─► variables filled in ─► `key.path=value` and `--key value ...` of the training

A script may choose a value by `if`, `case` or `&&`. Such a setting is doubtful: the user must say which value counts.
"""

from __future__ import annotations

import ast
import datetime
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

_SYNTAX = "$|&<>()"  # outside of quotes, each of these stands as a character of its own from here on
_MARKS = {character: chr(0xE000 + number) for number, character in enumerate(_SYNTAX)}
_BARE, _PIPE, _AMPERSAND, _LESS, _MORE, _OPEN, _CLOSE = _MARKS.values()
_LITERAL = "\ue010"  # a `$` in single quotes
_SPLIT = "\ue011"  # a space in the value of a variable outside of quotes: the shell begins another word there
_PLAIN = {ord(mark): character for character, mark in {**_MARKS, "$": _LITERAL, " ": _SPLIT}.items()}
_PLAIN[ord(_BARE)] = "$"
_VARIABLE = re.compile(rf"[${_BARE}]\{{(\w+)(?:(:?)[-=]([^{{}}]*))?\}}|[${_BARE}](\w+)")
_ASSIGNED_DEFAULT = re.compile(r"\{(\w+):?=([^{}]*)\}")
_ELEMENTS = re.compile(rf"[${_BARE}]\{{(\w+)\[[@*]\]\}}")
_ARITHMETIC = re.compile(r"\$\(\(([^()$]*(?:\([^()$]*\)[^()$]*)*)\)\)")
_HERE = re.compile(r"(<<-?[ \t]*['\"]?(\w+)['\"]?[^\n]*\n)(?:[^\n]*\n){0,99}?[ \t]*\2[ \t]*(?=\n|$)")  # a document
_SPACED = re.compile(rf"\$[({_OPEN}]{{2}}[^$\n]*?[){_CLOSE}]{{2}}")  # arithmetic, before it is a word
_UNREAD = re.compile(r"\$\{\w+(\[[@*]|:?\+)")  # of an array or an alternative: any number of words
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(rf"([A-Za-z_]\w*)(\+?)={_OPEN}(.*)", re.DOTALL)
_HYDRA = re.compile(r"([+~]{0,2})(\w+(?:\.\w+)+)(?:=(.*))?", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_REDIRECTION = re.compile(rf"(?:\d*|{_AMPERSAND})[{_LESS}{_MORE}]+(.*)", re.DOTALL)
_AND, _OR = 2 * _AMPERSAND, 2 * _PIPE
_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_TESTS = ("[", "[[", "test", 2 * _OPEN)
_SILENT = ("echo", "printf", "set")  # commands whose words are no settings
_PROGRAMS = ("trl", "swift", "accelerate", "torchrun", "deepspeed", "python", "python3")  # no values of an option
_TRAINS = re.compile(r"\b(grpo|rloo|rlhf|main_ppo)\b", re.IGNORECASE)
_OF_RL = {"num_generations", "advantage_estimator", "algorithm.adv_estimator", "actor_rollout_ref.rollout.n"}
_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?[eE][-+]?\d+|\.\d+([eE][-+]?\d+)?)")  # YAML 1.1 reads texts
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
    """The settings of a script, the values of variables, and the names whose value depends on a branch.

    Attributes:
        others: the commands whose settings are left out, because another command trains.
        unread: words of the training, each for an unknown number of others.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=lambda: {"HOME": str(Path.home())})
    doubtful: set[str] = field(default_factory=set)
    others: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Command:
    """The settings of a command, the other words, and the variables set for this command alone."""

    settings: dict[str, Any] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    words: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return any(map(_TRAINS.search, self.words)) or not _OF_RL.isdisjoint(self.settings)


@dataclass(slots=True)
class _Scope:
    """The variables of a script at a line."""

    variables: dict[str, str]
    arrays: dict[str, list[tuple[str, bool]]] = field(default_factory=dict)  # elements, and if each is doubtful
    chosen: set[str] = field(default_factory=set)  # variables whose value depends on a branch

    def assign(self, name: str, value: str, *, adds: bool, doubtful: bool) -> None:
        value = self.variables.get(name, "") + value if adds else value
        if doubtful and self.variables.get(name) != value:
            self.chosen.add(name)
        if len(value) <= _MOST_CHARACTERS:
            self.variables[name] = value

    def fill(self, line: Iterable[str], *, in_branch: bool) -> Iterator[tuple[str, bool]]:
        """Give the words of a line with all variables filled in, and if each is doubtful."""
        for word in line:
            for name, default in _ASSIGNED_DEFAULT.findall(word):
                self.variables.setdefault(name, default)
            if (elements := _ELEMENTS.fullmatch(word)) is not None and elements[1] in self.arrays:
                yield from ((element, doubtful or in_branch) for element, doubtful in self.arrays[elements[1]])
                continue
            filled = _filled(word, self.variables)
            used = set(re.findall(r"\w+", word)) if "$" in word.translate(_PLAIN) else set()
            is_one = _SPLIT not in filled or _ASSIGNMENT.fullmatch(word) is not None
            for part in [filled] if is_one else filter(None, filled.split(_SPLIT)):
                yield part.translate(_PLAIN), in_branch or bool(used & self.chosen)

    def restore(self, before: dict[str, str], names: Iterable[str]) -> None:
        """Give these variables the values of before."""
        for name in names:
            self.variables.pop(name, None)
            self.variables |= {name: before[name]} if name in before else {}


def read_shell(text: str) -> Script:
    """Read a script.

    Raises:
        ValueError: a quotation or an array does not end.
    """
    script, depth, commands = Script(), 0, list[_Command]()
    scope = _Scope(script.variables)
    for line in _lines(text):
        depth = max(0, depth + (line[0] in _OPENS) - (line[0] in _CLOSES))
        in_branch = depth > 0 or line[0] in _TESTS or _OR in line
        scope.chosen.update(line[1:2] if line[0] == "for" else ())
        for name in line[1:] if line[0] == "unset" else ():
            scope.variables.pop(name, None)
        is_after = line[0] in (_AND, _OR)  # another command decides if the array is set
        if (array := _ARRAY.fullmatch("".join(line[is_after : is_after + 1]))) is not None:
            before = scope.arrays.get(array[1], []) if array[2] else []
            words = _elements(array[3], line[is_after + 1 :])
            scope.arrays[array[1]] = [*before, *scope.fill(words, in_branch=in_branch or is_after)]
            continue
        for number, part in enumerate(_parts(line)):
            if part and part[0] not in _SILENT:
                commands.append(_read_line(part, scope, in_branch=in_branch, is_conditional=number > 0))
    commands = [command for command in commands if command.settings]
    training = [command for command in commands if command.trains] or commands
    script.settings, script.doubtful = merged([command.settings for command in training])
    script.doubtful |= {name for command in training for name in command.doubtful}
    script.doubtful |= scope.chosen
    for command in training:
        script.unread += command.unread
        script.variables |= command.environment
    script.others = [" ".join(command.words) for command in commands if command not in training]
    return script


def merged(parts: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], set[str]]:
    """Merge the settings of several places, the last first; doubtful are those with different values."""
    together = {name: value for part in parts for name, value in part.items()}
    return together, {name for name, value in together.items() if any(part.get(name) != value for part in parts)}


def _parts(line: list[str]) -> Iterator[list[str]]:
    """Split a line at `&&` and `||`."""
    part: list[str] = []
    for word in line:
        if word in (_AND, _OR):
            yield part
            part = []
        else:
            part.append(word)
    yield part


def _elements(first: str, rest: Sequence[str]) -> Iterator[str]:
    """Give the words between the parentheses of an array."""
    *words, last = [first, *rest]
    yield from (word for word in (*words, last.removesuffix(_CLOSE)) if word)


def _read_line(line: list[str], scope: _Scope, *, in_branch: bool, is_conditional: bool) -> _Command:
    """Read a command; `is_conditional`: after `&&` or `||`, so an assignment depends on another command."""
    command, name = _Command(), ""  # of the option whose values follow
    settings, before = command.settings, dict(scope.variables)
    for word, doubtful in scope.fill(_without_redirections(line), in_branch=in_branch):
        setting = ""
        if _UNREAD.match(word):
            command.unread.append(word)
            name = ""
        elif (option := _OPTION.fullmatch(word)) is not None:
            setting = option[1].replace("-", "_")
            settings[setting] = True if option[2] is None else typed(option[2])
            name = setting if option[2] is None else ""
        elif (hydra := _HYDRA.fullmatch(word)) is not None and (hydra[3] is not None or "~" in hydra[1]):
            setting, name = hydra[2], ""
            if "~" in hydra[1]:
                settings.pop(setting, None)
            else:
                settings[setting] = typed(hydra[3])
        elif not name and (assigned := _ASSIGNMENT.fullmatch(word)) is not None:
            scope.assign(assigned[1], assigned[3], adds=bool(assigned[2]), doubtful=doubtful or is_conditional)
            if not command.words and not settings:
                command.environment[assigned[1]] = scope.variables.get(assigned[1], "")
        elif name and not re.match(r"-(?![\d.])", word) and not _is_program(word, settings[name]):
            setting = name
            settings[name] = _with(settings[name], typed(word))
        else:
            command.words.append(word)
            name = ""
        command.doubtful |= {setting} if doubtful and setting else set()
    if command.words or settings:
        scope.restore(before, command.environment)
    return command


def _without_redirections(line: Iterable[str]) -> Iterator[str]:
    """Give the words of a command up to a pipe."""
    is_target = False  # of a redirection with a space
    for word in line:
        if word.startswith(_PIPE):
            return
        redirection = _REDIRECTION.fullmatch(word)
        if redirection is None and not is_target:
            yield word
        is_target = redirection is not None and not redirection[1]


def _is_program(word: str, values: Any) -> bool:
    """Return True for a word that begins a command, after the options of a launcher."""
    return word in _PROGRAMS or (word.endswith(".py") and values is not True)


def _with(before: Any, value: Any) -> Any:
    """Add a value to those of an option, which is True as long as there is none; a list grows in place."""
    if isinstance(before, list):
        before.append(value)
        return before
    return value if before is True else [before, value]


def _lines(text: str) -> Iterator[list[str]]:
    """Give the words of each command, or of an array; a backslash at the end of a line continues the command.

    Raises:
        ValueError: a quotation or an array does not end.
    """
    text = _SPACED.sub(
        lambda found: re.sub(r"[ \t]", "", found[0].translate(_PLAIN)),
        _prepared(_HERE.sub(r"\1", text)).replace("\\\n", " "),
    )
    lexer = shlex.shlex(text, posix=True, punctuation_chars="\n;")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    line: list[str] = []
    num_open = 0  # parentheses of an array
    for word in lexer:
        begins = num_open == 0 and _ARRAY.fullmatch(word)
        if begins and line:
            yield line
            line = line[-1:] if line[-1] in (_AND, _OR) else []
        if begins or num_open > 0:
            num_open += word.count(_OPEN) - word.count(_CLOSE)
            if not word or not set(word) <= set("\n;"):
                line.append(word)
        elif word == _AMPERSAND or (word and set(word) <= set("\n;")):
            if line:
                yield line
            line = []
        elif word not in ("export", "then", "else", "do", _OPEN, _CLOSE):
            line.append(word)
    if num_open > 0:
        raise ValueError(f"the array {line[0].partition('=')[0]} does not end")
    if line:
        yield line


def _prepared(text: str) -> str:
    """Outside of quotes, remove comments (`#` at the beginning of a word), and mark the characters of `_SYNTAX`."""
    kept, quote, before = [], "", "\n"
    in_comment = is_escaped = False
    for character, following in zip(text, f"{text}\n"[1:], strict=True):
        if in_comment and character != "\n":
            continue
        in_comment = not quote and character == "#" and before in " \t\n;"
        if in_comment:
            continue
        if character in "'\"" and not is_escaped and quote in ("", character):
            quote = "" if quote else character
        is_syntax = not quote and not is_escaped and (character != "$" or re.match(r"[\w{]", following))
        is_literal = quote == "'" and character == "$"
        kept.append(_LITERAL if is_literal else _MARKS.get(character, character) if is_syntax else character)
        is_escaped = character == "\\" and not is_escaped and quote != "'"
        before = character
    return "".join(kept)


def _filled(word: str, variables: dict[str, str]) -> str:
    """Fill in the variables and the arithmetic of a word; the rest stays as it is written."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[4], found[3]
        known = variables.get(name)
        if known is None or (known == "" and found[2]):
            known = found[0] if default is None else default
        return re.sub(r"\s", _SPLIT, known) if found[0].startswith(_BARE) and known != found[0] else known

    kept = {ord(mark): mark for mark in (_BARE, _LITERAL, _SPLIT)}
    word = word.translate(_PLAIN | kept)
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
    if not value or (re.search(r"[:#]", value) and not value.startswith(("[", "{"))):
        return value  # a text with a colon, which YAML reads as a mapping or a time, or a part of it as a comment
    try:
        read = float(value) if _FLOAT.fullmatch(value) else yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError):
        return value
    is_odd = isinstance(read, datetime.date) or (isinstance(read, int) and abs(read) >= 2**62)
    return value if is_odd else read
