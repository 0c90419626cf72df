"""What a task may be told in its source: checks that refuse what nothing would read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError


def check_parameters(source: ConfiguredSource, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a source over their defaults.

    Raises:
        DataError: one that the task does not have, or of another type than its default.
    """
    for name, value in source.parameters.items():
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"it has {', '.join(defaults) or 'none'}"
            raise DataError(f"data: {source.label}: parameters.{name}: the task has no such parameter; {hint}")
        if type(value) is not type(defaults[name]):
            expected = type(defaults[name]).__name__
            raise DataError(f"data: {source.label}: parameters.{name}: expected {expected}, got {value!r}")
    return {**defaults, **source.parameters}


def refuse_files(source: ConfiguredSource) -> None:
    """For tasks that make their items themselves.

    Raises:
        DataError: the source names a file, a dataset of the hub, or fields.
    """
    for key in ("path", "hub", "hub_split", "fields"):
        if getattr(source, key):
            raise DataError(f"data: {source.label}: the task {source.task} makes its items itself; leave {key} out")
