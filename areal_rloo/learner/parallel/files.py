"""Write the changing state of a rank to files, and read it (torch.distributed.checkpoint).

A checkpoint has a file for each rank; any number of ranks can read the files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from areal_rloo.errors import CheckpointError, first_line
from areal_rloo.learner.optimizer import empty_state
from areal_rloo.learner.parallel.ranks import RankLostError, Ranks
from areal_rloo.models.policy import Policy

_RANDOM = "random."

# torch warns at every checkpoint of a single process, which is not distributed.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")


class ShardsError(OSError):
    """A rank could not write its part of a checkpoint."""


def state_of(policy: Policy, optimizer: Optimizer, reference: Policy | None, rank: int) -> dict[str, Tensor]:
    """Return all changing tensors of a rank by name, the random state among them; not copies.

    `reference` is a reference policy that changes during the run.
    """
    state: dict[str, Tensor] = {f"policy.{name}": p.detach() for name, p in policy.causal.named_parameters()}
    for name, parameter in _trained(policy):
        state |= {f"{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()}
    if reference is not None:
        state |= {f"reference.{name}": p.detach() for name, p in reference.causal.named_parameters()}
    state[f"{_RANDOM}{rank}"] = torch.get_rng_state()
    return state


def save_shards(state: dict[str, Tensor], folder: Path, ranks: Ranks) -> Future[Any]:
    """Copy the shards of this rank and write the copy on a separate thread; every rank calls this at the same time.

    The future completes when the files of all ranks are on disk, or raises `ShardsError` if a rank could not write.
    """
    written: Future[Any] = Future()
    writing = async_save(
        dict(state), storage_writer=FileSystemWriter(folder), process_group=ranks.files, no_dist=ranks.files is None
    )
    assert isinstance(writing, Future), "no staging future was requested"

    def finish(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(ShardsError(_cause(error)))

    writing.add_done_callback(finish)
    return written


def load_shards(folder: Path, ranks: Ranks, policy: Policy, optimizer: Optimizer, reference: Policy | None) -> None:
    """Restore the state that `state_of` names; every rank calls this at the same time.

    Raises CheckpointError if the files do not fit this policy and optimizer, RankLostError if another rank ended.
    """
    names = set(FileSystemReader(folder).read_metadata().state_dict_metadata)
    for name, parameter in _trained(policy):
        if f"exp_avg.{name}" in names:
            optimizer.state[parameter] = empty_state(parameter, optimizer)
    state = state_of(policy, optimizer, reference, ranks.rank)
    random = f"{_RANDOM}{ranks.rank}"
    if random not in names:
        del state[random]
    different = {name for name in names ^ state.keys() if not name.startswith(_RANDOM)}
    if different:
        raise _misfit(folder, f"{len(different)} tensors exist on only one side, first {min(different)}")
    _read(state, folder, ranks)
    if random in state:
        torch.set_rng_state(state[random])
    for name, parameter in _trained(policy):
        for key in optimizer.state.get(parameter, {}):
            optimizer.state[parameter][key] = state[f"{key}.{name}"]


def _read(state: dict[str, Tensor], folder: Path, ranks: Ranks) -> None:
    """Fill these tensors with the saved values of the same names."""
    try:
        load(state, storage_reader=FileSystemReader(folder), process_group=ranks.files, no_dist=ranks.files is None)
    except (CheckpointException, ValueError) as error:
        raise _misfit(folder, _cause(error)) from error
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
    except RuntimeError as error:
        raise RankLostError(f"{folder}: a learner rank ended during loading: {_cause(error)}") from error


def _trained(policy: Policy) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in policy.causal.named_parameters() if p.requires_grad)


def _misfit(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: does not fit this model and optimizer: {reason}; resume with the config that wrote the checkpoint"
    )


def _cause(error: BaseException) -> str:
    """Return the first line of the first error on any rank."""
    while isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return first_line(error)
