"""Read a YAML file and dotted overrides into a `Config`. Every mistake gives a line with the key and the remedy.

file ─► mapping ─► AReaL's keys renamed ─► overrides applied ─► preset filled in ─► unknown keys refused
     ─► typed structs ─► `validate`
"""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from areal_rloo.config.areal import translate_file, translate_override
from areal_rloo.config.presets import expand, forget
from areal_rloo.config.schema import Config, validate
from areal_rloo.config.section import AutoInt
from areal_rloo.errors import ConfigError, shortened


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with YAML 1.2's floats: PyYAML alone reads `1e-6` as a string."""


class _Dumper(yaml.SafeDumper):
    """The matching writer: quotes strings that look like such floats."""


_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)([eE][-+]?\d+)$|^[-+]?(\d[\d_]*\.[\d_]*|\.[\d_]+)$")
for _end in (_Loader, _Dumper):
    _end.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a config file, apply overrides (`key.path=value`, with or without leading dashes), and check all values.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, or a value has a wrong type or range.
    """
    path = find_config(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    tree = _parsed(text, f"{path}:")
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(tree).__name__} {tree!r}")
    translate_file(tree)
    sources: dict[str, str] = {}
    for override in overrides:
        keys, value = parse_override(override)
        keys, value = translate_override(keys, value, tree)
        if keys == ("algorithm", "preset") and isinstance(tree.get("algorithm"), dict):
            forget(tree["algorithm"])  # a preset in an override wins over the file
        _apply(tree, keys, value, override)
        sources[".".join(keys)] = f"override '{override}'"
    algorithm = tree.get("algorithm")
    if algorithm is None or isinstance(algorithm, dict):
        tree["algorithm"] = expand(algorithm or {})
    return _typed(tree, str(path), sources)


def find_config(name: str) -> Path:
    """Find a config by path, or by bare name: in the current folder, then among the shipped configs."""
    package = Path(__file__).resolve().parent.parent
    shipped = [package / "configs", package.parent / "configs"]
    for path in [Path(name), *(folder / name for folder in shipped if Path(name).name == name)]:
        if path.is_file():
            return path
    names = sorted(path.name for folder in shipped for path in folder.glob("*.yaml"))
    raise ConfigError(f"{name}: no such config file; expected a path or one of the shipped {', '.join(names)}")


def parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    """Split `key.path=value` or `--key.path=value`; the value is read as YAML."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise ConfigError(f"override '{override}': expected key.path=value")
    return tuple(key.split(".")), _parsed(text, f"override '{shortened(override)}': the value is")


def _parsed(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date like 2024-02-30, a long number
        raise ConfigError(f"{where} not valid YAML: {' '.join(str(error).split())}") from error


def dump_config(config: Config) -> str:
    """Write the resolved config as YAML; `load_config` reads an equal config back."""
    return yaml.dump(msgspec.to_builtins(config), Dumper=_Dumper, sort_keys=False)


def _apply(tree: dict[str, Any], keys: tuple[str, ...], value: Any, override: str) -> None:
    node: Any = tree
    for depth, key in enumerate(keys, start=1):
        place = ".".join(keys[:depth])
        if isinstance(node, list) and not (key.isdecimal() and int(key) < len(node)):
            raise ConfigError(f"override '{override}': '{place}': expected an index from 0 to {len(node) - 1}")
        at: Any = int(key) if isinstance(node, list) else key
        if depth == len(keys):
            node[at] = value
            return
        if isinstance(node, dict) and node.get(at) is None:  # the section is absent or null
            node[at] = {}
        node = node[at]
        if not isinstance(node, dict | list):
            raise ConfigError(f"override '{override}': '{place}' is a value, not a section")


def _typed(tree: dict[str, Any], file: str, sources: dict[str, str]) -> Config:
    def source_of(path: str) -> str:
        related = (key for key in sources if f"{path}.".startswith(f"{key}.") or key.startswith(f"{path}."))
        return sources.get(next(related, ""), file)

    clean = _checked_keys(tree, Config, "", source_of)
    try:
        config = msgspec.convert(clean, Config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        path = path.rstrip("`")
        value, words = _at(clean, path), f"{message[0].lower()}{message[1:].replace('`', '')}"
        choices = _words(_hints(Config).get(path))
        if choices and isinstance(value, str):
            words = f"expected one of {', '.join(choices)}"
        raise ConfigError(f"{source_of(path)}: {path}: {words}; the value is {value!r}") from error
    try:
        validate(config)
    except ConfigError as error:
        raise ConfigError(f"{source_of(str(error).partition(':')[0])}: {error}") from error
    return config


def _checked_keys(node: Any, expected: Any, path: str, source_of: typing.Callable[[str], str]) -> Any:
    """Refuse unknown keys (with a suggestion), NaN and infinity.

    Also read null as `none` for a Literal with this word, and `auto` as 0 for an `AutoInt`.
    """
    struct = _struct_in(expected)
    if struct is not None and isinstance(node, list):
        return [_checked_keys(child, struct, f"{path}.{index}", source_of) for index, child in enumerate(node)]
    if struct is None or not isinstance(node, dict):
        for number in node if isinstance(node, list) else [node]:
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{source_of(path)}: {path}: expected a finite number; the value is {node!r}")
        if node == "auto" and expected == AutoInt:
            return 0
        return "none" if node is None and "none" in _words(expected) else node
    hints = typing.get_type_hints(struct, include_extras=True)
    clean = {}
    for key, value in node.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise ConfigError(f"{source_of(here)}: unknown key '{here}'; {_suggestion(str(key), here, hints)}")
        empty_section = value is None and _struct_in(hints[key]) and type(None) not in typing.get_args(hints[key])
        clean[key] = _checked_keys({} if empty_section else value, hints[key], here, source_of)
    return clean


def _suggestion(key: str, here: str, hints: dict[str, Any]) -> str:
    close = difflib.get_close_matches(key, hints, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    elsewhere = next((path for path in _hints(Config) if path.rpartition(".")[2] == key), None)
    if elsewhere is not None:
        return f"did you mean '{elsewhere}'?"
    parent = here.rpartition(".")[0] or "the top level"
    return f"expected one of {', '.join(hints)} in {parent}"


def _hints(struct: Any, prefix: str = "") -> dict[str, Any]:
    """Return the type of every key of a section and of the sections inside, by path."""
    hints = {}
    for key, hint in typing.get_type_hints(struct, include_extras=True).items():
        hints[prefix + key] = hint
        inner = _struct_in(hint)
        if inner is not None:
            hints |= _hints(inner, f"{prefix}{key}.")
    return hints


def _struct_in(expected: Any) -> Any:
    """Return the struct type X of a hint (`X`, `X | None`, `tuple[X, ...]`), or None."""
    options = typing.get_args(expected) if isinstance(expected, types.UnionType) else (expected,)
    options = (*options, *(typing.get_args(o)[0] for o in options if typing.get_origin(o) is tuple))
    return next((o for o in options if isinstance(o, type) and issubclass(o, msgspec.Struct)), None)


def _words(expected: Any) -> list[str]:
    return [str(word) for word in typing.get_args(expected)] if typing.get_origin(expected) is Literal else []


def _at(tree: Any, path: str) -> Any:
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(tree, list) and key.isdigit():
            tree = tree[int(key)]
        elif isinstance(tree, dict) and key in tree:
            tree = tree[key]
        else:
            break
    return tree
