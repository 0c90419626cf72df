"""Options on a command line: `key.path=value`, `key.path+=value` for lists, `~key.path` to remove.

In: words of a command line and the tree of a file. Out: the tree with the changes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from areal_rloo.config.areal import translate_override
from areal_rloo.config.data import SourceConfig
from areal_rloo.config.presets import forget
from areal_rloo.config.reading import MOST_KEY, parse
from areal_rloo.config.schema import Config
from areal_rloo.errors import ConfigError, shown

EXPECTED = "key.path=value, key.path+=value for a list, or ~key.path to remove a key"
_PRESET = ("algorithm", "preset")
_MOST_PARTS = 16  # of the key of an override


class Override(NamedTuple):
    """A change of the tree; `value` is as YAML, and None for `remove`."""

    text: str
    keys: tuple[str, ...]
    action: Literal["set", "append", "remove"]
    value: Any

    @property
    def words(self) -> str:
        return f"override '{shown(self.text)}'"


def is_override(argument: str) -> bool:
    """Return True if a word of a command line is an override."""
    return "=" in argument or argument.startswith("~")


def parse_override(text: str) -> Override:
    """Read an override, with or without leading dashes.

    Raises:
        ConfigError: the text is no override, or the value not YAML.
    """
    key, equals, value = text.removeprefix("--").partition("=")
    action: Literal["set", "append", "remove"] = "set"
    if key.startswith("~") and not equals:
        key, action = key.removeprefix("~"), "remove"
    elif key.endswith("+"):
        key, action = key.removesuffix("+"), "append"
    parts = tuple(key.split("."))
    if not (equals or action == "remove") or not all(parts):
        raise ConfigError(f"override '{shown(text)}': expected {EXPECTED}")
    if key.startswith("+"):
        raise ConfigError(f"override '{shown(text)}': expected {EXPECTED}; leave out the '+' at the beginning")
    if len(parts) > _MOST_PARTS or any(len(part) > MOST_KEY for part in parts):
        words = f"expected at most {_MOST_PARTS} names of at most {MOST_KEY} characters before the '='"
        raise ConfigError(f"override '{shown(text)}': {words}")
    found = None if action == "remove" else parse(value, f"override '{shown(text)}': the value", is_file=False).tree
    return Override(text, parts, action, found)


def override_of(key: str, text: str | Path) -> str:
    """Write an override with a text that must not be read as YAML, such as a path with ` #` in it."""
    return f"{key}={json.dumps(str(text), ensure_ascii=False)}"


def check_overrides(words: Sequence[str]) -> Sequence[str]:
    """Return the words of a command line that are no flags, if all are overrides of different keys.

    Raises:
        ConfigError: a word is no override, or a key is given twice.
    """
    for word in words:
        if not is_override(word):
            raise ConfigError(f"argument '{shown(word)}': expected {EXPECTED}; see --help")
    check_unique(words)
    return words


def check_unique(overrides: Sequence[str]) -> None:
    """Check the overrides of a command line: a value would be lost unseen if a later one replaced it.

    Raises:
        ConfigError: a key is given twice, or a section after a key inside it.
    """
    given: list[Override] = []
    for text in overrides:
        override = parse_override(text)
        lost = next((other for other in given if _replaces(override, other)), None)
        if lost is not None and lost.keys == override.keys:
            expected = f"expected each key once, got '{shown(lost.text)}' too; leave one out"
            raise ConfigError(f"{override.words}: {expected}")
        if lost is not None:
            expected = f"expected a section before the keys inside it, got '{shown(lost.text)}' before"
            raise ConfigError(f"{override.words}: {expected}; change the order")
        given.append(override)


def _replaces(override: Override, before: Override) -> bool:
    """Return True if the change before is lost, other than with a removed section."""
    if before.keys == override.keys:
        return override == before if before.action == "remove" else override.action != "append"
    inside = before.keys[: len(override.keys)] == override.keys
    return inside and before.action != "remove" and override.action == "set" and override.value is not None


def in_order(overrides: Sequence[str]) -> list[Override]:
    """Read overrides; a preset comes before the other keys of the section: it wins over the file alone.

    Raises:
        ConfigError: as `parse_override`.
    """
    ranks = {_PRESET[:1]: 0, _PRESET: 1}
    return sorted(map(parse_override, overrides), key=lambda override: ranks.get(override.keys, 2))


def apply(tree: dict[str, Any], override: Override) -> str:
    """Change the tree; return the changed key in our spelling.

    Raises:
        ConfigError: the key leads into a value, or there is nothing to remove.
    """
    if override.action == "set":
        keys, value = translate_override(override.keys, override.value, tree)
        override = override._replace(keys=keys, value=value)
    keys = override.keys
    if keys == _PRESET and isinstance(tree.get("algorithm"), dict):
        forget(tree["algorithm"])  # a preset in an override wins over the file
    node: Any = tree
    for depth in range(1, len(keys)):
        at = _at(node, override, depth)
        if isinstance(node, dict) and node.get(at) is None:  # the section is absent or null
            node[at] = {}
        node = node[at]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{override.words}: '{_place(override, depth)}' is a value, not a section")
    at = _at(node, override, len(keys))
    match override.action:
        case "set":
            node[at] = override.value
        case "append":
            present = node[at] if isinstance(node, list) or at in node else _default(keys)
            if at == "rewards" and not present and isinstance(node, dict):
                _check_own_reward(node, override)
            node[at] = _appended(present, override)
        case "remove":
            if isinstance(node, dict) and at not in node:
                raise ConfigError(f"{override.words}: expected a key of the file, got one that the file does not have")
            del node[at]
    return ".".join(keys)


def _at(node: Any, override: Override, depth: int) -> Any:
    """Return the key or index into a section or list for the first `depth` names."""
    key = override.keys[depth - 1]
    if not isinstance(node, list):
        return key
    if not (key.isdecimal() and int(key) < len(node)):
        words = f"expected an index from 0 to {len(node) - 1}"
        raise ConfigError(f"{override.words}: '{_place(override, depth)}': {words}")
    return int(key)


def _place(override: Override, depth: int) -> str:
    return shown(".".join(override.keys[:depth]))


def _appended(present: Any, override: Override) -> list[Any]:
    """Return a list with one more value, or with those of a list. A section alone becomes the first of a list."""
    if isinstance(present, dict):
        present = [present]
    if not isinstance(present, list | tuple | None):
        raise ConfigError(f"{override.words}: expected a list to append to, got '{shown(str(present))}'")
    value = override.value
    return [*(present or ()), *(value if isinstance(value, list) else [value])]


def _check_own_reward(source: dict[str, Any], override: Override) -> None:
    """Refuse to append to no rewards, which mean the reward of the task: the new one would replace it unseen."""
    task = source.get("task", SourceConfig().task)
    if task not in ("rows", "demonstrations"):
        key = ".".join(override.keys)
        own = f"expected {key}=[{{task: {shown(str(task))}}}, ...], got '+=' without a list"
        raise ConfigError(f"{override.words}: {own}; an empty list is the reward of the task, which '+=' would replace")


def _default(keys: Sequence[str]) -> Any:
    """Return the default of a key that the file leaves out; None if the key is inside a list, or unknown."""
    node = msgspec.to_builtins(Config())
    for key in keys:
        if not isinstance(node, dict):
            return None
        node = node.get(key)
    return node
