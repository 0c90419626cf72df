"""The rows of a source, from a local file or from the hub, each with its place for errors.

The hub is reached through the `datasets` library, which keeps what it has downloaded; with HF_HUB_OFFLINE=1 it asks
nobody and reads that copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from areal_rloo.config import ConfiguredSource
from areal_rloo.errors import DataError
from areal_rloo.tasks.base import Split
from areal_rloo.tasks.files import Located, read_rows, renamed


def rows_of(source: ConfiguredSource, split: Split, *, hub: str | None = None) -> Iterator[Located]:
    """Rows in order.

    Args:
        source: its `path`, or else its `hub`, says where they are.
        split: which of the hub's splits, where the source names none.
        hub: the dataset of a source that names neither, as `org/name` or `org/name:config`.

    Raises:
        DataError: they cannot be read, or have not the fields that are asked for; says what to do.
    """
    if source.path is not None:
        return read_rows(source.path, source.fields)
    name = source.hub or hub
    if name is None:
        raise DataError(
            f"data.{split}: the task {source.task} needs a file or a dataset; set data.{split}.path or data.{split}.hub"
        )
    hub_split = source.hub_split or ("train" if split == "train" else "test")
    return _from_hub(name, hub_split, source.fields, f"data.{split}.path")


def _from_hub(name: str, hub_split: str, fields: Mapping[str, str], key: str) -> Iterator[Located]:
    try:
        import datasets  # noqa: PLC0415 - an extra, imported where it is used
    except ImportError as error:
        raise DataError(
            f"{key}: null means the hub ({name}), which needs the `datasets` library; set {key} to a local file, or "
            "install the extra: pip install 'areal-rloo[data]'"
        ) from error
    path, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(path, config or None, split=hub_split)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{key}: {name} (split {hub_split}) cannot be had from the hub, nor from the copy of an earlier download "
            f"({type(error).__name__}: {reason}); set {key} to a local file"
        ) from error
    for number, row in enumerate(rows, start=1):
        where = f"{name}: {hub_split}: row {number}"
        yield where, renamed(row, fields, where)
