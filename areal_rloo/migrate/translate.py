"""Apply the rules of a system to the settings of a file: our options, and the fate of every setting."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from areal_rloo.config.load import config_of
from areal_rloo.errors import ConfigError
from areal_rloo.migrate import areal, trl, verl
from areal_rloo.migrate.reading import Found, System
from areal_rloo.migrate.rules import Options, Rule, UnreadableError

Fate = Literal["to", "none", "hand", "unknown"]

_SYNCHRONOUS: Options = {"algorithm.max_staleness": 0, "algorithm.loss.behaviour_weight.rule": "ignore"}
_HUGGING_FACE: Options = _SYNCHRONOUS | {
    "model.dtype": "bfloat16",
    "learner.optimizer.betas": [0.9, 0.999],
    "learner.gradient_checkpointing": True,
    "learner.microbatch_tokens": "auto",
    "run.seed": 42,
}
RULES: Mapping[System, Mapping[str, Rule]] = {
    "areal": areal.RULES,
    "verl": verl.RULES,
    "trl": trl.RULES,
    "ms-swift": trl.RULES,
}
DEFAULTS: Mapping[System, Options] = {  # of the systems, where ours differ
    "areal": {"model.dtype": "bfloat16", "rollout.num_workers": "auto"},
    "verl": {
        "model.dtype": "bfloat16",
        "algorithm.kl.coefficient": 0.0,
        "learner.optimizer.learning_rate": 1e-6,
        "learner.microbatch_tokens": "auto",
    },
    "trl": _HUGGING_FACE
    | {
        "algorithm.preset": "rloo_trl",
        "algorithm.group_size": 2,
        "learner.optimizer.schedule": "linear",
        "data.num_epochs": 3,
        "learner.num_train_steps": "auto",
    },
    "ms-swift": _HUGGING_FACE
    | {
        "algorithm.preset": "rloo_ms_swift",
        "algorithm.group_size": 8,
        "learner.optimizer.betas": [0.9, 0.95],
        "learner.optimizer.weight_decay": 0.1,
        "learner.optimizer.decay_all": True,
        "learner.optimizer.schedule": "cosine",
        "data.num_epochs": 1,
        "learner.num_train_steps": "auto",
    },
}


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
    refusal: str = ""  # of the whole config by our checks; empty if it is accepted


def translate(found: Found) -> Translation:
    """Translate the settings of a file."""
    rules, options = RULES[found.system], dict(DEFAULTS[found.system])
    given = dict(found.settings)
    if found.system in ("trl", "ms-swift"):
        given |= {"per_device_train_batch_size": given.get("per_device_train_batch_size", 8)}
        if trl.PROCESSES in found.variables:
            given[trl.PROCESSES] = int(found.variables[trl.PROCESSES])
    lines = {}
    order = {pattern: index for index, pattern in enumerate(rules)}
    matched = {name: next((pattern for pattern in rules if fnmatch.fnmatchcase(name, pattern)), None) for name in given}
    for name in sorted(given, key=lambda name: order.get(matched[name] or "", len(order))):
        pattern = matched[name]
        lines[name] = _applied(name, given, None if pattern is None else rules[pattern], options)
    tree = _tree(options)
    refusal = ""
    try:
        config_of(tree)
    except ConfigError as error:
        refusal = str(error)
    return Translation(tree, [lines[name] for name in given], refusal)


def _applied(name: str, given: Mapping[str, Any], rule: Rule | None, options: Options) -> Line:
    value = given[name]
    if rule is None:
        return Line(name, value, "unknown")
    if rule.make is None:
        return Line(name, value, "hand" if rule.by_hand else "none", why=rule.why)
    if value is None:
        return Line(name, value, "none", why="not set")
    try:
        made = rule.make(value, given)
    except (UnreadableError, TypeError, ValueError) as error:
        return Line(name, value, "hand", why=str(error))
    for key, option in made.items():
        both = isinstance(option, dict) and isinstance(options.get(key), dict)
        options[key] = options[key] | option if both else option
    return Line(name, value, "to" if made else "none", tuple(made), rule.why if made or rule.why else "the default")


def _tree(options: Options) -> dict[str, Any]:
    """Nest options by the parts of their keys."""
    tree: dict[str, Any] = {}
    for key in sorted(options, key=lambda key: key.count(".")):
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        value = copy.deepcopy(options[key])  # YAML would write a shared value as an alias
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            value = node[last] | value
        node[last] = value
    return tree
