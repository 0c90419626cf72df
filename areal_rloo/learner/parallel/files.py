"""Shards to files and back: torch.distributed.checkpoint, one file a rank, readable by any number of ranks."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from areal_rloo.errors import CheckpointError, first_line
from areal_rloo.learner.parallel.ranks import RankLostError, Ranks

# A single process is not distributed, and is told so at every checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")


def save_shards(state: dict[str, Tensor], folder: Path, ranks: Ranks) -> Future[Any]:
    """Copy this rank's shards and write the copy on a thread of its own; every rank calls it at the same time.

    The future ends when every rank's files are on the disk, or raises `ShardsError` where one of them could not write.
    """
    written: Future[Any] = Future()
    under_way = async_save(
        dict(state),
        storage_writer=FileSystemWriter(folder),
        process_group=ranks.files,
        no_dist=ranks.files is None,
    )
    assert isinstance(under_way, Future), "no staging future was asked for"

    def finish(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(ShardsError(_cause(error)))

    under_way.add_done_callback(finish)
    return written


class ShardsError(OSError):
    """A rank could not write its part of a checkpoint."""


def load_shards(state: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fill these tensors with what was saved under their names; every rank calls it at the same time.

    Raises:
        CheckpointError: something is missing, or of another shape; says what.
        RankLostError: another rank ended meanwhile.
    """
    try:
        load(
            state,
            storage_reader=FileSystemReader(folder),
            process_group=ranks.files,
            no_dist=ranks.files is None,
        )
    except (CheckpointException, ValueError) as error:
        raise CheckpointError(
            f"{folder}: does not fit this model and optimizer: {_cause(error)}; resume with the config that wrote it"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    except RuntimeError as error:
        raise RankLostError(f"{folder}: a learner rank is gone while it is read: {_cause(error)}") from error


def saved_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder of shards."""
    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def _cause(error: BaseException) -> str:
    """The first thing that went wrong on any rank."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)
