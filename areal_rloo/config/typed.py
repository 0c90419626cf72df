"""Give the tree of a config the types of the structs. Each mistake names the place, the key and the value.

tree ─► null, `auto` and `Plain` as the type of the key says ─► unknown keys refused ─► values filled in
     ─► structs ─► `validate` ─► limits
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from areal_rloo.config.filled import fill_sets, fill_template
from areal_rloo.config.other_names import ABSENT, OURS
from areal_rloo.config.reading import Plain, bounded
from areal_rloo.config.schema import Config, validate
from areal_rloo.config.section import AUTO, Bytes, bytes_of
from areal_rloo.errors import ConfigError, shown

# A subset of the texts in quotes of `dump_config`, so a text stays a text.
_INTEGER = re.compile(r"[-+]?(0|[1-9]\d*(_\d+)*)")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+|[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_MORE_BOOLS = {"yes": True, "on": True, "no": False, "off": False}  # of a key without texts
_KEY = re.compile(r"\b[a-z_]+(?:\.[a-z_0-9]+)+")
_AUTO = "expected auto, or a number from 1"
_TYPES = re.compile(r"`([^`]*)`")  # in a message of msgspec: `array | null`
_NAMES = {"array": "a list", "object": "a mapping of keys"}
_LIST = re.compile(r"a list( of length \d+)?")
_OF_ALL_SOURCES = ("sampling", "temperature", "top_p", "top_k")
_OTHER_ROLE = re.compile(r"critic|ref|teacher|reward(_model)?|(eval|val|valid|validation|test)(_\w+)?")
_MOST_DIGITS = 100  # of a number: 17 give every float, and no integer needs as many

SourceOf = Callable[[str], str]  # where the value of a path was written: a file and a line, or an override


def typed(tree: dict[str, Any], source_of: SourceOf) -> Config:
    """Make the config of a tree.

    Raises:
        ConfigError: a key is unknown, or a value has a wrong type, range or meaning.
    """
    clean = _Cleaner(source_of).section(tree, Config, "")
    fill_sets(clean)
    try:
        fill_template(clean)
    except ConfigError as error:
        raise ConfigError(f"{source_of('data.chat_template')}: {error}") from error
    try:
        config = msgspec.convert(clean, Config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        path = ".".join(_parts(path.rstrip("`")))
        value = _at(clean, path)
        hints, (parent, _, last) = hints_of(Config), path.rpartition(".")
        hint = _values_of(hints.get(parent), tuple) if last.isdecimal() else hints.get(path)
        words = _in_words(message, hint, value)
        said = "an empty value is null" if value is None else f"the value is {_quoted(value)}"
        if isinstance(value, str) and "," in value and source_of(path).startswith("override "):
            said += f"; to try several, areal-rloo sweep --over {path}={shown(value)}"
        raise ConfigError(f"{source_of(path)}: {path}: {words}; {said}") from error
    try:
        validate(config)
    except ConfigError as error:
        key, _, words = str(error).partition(":")
        found = (source_of(name) for name in _KEY.findall(words))  # an override may be the reason
        others = dict.fromkeys(other for other in found if other.startswith("override ") and other != source_of(key))
        raise ConfigError(f"{' with '.join([source_of(key), *others])}: {error}") from error
    if (too_large := bounded(msgspec.to_builtins(config))) is not None:
        raise ConfigError(f"{source_of('')}: the config is too large with all overrides: {too_large}; shorten it")
    return config


def _in_words(message: str, hint: Any, value: Any) -> str:
    """Say which value a key takes, in the words of a config instead of msgspec's."""
    kinds = _options(hint)
    if (choices := [word for kind in kinds for word in _words(kind)]) and isinstance(value, str):
        return f"expected one of {', '.join([*choices, *(('true', 'false') if bool in kinds else ())])}"
    if hint == Bytes:
        return "expected bytes, as 24000000000, 24GB or 24GiB"
    if hint in AUTO and "<=" not in message:
        return _AUTO
    words = _TYPES.sub(lambda found: " or ".join(_NAMES.get(name, name) for name in found[1].split(" | ")), message)
    for kind in kinds:
        if typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind):
            words = _LIST.sub(f"a list of {len(typing.get_args(kind))} numbers", words, count=1)
    return f"{words[:1].lower()}{words[1:]}"


class _Cleaner:
    """Walks a tree beside the types: refuses unknown keys (with a suggestion), NaN and infinity, and reads scalars."""

    def __init__(self, source_of: SourceOf) -> None:
        self._source_of = source_of

    def section(self, node: dict[str, Any], struct: Any, path: str) -> dict[str, Any]:
        hints = typing.get_type_hints(struct, include_extras=True)
        clean = {}
        for key, value in node.items():
            here = f"{path}.{key}" if path else key
            if key not in hints:
                words = f"unknown key '{shown(here)}'; {_known_leaf(here, value) or _suggestion(key, path, hints)}"
                raise ConfigError(f"{self._source_of(here)}: {words}")
            hint = hints[key]
            is_list = typing.get_origin(hint) is tuple
            empty_section = value is None and _struct_in(hint) and not is_list and type(None) not in _kinds(hint)
            clean[key] = self.value({} if empty_section else value, hint, here)
        return clean

    def value(self, node: Any, hint: Any, path: str) -> Any:
        """Read null as `none` for a Literal with this word, `auto` of a count as 0, and 24GB as bytes."""
        struct = _struct_in(hint)
        if isinstance(node, dict):
            if struct is not None:
                return self.section(node, struct, path)
            inner = _values_of(hint, dict)
            return {key: self.value(child, inner, f"{path}.{key}") for key, child in node.items()}
        if isinstance(node, list):
            inner = struct or _values_of(hint, tuple)
            return [self.value(child, inner, f"{path}.{index}") for index, child in enumerate(node)]
        if node == "auto" and hint in AUTO:
            return 0
        if node is None:
            return "none" if "none" in _words(hint) else None
        value = _scalar(node, _kinds(hint)) if isinstance(node, Plain) else node
        if hint == Bytes and isinstance(node, str) and not isinstance(value, int):
            value = bytes_of(node) or value
        if hint in AUTO and type(value) is int and value == 0:
            raise ConfigError(f"{self._source_of(path)}: {path}: {_AUTO}; the value is 0")
        if isinstance(value, float) and not math.isfinite(value):
            words = f"expected a finite number; the value is {shown(str(node))}"
            raise ConfigError(f"{self._source_of(path)}: {path}: {words}")
        return value


def _scalar(text: Plain, kinds: set[Any]) -> Any:
    """Read a scalar without quotes as the types of its key say."""
    if kinds <= {str, type(None)}:
        return str(text)
    bools = _BOOLS | _MORE_BOOLS if bool in kinds and str not in kinds else _BOOLS
    if text in bools:
        return bools[text]
    if len(text) <= _MOST_DIGITS and _INTEGER.fullmatch(text):
        return int(text)
    if len(text) <= _MOST_DIGITS and _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if _NOT_FINITE.fullmatch(text):
        return math.nan
    return str(text)


def _kinds(hint: Any) -> set[Any]:
    """Return the types that a hint admits; str for a Literal."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(hint)[0])
    if origin in (types.UnionType, typing.Union):
        return set().union(*(_kinds(option) for option in typing.get_args(hint)))
    return {str} if origin is Literal else {hint}


def _values_of(hint: Any, container: type) -> Any:
    """Return the type of the values of a dict or tuple in a hint; Any if the hint has none."""
    for option in _kinds(hint):
        if typing.get_origin(option) is container:
            return typing.get_args(option)[1 if container is dict else 0]
    return Any


def _known_leaf(section: str, value: Any) -> str | None:
    """Name our key for another system's key inside an unknown section.

    None if there are several keys, or none, if ours has this name, too, or if the section is of another model.
    """
    leaf, sections = "", section.split(".")
    while isinstance(value, dict) and len(value) == 1:
        ((leaf, value),) = value.items()
        sections.append(str(leaf))
    if leaf not in OURS or isinstance(value, dict) or any(map(_OTHER_ROLE.fullmatch, sections[:-1])):
        return None
    return None if _named(leaf) else f"did you mean {OURS[leaf]!r}?"


def _named(key: str) -> list[str]:
    """Return the paths of our keys with this name, in any section."""
    return [path for path in hints_of(Config) if path.rpartition(".")[2] == key]


def _suggestion(key: str, parent: str, hints: dict[str, Any]) -> str:
    if key in ABSENT and not _named(key):
        return f"there is no such option: {ABSENT[key]}"
    if parent.startswith("data.train") and key in _OF_ALL_SOURCES:
        return (
            "a source has only max_new_tokens of its own: the learner computes the logprobs of all sources from the "
            "same distribution, with rollout.sampling.temperature"
        )
    close = difflib.get_close_matches(key, hints, n=1, cutoff=0.7)
    if close:
        return f"did you mean '{parent}.{close[0]}'?" if parent else f"did you mean '{close[0]}'?"
    if key in OURS:
        return f"did you mean {OURS[key]!r}?"
    if elsewhere := _named(key):
        likely = sorted(elsewhere, key=lambda path: path.startswith("model.tiny."))  # last: no model of a user
        return f"did you mean {' or '.join(map(repr, likely))}?"
    return f"expected one of {', '.join(hints)} in {parent or 'the top level'}"


def hints_of(struct: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of every key of a section and of the sections inside, by path."""
    hints = {}
    for key, hint in typing.get_type_hints(struct, include_extras=True).items():
        hints[prefix + key] = hint
        inner = _struct_in(hint)
        if inner is not None:
            hints |= hints_of(inner, f"{prefix}{key}.")
    return hints


@functools.cache
def auto_keys() -> tuple[tuple[str, str], ...]:
    """Return section and key of each count that may be `auto`."""
    paths = (path.split(".") for path, hint in hints_of(Config).items() if hint in AUTO)
    return tuple((section, key) for section, key in paths)


def _struct_in(expected: Any) -> Any:
    """Return the struct type X of a hint (`X`, `X | None`, `tuple[X, ...]`), or None."""
    options = _options(expected)
    options = (*options, *(typing.get_args(o)[0] for o in options if typing.get_origin(o) is tuple))
    return next((o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)), None)


def _options(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the hint alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _words(expected: Any) -> list[str]:
    return [str(word) for word in typing.get_args(expected)] if typing.get_origin(expected) is Literal else []


def _at(tree: Any, path: str) -> Any:
    for key in _parts(path):
        if isinstance(tree, list) and key.isdigit():
            tree = tree[int(key)]
        elif isinstance(tree, dict) and key in tree:
            tree = tree[key]
        else:
            break
    return tree


def _parts(path: str) -> list[str]:
    """Split a path as overrides (`betas.0`) or msgspec (`betas[0]`, `fields[...]`) write it."""
    return re.findall(r"[^.\[\]]+", path)


def _quoted(value: Any) -> str:
    return shown(repr(value))
