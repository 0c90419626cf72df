"""Every option as data: key, values, default, meaning. The structs say all but the meaning, a comment at the field.

Read by `areal-rloo config`, which also makes docs/options.md and configs/schema.json.
"""

from __future__ import annotations

import ast
import functools
import io
import math
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec import inspect

from areal_rloo.config.schema import Config

_SIZE = r"^\d+(\.\d+)?([eE]\d+)? ?([KMGT]i?)?B?$"
_UNBOUNDED = 2**62  # bounds at and beyond this only keep sums finite
_PLAIN: dict[type[inspect.Type], str] = {
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.BoolType: "true or false",
    inspect.NoneType: "null",
    inspect.AnyType: "any value",
    inspect.StructType: "a section",
}


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the config file; N in a key stands for a position in a list, NAME for a key of a mapping."""

    key: str
    values: str
    default: str
    meaning: str
    choices: tuple[str, ...] = ()  # the words among the values, if the option takes a few


@dataclass(frozen=True, slots=True)
class Group:
    """A section of the config file: the options that stand directly in it, in the order of the struct."""

    key: str
    meaning: str
    options: tuple[Option, ...]


@functools.cache
def groups() -> tuple[Group, ...]:
    """Return every section with options, in the order of a resolved config."""
    return tuple(group for section, key in _sections(_root(), "") if (group := _group(section, key)).options)


def options() -> list[Option]:
    """Return every option."""
    return [option for group in groups() for option in group.options]


def find(key: str) -> list[Option]:
    """Return the option with a key, or all options of a section."""
    return [option for option in options() if option.key == key or option.key.startswith(f"{key}.")]


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors: keys, types, ranges, defaults, meanings."""
    schema = msgspec.json.schema(Config)
    of_areal = {"type": "object", "description": "AReaL's adv_norm, reward_norm and rejection_sampling, in its words."}
    schema["$defs"]["Config"]["properties"]["actor"] = of_areal
    structs = {section.cls.__name__: section.cls for section, _ in _sections(_root(), "")}
    for name, struct in schema["$defs"].items():
        meanings = _meanings(structs[name])
        for key, described in struct["properties"].items():
            auto, size = described.pop("auto", False), described.pop("bytes", False)
            if auto or size:  # texts that `typed` reads as numbers
                number = dict(described)
                default = number.pop("default", None)
                described.clear()
                number |= {"minimum": 1} if auto else {}
                described["anyOf"] = [number, {"enum": ["auto"]} if auto else {"type": "string", "pattern": _SIZE}]
                if default is not None:
                    described["default"] = default or ("auto" if auto else 0)
            described["description"] = meanings.get(key) or described.get("description", "")
    return schema


def _sections(section: inspect.StructType, key: str) -> Iterator[tuple[inspect.StructType, str]]:
    """Give a section and all sections inside, each with the key."""
    yield section, key
    for field in section.fields:
        for kind in _kinds(field.type):
            inner, below = _item(kind)
            if isinstance(inner, inspect.StructType):
                yield from _sections(inner, _joined(key, field.name) + below)


def _group(section: inspect.StructType, key: str) -> Group:
    meanings = _meanings(section.cls)
    described = (_option(field, key, meanings[field.name]) for field in section.fields)
    return Group(key, _first_paragraph(section.cls), tuple(option for option in described if option is not None))


def _option(field: inspect.Field, section: str, meaning: str) -> Option | None:
    """Describe a field; None for a section that every config has."""
    if isinstance(field.type, inspect.StructType):
        return None
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    auto = isinstance(field.type, inspect.Metadata) and (field.type.extra or {}).get("auto")
    shown = "auto" if auto and default == 0 else _written(default)
    return Option(_joined(section, field.name), _values(field.type), shown, meaning, tuple(_choices(field.type)))


def _written(default: Any) -> str:
    """Write a default as YAML, in a line."""
    if default is msgspec.NODEFAULT:
        return "required"
    tree = msgspec.to_builtins(default)
    if isinstance(default, msgspec.Struct):
        return "its defaults"
    if isinstance(tree, list | tuple) and any(isinstance(item, dict) for item in tree):
        names = {field.name: field.default for field in msgspec.structs.fields(type(default[0]))}
        tree = [{key: value for key, value in item.items() if value != names.get(key)} for item in tree]
    return yaml.safe_dump(tree, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...")


def _values(kind: inspect.Type) -> str:
    """Say in words which values a type admits."""
    words = _PLAIN.get(type(kind), "text")
    match kind:
        case inspect.Metadata(type=inner, extra=extra):
            words = _values(inner)
            if "auto" in (extra or {}):
                words = f"auto or {words.replace('from 0', 'from 1')}"
            elif "bytes" in (extra or {}):
                words = "bytes: 24000000000, 24GB or 24GiB"
        case inspect.IntType() | inspect.FloatType():
            words += _bounds(kind)
        case inspect.LiteralType(values=choices):
            words = " or ".join(map(str, choices))
        case inspect.VarTupleType(item_type=item):
            words = f"list of {'sections' if isinstance(item, inspect.StructType) else _values(item)}"
        case inspect.TupleType(item_types=items):
            words = f"list of {len(items)}: {_values(items[0])}"
        case inspect.DictType(value_type=value):
            words = f"mapping of names to {_values(value)}"
        case inspect.UnionType(types=options):
            words = " or ".join(_values(option) for option in options)
    return words


def _choices(kind: inspect.Type) -> Iterator[str]:
    for option in _kinds(kind):
        match option:
            case inspect.LiteralType(values=words):
                yield from map(str, words)
            case inspect.BoolType():
                yield from ("true", "false")
            case inspect.NoneType():
                yield "null"


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    lower = f" from {kind.ge:,}" if kind.ge is not None else f" above {kind.gt:,}" if kind.gt is not None else ""
    if kind.le is not None and kind.le < _UNBOUNDED:
        return f"{lower} to {kind.le:,}"
    return lower if kind.lt is None else f"{lower}, below {kind.lt:,}"


def _kinds(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Give the types of a union, or the type alone."""
    if isinstance(kind, inspect.UnionType):
        yield from kind.types
    else:
        yield kind


def _item(kind: inspect.Type) -> tuple[inspect.Type, str]:
    """Return the type of the items of a collection, with the part of their keys; or the type itself."""
    match kind:
        case inspect.VarTupleType(item_type=item):
            return item, ".N"
        case inspect.DictType(value_type=value):
            return value, ".NAME"
    return kind, ""


def _joined(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _first_paragraph(struct: type) -> str:
    """Return the docstring of a struct; empty for the one that msgspec makes."""
    text = (struct.__dict__.get("__doc__") or "").strip()
    return " ".join(text.split("\n\n")[0].split())


def _root() -> inspect.StructType:
    root = inspect.type_info(Config)
    assert isinstance(root, inspect.StructType), "the config is a struct"
    return root


@functools.cache
def _meanings(struct: type) -> dict[str, str]:
    """Return the comment at each field of a struct and of the bases; empty for a field without."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, msgspec.Struct) and base.__module__.startswith("areal_rloo."):
            found |= _comments(base.__module__).get(base.__name__, {})
    return found


@functools.cache
def _comments(module: str) -> dict[str, dict[str, str]]:
    """Return the comments of the fields of each class of a module: behind the field, and in the lines above it."""
    source = Path(import_module(module).__file__ or "").read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    alone = {row for row, token in comments.items() if token.line.lstrip().startswith("#")}
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        fields = (
            [child for child in node.body if isinstance(child, ast.AnnAssign)] if isinstance(node, ast.ClassDef) else []
        )
        for field in fields:
            assert isinstance(field.target, ast.Name) and isinstance(node, ast.ClassDef), "a field has a name"
            above = field.lineno
            while above - 1 in alone:
                above -= 1
            rows = [row for row in range(above, (field.end_lineno or field.lineno) + 1) if row in comments]
            words = " ".join(comments[row].string.removeprefix("#").strip() for row in rows)
            found.setdefault(node.name, {})[field.target.id] = words
    return found
