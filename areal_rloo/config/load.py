"""Read a YAML file and overrides into a `Config`. Every mistake gives a line with the key and the remedy.

file ─► `reading`: a bounded tree ─► AReaL's keys renamed ─► overrides applied ─► preset filled in ─► `typed`: structs
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from areal_rloo.config.areal import translate_file
from areal_rloo.config.overrides import apply, in_order
from areal_rloo.config.presets import expand
from areal_rloo.config.reading import MOST_BYTES, Parsed, parse
from areal_rloo.config.schema import Config
from areal_rloo.config.typed import auto_keys, typed
from areal_rloo.errors import ConfigError, DataError, shown


class _Dumper(yaml.SafeDumper):
    """YAML 1.1 with YAML 1.2's floats: quotes texts with the look of another type."""


_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.[\d_]+)([eE][-+]?\d+)$|^[-+]?(\d[\d_]*\.[\d_]*|\.[\d_]+)$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a config file, apply overrides as `overrides.py` describes them, and check all values.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, or a value has a wrong type, range or meaning.
    """
    path = find_config(name)
    parsed = _of_file(path)
    if parsed.tree is None and not overrides and path.stat().st_size == 0:  # of a command that failed, say
        raise ConfigError(f"{path}: is empty; expected sections, as in quickstart.yaml, or a comment for all defaults")
    tree = {} if parsed.tree is None else parsed.tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(parsed.tree).__name__} {shown(tree)}")
    translate_file(tree)
    sources: dict[str, str] = {}
    for change in in_order(overrides):
        sources[apply(tree, change)] = change.words
    algorithm = tree.get("algorithm")
    if algorithm is None or isinstance(algorithm, dict):
        tree["algorithm"] = expand(algorithm or {})

    def source_of(key: str) -> str:
        related = (given for given in sources if f"{key}.".startswith(f"{given}.") or given.startswith(f"{key}."))
        if key and (given := next(related, None)) is not None:
            return sources[given]
        places = (".".join(parts[:length]) for parts in [key.split(".")] for length in range(len(parts), 0, -1))
        line = next((parsed.lines[place] for place in places if place in parsed.lines), None)
        return str(path) if line is None else f"{path}:{line}"

    return typed(tree, source_of)


def config_of(tree: dict[str, Any]) -> Config:
    """Make and check a config from the tree of a file with YAML's types; the tree stays as it is.

    Raises:
        ConfigError: as `load_config`.
    """
    text = yaml.dump(tree, Dumper=_Dumper, sort_keys=False)
    copied = parse(text, "config", is_file=False).tree or {}
    translate_file(copied)
    copied["algorithm"] = expand(copied.get("algorithm") or {})
    return typed(copied, lambda key: "config")


def find_config(name: str) -> Path:
    """Find a config by path, or by bare name: in the current folder, then among the shipped configs."""
    shipped = {path.name: path for path in shipped_configs()}
    for path in [Path(name), *([shipped[name]] if name in shipped else [])]:
        try:
            if path.is_file():
                return path
        except OSError as error:  # the name is too long
            raise ConfigError(f"{shown(name)}: cannot be read: {error.strerror}") from error
    if Path(name).is_dir():
        inside = min(Path(name).glob("*.yaml"), default=None)
        such = "" if inside is None else f", such as {shown(str(inside))}"
        raise ConfigError(f"{shown(name)}: this is a folder; expected a config file{such}")
    expected = f"expected a path or one of the shipped {', '.join(shipped)}"
    raise ConfigError(f"{shown(name)}: no such config file; {expected}")


def shipped_configs() -> list[Path]:
    """List the configs that come with the package: a wheel has them inside, a checkout beside it."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return sorted((inside if inside.is_dir() else package.parent / "configs").glob("*.yaml"))


def _of_file(path: Path) -> Parsed:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path}: expected a config of at most {MOST_BYTES} bytes, got more; is this the right file?")
    return parse(text, str(path), is_file=True)


def dump_config(config: Config) -> str:
    """Write the resolved config as YAML; `load_config` reads an equal config back."""
    tree = msgspec.to_builtins(config)
    for section, key in auto_keys():
        tree[section][key] = tree[section][key] or "auto"
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf)


def check_run(folder: Path) -> None:
    """Raise DataError if a folder holds no run."""
    if not (folder / "config.yaml").is_file():
        raise DataError(f"{folder}: no run here (config.yaml is missing); expected a run folder such as runs/latest")


def check_launched(folder: Path) -> None:
    """Raise DataError if a folder holds no run with rollout workers; `sft` and `offline` have none."""
    check_run(folder)
    for name in ("sft", "offline"):
        if (records := folder / f"{name}.jsonl").exists():
            raise DataError(
                f"{folder}: expected a run of areal-rloo run, got one of areal-rloo {name}; its steps are in "
                f"{records.name}, and areal-rloo {name} goes on with --resume"
            )
