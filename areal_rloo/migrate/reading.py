"""Read the settings of another system's file: YAML, a shell script, or a Python script. Nothing in the file is run.

shell:   variables with their defaults are filled in; `key.path=value` and `--key value` are settings, and those of
         the YAML file after `--config` or `swift rlhf`
Python:  the keywords of RLOOConfig(...), GRPOConfig(...), their trainers, LoraConfig(...) and load_dataset(...), and
         later assignments to an attribute of a config
YAML:    nested keys are joined with dots; `${a.b}` stands for the value of another key
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from areal_rloo.errors import DataError, first_line
from areal_rloo.files import read_regular
from areal_rloo.migrate.rules import Expression
from areal_rloo.migrate.shell import Script, merged, read_shell, typed

System = Literal["areal", "verl", "trl", "ms-swift"]
Settings = dict[str, Any]

_MOST_BYTES = 2**18
_YAML = (".yaml", ".yml")
_SWIFT_FILE = re.compile(r"^[^#\n]*\bswift +rlhf +([^\s\"'-][^\s\"']*\.ya?ml)(?=\s|$)", re.MULTILINE)
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_BUILDERS = ("json", "csv", "parquet", "text")  # `load_dataset` reads files with them
_CHANGES = ("map", "filter", "select", "take", "train_test_split")  # of the rows of a set
_CONFIGS = ("RLOOConfig", "GRPOConfig")
_TRAINERS = ("RLOOTrainer", "GRPOTrainer")
_MOST_DEPTH = 20
_MOST_SETTINGS = 5_000


class Found(msgspec.Struct, frozen=True):
    """The system of a file and the settings by name.

    Attributes:
        system: whose file this is.
        settings: by name.
        variables: of a shell script.
        doubtful: settings whose value depends on a branch of a script.
        others: commands of a shell script whose settings are left out, because another command trains.
        unread: words of a shell script, each for an unknown number of others.
        text: of the file.
    """

    system: System
    settings: Settings
    variables: dict[str, str] = {}
    doubtful: frozenset[str] = frozenset()
    others: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    text: str = ""


def read(path: Path, system: System | None = None) -> Found:
    """Read a file; `system`: instead of a guess.

    Raises:
        DataError: the file cannot be read, or no system is recognized.
    """
    text, script = _parsed(path)
    settings, doubtful = dict(script.settings), script.doubtful
    if path.suffix not in (*_YAML, ".py") and (named := _SWIFT_FILE.search(text)) is not None:
        settings["config"] = named[1]
    found = system or _system_of(text, settings)
    file = _file_beside(path, settings) if found in (None, "trl", "ms-swift") else None
    beside = {} if file is None else _parsed(file)[1].settings
    found = found or ("trl" if _system_of("", beside) == "trl" else None)
    if found is None or not settings:
        raise DataError(
            f"{path}: expected settings of AReaL (YAML), verl (command or YAML), TRL or ms-swift (script or YAML), "
            f"found none; name the system with --from{script_in(text)}"
        )
    if found == "verl":  # options with dashes are of programs that start it
        settings = {name: value for name, value in settings.items() if "." in name}
    if found in ("trl", "ms-swift"):
        if "config" in doubtful:  # another file may count: the user is told, and decides
            doubtful = doubtful | (beside.keys() - settings.keys())
        elif file is not None:
            del settings["config"]
        doubtful |= {name.removeprefix("no_") for name in doubtful if settings.get(name) is True}
        settings = {**beside, **dict(map(_positive, settings.items()))}
    return Found(
        found,
        settings,
        script.variables,
        frozenset(doubtful),
        others=tuple(script.others),
        unread=tuple(script.unread),
        text=text,
    )


def _parsed(path: Path) -> tuple[str, Script]:
    """Read the text of a file, and the settings in it.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        text = read_regular(path, most_bytes=_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}; expected a config or a script") from error
    try:
        if path.suffix == ".py":
            return text, _of_python(ast.parse(text))
        if path.suffix in _YAML:
            _check_events(text)
            return text, Script(_of_yaml(yaml.safe_load(text)))
        return text, read_shell(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError, yaml.YAMLError) as error:
        raise DataError(f"{path}: cannot be read: {first_line(error)}") from error


def _file_beside(script: Path, settings: Settings) -> Path | None:
    """Find the YAML file of a command; the options of the command win."""
    path = script.parent / str(settings.get("config"))
    return path if script.suffix not in _YAML and path.suffix in _YAML and path.is_file() else None


def _positive(setting: tuple[str, Any]) -> tuple[str, Any]:
    """Read `--no_X` as X = False, as the parser of these systems does."""
    name, value = setting
    return (name.removeprefix("no_"), False) if name.startswith("no_") and value is True else setting


def script_in(text: str) -> str:
    """Advise to read the Python script behind a shell script, if there is one."""
    named = re.search(r"[\w./-]+\.py\b", text)
    return "" if named is None else f"; the settings may be in {named[0]}: areal-rloo migrate {named[0]} --processes N"


def _system_of(text: str, settings: Settings) -> System | None:
    names = {name.split(".")[0] for name in settings}
    if "actor_rollout_ref" in names:
        return "verl"
    if {"gconfig", "allocation_mode", "actor"} & names:
        return "areal"
    if re.search(r"\bswift +rlhf\b", text) or "rlhf_type" in names:
        return "ms-swift"
    if "config" in names and re.search(r"\btrl +(grpo|rloo)\b", text):
        return "trl"
    of_trl = {"num_generations", "max_completion_length", "per_device_train_batch_size", "model_name_or_path"}
    return "trl" if of_trl & names or any(word in text for word in _CONFIGS) else None


def _check_events(text: str) -> None:
    """Refuse YAML that is small in the file and large in memory.

    Raises:
        ValueError: there is an alias, or the nesting is too deep.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("expected no aliases")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MOST_DEPTH:
            raise ValueError(f"expected a depth of at most {_MOST_DEPTH}")


def _of_yaml(tree: Any) -> Settings:
    settings: Settings = {}
    for name, value in _leaves(tree, ""):
        settings[name] = value
        if len(settings) > _MOST_SETTINGS:
            raise ValueError(f"more than {_MOST_SETTINGS:,} settings")

    def resolved(value: Any, depth: int = 0) -> Any:
        whole = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
        if whole is None or depth == _MOST_DEPTH or whole[1] not in settings:
            return value
        return resolved(settings[whole[1]], depth + 1)

    return {name: typed(resolved(value)) for name, value in settings.items()}


def _leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from _leaves(child, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, tree


def _of_python(tree: ast.Module) -> Script:
    reader, tree = _PythonReader(), _Constants(tree).visit(tree)
    reader.visit(tree)
    reader.take_data(tree)
    script = Script()
    for calls in reader.calls.values():
        settings, doubtful = merged(calls)
        script.settings |= settings
        script.doubtful |= doubtful
    script.settings |= reader.later
    script.doubtful |= reader.doubtful
    return script


_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


class _Constants(ast.NodeTransformer):
    """Puts literals in the place of the names that a module gives them, once and for all, and computes with numbers."""

    def __init__(self, tree: ast.Module) -> None:
        given = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        self._constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and given.count(target.id) == 1
        }

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._constants.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        compute, sides = _ARITHMETIC.get(type(node.op)), (node.left, node.right)
        numbers = [side.value for side in sides if isinstance(side, ast.Constant) and type(side.value) in (int, float)]
        if compute is None or len(numbers) < len(sides):
            return node
        try:
            return ast.copy_location(ast.Constant(compute(*numbers)), node)
        except ArithmeticError:
            return node


class _PythonReader(ast.NodeVisitor):
    """Collects the settings of a script: of each call by the name of the class, and of the assignments after it."""

    def __init__(self) -> None:
        self.calls: dict[str, list[Settings]] = {}
        self.later: Settings = {}
        self.doubtful: set[str] = set()
        self._configs: set[str] = set()  # names of variables
        self._num_branches = 0
        self._trained: str | None = None  # variable of the data set

    def visit_Call(self, node: ast.Call) -> None:
        called = _name_of(node.func)
        if called in _TRAINERS:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            self._trained = _root(given["train_dataset"]) if "train_dataset" in given else None
        if called in (*_CONFIGS, *_TRAINERS, "LoraConfig"):
            self._take("trainer" if called in _TRAINERS else called, _keywords(node, called))
        self.generic_visit(node)

    def _take(self, kind: str, settings: Settings) -> None:
        self.calls.setdefault(kind, []).append(settings)
        self.doubtful.update(settings if self._num_branches else ())

    def take_data(self, tree: ast.Module) -> None:
        """Take the data set of the trainer, or the first one."""
        sets: dict[str | None, ast.Call] = {}
        changes: list[str] = []
        for variable, call in _calls(tree):
            if _name_of(call.func) == "load_dataset" and call.args:
                sets.setdefault(variable, call)
            elif isinstance(call.func, ast.Attribute) and call.func.attr in _CHANGES:
                changes.append(call.func.attr)
        if changes and sets:
            self.later["dataset_changes"] = sorted(set(changes))
        if sets:
            self.calls["load_dataset"] = [
                {"dataset_name": _dataset(sets.get(self._trained, next(iter(sets.values()))))}
            ]

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._assign(target, node.value, _literal(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if node.value is not None:
            self._assign(node.target, node.value, _literal(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assign(node.target, node.value, Expression(ast.unparse(node)))

    def _assign(self, target: ast.expr, value: ast.expr, literal: Any) -> None:
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            self._configs |= {target.id} if _name_of(value.func) in _CONFIGS else set()
        elif isinstance(target, ast.Attribute) and _name_of(target.value) in self._configs:
            self.later[target.attr] = literal
            self.doubtful |= {target.attr} if self._num_branches else set()

    def _visit_branch(self, node: ast.AST) -> None:
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        self._num_branches += not is_main
        self.generic_visit(node)
        self._num_branches -= not is_main

    visit_If = visit_For = visit_While = visit_Match = visit_IfExp = visit_Try = _visit_branch  # noqa: N815


def _calls(tree: ast.Module) -> Iterator[tuple[str | None, ast.Call]]:
    """Give the calls in the statements of a script, each with the assigned variable."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) and statement.value is not None:
            variable = _root(statement.targets[0]) if isinstance(statement, ast.Assign) else None
            yield from ((variable, call) for call in ast.walk(statement.value) if isinstance(call, ast.Call))


def _root(node: ast.expr) -> str | None:
    """Return the name at the beginning of an expression such as `data["train"].map(f)`."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _keywords(call: ast.Call, called: str) -> Settings:
    """Return the keywords of a config, a trainer or a LoraConfig, as settings."""
    settings: Settings = {"use_peft": True} if called == "LoraConfig" else {}
    settings |= {"trainer": called} if called in _TRAINERS else {}
    for keyword in call.keywords:
        if keyword.arg is None:
            settings[f"**{ast.unparse(keyword.value)}"] = "more settings"
        elif keyword.arg not in ("args", "peft_config"):
            is_set = keyword.arg == "train_dataset"  # the name of the set is in another call
            name = f"peft_config.{keyword.arg}" if called == "LoraConfig" else keyword.arg
            settings[name] = (ast.unparse if is_set else _literal)(keyword.value)
    return settings


def _dataset(call: ast.Call) -> Any:
    """Return the name of a dataset of the hub, or the file that a builder reads."""
    name = _literal(call.args[0])
    if name not in _BUILDERS:
        return name
    files = [_literal(keyword.value) for keyword in call.keywords if keyword.arg == "data_files"]
    return files[0] if files and isinstance(files[0], str) else Expression(ast.unparse(call))


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that YAML has, too; else the expression, or the text of a type of torch."""
    try:
        value = ast.literal_eval(node)
        if len(msgspec.json.encode(value)) > 0:
            return value
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
        pass
    text = ast.unparse(node)
    return text if "torch." in text else Expression(text)
