"""A user's function by its import path: `package.module:function`, `path/to/file.py:function` or `entry:function`.

The entry is what `run.entry` names: the user's own script, imported by every process of a run. Launchers tell it in an
environment variable, so that processes which never see the config (rewards) have it too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_rloo.errors import ConfigError

ENTRY = "AREAL_RLOO_ENTRY"  # the environment variable


def import_entry(path: str | None = None) -> None:
    """Import the entry once, as the module `entry`.

    Args:
        path: a module or file.py; None for the one this process was started with, if any.

    Raises:
        ConfigError: it cannot be imported; says why.
    """
    path = path or os.environ.get(ENTRY)
    if path is None or "entry" in sys.modules:
        return
    os.environ[ENTRY] = path  # for the processes that this one starts
    try:
        sys.modules["entry"] = _from_file(Path(path)) if path.endswith(".py") else _from_path(path)
    except Exception as error:
        raise ConfigError(f"run.entry: {path} cannot be imported: {type(error).__name__}: {error}") from error


def import_function(key: str, path: str) -> Callable[..., Any]:
    """The function that a config value names.

    Args:
        key: where the value stands, for the error.
        path: `module:function`, or `file.py:function` relative to the current folder.

    Raises:
        ConfigError: it is not of this form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.rpartition(":")
    if module_name == "entry":
        import_entry()
    if not colon or not module_name or not name:
        raise ConfigError(f"{key}: expected module:function or path/to/file.py:function, got '{path}'")
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else _from_path(module_name)
    except Exception as error:
        raise ConfigError(f"{key}: {module_name} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}: {module_name} has no function '{name}'")
    return function  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file, seen from {Path.cwd()}")
    name = f"{path.resolve()}".replace(".", "_")  # unlike any module's, so that a json.py of the user shadows nothing
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} is a .py file, so it has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module they are of
    spec.loader.exec_module(module)
    return module


def _from_path(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python script.py` would have it
    return importlib.import_module(name)
