"""Public names of a package, each imported from the module of the name on first use (PEP 562).

A package lists the imports under `if TYPE_CHECKING:`, where editors and type checkers find them. At run time a name is
imported when somebody asks for the name: `areal_rloo.algorithm.staleness` does not wait for torch, and the command
starts at once.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def exports_of(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package."""

    @functools.cache
    def homes() -> dict[str, str]:
        """Read the module of each name from the source of the package."""
        import ast  # noqa: PLC0415 - these two would double the time of the package's import
        import inspect  # noqa: PLC0415

        blocks = [node for node in ast.parse(inspect.getsource(sys.modules[package])).body if isinstance(node, ast.If)]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(importlib.import_module(homes()[name]), name)

    return get
