"""Write the changing state of a rank to a file, and read the files of all ranks. The files are safetensors: no pickle.

    shards/rank-0-of-2.safetensors    rank 0's rows of each sharded tensor, every other tensor, and the random state
           rank-1-of-2.safetensors    rank 1's rows of each sharded tensor, and the random state

A sharded tensor is cut along the first dimension: the parts in all files, in the order of ranks, are the whole tensor.
So any number of ranks can read the files. With replicas, a single replica writes each tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from areal_rloo.container_limits import memory
from areal_rloo.errors import CheckpointError, DecodeError, first_line
from areal_rloo.files import use_umask
from areal_rloo.learner.optimizer import empty_state
from areal_rloo.learner.parallel.ranks import Ranks
from areal_rloo.learner.parallel.sharding import first_row, is_written_here
from areal_rloo.models.policy import Policy
from areal_rloo.telemetry.logs import get_logger

logger = get_logger(__name__)

_SPARE = 1.25  # of the size of a copy: the other processes of the host grow meanwhile
_RANDOM = "random."
_NAME = re.compile(r"rank-[0-9]+-of-[0-9]+\.safetensors")

Parts = dict[str, list[Any]]
"""By name of a tensor: the open files with a part, in the order of ranks."""


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


def save_shards(state: dict[str, Tensor], folder: Path, ranks: Ranks) -> Future[None]:
    """Copy the shards of this rank and write the copy on a separate thread; every rank calls this at the same time.

    If the host's memory has no room for the copy, write at once. The caller waits meanwhile.

    On rank 0, the future completes when the files of all ranks are written, or raises `ShardsError` if a rank could not
    write; on another rank, when rank 0 has the news of this rank.
    """
    parts, path = dict(_parts_to_write(state, ranks.rank)), _path(folder, ranks.rank, ranks.num)
    if not has_room(parts.values(), num_copies=ranks.num):  # as if all ranks were on this host, and of equal size
        written: Future[None] = Future()
        try:
            _write(parts, path, ranks)
            written.set_result(None)
        except ShardsError as error:
            written.set_exception(error)
        return written
    copies = {name: torch.empty(part.shape, dtype=part.dtype).copy_(part) for name, part in parts.items()}
    writer = ThreadPoolExecutor(1, thread_name_prefix="shards")
    written = writer.submit(_write, copies, path, ranks)
    writer.shutdown(wait=False)
    return written


def has_room(tensors: Iterable[Tensor], *, num_copies: int = 1) -> bool:
    """Return True if the memory of the host has room for copies, or if the tensors must be copied from a GPU."""
    sizes = [tensor.nbytes if tensor.device.type == "cpu" else math.inf for tensor in tensors]
    needed, (_, available) = num_copies * _SPARE * sum(sizes), memory()
    if needed <= available or needed == math.inf:
        return True
    logger.warning(
        "the host has %.1f GiB free, and copies for the checkpoint need %.1f: training waits for the write",
        *(available / 2**30, needed / 2**30),
    )
    return False


def _parts_to_write(state: dict[str, Tensor], rank: int) -> Iterator[tuple[str, Tensor]]:
    """Give the parts that this rank writes: the files of all ranks have each row of each tensor once."""
    for index, (name, tensor) in enumerate(state.items()):
        if isinstance(tensor, DTensor):
            if is_written_here(tensor, index):
                yield name, tensor.to_local()
        elif rank == 0 or name == f"{_RANDOM}{rank}":
            yield name, tensor


def _write(tensors: dict[str, Tensor], path: Path, ranks: Ranks) -> None:
    problem = ""
    try:
        save_file(tensors, path)
        use_umask(path)
    except (OSError, SafetensorError) as error:
        problem = f"{path.name}: {first_line(error)}"
    tensors.clear()  # before the wait for other ranks
    problems = [problem for problem in ranks.tell_of_writing(problem) if problem]
    if problems:
        raise ShardsError(problems[0])


def load_shards(folder: Path, ranks: Ranks, policy: Policy, optimizer: Optimizer, reference: Policy | None) -> None:
    """Restore the state that `state_of` names; every rank calls this.

    Raises CheckpointError if the files do not fit this policy and optimizer, or cannot be read.
    """
    try:
        with opened_shards(folder) as parts, torch.no_grad():
            _load(parts, folder, ranks, policy, optimizer, reference)
    except (DecodeError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be read: {first_line(error)}") from error


def _load(
    parts: Parts, folder: Path, ranks: Ranks, policy: Policy, optimizer: Optimizer, reference: Policy | None
) -> None:
    for name, parameter in _trained(policy):
        if f"exp_avg.{name}" in parts:
            optimizer.state[parameter] = empty_state(parameter, optimizer)
    state = state_of(policy, optimizer, reference, ranks.rank)
    random = state.pop(f"{_RANDOM}{ranks.rank}")
    different = {name for name in parts.keys() ^ state.keys() if not name.startswith(_RANDOM)}
    if different:
        raise _misfit(folder, f"{len(different)} tensors exist on only one side, first {min(different)}")
    for name, tensor in state.items():
        _fill(tensor, name, parts[name], folder)
    if (name := f"{_RANDOM}{ranks.rank}") in parts:
        _fill(random, name, parts[name], folder)
        try:
            torch.set_rng_state(random)
        except RuntimeError as error:
            raise _misfit(folder, f"{name}: {first_line(error)}") from error


def _fill(tensor: Tensor, name: str, files: list[Any], folder: Path) -> None:
    """Copy this rank's rows of a tensor from the files, which may have another floating dtype."""
    parts = [file.get_slice(name) for file in files]
    shapes = [part.get_shape() for part in parts]
    if tensor.ndim == 0:
        fits = shapes == [[]]
    else:
        fits = all(shape and shape[1:] == [*tensor.shape[1:]] for shape in shapes)
        fits = fits and sum(shape[0] for shape in shapes) == tensor.shape[0]
    if not fits or any(("F" in part.get_dtype()) != tensor.is_floating_point() for part in parts):
        got = " and ".join(f"{part.get_dtype()} {part.get_shape()}" for part in parts)
        raise _misfit(folder, f"{name}: expected {tensor.dtype} of shape {list(tensor.shape)}, got {got}")
    if tensor.ndim == 0:
        tensor.copy_(files[0].get_tensor(name))
        return
    first, local = (first_row(tensor), tensor.to_local()) if isinstance(tensor, DTensor) else (0, tensor)
    row = 0  # the first of the part
    for part, (rows, *_) in zip(parts, shapes, strict=True):
        start, end = max(first, row), min(first + len(local), row + rows)
        if start < end:
            local[start - first : end - first].copy_(part[start - row : end - row])
        row += rows


def shard_files(folder: Path) -> list[Path]:
    """Give the files of all ranks, in the order of ranks.

    Raises:
        DecodeError: a file is missing.
    """
    num = sum(1 for path in folder.glob("rank-*") if _NAME.fullmatch(path.name))
    files = [_path(folder, rank, num) for rank in range(num)]
    missing = next((path for path in files or [_path(folder, 0, 1)] if not path.is_file()), None)
    if missing is not None:
        raise DecodeError(f"{folder.name}/{missing.name} is missing")
    return files


@contextmanager
def opened_shards(folder: Path) -> Iterator[Parts]:
    """Open the files of all ranks; their headers are checked.

    Raises:
        DecodeError: a file is missing, or its header does not describe the file; names the file.
    """
    with ExitStack() as stack:
        parts: Parts = {}
        for path in shard_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise DecodeError(f"{folder.name}/{path.name}: {first_line(error)}") from error
            for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
                parts.setdefault(name, []).append(file)
        yield parts


def _path(folder: Path, rank: int, num: int) -> Path:
    return folder / f"rank-{rank}-of-{num}.safetensors"


def _trained(policy: Policy) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return ((name, p) for name, p in policy.causal.named_parameters() if p.requires_grad)


def _misfit(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: does not fit this model and optimizer: {reason}; resume with the config that wrote the checkpoint"
    )
