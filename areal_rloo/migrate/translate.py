"""Apply the rules of a system to the settings of a file: our options, and the fate of every setting."""

from __future__ import annotations

import copy
import fnmatch
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from areal_rloo.config.load import config_of
from areal_rloo.errors import ConfigError, shown
from areal_rloo.migrate import areal, trl, verl
from areal_rloo.migrate.reading import Found, System
from areal_rloo.migrate.rules import Expression, Options, Rule, UnreadableError
from areal_rloo.migrate.trl_steps import processes
from areal_rloo.migrate.trl_trainer import with_algorithm

Fate = Literal["to", "none", "hand", "unknown"]

RULES: Mapping[System, Mapping[str, Rule]] = {
    "areal": areal.RULES,
    "verl": verl.RULES,
    "trl": trl.RULES,
    "ms-swift": trl.RULES,
}
_DEFAULTS = {"areal": areal.defaults, "verl": verl.defaults, "trl": trl.defaults, "ms-swift": trl.defaults}
_DECIDE = ("trainer", "advantage_estimator", "tuner_type", "train_type")


class Line(msgspec.Struct, frozen=True):
    """The fate of a setting.

    Attributes:
        name: of the setting.
        value: of the setting.
        fate: `to` our options, `none` without a counterpart, `hand` for the user, `unknown` to the rules.
        keys: our options.
        why: in words.
    """

    name: str
    value: Any
    fate: Fate
    keys: tuple[str, ...] = ()
    why: str = ""


class Translation(msgspec.Struct, frozen=True):
    """Our options as the tree of a config file, and a line for every setting."""

    tree: dict[str, Any]
    lines: list[Line]
    refusal: str = ""  # why the config is not complete; empty if our checks accept it


def translate(found: Found) -> Translation:
    """Translate the settings of a file; the defaults of the system are written where ours differ.

    Raises:
        DataError: the file does not say which algorithm it runs.
    """
    given = dict(found.settings)
    if found.system in ("trl", "ms-swift"):
        given |= processes(found)
        given = with_algorithm(found, given)
    rules = RULES[found.system]
    try:
        options = dict(_DEFAULTS[found.system](given))
    except (UnreadableError, TypeError, ValueError, ArithmeticError):  # a line says which value cannot be read
        options = dict(_DEFAULTS[found.system]({name: given[name] for name in _DECIDE if name in given}))
    order = {pattern: index for index, pattern in enumerate(rules)}
    matched = {name: next((pattern for pattern in rules if fnmatch.fnmatchcase(name, pattern)), None) for name in given}
    lines, refusals = {}, []
    for name in sorted(given, key=lambda name: order.get(matched[name] or "", len(order))):
        pattern = matched[name]
        rule = None if pattern is None else rules[pattern]
        line = lines[name] = _applied(name, given, rule, options, doubtful=name in found.doubtful)
        if line.fate == "hand" and rule is not None and rule.decides:
            refusals.append(f"{name}={shown(str(line.value))}: {line.why}")
    tree = _tree(options)
    try:
        config_of(tree)
    except ConfigError as error:
        refusals.append(str(error))
    return Translation(tree, [lines[name] for name in given], "; ".join(refusals))


def _applied(name: str, given: Mapping[str, Any], rule: Rule | None, options: Options, *, doubtful: bool) -> Line:
    """Put the options of a setting into `options`, and return the line of the setting."""
    value = given[name]
    if rule is None:
        return Line(name, value, "unknown")
    if rule.make is None:
        return Line(name, value, "hand" if rule.by_hand else "none", why=rule.why)
    if value is None:
        return Line(name, value, "none", why="not set")
    try:
        if doubtful:
            raise UnreadableError("the script chooses the value by a condition, or has several; this is the last one")
        if re.search(r"\$[\w({]", str(value)):
            raise UnreadableError("a value that only the shell knows")
        if isinstance(value, Expression) and not rule.by_name:
            raise UnreadableError("an expression of Python, whose value is unknown because the file is not run")
        made = rule.make(value, given)
    except UnreadableError as error:
        return Line(name, value, "hand", why=str(error))
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
        return Line(name, value, "hand", why="cannot be read")
    for key, option in made.items():
        both = isinstance(option, dict) and isinstance(options.get(key), dict)
        options[key] = options[key] | option if both else option
    return Line(name, value, "to" if made else "none", tuple(made), rule.why or ("" if made else "nothing to set"))


def _tree(options: Options) -> dict[str, Any]:
    """Nest options by the parts of their keys."""
    tree: dict[str, Any] = {}
    for key in sorted(options, key=lambda key: key.count(".")):
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            if node.get(section) is None:
                node[section] = {}
            node = node[section]
        value = copy.deepcopy(options[key])  # YAML would write a shared value as an alias
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            value = node[last] | value
        node[last] = value
    return tree
