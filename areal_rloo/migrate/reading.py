"""Read the settings of another system's file: YAML, a shell script, or a Python script. Nothing in the file is run.

shell:   variables with their defaults are filled in; `key.path=value` and `--key value` are settings
Python:  the keywords of RLOOConfig(...), GRPOConfig(...), their trainers, LoraConfig(...) and load_dataset(...)
YAML:    nested keys are joined with dots; `${a.b}` stands for the value of another key
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from areal_rloo.errors import DataError, first_line

System = Literal["areal", "verl", "trl", "ms-swift"]
Settings = dict[str, Any]

_MOST_BYTES = 2**20
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_ASSIGNMENT = re.compile(r"(?:export )?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_CONFIGS = ("RLOOConfig", "GRPOConfig")
_TRAINERS = ("RLOOTrainer", "GRPOTrainer")
_MOST_DEPTH = 10  # of variables in variables


class Found(msgspec.Struct, frozen=True):
    """The system of a file, the settings by name, and the values of shell variables."""

    system: System
    settings: Settings
    variables: dict[str, str] = {}


def read(path: Path, system: System | None = None) -> Found:
    """Read a file; `system`: instead of a guess.

    Raises:
        DataError: the file cannot be read, or no system is recognized.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: expected a config or a script, got more than {_MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error
    try:
        if path.suffix == ".py":
            settings, variables = _of_python(ast.parse(text)), dict[str, str]()
        elif path.suffix in (".yaml", ".yml"):
            settings, variables = _of_yaml(yaml.safe_load(text)), {}
        else:
            settings, variables = _of_shell(text)
    except (SyntaxError, ValueError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error
    found = system or _system_of(text, settings)
    if found is None or not settings:
        raise DataError(
            f"{path}: expected settings of AReaL (YAML), verl (command or YAML), TRL or ms-swift (script or YAML), "
            "found none; name the system with --from"
        )
    if found == "verl":  # options with dashes are of programs that start it
        settings = {name: value for name, value in settings.items() if "." in name}
    return Found(found, settings, variables)


def _system_of(text: str, settings: Settings) -> System | None:
    names = {name.split(".")[0] for name in settings}
    if "actor_rollout_ref" in names:
        return "verl"
    if {"gconfig", "allocation_mode", "actor"} & names:
        return "areal"
    if re.search(r"\bswift\b", text) or {"rlhf_type", "reward_funcs_plugin"} & names:
        return "ms-swift"
    of_trl = {"num_generations", "max_completion_length", "per_device_train_batch_size", "model_name_or_path"}
    return "trl" if of_trl & names or any(word in text for word in _CONFIGS) else None


def _of_yaml(tree: Any) -> Settings:
    settings = dict(_leaves(tree, ""))

    def resolved(value: Any, depth: int = 0) -> Any:
        whole = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
        if whole is None or depth == _MOST_DEPTH or whole[1] not in settings:
            return value
        return resolved(settings[whole[1]], depth + 1)

    return {name: _typed(resolved(value)) for name, value in settings.items()}


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from _leaves(child, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, tree


def _of_shell(text: str) -> tuple[Settings, dict[str, str]]:
    """Read the words of a script in their order; the last value of a setting counts."""
    lines = re.sub(r"\\\n", " ", text)
    words = shlex.split(lines, comments=True)
    variables: dict[str, str] = {}
    settings: Settings = {}
    name = ""  # of the option whose values follow
    for word in (_filled(word, variables) for word in words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            settings[name] = _typed(value) if equals else True
            name = "" if equals else name
        elif re.match(r"\+{0,2}\w+(\.\w+)+=", word):  # hydra
            key, _, value = word.lstrip("+").partition("=")
            settings[key], name = _typed(value), ""
        elif (assigned := _ASSIGNMENT.fullmatch(word)) is not None and not name:
            variables[assigned[1]] = assigned[2]
        elif name:
            before = settings[name]
            values = (
                [_typed(word)]
                if before is True
                else [*(before if isinstance(before, list) else [before]), _typed(word)]
            )
            settings[name] = values[0] if len(values) == 1 else values
    return settings, variables


def _filled(word: str, variables: dict[str, str]) -> str:
    """Fill in the variables of a word; unknown variables without a default stay as they are."""
    for _ in range(_MOST_DEPTH):
        filled = _VARIABLE.sub(
            lambda found: variables.get(found[1] or found[3], found[2] if found[2] is not None else found[0]), word
        )
        if filled == word:
            break
        word = filled
    return word


def _of_python(tree: ast.Module) -> Settings:
    settings: Settings = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        prefix = {"LoraConfig": "peft_config.", **dict.fromkeys((*_CONFIGS, *_TRAINERS), "")}.get(called)
        if called == "load_dataset" and node.args:
            settings.setdefault("dataset_name", _literal(node.args[0]))
        if called in _TRAINERS:
            settings["trainer"] = called
        if called == "LoraConfig":
            settings["use_peft"] = True
        for keyword in node.keywords if prefix is not None else ():
            if keyword.arg not in (None, "args", "peft_config"):
                settings[f"{prefix}{keyword.arg}"] = _literal(keyword.value)
    return settings


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, and the source of anything else."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _typed(value: Any) -> Any:
    """Read a text as YAML would: numbers, booleans, lists."""
    if not isinstance(value, str):
        return value
    try:
        return float(value) if re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else yaml.safe_load(value)
    except yaml.YAMLError:
        return value
