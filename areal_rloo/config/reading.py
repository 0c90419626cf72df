"""Read YAML from outside into a bounded tree, without a guess at the type of any value.

text ─► events of PyYAML ─► mappings, lists, None, `str` for text in quotes, `Plain` for all other scalars

The type of a config key decides later what a `Plain` means (`typed`). So `2024-02-30`, `0x_` or `no` is a text for a
key of text, and a mistake for a number. Depth, number of values and length are bounded while the text is read, aliases
counted as if they were written out. Tags, merge keys, duplicate keys and control characters are refused.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from areal_rloo.errors import ConfigError, shown

MOST_BYTES = 2**19  # of a file: room for every dumped config within the limits of `bounded`
MOST_KEY = 100  # characters of a key
_MOST_DEPTH, _MOST_VALUES, _MOST_CHARACTERS = 16, 5_000, 50_000  # of a config
_NEWLINE = "\n"
_HINTS = {
    "mapping values are not allowed here": "; the line before may lack ': ', or a text with ': ' may lack quotes",
}
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


class Plain(str):
    """The text of a scalar without quotes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Parsed:
    """The tree of a text, and the line of each key in it, by path (`learner.optimizer`)."""

    tree: Any
    lines: dict[str, int] = field(default_factory=dict)


def parse(text: str, where: str, *, is_file: bool) -> Parsed:
    """Read a text with a single YAML document. `where` begins each error: a file, or the words for an override.

    Raises:
        ConfigError: the text is not YAML, or not within the limits; names the line.
    """
    reader = _Reader(where, is_file=is_file, last_line=text.rstrip().count("\n"))
    try:
        return reader.read(yaml.parse(text, yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        raise reader.mistake(*_place_and_words(error, text)) from error
    except yaml.reader.ReaderError as error:
        place = f":{text.count(_NEWLINE, 0, error.position) + 1}" if is_file else ""
        character = f"{chr(error.character)!a}"
        raise ConfigError(f"{where}{place}: not valid YAML: the character {character} is not allowed") from error
    except (yaml.YAMLError, ValueError, IndexError) as error:  # ValueError: an escape beyond Unicode, a long version
        raise ConfigError(f"{where}: not valid YAML: {error}") from error


def _place_and_words(error: yaml.MarkedYAMLError, text: str) -> tuple[Any, str]:
    """Find the line of the mistake: PyYAML may notice an open bracket or quote only at the end of the text."""
    mark, began = error.problem_mark, error.context_mark
    words = f"not valid YAML: {error.problem or error.context}{_HINTS.get(error.problem or '', '')}"
    if mark is None or began is None or began.line == mark.line:
        return mark, words
    if mark.index >= len(text.rstrip()):
        return began, f"{words}, {error.context} that begins here"
    return mark, f"{words}, {error.context} that begins in line {began.line + 1}"


def bounded(tree: Any) -> str | None:
    """Say why a config is too large or too deep to be dumped and parsed again; None if the config is not."""
    num_values = num_characters = 0
    level = [tree]
    for _ in range(_MOST_DEPTH):
        num_values += len(level)
        num_characters += sum(len(value) for value in level if isinstance(value, str))
        if num_values > _MOST_VALUES or num_characters > _MOST_CHARACTERS:
            return f"expected at most {_MOST_VALUES} values and {_MOST_CHARACTERS} characters of text"
        level = [child for value in level for child in _children(value)]
        if not level:
            return None
    return f"expected at most {_MOST_DEPTH} levels"


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, list | tuple) else []


class _Reader:
    """Builds the tree of a document. The limits leave room above `bounded` for a config of many default values."""

    def __init__(self, where: str, *, is_file: bool, last_line: int) -> None:
        """`last_line`: the number, from 0, of the last line with text; no mistake is after it."""
        self._where = where
        self._is_file = is_file
        self._last_line = last_line
        self._lines: dict[str, int] = {}
        self._anchors: dict[str, tuple[Any, int, int]] = {}  # the value, its number of values and of characters
        self._num_values = self._num_characters = 0

    def mistake(self, mark: Any, words: str) -> ConfigError:
        place = f":{min(mark.line, self._last_line) + 1}" if mark is not None and self._is_file else ""
        return ConfigError(f"{self._where}{place}: {words}")

    def read(self, events: Iterator[Any]) -> Parsed:
        tree: Any = None
        for number, event in enumerate(event for event in events if not isinstance(event, _FRAME)):
            if isinstance(event, yaml.DocumentStartEvent):
                if number:
                    raise self.mistake(event.start_mark, "expected a single document, got another after '---'")
                tree = self._node(next(events), events, ())
        return Parsed(tree, self._lines)

    def _node(self, event: Any, events: Iterator[Any], path: tuple[str, ...]) -> Any:
        if len(path) > 2 * _MOST_DEPTH:
            raise self.mistake(event.start_mark, f"expected at most {2 * _MOST_DEPTH} levels")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if event.tag is not None:
            words = f"expected no tag, got {shown(event.tag)}; put text in quotes, and write other values without a tag"
            raise self.mistake(event.start_mark, words)
        before = self._num_values, self._num_characters
        self._count(event, 1, len(event.value) if isinstance(event, yaml.ScalarEvent) else 0)
        value: Any
        if isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            numbers = itertools.count()
            value = [self._node(child, events, (*path, str(next(numbers)))) for child in _until_end(events)]
        else:
            value = self._mapping(events, path)
        if event.anchor is not None:
            size = self._num_values - before[0], self._num_characters - before[1]
            self._anchors[event.anchor] = (value, *size)
        return value

    def _mapping(self, events: Iterator[Any], path: tuple[str, ...]) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        lines: dict[str, Any] = {}
        for event in _until_end(events):
            key = self._key(event)
            whole = (*path, key)
            if key in mapping:
                also = f", in line {lines[key]} too" if self._is_file else ""
                words = f"the key '{'.'.join(whole)}' is given twice{also}; leave one of them out"
                raise self.mistake(event.start_mark, words)
            lines[key] = self._lines[".".join(whole)] = event.start_mark.line + 1
            mapping[key] = self._node(next(events), events, whole)
        return mapping

    def _key(self, event: Any) -> str:
        if not isinstance(event, yaml.ScalarEvent) or event.tag is not None or event.anchor is not None:
            raise self.mistake(event.start_mark, "expected a plain name as the key of a value")
        if event.value == "<<" and event.style is None:
            raise self.mistake(event.start_mark, "the merge key '<<' is not read here; write the keys out")
        if len(event.value) > MOST_KEY:
            words = f"expected a key of at most {MOST_KEY} characters, got {shown(event.value)}"
            raise self.mistake(event.start_mark, words)
        self._count(event, 1, len(event.value))
        return str(self._checked(event))

    def _scalar(self, event: Any) -> str | None:
        text = self._checked(event)
        if event.style is not None:
            return text
        return None if text in _NULLS else Plain(text)

    def _checked(self, event: Any) -> str:
        text: str = event.value
        if not text.isprintable() and (wrong := next((c for c in text if not is_allowed(c)), None)) is not None:
            raise self.mistake(event.start_mark, f"expected no control characters in a text, got {wrong!a}")
        return text

    def _alias(self, event: Any) -> Any:
        if event.anchor not in self._anchors:
            words = f"the alias '*{shown(event.anchor)}' names no anchor that ends before it"
            raise self.mistake(event.start_mark, words)
        value, num_values, num_characters = self._anchors[event.anchor]
        self._count(event, num_values, num_characters)
        return _copied(value)

    def _count(self, event: Any, num_values: int, num_characters: int) -> None:
        self._num_values += num_values
        self._num_characters += num_characters
        if self._num_values > 2 * _MOST_VALUES:
            raise self.mistake(event.start_mark, f"expected at most {2 * _MOST_VALUES} values, aliases written out")
        if self._num_characters > 2 * _MOST_CHARACTERS:
            words = f"expected at most {2 * _MOST_CHARACTERS} characters of text, aliases written out"
            raise self.mistake(event.start_mark, words)


_FRAME = (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)


def _until_end(events: Iterator[Any]) -> Iterator[Any]:
    """Give the first event of each child of a collection."""
    while not isinstance(event := next(events), yaml.CollectionEndEvent):
        yield event


def is_allowed(character: str) -> bool:
    """Whether a text may have this character: lines and tabs, but no codes of terminals and no half characters."""
    return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")


def _copied(value: Any) -> Any:
    """Copy the collections of a value: an override must change a single place."""
    if isinstance(value, dict):
        return {key: _copied(child) for key, child in value.items()}
    return [_copied(child) for child in value] if isinstance(value, list) else value
