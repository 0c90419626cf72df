"""Import a user's function or class by path: `package.module:function`, `path/to/file.py:function` or `entry:function`.

The entry is the user's script in `run.entry`; every process of a run imports the entry. Launchers pass the path in an
environment variable, which also reaches processes without the config (rewards).
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_rloo.errors import ConfigError, raised

ENTRY = "AREAL_RLOO_ENTRY"  # the environment variable


def import_entry(path: str | None = None) -> None:
    """Import the entry once, as the module `entry`. `path`: a module or file.py; None: as the environment says.

    Raises:
        ConfigError: the import fails; gives the reason.
    """
    path = path or os.environ.get(ENTRY)
    if path is None or "entry" in sys.modules:
        return
    sys.modules["entry"] = _imported("run.entry", path)
    os.environ[ENTRY] = path  # for child processes


def import_function(key: str, path: str) -> Callable[..., Any]:
    """Import the function that the config value `path` of a `key` names; files are relative to the current folder.

    Raises:
        ConfigError: as `import_named`, or the value is a class or cannot be called.
    """
    function = import_named(key, path, kind="function")
    if isinstance(function, type):
        raise ConfigError(
            f"{key}: expected a function, but {path} is a class; name a function, or an instance of a class with "
            "__call__"
        )
    if not callable(function):
        raise ConfigError(f"{key}: expected a function, but {path} is a value of the type {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def import_named(key: str, path: str, *, kind: str) -> Any:
    """Import a value as `import_function` does, without a check of the value; `kind` is its name in an error.

    Raises:
        ConfigError: the path has another form, the import fails, or the module has no such name.
    """
    module_name, colon, name = path.rpartition(":")
    if module_name == "entry":
        import_entry()
    if not colon or not module_name or not name:
        raise ConfigError(f"{key}: expected module:{kind} or path/to/file.py:{kind}, got '{path}'")
    module = _imported(key, module_name)
    try:
        return getattr(module, name)
    except AttributeError as error:
        close = difflib.get_close_matches(name, vars(module), n=1)
        fix = f"did you mean '{close[0]}'?" if close else "correct the name"
        raise ConfigError(f"{key}: {module_name} has no {kind} '{name}'; {fix}") from error


def _imported(key: str, path: str) -> Any:
    try:
        return _from_file(Path(path)) if path.endswith(".py") else _from_path(path)
    except (Exception, SystemExit) as error:
        absent = isinstance(error, ModuleNotFoundError)
        fix = "correct the name, or install it, or name a file.py" if absent else "correct the file"
        raise ConfigError(f"{key}: {path} cannot be imported: {raised(error)}; {fix}") from error


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"no such file, seen from {Path.cwd()}")
    name = f"{path.resolve()}".replace(".", "_")  # unique, so a user's json.py does not shadow a module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"every .py file has a loader, also {path}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    return module


def _from_path(name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as with `python script.py`
    return importlib.import_module(name)
